//! Mount options (`-o`): the options of tensorfs, and the options that mount(8), systemd and
//! SELinux add.

mod access;
mod disk_cache;
mod help;
mod nearest;
mod paths;
mod row;
mod table;

use std::ffi::OsStr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tensorfs::RemoteSettings;
use tensorfs::internal::error::{expect_local_path, quoted, shown_argument};
use tensorfs::internal::index::IndexStore;
use tensorfs::internal::io::{Backend, DirectIo, Settings};
use tensorfs::internal::open_options::{Links, OpenOptions};
use tensorfs::internal::source::SecretOrigin;
use tensorfs::internal::view::View;
use tensorfs::words;

pub(crate) use access::AccessRule;
pub(crate) use disk_cache::DiskCacheOptions;
pub(crate) use help::{Completion, completions, help, names_for};
pub(crate) use nearest::nearest;
pub(crate) use row::Use;

use nearest::hint;

words! {
    /// Whether the kernel may serve whole files by passthrough.
    #[derive(Default)]
    pub enum Passthrough {
        /// The kernel may serve them, if it is able to.
        #[default]
        Auto = "auto",
        /// The kernel never serves them. This is for tests and comparisons.
        Never = "never",
    }
}

words! {
    /// When weights are compared with their recorded checksums.
    #[derive(Default)]
    pub enum Verify {
        /// Weights are not compared.
        #[default]
        None = "none",
        /// Each tensor is compared as a whole before its first byte is served.
        Read = "read",
    }
}

words! {
    /// The format of log lines.
    #[derive(Default)]
    pub enum LogFormat {
        /// Fields if the log goes to the journal, and text otherwise.
        #[default]
        Auto = "auto",
        /// Text.
        Human = "human",
        /// One JSON object on each line.
        Json = "json",
        /// Fields. The log must go to the journal.
        Journal = "journal",
    }
}

words! {
    /// How changes of the source are found while it is mounted.
    pub enum Watch {
        /// By inotify, and by polling for file systems without inotify events.
        Auto = "auto",
        /// By inotify, even on remote file systems, where only changes by this machine have events.
        Inotify = "inotify",
        /// By checking every folder at an interval.
        Poll = "poll",
        /// Not at all: the mount shows the folders as they were at its start.
        Off = "off",
    }
}

/// Default of `watch-interval=`.
const WATCH_INTERVAL: Duration = Duration::from_secs(1);

/// Default of `watch-grace=`.
const WATCH_GRACE: Duration = Duration::from_secs(30);

/// The folder in which indexes are stored.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum IndexDir {
    /// The user's cache folder.
    #[default]
    OfUser,
    /// No folder: every start reads all headers.
    Nowhere,
    /// This folder.
    At(PathBuf),
}

impl IndexDir {
    /// Parses the value of the option.
    pub(crate) fn parse(value: &OsStr) -> IndexDir {
        if value == "none" { IndexDir::Nowhere } else { IndexDir::At(value.into()) }
    }

    /// The folder. `None` if indexes are not stored.
    pub(crate) fn folder(&self) -> Option<PathBuf> {
        match self {
            IndexDir::OfUser => Some(IndexStore::of_user()?.folder().to_owned()),
            IndexDir::Nowhere => None,
            IndexDir::At(folder) => Some(folder.clone()),
        }
    }
}

/// Default of `io-timeout=`, the time limit for a read of a source.
const IO_TIMEOUT: Duration = Duration::from_secs(60);

/// Default of `cache=` in bytes. The data itself is cached in the kernel's page cache. This memory
/// only has to be large enough for read-ahead to keep the disk busy.
pub(crate) const CACHE_DEFAULT: u64 = 128 << 20;

/// All options of a mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// How the source is opened and how it is shown.
    pub open: OpenOptions,
    /// Whether the user gave any option of views, even if its value is the default.
    pub has_view: bool,
    /// Owner of all files.
    pub uid: Option<u32>,
    /// Group of all files.
    pub gid: Option<u32>,
    /// Permission bits that are removed from each mode.
    pub umask: u32,
    /// Whether other users may access the mount.
    pub allow_other: bool,
    /// Rules that give parts of the mount to users and groups. The first rule that matches a path
    /// applies.
    pub(crate) access: Vec<AccessRule>,
    /// Device name in the mount table.
    pub fsname: Option<String>,
    /// File that the daemon writes its log to.
    pub log: Option<PathBuf>,
    /// The format of log lines.
    pub log_format: LogFormat,
    /// Whether the kernel may serve whole files by passthrough.
    pub passthrough: Passthrough,
    /// Whether the mount gets the flag `noexec` of mount(2).
    pub noexec: bool,
    /// Whether the mount gets the flag `noatime` of mount(2).
    pub noatime: bool,
    /// Whether the mount gets the flag `nosymfollow` of mount(2). Kernels before 5.10 do not have
    /// this flag.
    pub nosymfollow: bool,
    /// Whether the user gave `rw`. The mount is read-only nevertheless.
    pub rw: bool,
    /// SELinux contexts, which are passed to the kernel.
    pub contexts: Vec<String>,
    /// Maximum size in bytes of the cache of blocks.
    pub cache: Option<u64>,
    /// How the engine reads sources.
    pub io: Backend,
    /// Whether reads of sources bypass the kernel's page cache.
    pub direct: DirectIo,
    /// Time limit for a read of a source. `None` means no limit.
    pub io_timeout: Option<Duration>,
    /// Readahead window of the kernel in bytes. 0 turns readahead off.
    pub readahead: Option<u64>,
    /// Folder for real copies of virtual files that are read often.
    pub assemble: Option<PathBuf>,
    /// Maximum size in bytes of all copies in that folder.
    pub assemble_size: Option<u64>,
    /// The folder in which indexes are stored.
    pub index_dir: IndexDir,
    /// Where blocks of remote sources are stored on a local disk.
    pub(crate) disk_cache: DiskCacheOptions,
    /// Addresses of remote sources, and where their credentials come from.
    pub(crate) remote: RemoteSettings,
    /// Where the key or the passphrase of encrypted files comes from.
    pub(crate) secret: Option<SecretOrigin>,
    /// When weights are compared with their checksums.
    pub verify: Verify,
    /// How changes of the source are found, if the user set that.
    pub watch: Option<Watch>,
    /// How changes of the source are found if the user did not set that. Each command has its own
    /// default.
    pub(crate) watch_default: Watch,
    /// Time between two polls of the source.
    pub watch_interval: Duration,
    /// How long a set that is not whole counts as still arriving.
    pub watch_grace: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            open: OpenOptions { links: Links::Inside, ..OpenOptions::default() },
            has_view: false,
            uid: None,
            gid: None,
            umask: 0,
            allow_other: false,
            access: Vec::new(),
            fsname: None,
            log: None,
            log_format: LogFormat::Auto,
            passthrough: Passthrough::default(),
            noexec: false,
            noatime: false,
            nosymfollow: false,
            rw: false,
            contexts: Vec::new(),
            cache: None,
            io: Backend::default(),
            direct: DirectIo::default(),
            io_timeout: Some(IO_TIMEOUT),
            readahead: None,
            assemble: None,
            assemble_size: None,
            index_dir: IndexDir::default(),
            disk_cache: DiskCacheOptions::default(),
            remote: RemoteSettings::default(),
            secret: None,
            verify: Verify::default(),
            watch: None,
            watch_default: Watch::Off,
            watch_interval: WATCH_INTERVAL,
            watch_grace: WATCH_GRACE,
        }
    }
}

/// Options that have no effect here: defaults, options that only mount(8) uses, and options that
/// make no difference for a read-only mount.
const IGNORED: &str = "ro defaults auto noauto nofail _netdev user nouser users nousers \
    owner noowner group nogroup nodev nosuid dev suid diratime nodiratime relatime norelatime strictatime \
    nostrictatime lazytime nolazytime async sync dirsync mand nomand silent loud \
    default_permissions iversion noiversion";

/// Prefixes of options that are for other programs.
const IGNORED_STARTS: [&str; 4] = ["x-", "X-", "comment=", "user="];

/// Prefixes of options with an SELinux context.
const CONTEXTS: [&str; 4] = ["context=", "fscontext=", "defcontext=", "rootcontext="];

impl Options {
    /// Parses option strings in the form of `-o`, in order. `sloppy` means that unknown options are
    /// ignored, as with the flag `-s` of mount(8).
    ///
    /// # Errors
    /// One line with the option and its allowed values.
    pub fn parse<S: AsRef<str>>(strings: &[S], sloppy: bool) -> Result<Options, String> {
        let mut options = Options::default();
        let mut seen = Vec::new();
        for option in strings.iter().flat_map(|s| split(s.as_ref())).filter(|o| !o.is_empty()) {
            options.apply(&option, &mut seen, sloppy)?;
        }
        options.open.show_all_ranks()?;
        options.open.view.check()?;
        let has_one = options.open.hub || options.open.view != View::default();
        if options.open.views.is_some() && has_one {
            let why = "option views: each view has its own options: give layout=, format= and so on \
                       in its file";
            return Err(why.to_owned());
        }
        if options.open.hub && options.watch() != Watch::Off {
            let why = "layout=hub shows the models that are there at its start: give watch=off";
            return Err(why.to_owned());
        }
        if !options.access.is_empty() && !options.allow_other {
            return Err("option access= needs allow_other: it lets other users in".to_owned());
        }
        if options.log_format == LogFormat::Journal && options.log.is_some() {
            return Err("log-format=journal and log=FILE exclude each other".to_owned());
        }
        if options.assemble_size.is_some() && options.assemble.is_none() {
            return Err("option assemble-size needs assemble=DIR".to_owned());
        }
        Ok(options)
    }

    /// The value of `io-timeout=` in option strings, or its default if the value is not valid. No
    /// file is read.
    pub(crate) fn io_timeout_in(strings: &[String]) -> Option<Duration> {
        let mut words: Vec<String> = strings.iter().flat_map(|s| split(s)).collect();
        words.retain(|option| name_of(option) == "io-timeout");
        Options::parse(&words, false).unwrap_or_default().io_timeout
    }

    /// Merges the option strings `defaults` and `own`. An option in `own` replaces the option with
    /// the same name in `defaults`.
    pub(crate) fn merge(defaults: &str, own: &str) -> String {
        let own = split(own);
        let names: Vec<&str> = own.iter().map(|option| name_of(option)).collect();
        let kept = split(defaults).into_iter().filter(|option| !names.contains(&name_of(option)));
        let all: Vec<String> =
            kept.chain(own.clone()).filter(|option| !option.is_empty()).collect();
        all.iter().map(|option| escape(option)).collect::<Vec<_>>().join(",")
    }

    fn apply(
        &mut self,
        option: &str,
        seen: &mut Vec<&'static str>,
        sloppy: bool,
    ) -> Result<(), String> {
        let (key, value) = match option.split_once('=') {
            Some((key, value)) => (key, Some(value)),
            None => (option, None),
        };
        if CONTEXTS.iter().any(|start| option.starts_with(start)) {
            self.contexts.push(option.to_owned());
            return Ok(());
        }
        if (key, value) == ("remount", None) {
            return Err("a mount cannot be changed; unmount it and mount it again".to_owned());
        }
        if let Some(row) = table::find(key, value.is_some()) {
            if value.is_some() && !row.repeats {
                if seen.contains(&row.name) {
                    return Err(format!("option {key}= is given twice"));
                }
                seen.push(row.name);
            }
            let value = value.unwrap_or_default();
            let checked = row.path_in(value).map_or(Ok(()), expect_local_path);
            checked.map_err(|why| format!("option {key}: {why}"))?;
            return row.apply(self, value).map_err(|values| {
                let words = row.values().filter(|it| it.chosen.is_empty()).map(|it| it.text);
                let shown = quoted(&shown_argument(option));
                format!("option {shown}: expected {values}{}", hint(value, words))
            });
        }
        let ignored = match value {
            None if table::find(key, true).is_some() => {
                return Err(format!("option {key} needs a value: {key}=..."));
            }
            None => IGNORED.split(' ').any(|word| word == key),
            Some(_) if table::find(key, false).is_some() => {
                return Err(format!("option {key} takes no value"));
            }
            Some(_) => false,
        };
        if ignored || sloppy || IGNORED_STARTS.iter().any(|start| option.starts_with(start)) {
            return Ok(());
        }
        let names = table::rows().map(|row| row.name).chain(IGNORED.split(' '));
        let shown = quoted(&shown_argument(option));
        Err(format!("unknown option {shown}{}", hint(key, names)))
    }

    /// The first option in `strings` whose use is not one of `uses`, and the use of that option.
    /// The strings were parsed before.
    pub(crate) fn other_than(strings: &[String], uses: &[Use]) -> Option<(String, Option<Use>)> {
        let of_command = |option: &String| {
            let (key, value) = match option.split_once('=') {
                Some((key, value)) => (key, Some(value)),
                None => (option.as_str(), None),
            };
            let row = table::find(key, value.is_some())?;
            row.commands(value.unwrap_or_default())
        };
        let options = strings.iter().flat_map(|string| split(string));
        let mut with_uses = options.filter(|option| !option.is_empty()).map(|option| {
            let own = of_command(&option);
            (option, own)
        });
        with_uses.find(|(_, own)| own.is_none_or(|own| !uses.contains(&own)))
    }

    /// The settings of an engine with these options.
    pub(crate) fn settings(&self) -> Settings {
        Settings::new(self.io, self.direct, self.io_timeout)
    }

    /// The options to open the source, with the secret that these options or the environment name.
    /// Reads the file with the secret, or runs the command that prints it. Also makes the settings
    /// of remote sources take effect.
    ///
    /// # Errors
    /// One line with the reason why there is no secret, or with the file that cannot be read.
    pub(crate) fn open_with_secret(&self) -> Result<OpenOptions, String> {
        self.remote.take_effect()?;
        let open = OpenOptions { disk_cache: self.disk_cache.place(), ..self.open.clone() };
        if open.secret.is_some() {
            return Ok(open);
        }
        let secret = match &self.secret {
            Some(origin) => Some(origin.read()?),
            None => SecretOrigin::of_environment()?,
        };
        Ok(OpenOptions { secret: secret.map(Arc::new), ..open })
    }

    /// Reads the secret once, for use with several sources. Some of them may not be encrypted.
    ///
    /// # Errors
    /// The errors of `open_with_secret`.
    pub(crate) fn keep_secret(&mut self) -> Result<(), String> {
        self.remote.take_effect()?;
        let secret = match &self.secret {
            Some(origin) => Some(origin.read()?.optional()),
            None => SecretOrigin::of_environment()?,
        };
        self.open.secret = secret.map(Arc::new);
        Ok(())
    }

    /// Records where the secret comes from.
    fn set_secret(&mut self, origin: SecretOrigin) -> Result<(), String> {
        match self.secret.replace(origin) {
            None => Ok(()),
            Some(_) => Err("one of key-file=, passphrase-file= and key-command=".to_owned()),
        }
    }

    /// How changes of the source are found. By default, `layout=hub` does not follow changes.
    pub fn watch(&self) -> Watch {
        let default = if self.open.hub { Watch::Off } else { self.watch_default };
        self.watch.unwrap_or(default)
    }

    /// The options in force as JSON, for `tensorfs status`.
    pub(crate) fn to_json(&self) -> Value {
        let mut json = self.open.to_json();
        if let Some(json) = json.as_object_mut() {
            json.extend(table::shown(self).map(|(name, value)| (name.to_owned(), value)));
        }
        json
    }

    /// The options in `json`, which `to_json` wrote, in the form of `-o`. Other keys of `json` are
    /// ignored.
    pub(crate) fn words(json: &Value) -> Vec<String> {
        let options = json.as_object().into_iter().flatten();
        let words = options.flat_map(|(name, value)| {
            let row = table::find(name, *value != Value::Bool(true));
            let values = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
            values.iter().filter_map(move |value| row?.word(value))
        });
        words.collect()
    }
}

/// The name of an option.
fn name_of(option: &str) -> &str {
    option.split_once('=').map_or(option, |(key, _)| key)
}

/// Splits a string at commas. `\,` means a comma in a value, and `\\` means a backslash. Commas
/// between the double quotes of an SELinux context do not split.
fn split(options: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut chars = options.chars().peekable();
    let mut quoted = false;
    while let Some(c) = chars.next() {
        let Some(part) = parts.last_mut() else { break };
        match c {
            '\\' if chars.peek().is_some_and(|next| matches!(next, ',' | '\\')) => {
                part.extend(chars.next());
            }
            '"' if CONTEXTS.iter().any(|start| part.starts_with(start)) => quoted = !quoted,
            ',' if !quoted => parts.push(String::new()),
            _ => part.push(c),
        }
    }
    parts
}

/// Escapes `value` so that `split` returns it as one part.
pub(crate) fn escape(value: &str) -> String {
    value.replace('\\', r"\\").replace(',', r"\,")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(options: &str) -> Result<Options, String> {
        Options::parse(&[options], false)
    }

    #[test]
    fn what_mount_and_systemd_and_selinux_add_is_accepted() {
        let parsed = parse(
            "rw,nofail,_netdev,user,user=joe,x-systemd.automount,comment=a,defaults,noexec,\
             context=\"system_u:object_r:x:s0:c1,c2\"",
        );
        let options = parsed.unwrap();
        assert!(options.rw && options.noexec);
        assert_eq!(options.contexts, ["context=system_u:object_r:x:s0:c1,c2"]);
        assert_eq!(parse("").unwrap(), Options::default());
    }

    #[test]
    fn of_opposites_the_last_one_counts() {
        let flags = |options| parse(options).map(|options| (options.noexec, options.noatime));
        assert_eq!(flags("noexec,noatime"), Ok((true, true)));
        assert_eq!(flags("noexec,exec,noatime,atime"), Ok((false, false)));
        assert_eq!(flags("exec,noexec,atime,noatime"), Ok((true, true)));
        assert!(!parse("nosymfollow,symfollow").unwrap().nosymfollow);
    }

    /// The options of mount(8) version 2.42 that do not depend on the file system, each with its
    /// opposite.
    const OF_MOUNT: &str = "async sync atime noatime auto noauto context=a fscontext=a \
        defcontext=a rootcontext=a defaults dev nodev diratime nodiratime dirsync exec noexec \
        group nogroup iversion noiversion mand nomand _netdev nofail relatime norelatime \
        strictatime nostrictatime lazytime nolazytime suid nosuid silent loud owner noowner ro rw \
        user nouser users nousers user=joe nosymfollow symfollow comment=a x-systemd.automount \
        x-initrd.mount x-gvfs-hide X-mount.mkdir X-mount.mkdir=0755 X-mount.subdir=a \
        X-mount.owner=joe X-mount.group=joe X-mount.mode=0755 X-mount.idmap=b:0:1:1 \
        X-mount.nocanonicalize=source X-mount.noloop X-mount.auto-fstypes=tensorfs";

    #[test]
    fn every_option_of_mount_8_for_all_file_systems_is_accepted() {
        for option in OF_MOUNT.split_whitespace() {
            assert!(parse(option).is_ok(), "{option}");
        }
        assert!(parse("nosymfollow").unwrap().nosymfollow);
        assert!(!parse("nosymfollow,symfollow").unwrap().nosymfollow);
    }

    #[test]
    fn an_unknown_option_is_refused_unless_sloppy() {
        let error = "unknown option `laoyut=single`; did you mean `layout`?";
        assert_eq!(parse("ro,laoyut=single").unwrap_err(), error);
        assert!(Options::parse(&["laoyut=single"], true).is_ok());
    }

    #[test]
    fn an_error_names_the_option_or_the_value_that_was_meant() {
        for (given, meant) in [
            ("allow-other", "allow_other"),
            ("nofial", "nofail"),
            ("expect_shards=3", "expect-shards"),
            ("verify=raed", "read"),
            ("layout=sigle", "single"),
            ("dtype=fp16", "f16"),
            ("watch=ioniftu", "inotify"),
        ] {
            let error = parse(given).unwrap_err();
            assert!(error.ends_with(&format!("; did you mean `{meant}`?")), "{error}");
        }
        for nothing in ["zzzzzzzz=1", "verify=zzzzzzzz", "umask=888"] {
            let error = parse(nothing).unwrap_err();
            assert!(!error.contains("did you mean"), "{error}");
        }
        assert_eq!(parse("allow_other=1").unwrap_err(), "option allow_other takes no value");
    }

    #[test]
    fn an_error_about_an_option_hides_the_secrets_of_a_url() {
        for option in ["endpoint=https://u:hunt/er2@h", "endpiont=https://u:hunt/er2@h"] {
            let error = parse(option).unwrap_err();
            assert!(error.contains("=https://***@h`") && !error.contains("er2"), "{error}");
        }
    }

    #[test]
    fn an_option_with_a_path_refuses_a_url() {
        let prefixed = ["layout=map=", "dtype=map=", "dtype=like:"].map(str::to_owned);
        let plain = "config views rename tp-rules follow reference key-file passphrase-file \
                     index-dir cache-dir credentials-file ca-file assemble log";
        for option in plain.split_whitespace().map(|name| format!("{name}=")).chain(prefixed) {
            let error = parse(&format!("{option}s3://u:hunt/er2@b/a")).unwrap_err();
            let why = "s3://***@b/a: is a URL, and only paths of this machine are possible here";
            assert!(error.starts_with("option ") && error.ends_with(why), "{option}: {error}");
        }
        assert!(parse("endpoint=https://h,key-command=echo s3://b").is_ok());
    }

    #[test]
    fn an_option_given_twice_is_refused_but_for_follow() {
        assert_eq!(parse("uid=1,uid=2").unwrap_err(), "option uid= is given twice");
        assert_eq!(parse("follow=/a,follow=/b").unwrap().open.follow.len(), 2);
    }

    #[test]
    fn a_comma_in_a_value_is_escaped() {
        let options = parse(r"fsname=a\,b\\c,umask=077").unwrap();
        assert_eq!(options.fsname.as_deref(), Some(r"a,b\c"));
        assert_eq!(options.umask, 0o077);
        assert_eq!(split(&escape(r"x,\y")), [r"x,\y"]);
    }

    #[test]
    fn an_option_replaces_the_default_of_its_name() {
        let merged = Options::merge("ro,cache=256M,follow=/a,prefer=file", "cache=1G,follow=/b");
        assert_eq!(merged, "ro,prefer=file,cache=1G,follow=/b");
        assert_eq!(Options::merge(r"fsname=a\,b", ""), r"fsname=a\,b");
        assert_eq!(Options::merge("", ""), "");
    }

    #[test]
    fn a_bad_value_is_refused_with_what_it_may_be() {
        assert!(parse("layout=double").unwrap_err().contains("single, original, shards=N"));
        assert!(parse("verify=all").unwrap_err().contains("none or read"));
        assert!(parse("umask=888").unwrap_err().contains("octal"));
        assert!(parse("uid").unwrap_err().contains("needs a value"));
        assert!(parse("expect-shards=0").unwrap_err().contains("a number from 1"));
    }

    #[test]
    fn how_sources_are_read_can_be_said() {
        assert_eq!(parse("verify=read").unwrap().verify, Verify::Read);
        let parsed = parse(
            "cache=128M,io=pread,direct=never,io-timeout=5,readahead=1MiB,\
             assemble=/a\\,b,assemble-size=2g",
        );
        let options = parsed.unwrap();
        assert_eq!(options.cache, Some(128 << 20));
        assert_eq!((options.io, options.direct), (Backend::Pread, DirectIo::Never));
        assert_eq!(options.io_timeout, Some(Duration::from_secs(5)));
        assert_eq!(options.readahead, Some(1 << 20));
        assert_eq!(options.assemble, Some("/a,b".into()));
        assert_eq!(options.assemble_size, Some(2 << 30));
    }

    #[test]
    fn options_of_status_are_written_as_they_were_given() {
        for given in
            ["cache=256M,io-timeout=5,layout=shards=2,include=a*,include=b,follow=/c", "layout=hub"]
        {
            let given: Vec<&str> = given.split(',').collect();
            let words = Options::words(&Options::parse(&given, false).unwrap().to_json());
            assert!(given.iter().all(|word| words.iter().any(|it| it == word)), "{words:?}");
            assert_eq!(words.iter().filter(|word| word.starts_with("layout=")).count(), 1);
            assert_eq!(Options::words(&Options::parse(&words, false).unwrap().to_json()), words);
        }
    }

    #[test]
    fn ids_and_sizes_have_bounds() {
        assert!(parse("uid=4294967295").is_err() && parse("cache=2T").is_err());
    }

    #[test]
    fn a_read_has_a_deadline_unless_it_is_turned_off() {
        assert_eq!(parse("").unwrap().io_timeout, Some(Duration::from_secs(60)));
        assert_eq!(parse("io-timeout=0").unwrap().io_timeout, None);
        for bad in ["io-timeout=-1", "io-timeout=", "io-timeout=1m", "io-timeout=99999999999"] {
            assert!(parse(bad).unwrap_err().contains("expected seconds"), "{bad}");
        }
    }

    #[test]
    fn a_size_that_cannot_work_is_refused() {
        for bad in ["cache=1M", "readahead=2G", "cache=big"] {
            assert!(parse(bad).unwrap_err().contains("expected a size"), "{bad}");
        }
        assert_eq!(parse("readahead=0").unwrap().readahead, Some(0));
        assert!(parse("assemble-size=1G").unwrap_err().contains("assemble=DIR"));
        assert!(parse("assemble-size=0,assemble=/a").unwrap_err().contains("a size"));
    }
}
