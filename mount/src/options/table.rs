//! The options of a mount, one row each: name, parser, value for `status`, and help.

use std::ffi::OsStr;
use std::ops::RangeInclusive;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tensorfs::internal::cache::BUDGET_MIN;
use tensorfs::internal::source::{SecretOrigin, read_option_file, read_text};
use tensorfs::internal::view::{LAYOUTS, NamedViews};
use tensorfs::internal::words::UnknownWord;

use super::access::AccessRule;
use super::{CACHE_DEFAULT, IndexDir, Options, Watch, size};

/// Largest cache: a larger value is a typing error.
const CACHE_MAX: u64 = 1 << 40;

/// Largest readahead window: one fault may read half of it before the requested byte.
const READAHEAD_MAX: u64 = 1 << 30;

/// Sizes of a request: the kernel takes no smaller one, and fuser no larger one.
const REQUEST_SIZES: RangeInclusive<u64> = 128 << 10..=16 << 20;

/// The layout of a hub cache, which has several checkpoints.
const HUB: &str = "hub";

/// Column of the explanations in the help, and width of its lines.
const COLUMN: usize = 21;
const WIDTH: usize = 84;

/// The use of an option for commands other than `mount`. Each command has some of these uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    /// How the source is found and proved.
    Source,
    /// The tensors of a view.
    View,
    /// The format of its files.
    Format,
    /// Its number of files.
    Layout,
    /// The files beside those with tensors.
    Files,
    /// Several views.
    Views,
    /// `layout=hub`.
    Hub,
    /// How tensors are read.
    Reads,
}

/// Stores the value of an option; the error says which values there are.
type SetValue = fn(&mut Options, &str) -> Result<(), String>;

/// The effect of an option.
enum Effect {
    /// It takes a value.
    Value(SetValue),
    /// It takes none.
    Flag(fn(&mut Options)),
}

/// One option.
pub(super) struct OptionRow {
    pub(super) name: &'static str,
    /// Its name until this release, which is still accepted.
    pub(super) former: Option<&'static str>,
    /// Whether it may be given more than once.
    pub(super) repeats: bool,
    /// The commands that take it too.
    commands: Option<Use>,
    effect: Effect,
    /// Its value in `tensorfs status`, if it is shown there.
    shown: Option<fn(&Options) -> Value>,
    /// Syntax and explanation of its values.
    help: &'static [(&'static str, &'static str)],
}

impl OptionRow {
    const fn value(
        name: &'static str,
        set: SetValue,
        help: &'static [(&'static str, &'static str)],
    ) -> OptionRow {
        let effect = Effect::Value(set);
        OptionRow { name, former: None, repeats: false, commands: None, effect, shown: None, help }
    }

    const fn flag(
        name: &'static str,
        set: fn(&mut Options),
        help: &'static [(&'static str, &'static str)],
    ) -> OptionRow {
        OptionRow { effect: Effect::Flag(set), ..OptionRow::value(name, |_, _| Ok(()), help) }
    }

    const fn formerly(mut self, name: &'static str) -> OptionRow {
        self.former = Some(name);
        self
    }

    const fn repeats(mut self) -> OptionRow {
        self.repeats = true;
        self
    }

    const fn for_commands(mut self, commands: Use) -> OptionRow {
        self.commands = Some(commands);
        self
    }

    const fn shown(mut self, value: fn(&Options) -> Value) -> OptionRow {
        self.shown = Some(value);
        self
    }

    /// The row of the option `name`, given with a value or without.
    pub(super) fn find(name: &str, with_value: bool) -> Option<&'static OptionRow> {
        let is_named = |row: &&OptionRow| row.name == name || row.former == Some(name);
        let fits = |row: &&OptionRow| matches!(row.effect, Effect::Value(_)) == with_value;
        TABLE.iter().filter(is_named).find(fits)
    }

    /// The use of the option with this value for commands other than `mount`.
    pub(super) fn commands(&self, value: &str) -> Option<Use> {
        match self.commands {
            Some(Use::Layout) if value == HUB => Some(Use::Hub),
            commands => commands,
        }
    }

    /// Applies the option, with its value if it takes one.
    pub(super) fn apply(&self, options: &mut Options, value: &str) -> Result<(), String> {
        match self.effect {
            Effect::Value(set) => set(options, value),
            Effect::Flag(set) => {
                set(options);
                Ok(())
            }
        }
    }
}

/// The options that `tensorfs status` shows, apart from those of `OpenOptions`.
pub(super) fn shown(options: &Options) -> impl Iterator<Item = (&'static str, Value)> + '_ {
    TABLE.iter().filter_map(|row| Some((row.name, row.shown?(options))))
}

/// The names of the options for these uses.
pub(crate) fn names_for(uses: &[Use]) -> String {
    let name = |row: &OptionRow| {
        let commands = row.commands?;
        if uses.contains(&commands) {
            return Some(format!("{}=", row.name));
        }
        let takes_hub = commands == Use::Layout && uses.contains(&Use::Hub);
        takes_hub.then(|| format!("{}={HUB}", row.name))
    };
    TABLE.iter().filter_map(name).collect::<Vec<_>>().join(", ")
}

/// The help on all options.
pub(crate) fn help() -> String {
    let mut text = String::from("Mount options:\n");
    for row in TABLE {
        for (syntax, explanation) in row.help {
            let term = match row.effect {
                Effect::Value(_) => format!("  {}={syntax}", row.name),
                Effect::Flag(_) => format!("  {}", row.name),
            };
            let mut line = format!("{term:<COLUMN$}");
            if term.len() >= COLUMN {
                text.push_str(&term);
                text.push('\n');
                line = " ".repeat(COLUMN);
            }
            for word in explanation.split(' ') {
                if line.len() + word.len() > WIDTH {
                    text.push_str(line.trim_end());
                    text.push('\n');
                    line = " ".repeat(COLUMN);
                }
                line.push_str(word);
                line.push(' ');
            }
            text.push_str(line.trim_end());
            text.push('\n');
        }
    }
    text.push_str(
        "Sizes are bytes, or a number with K, M, G or T.\n\
         Options of mount(8), systemd and SELinux (ro, nofail, _netdev, x-*, context=...)\n\
         are accepted. A comma in a value is written `\\,`.",
    );
    text
}

fn word<T: FromStr<Err = UnknownWord>>(slot: &mut T, value: &str) -> Result<(), String> {
    *slot = value.parse().map_err(|known: UnknownWord| known.to_string())?;
    Ok(())
}

/// Sets an option of the view.
fn view(options: &mut Options, key: &str, value: &str) -> Result<(), String> {
    options.has_view = true;
    let set = options.open.view.set(key, value, &mut read_option_file);
    set.unwrap_or_else(|| Err("another option".to_owned()))
}

fn text(value: &str) -> Result<String, String> {
    if value.is_empty() { Err("a name".to_owned()) } else { Ok(value.to_owned()) }
}

fn id(value: &str) -> Result<Option<u32>, String> {
    // The last one means "no one" to the kernel.
    let id = value.parse().ok().filter(|id| *id < u32::MAX);
    id.map(Some).ok_or_else(|| "a number".to_owned())
}

fn seconds(value: &str) -> Result<Duration, String> {
    let seconds = value.parse().ok().filter(|seconds| (1..=86400).contains(seconds));
    seconds.map(Duration::from_secs).ok_or_else(|| "seconds from 1 to 86400".to_owned())
}

fn size_in(sizes: RangeInclusive<u64>, expected: &str, value: &str) -> Result<Option<u64>, String> {
    let size = size(value).filter(|size| sizes.contains(size));
    size.map(Some).ok_or_else(|| expected.to_owned())
}

/// All mount options of tensorfs, in the order of the help.
const TABLE: &[OptionRow] = &[
    OptionRow::value(
        "layout",
        |options, value| {
            if value == HUB {
                (options.open.hub, options.has_view) = (true, true);
                return Ok(());
            }
            let expected = |why: String| if why == LAYOUTS { format!("{why}, or hub") } else { why };
            view(options, "layout", value).map_err(expected)
        },
        &[
            ("single", "one virtual file per checkpoint (default)"),
            ("original", "shards and weight map as they are, still proved"),
            ("shards=N", "N virtual files of about one size, with a weight map"),
            ("shards=SIZE", "virtual files of at most SIZE, like 5GB, as the hub splits models"),
            ("map=FILE", "the files that FILE lists: {\"TENSOR\": NUMBER, ...} in JSON"),
            (HUB, "a folder of models as a cache of the Hugging Face hub, for HF_HUB_CACHE"),
        ],
    )
    .for_commands(Use::Layout),
    OptionRow::value(
        "format",
        |options, value| view(options, "format", value),
        &[
            ("safetensors", "the virtual file is a safetensors file (default)"),
            ("bintensors", "it is NAME.bt, as the bintensors package would write it"),
        ],
    )
    .for_commands(Use::Format),
    OptionRow::value(
        "weight-map",
        |options, value| view(options, "weight-map", value),
        &[
            ("rewrite", "the weight map sends every tensor to the virtual file (default)"),
            ("hide", "no weight map"),
        ],
    )
    .for_commands(Use::Files)
    .formerly("index"),
    OptionRow::value(
        "include",
        |options, value| view(options, "include", value),
        &[("GLOB", "only tensors whose names match; may be given more than once")],
    )
    .repeats()
    .for_commands(Use::View),
    OptionRow::value(
        "exclude",
        |options, value| view(options, "exclude", value),
        &[("GLOB", "no tensors whose names match; may be given more than once")],
    )
    .repeats()
    .for_commands(Use::View),
    OptionRow::value(
        "tp",
        |options, value| view(options, "tp", value),
        &[(
            "N",
            "the slices of N tensor-parallel ranks, each as a folder tp-N/rank-R; with rank=, those of \
             one",
        )],
    )
    .for_commands(Use::View),
    OptionRow::value(
        "rank",
        |options, value| view(options, "rank", value),
        &[("R", "with tp=N, the rank, from 0 to N-1")],
    )
    .for_commands(Use::View),
    OptionRow::value(
        "tp-rules",
        |options, value| view(options, "tp-rules", value),
        &[("FILE", "with tp=N, how tensors are cut; the default is by the model's config.json")],
    )
    .for_commands(Use::View),
    OptionRow::value(
        "rename",
        |options, value| view(options, "rename", value),
        &[("FILE", "other names for tensors, and tensors split or joined, by the rules in FILE")],
    )
    .for_commands(Use::View),
    OptionRow::value(
        "dtype",
        |options, value| view(options, "dtype", value),
        &[
            (
                "bf16|f16|f32",
                "cast floating point tensors, but for quantized ones and their scales",
            ),
            ("map=FILE", "cast as FILE says: {\"TENSOR\": \"BF16\", ...} in JSON"),
            ("like:FILE", "cast to the dtypes that the tensors have in the checkpoint FILE"),
        ],
    )
    .for_commands(Use::View),
    OptionRow::value(
        "keep",
        |options, value| view(options, "keep", value),
        &[("GLOB", "with dtype=, tensors that stay as they are; may be given more than once")],
    )
    .repeats()
    .for_commands(Use::View),
    OptionRow::value(
        "views",
        |options, value| {
            let (path, text) = read_text(Path::new(&text(value)?))?;
            let views = NamedViews::parse(&path, &text, &mut read_option_file)?;
            (options.open.views, options.has_view) = (Some(Arc::new(views)), true);
            Ok(())
        },
        &[(
            "FILE",
            "several views, each as a folder: a [view.NAME] table in TOML for each, with the options \
             above as keys",
        )],
    )
    .for_commands(Use::Views),
    OptionRow::value(
        "prefer",
        |options, value| word(&mut options.open.prefer, value),
        &[
            ("file", "a whole file wins over a sharded set of its name (default)"),
            ("shards", "the sharded set wins"),
        ],
    )
    .for_commands(Use::Source),
    OptionRow::value(
        "follow",
        |options, value| {
            if value.is_empty() {
                return Err("a folder".to_owned());
            }
            options.open.follow.push(value.into());
            Ok(())
        },
        &[("DIR", "symbolic links may lead into DIR; may be given more than once")],
    )
    .repeats()
    .for_commands(Use::Source),
    OptionRow::value(
        "expect-shards",
        |options, value| {
            let shards = value.parse().ok().filter(|shards| *shards > 0);
            options.open.expect_shards = Some(shards.ok_or("a number from 1")?);
            Ok(())
        },
        &[("N", "refuse a checkpoint that is not made of N shard files")],
    )
    .for_commands(Use::Source),
    OptionRow::value(
        "reference",
        |options, value| {
            options.open.reference = Some(text(value)?.into());
            Ok(())
        },
        &[(
            "FILE",
            "refuse a checkpoint that does not hold what FILE lists: a safetensors file, a weight \
             map or a manifest of `verify`",
        )],
    )
    .for_commands(Use::Source),
    OptionRow::value(
        "key-file",
        |options, value| options.set_secret(SecretOrigin::KeyFile(text(value)?.into())),
        &[(
            "FILE",
            "the key of encrypted tensorizer files: 32 bytes, or 64 hexadecimal digits; default: \
             $TENSORFS_KEY_FILE",
        )],
    )
    .for_commands(Use::Source),
    OptionRow::value(
        "passphrase-file",
        |options, value| options.set_secret(SecretOrigin::PassphraseFile(text(value)?.into())),
        &[("FILE", "the passphrase of encrypted files; default: $TENSORFS_PASSPHRASE_FILE")],
    )
    .for_commands(Use::Source),
    OptionRow::value(
        "key-command",
        |options, value| options.set_secret(SecretOrigin::KeyCommand(text(value)?.into())),
        &[(
            "COMMAND",
            "a command for sh that writes the key, as in a key file; default: $TENSORFS_KEY_COMMAND",
        )],
    )
    .for_commands(Use::Source),
    OptionRow::value(
        "uid",
        |options, value| {
            options.uid = id(value)?;
            Ok(())
        },
        &[("N", "owner of all files (default: the user who mounts)")],
    ),
    OptionRow::value(
        "gid",
        |options, value| {
            options.gid = id(value)?;
            Ok(())
        },
        &[("N", "group of all files (default: that of the user who mounts)")],
    ),
    OptionRow::value(
        "umask",
        |options, value| {
            let mask = u32::from_str_radix(value, 8).ok().filter(|mask| *mask <= 0o777);
            options.umask = mask.ok_or("an octal number up to 777")?;
            Ok(())
        },
        &[("OCTAL", "permission bits taken away")],
    ),
    OptionRow::flag(
        "allow_other",
        |options| options.allow_other = true,
        &[("", "let other users in")],
    ),
    OptionRow::value(
        "access",
        |options, value| {
            options.access.push(AccessRule::parse(value)?);
            Ok(())
        },
        &[(
            "GLOB:OWNER:GROUP:MODE",
            "owner, group and octal mode of what GLOB matches in the mount, files without x; may be \
             given more than once, the first that matches counts; needs allow_other",
        )],
    )
    .repeats(),
    OptionRow::value(
        "fsname",
        |options, value| {
            options.fsname = Some(text(value)?);
            Ok(())
        },
        &[("NAME", "device name in the mount table (default: the source)")],
    ),
    OptionRow::value(
        "log",
        |options, value| {
            options.log = Some(text(value)?.into());
            Ok(())
        },
        &[("FILE", "where the daemon logs (default: the system log); SIGHUP opens it anew")],
    ),
    OptionRow::value(
        "log-format",
        |options, value| word(&mut options.log_format, value),
        &[(
            "auto|human|json|journal",
            "form of log lines: fields for the journal where it is reached and text elsewhere \
             (auto), text, a JSON object a line, or the journal and nothing else",
        )],
    ),
    OptionRow::value(
        "passthrough",
        |options, value| word(&mut options.passthrough, value),
        &[("auto|never", "whether the kernel may serve whole files by itself")],
    ),
    OptionRow::value(
        "cache",
        |options, value| {
            options.cache =
                size_in(BUDGET_MIN..=CACHE_MAX, "a size from 16M to 1T, like 256M", value)?;
            Ok(())
        },
        &[("SIZE", "memory for what is read from the source (default: 128M)")],
    )
    .shown(|options| json!(options.cache.unwrap_or(CACHE_DEFAULT))),
    OptionRow::value(
        "readahead",
        |options, value| {
            let expected = "a size up to 1G, like 4M, or 0";
            options.readahead = size_in(0..=READAHEAD_MAX, expected, value)?;
            Ok(())
        },
        &[("SIZE", "how far the kernel reads ahead (default: 2M); needs root")],
    ),
    OptionRow::value(
        "max_request",
        |options, value| {
            options.max_request = size_in(REQUEST_SIZES, "a size from 128K to 16M", value)?;
            Ok(())
        },
        &[(
            "SIZE",
            "largest read that the kernel asks for, up to 16M (default: 1M); above 1M it raises a \
             limit of the whole system, as root",
        )],
    ),
    OptionRow::value(
        "io",
        |options, value| word(&mut options.io, value),
        &[(
            "auto|uring|pread",
            "what reads the source: io_uring if it is available, or threads (auto: io_uring for \
             local file systems)",
        )],
    )
    .for_commands(Use::Reads)
    .shown(|options| json!(options.io.as_str())),
    OptionRow::value(
        "direct",
        |options, value| word(&mut options.direct, value),
        &[(
            "auto|always|never",
            "whether the source is read past the page cache (auto: what is not in it)",
        )],
    )
    .for_commands(Use::Reads)
    .shown(|options| json!(options.direct.as_str())),
    OptionRow::value(
        "verify",
        |options, value| word(&mut options.verify, value),
        &[(
            "none|read",
            "whether each tensor is compared with the checksums that `tensorfs verify` has \
             recorded before its first bytes are handed out (default: none)",
        )],
    )
    .shown(|options| json!(options.verify.as_str())),
    OptionRow::value(
        "io-timeout",
        |options, value| {
            let seconds = value.parse::<u32>().map_err(|_| "seconds, or 0 for none")?;
            options.io_timeout = (seconds > 0).then(|| Duration::from_secs(seconds.into()));
            Ok(())
        },
        &[(
            "SECONDS",
            "fail what the source takes longer to answer, mounting included (default: 60); 0 waits \
             for ever",
        )],
    )
    .for_commands(Use::Reads)
    .shown(|options| json!(options.io_timeout.map(|timeout| timeout.as_secs_f64()))),
    OptionRow::value(
        "assemble",
        |options, value| {
            if value.is_empty() {
                return Err("a folder".to_owned());
            }
            options.assemble = Some(value.into());
            Ok(())
        },
        &[("DIR", "write files that are read often into DIR, and serve those")],
    ),
    OptionRow::value(
        "assemble-size",
        |options, value| {
            options.assemble_size = size_in(1..=u64::MAX, "a size, like 100G", value)?;
            Ok(())
        },
        &[("SIZE", "how much DIR may hold")],
    ),
    OptionRow::value(
        "index-dir",
        |options, value| {
            options.index_dir = IndexDir::parse(OsStr::new(&text(value)?));
            Ok(())
        },
        &[(
            "DIR",
            "where indexes are kept, so that the next start need not read all headers, and \
             checksums (default: $XDG_CACHE_HOME/tensorfs or ~/.cache/tensorfs, for root \
             /var/cache/tensorfs); none: nowhere; $TENSORFS_INDEX_DIR is the same for all commands",
        )],
    )
    .for_commands(Use::Source),
    OptionRow::value(
        "watch",
        |options, value| {
            let mut watch = Watch::Off;
            word(&mut watch, value)?;
            options.watch = Some(watch);
            Ok(())
        },
        &[(
            "auto|inotify|poll|off",
            "how new, changed and removed checkpoints are found while the source is mounted (auto: \
             by inotify, and by polling on network file systems; default: off, for mounts of \
             `serve` auto)",
        )],
    )
    .shown(|options| json!(options.watch().as_str())),
    OptionRow::value(
        "watch-interval",
        |options, value| {
            options.watch_interval = seconds(value)?;
            Ok(())
        },
        &[("SECONDS", "time between two polls of the source (default: 1)")],
    ),
    OptionRow::value(
        "watch-grace",
        |options, value| {
            options.watch_grace = seconds(value)?;
            Ok(())
        },
        &[(
            "SECONDS",
            "a checkpoint that is not whole counts as on its way until it was left alone for so \
             long (default: 30); then a TENSORFS-ERROR.txt is shown",
        )],
    ),
    OptionRow::flag("rw", |options| options.rw = true, &[]),
    OptionRow::flag("noexec", |options| options.noexec = true, &[]),
    OptionRow::flag("exec", |options| options.noexec = false, &[]),
    OptionRow::flag("noatime", |options| options.noatime = true, &[]),
    OptionRow::flag("atime", |options| options.noatime = false, &[]),
    OptionRow::flag("nosymfollow", |options| options.nosymfollow = true, &[]),
    OptionRow::flag("symfollow", |options| options.nosymfollow = false, &[]),
];
