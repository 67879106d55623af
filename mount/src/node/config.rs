//! The config of `tensorfs serve`: a TOML file with one table for each mount. Errors have file, line and key.

use std::fmt::{self, Write as _};
use std::io::Read;
use std::net::SocketAddr;
use std::ops::Range;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use nix::libc;
use tensorfs::internal::error::{is_url, quoted, shown_path};
use tensorfs::internal::store::{Store, hub_cache};
use tensorfs::{Error, UnknownWord};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::options::{LogFormat, Options, escape, nearest};

/// Maximum size of a config file, in bytes.
const LEN_MAX: u64 = 4 << 20;

/// Maximum length of the name of a mount.
const NAME_MAX: usize = 64;

/// Maximum length of the path of a socket, in bytes.
const SOCKET_PATH_MAX: usize = 107;

/// Default of `watchdog`.
const WATCHDOG: Duration = Duration::from_secs(30);

/// A config that has been checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Config {
    /// Settings of the service.
    pub service: ServiceConfig,
    /// The mounts, in the order of the file.
    pub mounts: Vec<MountConfig>,
}

/// The address at which metrics are served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum MetricsAddress {
    /// A TCP port of this machine.
    Tcp(SocketAddr),
    /// A socket file.
    Unix(PathBuf),
}

impl fmt::Display for MetricsAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MetricsAddress::Tcp(address) => address.fmt(f),
            MetricsAddress::Unix(path) => write!(f, "unix:{}", shown_path(path)),
        }
    }
}

/// Settings of the service: the table `[service]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ServiceConfig {
    /// The address at which metrics are served. `None` if they are not served.
    pub metrics: Option<MetricsAddress>,
    /// The format of log lines of the supervisor, and of workers whose mount sets no format.
    pub log_format: LogFormat,
    /// Time without an answer after which a worker is replaced. `None` if workers are never replaced for silence.
    pub watchdog: Option<Duration>,
}

/// One mount: a table `[[mount]]`, with the defaults applied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MountConfig {
    /// The name of the mount in messages.
    pub name: String,
    /// Absolute path or URL of the source, or the name of a model in the hub cache.
    pub source: PathBuf,
    /// Absolute path of the mount point.
    pub target: PathBuf,
    /// The options, as for `tensorfs mount -o`.
    pub options: String,
}

/// The reason why a config cannot be used, in one line.
#[derive(Debug)]
pub(crate) enum ConfigError {
    /// The file cannot be read.
    Unreadable(String),
    /// The content of the file is wrong.
    Wrong(String),
}

impl ConfigError {
    /// The reason.
    pub(crate) fn message(&self) -> &str {
        match self {
            ConfigError::Unreadable(message) | ConfigError::Wrong(message) => message,
        }
    }
}

impl Config {
    /// Reads and checks the config in `file`. Does not access sources and targets.
    ///
    /// # Errors
    /// The first fault in the config.
    pub(crate) fn read(file: &Path) -> Result<Config, ConfigError> {
        let text = read_file(file)
            .map_err(|why| ConfigError::Unreadable(format!("{}: {why}", shown_path(file))))?;
        Config::parse(file, &text).map_err(ConfigError::Wrong)
    }

    /// Parses `text`. Errors call it `file`.
    fn parse(file: &Path, text: &str) -> Result<Config, String> {
        let document = Document { file, text };
        let table = DeTable::parse(text).map_err(|e| {
            let message = e.message().replace('\n', " ");
            document.error(e.span().unwrap_or_default(), &format!("not TOML: {message}"))
        })?;
        let root = Section { document: &document, name: "", table: table.get_ref(), span: 0..0 };
        root.check_keys(&["service", "defaults", "mount"])?;
        let service = match root.table("service")? {
            Some(section) => section.service()?,
            None => ServiceConfig {
                metrics: None,
                log_format: LogFormat::Auto,
                watchdog: Some(WATCHDOG),
            },
        };
        let mut defaults = String::new();
        if let Some(section) = root.table("defaults")? {
            section.check_keys(&["options"])?;
            let (options, span) = section.string("options")?.unwrap_or_default();
            document.options(&options, span, "defaults.options")?;
            defaults = options;
        }
        if service.log_format != LogFormat::Auto {
            defaults = Options::merge(&format!("log-format={}", service.log_format), &defaults);
        }
        let mut mounts: Vec<(MountConfig, usize)> = Vec::new();
        for section in root.tables("mount")? {
            let mount = section.mount(&defaults)?;
            if let Some((key, line)) =
                mounts.iter().find_map(|(other, line)| Some((mount.conflict_with(other)?, *line)))
            {
                let span = section.span.clone();
                return Err(document.error(span, &format!("{key} of the mount on line {line}")));
            }
            mounts.push((mount, document.line(section.span.start)));
        }
        if let Some(index) = circle_in(&mounts) {
            let (mount, line) = &mounts[index];
            return Err(format!(
                "{}:{line}: mount.source: {} lies on a mount whose source lies on this one, maybe \
                 with others between them",
                shown_path(file),
                shown_path(&mount.source)
            ));
        }
        Ok(Config { service, mounts: mounts.into_iter().map(|(mount, _)| mount).collect() })
    }
}

/// The index of the first mount that would read itself through other mounts. `mounts` has the line of each.
fn circle_in(mounts: &[(MountConfig, usize)]) -> Option<usize> {
    let below = |mount: &MountConfig| mounts.iter().position(|(it, _)| mount.lies_on(it));
    (0..mounts.len()).find(|index| {
        let mut chain = std::iter::successors(below(&mounts[*index].0), |it| below(&mounts[*it].0));
        chain.by_ref().take(mounts.len()).any(|it| it == *index)
    })
}

impl MountConfig {
    /// Whether the source of this mount lies on the mount `other`, by the paths in the config.
    pub(super) fn lies_on(&self, other: &MountConfig) -> bool {
        self.name != other.name && self.source.starts_with(&other.target)
    }

    /// Why this mount and `other` cannot both be in the config.
    fn conflict_with(&self, other: &MountConfig) -> Option<String> {
        let target = shown_path(&self.target);
        if self.name == other.name {
            return Some(format!("mount.name: {} is the name", quoted(&self.name)));
        }
        if self.target == other.target {
            return Some(format!("mount.target: {target} is the target"));
        }
        if self.target.starts_with(&other.target) {
            return Some(format!("mount.target: {target} lies in the target"));
        }
        let above = other.target.starts_with(&self.target);
        above.then(|| format!("mount.target: {target} contains the target"))
    }
}

/// The text of a regular file. Other files are refused, because reading them could block.
fn read_file(file: &Path) -> Result<String, String> {
    let mut options = std::fs::File::options();
    let opened = options
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(file)
        .map_err(|e| e.to_string())?;
    if !opened.metadata().map_err(|e| e.to_string())?.is_file() {
        return Err("not a regular file".to_owned());
    }
    let mut bytes = Vec::new();
    opened.take(LEN_MAX + 1).read_to_end(&mut bytes).map_err(|e| e.to_string())?;
    if bytes.len() as u64 > LEN_MAX {
        return Err(format!("longer than {LEN_MAX} bytes; not a config"));
    }
    String::from_utf8(bytes).map_err(|e| {
        let start = e.utf8_error().valid_up_to();
        format!("not UTF-8 at byte {start}; TOML is UTF-8")
    })
}

/// A config file, from which errors get their line numbers.
struct Document<'a> {
    file: &'a Path,
    text: &'a str,
}

impl Document<'_> {
    /// The number of the line that contains byte `offset`.
    fn line(&self, offset: usize) -> usize {
        let before = &self.text.as_bytes()[..offset.min(self.text.len())];
        before.iter().filter(|&&byte| byte == b'\n').count() + 1
    }

    fn error(&self, span: Range<usize>, message: &str) -> String {
        format!("{}:{}: {message}", shown_path(self.file), self.line(span.start))
    }

    /// Checks the options that the key `key` has as its value. Paths in them must be absolute, because the service
    /// has no working directory of its own.
    fn options(&self, options: &str, span: Range<usize>, key: &str) -> Result<(), String> {
        let mut parsed = Options::parse(&[options], false)
            .map_err(|e| self.error(span.clone(), &format!("{key}: {e}")))?;
        if let Some(path) = parsed.paths().find(|path| path.is_relative()) {
            let path = shown_path(path);
            let message = format!("{key}: {path}: expected an absolute path");
            return Err(self.error(span, &message));
        }
        Ok(())
    }
}

/// A string of the config file and its position.
type Text = (String, Range<usize>);

/// A table of the file.
struct Section<'a> {
    document: &'a Document<'a>,
    /// The key of the table.
    name: &'static str,
    table: &'a DeTable<'a>,
    span: Range<usize>,
}

impl<'a> Section<'a> {
    /// Refuses keys that are not in `known`.
    fn check_keys(&self, known: &[&str]) -> Result<(), String> {
        // The error is about the first unknown key in the file, not the first in alphabetical order.
        let unknown = self.table.keys().filter(|key| !known.contains(&key.get_ref().as_ref()));
        let Some(key) = unknown.min_by_key(|key| key.span().start) else { return Ok(()) };
        let word = key.get_ref().as_ref();
        let hint = match nearest(word, known.iter().copied()) {
            Some(name) => format!("did you mean `{name}`?"),
            None => format!("expected {}", list(known)),
        };
        let message = format!("unknown key {}; {hint}", quoted(&self.full(word)));
        Err(self.document.error(key.span(), &message))
    }

    /// `key` with the name of this table in front.
    fn full(&self, key: &str) -> String {
        if self.name.is_empty() { key.to_owned() } else { format!("{}.{key}", self.name) }
    }

    fn wrong(&self, key: &str, span: Range<usize>, message: &str) -> String {
        self.document.error(span, &format!("{}: {message}", self.full(key)))
    }

    fn value(&self, key: &str) -> Option<&'a Spanned<DeValue<'a>>> {
        self.table.get(key)
    }

    fn mistyped(&self, key: &str, value: &Spanned<DeValue<'_>>, expected: &str) -> String {
        let found = format!("expected {expected}, found {}", kind(value.get_ref()));
        self.wrong(key, value.span(), &found)
    }

    fn string(&self, key: &'static str) -> Result<Option<Text>, String> {
        let Some(value) = self.value(key) else { return Ok(None) };
        match value.get_ref().as_str() {
            Some(text) => Ok(Some((text.to_owned(), value.span()))),
            None => Err(self.mistyped(key, value, "a string")),
        }
    }

    fn required(&self, key: &'static str) -> Result<Text, String> {
        let missing = || self.document.error(self.span.clone(), &self.missing(key));
        self.string(key)?.ok_or_else(missing)
    }

    fn missing(&self, key: &str) -> String {
        format!("{}: the key is missing", self.full(key))
    }

    fn path(&self, key: &'static str) -> Result<PathBuf, String> {
        let (text, span) = self.required(key)?;
        let path = Path::new(&text);
        let plain = |part| matches!(part, Component::RootDir | Component::Normal(_));
        let problem = if path.is_relative() {
            "expected an absolute path"
        } else if text.contains('\0') {
            "a path has no zero bytes"
        } else if !path.components().all(plain) {
            "expected a path without `..`"
        } else {
            // The path ends without a slash, as in the mount table.
            return Ok(path.components().collect());
        };
        Err(self.wrong(key, span, &format!("{}: {problem}", shown_path(path))))
    }

    /// The source of a mount: a path, a URL, or the name of a model in the hub cache.
    fn source(&self) -> Result<PathBuf, String> {
        let (text, span) = self.required("source")?;
        let path = Path::new(&text);
        if hub_cache::has_form(path) || is_url(path) {
            let refused = |e: Error| self.wrong("source", span, &e.to_string());
            return Store::check_url(path).map_err(refused).map(|()| text.into());
        }
        if path.is_relative() {
            let problem =
                "expected an absolute path, a URL, or ORG/NAME of a model in the hub cache";
            return Err(self.wrong("source", span, &format!("{}: {problem}", shown_path(path))));
        }
        self.path("source")
    }

    fn table(&self, key: &'static str) -> Result<Option<Section<'a>>, String> {
        let Some(value) = self.value(key) else { return Ok(None) };
        match value.get_ref() {
            DeValue::Table(table) => {
                let span = value.span();
                Ok(Some(Section { document: self.document, name: key, table, span }))
            }
            _ => Err(self.mistyped(key, value, &format!("a table [{key}]"))),
        }
    }

    fn tables(&self, key: &'static str) -> Result<Vec<Section<'a>>, String> {
        let Some(value) = self.value(key) else { return Ok(Vec::new()) };
        let expected = format!("tables [[{key}]]");
        let DeValue::Array(array) = value.get_ref() else {
            return Err(self.mistyped(key, value, &expected));
        };
        let section = |item: &'a Spanned<DeValue<'a>>| match item.get_ref() {
            DeValue::Table(table) => {
                let name = if key == "access" { "mount.access" } else { key };
                Ok(Section { document: self.document, name, table, span: item.span() })
            }
            _ => Err(self.mistyped(key, item, &expected)),
        };
        array.iter().map(section).collect()
    }

    /// The value of `key` as a number of seconds. `None` if the value is 0.
    fn seconds(&self, key: &'static str, default: Duration) -> Result<Option<Duration>, String> {
        let Some(value) = self.value(key) else { return Ok(Some(default)) };
        let number = match value.get_ref() {
            DeValue::Integer(number) => i64::from_str_radix(number.as_str(), number.radix()).ok(),
            _ => None,
        };
        match number {
            Some(0) => Ok(None),
            Some(number @ 1..=86400) => Ok(Some(Duration::from_secs(number.unsigned_abs()))),
            Some(number) => {
                let message = format!("expected 0 to 86400 seconds, found {number}");
                Err(self.wrong(key, value.span(), &message))
            }
            None => Err(self.mistyped(key, value, "a whole number of seconds")),
        }
    }

    /// Reads this table as `[service]`.
    fn service(&self) -> Result<ServiceConfig, String> {
        self.check_keys(&["watchdog", "metrics", "metrics-public", "log-format"])?;
        let log_format = match self.string("log-format")? {
            Some((word, span)) => word.parse().map_err(|known: UnknownWord| {
                let message = format!("expected {known}, found {}", quoted(&word));
                self.wrong("log-format", span, &message)
            })?,
            None => LogFormat::Auto,
        };
        Ok(ServiceConfig {
            metrics: self.metrics()?,
            log_format,
            watchdog: self.seconds("watchdog", WATCHDOG)?,
        })
    }

    /// The address for metrics. Metrics contain the names of mounts. So an address that other machines can reach
    /// needs `metrics-public`.
    fn metrics(&self) -> Result<Option<MetricsAddress>, String> {
        let is_public = match self.value("metrics-public").map(|value| (value, value.get_ref())) {
            None => false,
            Some((_, DeValue::Boolean(is_public))) => *is_public,
            Some((value, _)) => return Err(self.mistyped("metrics-public", value, "a boolean")),
        };
        let Some((text, span)) = self.string("metrics")? else { return Ok(None) };
        let wrong = |message: &str| {
            self.wrong("metrics", span.clone(), &format!("{}: {message}", quoted(&text)))
        };
        if let Some(path) = text.strip_prefix("unix:") {
            let path = Path::new(path);
            if path.is_relative() || path.as_os_str().len() > SOCKET_PATH_MAX {
                let message =
                    format!("expected an absolute path of at most {SOCKET_PATH_MAX} bytes");
                return Err(wrong(&message));
            }
            return Ok(Some(MetricsAddress::Unix(path.to_owned())));
        }
        let numeric = text.replace("localhost:", "127.0.0.1:");
        let address: SocketAddr = numeric.parse().map_err(|_| {
            wrong("expected an address and a port as 127.0.0.1:9469, or unix:/run/tensorfs/metrics.sock")
        })?;
        if !address.ip().is_loopback() && !is_public {
            return Err(wrong(
                "other machines could reach it; add metrics-public = true to allow that",
            ));
        }
        Ok(Some(MetricsAddress::Tcp(address)))
    }

    /// Reads this table as `[[mount.access]]`. Returns a mount option.
    fn access(&self) -> Result<String, String> {
        self.check_keys(&["path", "owner", "group", "mode"])?;
        let (path, _) = self.required("path")?;
        let mut rule = format!("access={path}");
        for key in ["owner", "group", "mode"] {
            let (value, span) = self.string(key)?.unwrap_or_default();
            if value.contains(':') {
                return Err(self.wrong(key, span, &format!("{}: has a colon", quoted(&value))));
            }
            rule = format!("{rule}:{value}");
        }
        Ok(escape(&rule))
    }

    /// Reads this table as `[[mount]]`.
    fn mount(&self, defaults: &str) -> Result<MountConfig, String> {
        self.check_keys(&["name", "source", "target", "options", "access"])?;
        let (name, span) = self.required("name")?;
        let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        let begins = name.starts_with(|c: char| c.is_ascii_alphanumeric());
        if !begins || name.len() > NAME_MAX || !name.chars().all(is_plain) {
            let message = format!(
                "{}: expected a letter or digit, then up to {} letters, digits, `.`, `_` or `-`",
                quoted(&name),
                NAME_MAX - 1
            );
            return Err(self.wrong("name", span, &message));
        }
        let (source, target) = (self.source()?, self.path("target")?);
        let (own, span) = self.string("options")?.unwrap_or((String::new(), self.span.clone()));
        // All users can read the device name in the mount table, so it is the name of the mount and not the source.
        let defaults = Options::merge(&format!("fsname={name}"), defaults);
        let mut options = Options::merge(&defaults, &own);
        self.document.options(&options, span, "mount.options")?;
        for section in self.tables("access")? {
            let rule = section.access()?;
            options = [options.as_str(), &rule].join(",");
            self.document.options(&options, section.span.clone(), "mount.access")?;
        }
        Ok(MountConfig { name, source, target, options })
    }
}

/// The type of a value, with its article, for errors.
fn kind(value: &DeValue<'_>) -> &'static str {
    match value {
        DeValue::String(_) => "a string",
        DeValue::Integer(_) => "an integer",
        DeValue::Float(_) => "a float",
        DeValue::Boolean(_) => "a boolean",
        DeValue::Datetime(_) => "a date",
        DeValue::Array(_) => "an array",
        DeValue::Table(_) => "a table",
    }
}

/// The names as a text: `a`, `b` or `c`.
fn list(names: &[&str]) -> String {
    let mut text = String::new();
    for (index, name) in names.iter().enumerate() {
        let separator = match index {
            0 => "",
            _ if index + 1 == names.len() => " or ",
            _ => ", ",
        };
        let _ = write!(text, "{separator}`{name}`");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Config, String> {
        Config::parse(Path::new("/etc/c.toml"), text)
    }

    fn refused(text: &str) -> String {
        parse(text).unwrap_err()
    }

    const ONE: &str = "[[mount]]\nname = \"a\"\nsource = \"/data\"\ntarget = \"/srv/a/\"\n";

    #[test]
    fn a_mount_takes_the_defaults_that_it_does_not_replace() {
        let text = "[defaults]\noptions = \"ro,cache=256M\"\n[[mount]]\nname = 'a'\n\
                    source = '/data'\ntarget = '/srv/a/'\noptions = 'cache=1G,allow_other'";
        let config = parse(text).unwrap();
        let mount = &config.mounts[0];
        assert_eq!((mount.name.as_str(), mount.target.to_str()), ("a", Some("/srv/a")));
        assert_eq!(mount.options, "fsname=a,ro,cache=1G,allow_other");
        assert_eq!(config.service.watchdog, Some(WATCHDOG));
        assert_eq!(parse("").unwrap().mounts, []);
        let off = parse("[service]\nwatchdog = 0").unwrap();
        assert_eq!(off.service.watchdog, None);
    }

    #[test]
    fn an_unknown_key_is_refused_with_its_line_and_the_nearest_name() {
        let error = refused(&format!("{ONE}optoins = \"ro\"\n"));
        assert_eq!(error, "/etc/c.toml:5: unknown key `mount.optoins`; did you mean `options`?");
        let error = refused("[[mounts]]\nname = 'a'");
        assert_eq!(error, "/etc/c.toml:1: unknown key `mounts`; did you mean `mount`?");
        let error = refused("[defaults]\nxyzzy = 1");
        assert_eq!(error, "/etc/c.toml:2: unknown key `defaults.xyzzy`; expected `options`");
        let error = refused("[service]\nzzz = 1\naaa = 2");
        assert!(error.starts_with("/etc/c.toml:2: unknown key `service.zzz`"), "{error}");
    }

    #[test]
    fn a_value_of_another_type_is_refused_with_both_types() {
        let error = refused("[[mount]]\nname = 7");
        assert_eq!(error, "/etc/c.toml:2: mount.name: expected a string, found an integer");
        let error = refused("[mount]\nname = 'a'");
        assert_eq!(error, "/etc/c.toml:1: mount: expected tables [[mount]], found a table");
        let error = refused("[service]\nwatchdog = '3s'");
        let expected = "service.watchdog: expected a whole number of seconds, found a string";
        assert_eq!(error, format!("/etc/c.toml:2: {expected}"));
        let error = refused("[service]\nwatchdog = -1");
        assert!(error.ends_with("expected 0 to 86400 seconds, found -1"), "{error}");
        assert!(refused("defaults = 3").contains("expected a table [defaults]"));
    }

    #[test]
    fn a_missing_or_bad_key_is_refused_with_its_line() {
        let error = refused("\n[[mount]]\nname = 'a'\nsource = '/a'");
        assert_eq!(error, "/etc/c.toml:2: mount.target: the key is missing");
        for (line, part) in [
            ("source = 'data'", "data: expected an absolute path"),
            ("source = '/a/../b'", "without `..`"),
            (
                "source = 's3://u:hunter2@b/a'",
                "mount.source: s3://***@b/a: cannot open: user names",
            ),
            ("source = 's3://u:hunt/er2@b/a'", "s3://***@b/a: cannot open: user names"),
            ("source = 'https://u:hunt/er2@h/a'", "https://***@h/a: cannot open: user names"),
            ("source = 'https://h/a#hunter2'", "https://h/a#***: cannot open: URLs with"),
            ("source = 'redis://u:hunter2@h/a'", "redis://***@h/a: cannot open: user names"),
            ("name = 'a b'", "expected a letter or digit, then up to 63 letters"),
            ("name = ''", "expected a letter or digit"),
            ("name = '-v'", "expected a letter or digit"),
            (
                "options = 'laoyut=x'",
                "mount.options: unknown option `laoyut=x`; did you mean `layout`?",
            ),
            ("options = 'log=x.log'", "x.log: expected an absolute path"),
        ] {
            let key = line.split(' ').next().unwrap_or_default();
            let kept: Vec<&str> = ONE.lines().filter(|line| !line.starts_with(key)).collect();
            let error = refused(&format!("{}\n{line}", kept.join("\n")));
            assert!(error.contains(part) && error.contains(&format!("mount.{key}")), "{error}");
        }
        assert!(refused("[[mount]\n").contains("/etc/c.toml:1: not TOML: "));
        assert!(refused("a = 1\na = 2").contains("/etc/c.toml:2: not TOML: "));
    }

    #[test]
    fn rules_of_access_are_options_of_the_mount_and_checked_with_their_line() {
        let rules = |lines: &str, options: &str| {
            let text = format!("{ONE}options = '{options}'\n[[mount.access]]\n{lines}");
            parse(&text).map(|config| config.mounts[0].options.clone())
        };
        let found = rules("path = 'a/**'\nowner = 'root'\nmode = '0750'", "allow_other").unwrap();
        assert_eq!(found, "fsname=a,allow_other,access=a/**:root::0750");
        assert!(rules("path = 'a,b'\nmode = '0700'", "allow_other").is_ok());
        for (lines, options, part) in [
            ("path = 'a'", "", "needs allow_other"),
            ("mode = '0750'", "allow_other", "mount.access.path: the key is missing"),
            ("path = '/a'", "allow_other", "a path in the mount"),
            ("path = 'a'\nmode = 'rwx'", "allow_other", "octal"),
            ("path = 'a'\nmode = 750", "allow_other", "expected a string"),
            ("path = 'a'\ngruop = 'x'", "allow_other", "did you mean `group`?"),
            ("path = 'a'\ngroup = 'no-such-group'", "allow_other", "a group that exists"),
        ] {
            let error = rules(lines, options).unwrap_err();
            assert!(error.starts_with("/etc/c.toml:") && error.contains(part), "{error}");
        }
    }

    #[test]
    fn the_log_format_of_the_service_is_that_of_its_mounts_unless_they_have_their_own() {
        let options = |own: &str| {
            let text = format!("[service]\nlog-format = 'json'\n{ONE}options = '{own}'");
            parse(&text).map(|config| config.mounts[0].options.clone())
        };
        assert_eq!(options("ro").unwrap(), "fsname=a,log-format=json,ro");
        assert_eq!(options("log-format=human").unwrap(), "fsname=a,log-format=human");
    }

    #[test]
    fn metrics_are_for_this_machine_unless_the_config_says_otherwise() {
        let metrics = |lines: &str| {
            let config = parse(&format!("[service]\n{lines}"))?;
            Ok::<_, String>(config.service.metrics.map(|address| address.to_string()))
        };
        assert_eq!(metrics(""), Ok(None));
        for (line, shown) in [
            ("metrics = '127.0.0.1:9469'", "127.0.0.1:9469"),
            ("metrics = 'localhost:9469'", "127.0.0.1:9469"),
            ("metrics = '[::1]:9469'", "[::1]:9469"),
            ("metrics = 'unix:/run/m.sock'", "unix:/run/m.sock"),
            ("metrics = '0.0.0.0:9469'\nmetrics-public = true", "0.0.0.0:9469"),
        ] {
            assert_eq!(metrics(line), Ok(Some(shown.to_owned())), "{line}");
        }
        for (line, part) in [
            ("metrics = '0.0.0.0:9469'", "metrics-public = true"),
            ("metrics = '[::]:9469'\nmetrics-public = false", "metrics-public = true"),
            ("metrics = '9469'", "expected an address and a port"),
            ("metrics = 'unix:m.sock'", "an absolute path"),
            ("metrics = 9469", "expected a string"),
            ("metrics-public = 1", "expected a boolean"),
            ("log-format = 'xml'", "expected auto, human, json or journal"),
        ] {
            let error = parse(&format!("[service]\n{line}")).unwrap_err();
            assert!(
                error.starts_with("/etc/c.toml:2: service.") && error.contains(part),
                "{error}"
            );
        }
    }

    #[test]
    fn mounts_that_read_each_other_are_refused() {
        let mounts = |sources: &[&str]| -> String {
            let one = |(index, source): (usize, &&str)| {
                format!(
                    "[[mount]]\nname = 'm{index}'\nsource = '{source}'\ntarget = '/srv/{index}'\n"
                )
            };
            sources.iter().enumerate().map(one).collect()
        };
        for sources in [&["/srv/1/a", "/srv/2", "/data"][..], &["/srv/0", "/srv/0/a", "/srv/01"]] {
            assert!(parse(&mounts(sources)).is_ok(), "{sources:?}");
        }
        for (sources, line) in
            [(&["/srv/1/a", "/srv/0"][..], 1), (&["/srv/1", "/srv/2", "/srv/3", "/srv/1/a"], 5)]
        {
            let error = refused(&mounts(sources));
            assert!(error.starts_with(&format!("/etc/c.toml:{line}: mount.source: ")), "{error}");
        }
    }

    #[test]
    fn two_mounts_share_neither_name_nor_target() {
        let other = |name: &str, target: &str| {
            format!("{ONE}[[mount]]\nname = '{name}'\nsource = '/data'\ntarget = '{target}'")
        };
        assert!(parse(&other("b", "/srv/ab")).is_ok());
        let error = refused(&other("a", "/srv/b"));
        assert_eq!(error, "/etc/c.toml:5: mount.name: `a` is the name of the mount on line 1");
        for (target, how) in [
            ("/srv//a", "is the target"),
            ("/srv/a/x", "lies in the target"),
            ("/srv", "contains the target"),
        ] {
            let error = refused(&other("b", target));
            assert!(error.contains(how) && error.ends_with("line 1"), "{error}");
        }
    }
}
