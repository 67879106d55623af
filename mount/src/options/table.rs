//! The options of a mount, in groups. Each option is one row.

use std::ffi::OsStr;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tensorfs::internal::cache::BUDGET_MIN;
use tensorfs::internal::error::real_name;
use tensorfs::internal::open_options::HUB;
use tensorfs::internal::size::parse_size;
use tensorfs::internal::source::{SecretOrigin, read_option_file, read_text};
use tensorfs::internal::store::{SERVER_URL, is_server_url};
use tensorfs::internal::view::{LAYOUTS, NamedViews};
use tensorfs::internal::words::UnknownWord;

use super::access::AccessRule;
use super::row::{OptionGroup, OptionRow, Use, for_all, set_view};
use super::{CACHE_DEFAULT, IndexDir, Options};

/// Maximum size of the cache. A larger value is probably a typing error.
const CACHE_MAX: u64 = 1 << 40;

/// Minimum size of the disk cache.
const DISK_CACHE_MIN: u64 = 16 << 20;

/// Maximum readahead window. For one page fault, the kernel may read half of the window before the
/// requested byte.
const READAHEAD_MAX: u64 = 1 << 30;

/// All rows of all groups.
pub(super) fn rows() -> impl Iterator<Item = &'static OptionRow> {
    GROUPS.iter().flat_map(|group| group.rows)
}

/// The row of the option `name`. `with_value` says whether the user gave a value.
pub(super) fn find(name: &str, with_value: bool) -> Option<&'static OptionRow> {
    rows().find(|row| row.name == name && row.takes_value() == with_value)
}

/// The options that `tensorfs status` shows, without the options of `OpenOptions`.
pub(super) fn shown(options: &Options) -> impl Iterator<Item = (&'static str, Value)> + '_ {
    rows().filter_map(|row| Some((row.name, row.shown?(options))))
}

fn word<T: FromStr<Err = UnknownWord>>(slot: &mut T, value: &str) -> Result<(), String> {
    *slot = value.parse().map_err(|known: UnknownWord| known.to_string())?;
    Ok(())
}

fn set<T>(slot: &mut T, value: Result<T, String>) -> Result<(), String> {
    *slot = value?;
    Ok(())
}

fn text(value: &str) -> Result<String, String> {
    if value.is_empty() { Err("a name".to_owned()) } else { Ok(value.to_owned()) }
}

fn path(value: &str) -> Result<Option<PathBuf>, String> {
    text(value).map(|path| Some(path.into()))
}

/// The URL of a server. It must not contain a login or a query, since both may be secret.
fn server(value: &str) -> Result<Option<String>, String> {
    let expected = || SERVER_URL.to_owned();
    is_server_url(value).then(|| Some(value.to_owned())).ok_or_else(expected)
}

fn shown_file(file: Option<&Path>) -> Value {
    json!(file.map(real_name))
}

fn folder(value: &str) -> Result<PathBuf, String> {
    if value.is_empty() { Err("a folder".to_owned()) } else { Ok(value.into()) }
}

fn id(value: &str) -> Result<Option<u32>, String> {
    // The largest number means "no one" to the kernel.
    let id = value.parse().ok().filter(|id| *id < u32::MAX);
    id.map(Some).ok_or_else(|| "a number".to_owned())
}

fn seconds(value: &str) -> Result<Duration, String> {
    let seconds = value.parse().ok().filter(|seconds| (1..=86400).contains(seconds));
    seconds.map(Duration::from_secs).ok_or_else(|| "seconds from 1 to 86400".to_owned())
}

fn size_in(sizes: RangeInclusive<u64>, expected: &str, value: &str) -> Result<Option<u64>, String> {
    let size = parse_size(value).filter(|size| sizes.contains(size));
    size.map(Some).ok_or_else(|| expected.to_owned())
}

/// All mount options of tensorfs, in the order of the help.
pub(super) const GROUPS: &[OptionGroup] = &[
    OptionGroup { title: "Files", rows: FILES },
    OptionGroup { title: "Tensors", rows: &for_all(Use::View, TENSORS) },
    OptionGroup { title: "Source", rows: &for_all(Use::Source, SOURCE) },
    OptionGroup { title: "Changes of the source", rows: CHANGES },
    OptionGroup { title: "Users and permissions", rows: USERS },
    OptionGroup { title: "Reading", rows: READING },
    OptionGroup { title: "Mount table and log", rows: PLACE },
];

/// Options for the files that the mount shows.
const FILES: &[OptionRow] = &[
    OptionRow::value(
        "layout",
        |options, value| {
            if value == HUB {
                (options.open.hub, options.has_view) = (true, true);
                return Ok(());
            }
            let expected =
                |why: String| if why == LAYOUTS { format!("{why}, or hub") } else { why };
            set_view(options, "layout", value).map_err(expected)
        },
        "single: one virtual file per checkpoint (default)\n\
         original: shards and weight map as they are, still proved\n\
         shards=N: N virtual files of about one size, with a weight map\n\
         shards=SIZE: virtual files of at most SIZE, like 5GB, as the hub splits models\n\
         map=FILE: the files that FILE lists: {\"TENSOR\": NUMBER, ...} in JSON\n\
         hub: a folder of models as a cache of the Hugging Face hub, for HF_HUB_CACHE",
    )
    .for_commands(Use::Layout),
    OptionRow::view(
        "format",
        "safetensors: the virtual file is a safetensors file (default)\n\
         bintensors: it is NAME.bt, as the bintensors package would write it",
    )
    .for_commands(Use::Format),
    OptionRow::view(
        "weight-map",
        "rewrite: a weight map, for rank shards too, sends every tensor to the virtual file \
         (default)\n\
         hide: no weight map",
    )
    .for_commands(Use::Files),
    OptionRow::value(
        "config",
        |options, value| set(&mut options.open.config, path(value)),
        "DIR|FILE: also show the small files of DIR, or FILE: config.json, those of the tokenizer \
         and others without weights; they win over those of the source",
    )
    .for_commands(Use::Files),
    OptionRow::value(
        "views",
        |options, value| {
            let (path, text) = read_text(Path::new(&text(value)?))?;
            let views = NamedViews::parse(&path, &text, &mut read_option_file)?;
            (options.open.views, options.has_view) = (Some(Arc::new(views)), true);
            Ok(())
        },
        "FILE: several views, each as a folder: a [view.NAME] table in TOML for each, with the \
         options about files and tensors as keys",
    )
    .for_commands(Use::Views),
];

/// Options for the tensors in these files.
const TENSORS: [OptionRow; 8] = [
    OptionRow::view("include", "GLOB: only tensors whose names match; may be given more than once")
        .repeats(),
    OptionRow::view("exclude", "GLOB: no tensors whose names match; may be given more than once")
        .repeats(),
    OptionRow::view(
        "rename",
        "FILE: other names for tensors, and tensors split or joined, by the rules in FILE",
    ),
    OptionRow::view(
        "tp",
        "N: the slices of N tensor-parallel ranks, each as a folder tp-N/rank-R; with rank=, those \
         of one",
    ),
    OptionRow::view("rank", "R: with tp=N, the rank, from 0 to N-1"),
    OptionRow::view(
        "tp-rules",
        "FILE: with tp=N, how tensors are cut; the default is by the model's config.json",
    ),
    OptionRow::view(
        "dtype",
        "bf16|f16|f32: cast floating point tensors, but for quantized ones and their scales\n\
         map=FILE: cast as FILE says: {\"TENSOR\": \"BF16\", ...} in JSON\n\
         like:FILE: cast to the dtypes that the tensors have in the checkpoint FILE",
    ),
    OptionRow::view(
        "keep",
        "GLOB: with dtype=, tensors that stay as they are; may be given more than once",
    )
    .repeats(),
];

/// Options for how the source is found, proved and opened.
const SOURCE: [OptionRow; 17] = [
    OptionRow::value(
        "prefer",
        |options, value| word(&mut options.open.prefer, value),
        "file: of a whole file and a sharded set of one name show the file, as transformers does \
         (default)\n\
         shards: show the sharded set, as diffusers does",
    ),
    OptionRow::value(
        "zero",
        |options, value| word(&mut options.open.zero, value),
        "module: of DeepSpeed ZeRO-1 and ZeRO-2 show the weights of the model (default)\n\
         fp32: show those of the optimizer in F32, as zero_to_fp32.py writes them",
    ),
    OptionRow::value(
        "state",
        |options, value| word(&mut options.open.state, value),
        "none: of files of torch.save and distributed checkpoints show the model (default)\n\
         all: show all tensors under their full names, with the state of optimizers, schedulers \
         and random numbers",
    ),
    OptionRow::value(
        "follow",
        |options, value| {
            options.open.follow.push(folder(value)?);
            Ok(())
        },
        "DIR: also show the targets of links that lead into DIR; may be given more than once",
    )
    .repeats(),
    OptionRow::value(
        "expect-shards",
        |options, value| {
            let shards = value.parse().ok().filter(|shards| *shards > 0);
            options.open.expect_shards = Some(shards.ok_or("a number from 1")?);
            Ok(())
        },
        "N: refuse a checkpoint that is not made of N shard files",
    ),
    OptionRow::value(
        "reference",
        |options, value| set(&mut options.open.reference, path(value)),
        "FILE: refuse a checkpoint that differs in names, dtypes or shapes from FILE: a \
         safetensors file, a manifest of `verify`, or a weight map (names only)",
    ),
    OptionRow::value(
        "key-file",
        |options, value| options.set_secret(SecretOrigin::KeyFile(text(value)?.into())),
        "FILE: the key of encrypted tensorizer files: 32 bytes, or 64 hexadecimal digits; default: \
         $TENSORFS_KEY_FILE",
    ),
    OptionRow::value(
        "passphrase-file",
        |options, value| options.set_secret(SecretOrigin::PassphraseFile(text(value)?.into())),
        "FILE: the passphrase of encrypted files; default: $TENSORFS_PASSPHRASE_FILE",
    ),
    OptionRow::value(
        "key-command",
        |options, value| options.set_secret(SecretOrigin::KeyCommand(text(value)?.into())),
        "COMMAND: a command for sh that writes the key, as in a key file; default: \
         $TENSORFS_KEY_COMMAND",
    ),
    OptionRow::value(
        "index-dir",
        |options, value| {
            let dir = text(value).map(|dir| IndexDir::parse(OsStr::new(&dir)));
            set(&mut options.index_dir, dir)
        },
        "DIR: where indexes are kept, so that the next start need not read all headers, and \
         checksums (default: $XDG_CACHE_HOME/tensorfs or ~/.cache/tensorfs, for root \
         /var/cache/tensorfs); none: nowhere; $TENSORFS_INDEX_DIR is the same for all commands",
    ),
    OptionRow::value(
        "cache-dir",
        |options, value| {
            options.disk_cache.set(folder(value)?);
            Ok(())
        },
        "DIR: where blocks of remote sources are kept, for later starts and other processes; none: \
         nowhere; for mounts the default is remote/ in the folder of indexes of this user, for \
         other commands none; $TENSORFS_CACHE_DIR is the same for all",
    )
    .shown(|options| options.disk_cache.shown()),
    OptionRow::value(
        "cache-dir-size",
        |options, value| {
            let expected = "a size from 16M, like 100G";
            set(&mut options.disk_cache.size, size_in(DISK_CACHE_MIN..=u64::MAX, expected, value))
        },
        "SIZE: how much that folder may take (default: leaves 10 % of its file system free, at \
         least 1 GiB)",
    )
    .shown(|options| json!(options.disk_cache.size)),
    OptionRow::value(
        "credentials-file",
        |options, value| set(&mut options.remote.credentials_file, path(value)),
        "FILE: the file with the credentials of a remote source, before those of the environment: \
         for S3 as ~/.aws/credentials, for Google Cloud Storage as GOOGLE_APPLICATION_CREDENTIALS, \
         for Azure a connection string, for the hub a token, for HTTP as .netrc",
    )
    .shown(|options| shown_file(options.remote.credentials_file.as_deref())),
    OptionRow::value(
        "profile",
        |options, value| set(&mut options.remote.profile, text(value).map(Some)),
        "NAME: the profile of S3, before the keys of the environment; default: $AWS_PROFILE",
    )
    .shown(|options| json!(options.remote.profile)),
    OptionRow::value(
        "endpoint",
        |options, value| set(&mut options.remote.endpoint, server(value)),
        "URL: the server of a remote source, as http(s)://HOST[:PORT]; http:// URLs have it",
    )
    .shown(|options| json!(options.remote.endpoint)),
    OptionRow::value(
        "region",
        |options, value| set(&mut options.remote.region, text(value).map(Some)),
        "NAME: the region of S3; default: $AWS_REGION",
    )
    .shown(|options| json!(options.remote.region)),
    OptionRow::value(
        "ca-file",
        |options, value| set(&mut options.remote.ca_file, path(value)),
        "FILE: certificates that remote sources are trusted by, besides those of the machine; \
         default: $AWS_CA_BUNDLE",
    )
    .shown(|options| shown_file(options.remote.ca_file.as_deref())),
];

/// Options for how changes of the source are found.
const CHANGES: &[OptionRow] = &[
    OptionRow::value(
        "watch",
        |options, value| {
            let watch = value.parse().map_err(|known: UnknownWord| known.to_string());
            set(&mut options.watch, watch.map(Some))
        },
        "auto|inotify|poll|off: how new, changed and removed checkpoints are found while the \
         source is mounted (auto: by inotify, and by polling on network file systems; default: \
         off, for mounts of `serve` auto)",
    )
    .shown(|options| json!(options.watch().as_str())),
    OptionRow::value(
        "watch-interval",
        |options, value| set(&mut options.watch_interval, seconds(value)),
        "SECONDS: time between two polls of folders without events (default: 1)",
    ),
    OptionRow::value(
        "watch-grace",
        |options, value| set(&mut options.watch_grace, seconds(value)),
        "SECONDS: a checkpoint that is not whole counts as on its way until it was left alone for \
         so long (default: 30); then a TENSORFS-ERROR.txt is shown",
    ),
];

/// Options for owners and permissions.
const USERS: &[OptionRow] = &[
    OptionRow::flag(
        "allow_other",
        |options| options.allow_other = true,
        "let every user in; without it only the user who mounted gets in",
    ),
    OptionRow::value(
        "access",
        |options, value| {
            options.access.push(AccessRule::parse(value)?);
            Ok(())
        },
        "GLOB:OWNER:GROUP:MODE: owner, group and octal mode of what GLOB matches in the mount, \
         files without x; may be given more than once, the first that matches counts; needs \
         allow_other",
    )
    .repeats(),
    OptionRow::value(
        "uid",
        |options, value| set(&mut options.uid, id(value)),
        "N: owner of all files (default: the user who mounts)",
    ),
    OptionRow::value(
        "gid",
        |options, value| set(&mut options.gid, id(value)),
        "N: group of all files (default: that of the user who mounts)",
    ),
    OptionRow::value(
        "umask",
        |options, value| {
            let mask = u32::from_str_radix(value, 8).ok().filter(|mask| *mask <= 0o777);
            options.umask = mask.ok_or("an octal number up to 777")?;
            Ok(())
        },
        "OCTAL: remove bits from the modes, which are 0444 for files and 0755 for folders",
    ),
];

/// Options for how bytes are read.
const READING: &[OptionRow] = &[
    OptionRow::value(
        "cache",
        |options, value| {
            let expected = "a size from 16M to 1T, like 256M";
            set(&mut options.cache, size_in(BUDGET_MIN..=CACHE_MAX, expected, value))
        },
        "SIZE: memory for bytes that are read from the source, from 16M: a hard bound (default: \
         128M)",
    )
    .shown(|options| json!(options.cache.unwrap_or(CACHE_DEFAULT))),
    OptionRow::value(
        "io-timeout",
        |options, value| {
            let seconds = value.parse::<u32>().map_err(|_| "seconds, or 0 for none")?;
            options.io_timeout = (seconds > 0).then(|| Duration::from_secs(seconds.into()));
            // Requests that no read waits for have the same limit.
            options.remote.timeout = Some(options.io_timeout.unwrap_or(Duration::MAX));
            Ok(())
        },
        "SECONDS: fail what the source takes longer to answer, mounting included (default: 60); 0 \
         waits for ever",
    )
    .for_commands(Use::Source)
    .shown(|options| json!(options.io_timeout.map(|timeout| timeout.as_secs_f64()))),
    OptionRow::value(
        "verify",
        |options, value| word(&mut options.verify, value),
        "none|read: whether each tensor is compared with the checksums that `tensorfs verify` has \
         recorded before its first bytes are handed out (default: none)",
    )
    .shown(|options| json!(options.verify.as_str())),
    OptionRow::value(
        "io",
        |options, value| word(&mut options.io, value),
        "auto|uring|pread: what reads the source: io_uring if it is available, or threads (auto: \
         io_uring for local file systems)",
    )
    .for_commands(Use::Reads)
    .shown(|options| json!(options.io.as_str())),
    OptionRow::value(
        "direct",
        |options, value| word(&mut options.direct, value),
        "auto|always|never: whether the source is read past the page cache (auto: bytes that are \
         not in it)",
    )
    .for_commands(Use::Reads)
    .shown(|options| json!(options.direct.as_str())),
    OptionRow::value(
        "readahead",
        |options, value| {
            let expected = "a size up to 1G, like 4M, or 0";
            set(&mut options.readahead, size_in(0..=READAHEAD_MAX, expected, value))
        },
        "SIZE: how far the kernel reads ahead, up to 1G (default: 2M); 0 turns it off; needs root, \
         other mounts stay at 128 KiB",
    ),
    OptionRow::value(
        "passthrough",
        |options, value| word(&mut options.passthrough, value),
        "auto|never: whether the kernel may serve whole files by itself (auto: those on local file \
         systems; with `io-timeout=0` all)",
    ),
    OptionRow::value(
        "assemble",
        |options, value| set(&mut options.assemble, folder(value).map(Some)),
        "DIR: write virtual files that are read often into DIR, and let the kernel serve those; \
         needs root",
    ),
    OptionRow::value(
        "assemble-size",
        |options, value| {
            set(&mut options.assemble_size, size_in(1..=u64::MAX, "a size, like 100G", value))
        },
        "SIZE: how much the copies in DIR may take (default: leaves 10 % of its file system free, \
         at least 1 GiB)",
    ),
];

/// Options for the mount table, the flags of mount(2), and the log.
const PLACE: &[OptionRow] = &[
    OptionRow::value(
        "fsname",
        |options, value| set(&mut options.fsname, text(value).map(Some)),
        "NAME: device name in the mount table (default: the source)",
    ),
    OptionRow::value(
        "log",
        |options, value| set(&mut options.log, path(value)),
        "FILE: where the daemon logs (default: the system log); SIGHUP opens it anew",
    ),
    OptionRow::value(
        "log-format",
        |options, value| word(&mut options.log_format, value),
        "auto|human|json|journal: form of log lines: fields for the journal where it is reached \
         and text elsewhere (auto), text, a JSON object a line, or the journal and nothing else",
    ),
    OptionRow::flag("rw", |options| options.rw = true, ""),
    OptionRow::flag("noexec", |options| options.noexec = true, ""),
    OptionRow::flag("exec", |options| options.noexec = false, ""),
    OptionRow::flag("noatime", |options| options.noatime = true, ""),
    OptionRow::flag("atime", |options| options.noatime = false, ""),
    OptionRow::flag("nosymfollow", |options| options.nosymfollow = true, ""),
    OptionRow::flag("symfollow", |options| options.nosymfollow = false, ""),
];
