//! The command line.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Arg, Args, Parser, Subcommand, ValueEnum};
use tensorfs::internal::size::parse_size;

use crate::options::{self, Use};

/// Sharded model checkpoints as one safetensors file, without a copy.
#[derive(Debug, Parser)]
#[command(
    name = "tensorfs",
    version,
    arg_required_else_help = true,
    after_help = "Exit status: 0 done, 1 failed or refused, 2 usage.\n\
                  Environment: TENSORFS_INDEX_DIR says where indexes are kept, TENSORFS_CACHE_DIR where \
                  blocks of remote sources are, TENSORFS_LOG what is logged."
)]
pub(crate) struct Cli {
    /// Write only failures to standard error: no notes, warnings or progress
    #[arg(short, long, global = true)]
    pub quiet: bool,
    /// The command.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Measure reads through a mount against those of a real consolidated file
    Bench(super::bench::args::BenchArgs),
    /// Make small checkpoints, mount them, read them through the mount and compare every byte
    Demo(DemoArgs),
    /// Say what this machine has for mounting and reading, and what it lacks
    Doctor(DoctorArgs),
    /// Mount a checkpoint, or a tree of them
    Mount(MountArgs),
    /// Mount for one command, and unmount when it ends
    #[command(
        override_usage = "tensorfs run [-o OPTIONS] SOURCE -- COMMAND [ARGS]...",
        after_help = "{} in COMMAND and ARGS stands for the mount, as does $TENSORFS_MOUNT in its \
                      environment.\n\
                      Exit status: that of the command; 1 nothing was mounted, 2 usage, 126 the \
                      command cannot be run, 127 there is none. A signal that ends the command \
                      ends tensorfs too."
    )]
    Run(RunArgs),
    /// Take a mount off
    Umount(UmountArgs),
    /// Serve all mounts of a config file, as a service
    Serve(ServeArgs),
    /// Show the running mounts: what they have served, from where and how fast
    Status(StatusArgs),
    /// Watch the running mounts
    Top(TopArgs),
    /// Show which tensors of a mount were read, how much, how often and by which programs
    Heat(HeatArgs),
    /// Read a mount or a source into the page cache
    Warm(WarmArgs),
    /// List, check, fill or empty the disk cache of remote sources
    Cache(CacheArgs),
    /// List the checkpoints of a source and their tensors
    Ls(LsArgs),
    /// Show where the data of tensors lies
    Inspect(InspectArgs),
    /// Write the bytes of a tensor to standard output
    Cat(CatArgs),
    /// Load tensors into memory, past any mount, and say how fast it went
    Load(LoadArgs),
    /// Show or make the index, from which the next start need not read all headers
    Index(IndexArgs),
    /// Prove a checkpoint whole and read every byte of it
    Verify(VerifyArgs),
    /// Write what a mount would show as real files
    Consolidate(ConsolidateArgs),
    /// Write a checkpoint as one file in another format
    Convert(ConvertArgs),
    /// Compare the tensors of two checkpoints
    #[command(after_help = "Exit status: 0 the same, 1 different, 2 trouble.")]
    Diff(DiffArgs),
    /// Make a page that shows where the tensors of a checkpoint lie
    Report(ReportArgs),
    /// Print a completion script
    Completions {
        /// For this shell
        shell: clap_complete::Shell,
    },
    /// Print the manual page, or write all pages into a folder
    Man {
        /// Folder for the pages
        folder: Option<PathBuf>,
    },
}

/// The source of a command, and how it is read.
#[derive(Clone, Debug, Args)]
pub(crate) struct SourceArgs {
    /// Checkpoint folder, tree of them, or one file of a checkpoint; a URL, s3://BUCKET/PREFIX,
    /// https://HOST/FOLDER or hf://ORG/NAME; or ORG/NAME, a model of the hub cache
    pub source: PathBuf,
    /// Options as for mount
    #[arg(short = 'o', value_name = "OPTIONS")]
    pub options: Vec<String>,
    /// Folder of indexes and checksums; `none` for none
    #[arg(long, value_name = "DIR")]
    pub index_dir: Option<OsString>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Say more; twice for debugging
    #[arg(short, action = clap::ArgAction::Count)]
    pub verbose: u8,
}

/// A command that reads a source, and the uses of the mount options that it accepts.
pub(crate) struct SourceCommand {
    /// The name of the command.
    pub name: &'static str,
    /// The uses of the mount options that the command accepts.
    pub uses: &'static [Use],
}

use Use::{Files, Format, Hub, Layout, Reads, Source, View, Views};

pub(crate) const WARM: SourceCommand =
    SourceCommand { name: "warm", uses: &[Source, View, Format, Layout] };
/// `warm` without `--heat`. Options about files are accepted only with `--heat`, because a list for
/// `--heat` has names of virtual files.
pub(crate) const WARM_ALL: SourceCommand = SourceCommand { name: "warm", uses: &[Source, View] };
/// `cache warm`.
pub(crate) const CACHE: SourceCommand = SourceCommand { name: "cache", uses: &[Source, View] };
pub(crate) const LS: SourceCommand =
    SourceCommand { name: "ls", uses: &[Source, View, Format, Hub, Views] };
pub(crate) const INSPECT: SourceCommand =
    SourceCommand { name: "inspect", uses: &[Source, View, Format, Hub, Views] };
pub(crate) const CAT: SourceCommand = SourceCommand { name: "cat", uses: &[Source, View, Reads] };
pub(crate) const INDEX: SourceCommand = SourceCommand { name: "index", uses: &[Source, Format] };
pub(crate) const LOAD: SourceCommand = SourceCommand { name: "load", uses: &[Source, View, Reads] };
pub(crate) const VERIFY: SourceCommand = SourceCommand { name: "verify", uses: &[Source] };
pub(crate) const CONSOLIDATE: SourceCommand = SourceCommand {
    name: "consolidate",
    uses: &[Source, View, Format, Layout, Hub, Files, Views, Reads],
};
pub(crate) const CONVERT: SourceCommand =
    SourceCommand { name: "convert", uses: &[Source, View, Layout, Reads] };
pub(crate) const DIFF: SourceCommand = SourceCommand { name: "diff", uses: &[Source, View, Reads] };
pub(crate) const REPORT: SourceCommand =
    SourceCommand { name: "report", uses: &[Source, View, Format, Layout] };

/// All commands that read a source. Shell completion offers each of them its own options.
pub(crate) const SOURCE_COMMANDS: [&SourceCommand; 13] = [
    &CAT,
    &WARM,
    &CACHE,
    &LS,
    &INSPECT,
    &INDEX,
    &LOAD,
    &VERIFY,
    &CONSOLIDATE,
    &CONVERT,
    &DIFF,
    &REPORT,
    &DOCTOR,
];

/// `tensorfs doctor` with a URL.
pub(crate) const DOCTOR: SourceCommand = SourceCommand { name: "doctor", uses: &[Use::Source] };

/// Adds the names of the options that a command accepts to the help text of its argument `-o`.
fn takes(command: &'static SourceCommand) -> impl FnOnce(Arg) -> Arg {
    move |arg| arg.help(format!("Options as for mount: {}", options::names_for(command.uses)))
}

/// Arguments of `demo`.
#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// Leave the checkpoints where they were made
    #[arg(long)]
    pub keep: bool,
}

/// Arguments of `doctor`.
#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// A file with pickles: say what it is, which names its pickles ask for, and whether it is shown.
    /// Nothing of it is run. A URL: say whether it can be read, with which credentials, and how fast
    pub file: Option<PathBuf>,
    /// Options about the credentials and the server of a URL, as for mount
    #[arg(short = 'o', value_name = "OPTIONS")]
    pub options: Vec<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `mount`.
#[derive(Debug, Args)]
#[command(after_long_help = options::help())]
pub(crate) struct MountArgs {
    /// Checkpoint folder, tree of them, or one file of a checkpoint; a URL, s3://BUCKET/PREFIX,
    /// https://HOST/FOLDER or hf://ORG/NAME; or ORG/NAME, a model of the hub cache
    pub source: PathBuf,
    /// Folder to mount on
    pub target: PathBuf,
    /// Mount options, separated by commas; see --help
    #[arg(short = 'o', value_name = "OPTIONS")]
    pub options: Vec<String>,
    /// Folder of indexes and checksums; `none` for none
    #[arg(long, value_name = "DIR")]
    pub index_dir: Option<OsString>,
    /// Serve from this process instead of the background
    #[arg(short, long)]
    pub foreground: bool,
    /// Form of log lines, as -o log-format=
    #[arg(long, value_name = "FORMAT", value_parser = ["auto", "human", "json", "journal"])]
    pub log_format: Option<String>,
    /// Ignore unknown options
    #[arg(short, long)]
    pub sloppy: bool,
    /// Say more; twice for debugging
    #[arg(short, action = clap::ArgAction::Count)]
    pub verbose: u8,
}

/// Arguments of `run`.
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// Checkpoint folder, tree of them, or one file of a checkpoint; a URL, s3://BUCKET/PREFIX,
    /// https://HOST/FOLDER or hf://ORG/NAME; or ORG/NAME, a model of the hub cache
    pub source: PathBuf,
    /// Options as for mount, separated by commas
    #[arg(short = 'o', value_name = "OPTIONS")]
    pub options: Vec<String>,
    /// Folder of indexes and checksums; `none` for none
    #[arg(long, value_name = "DIR")]
    pub index_dir: Option<OsString>,
    /// Say more; twice for debugging
    #[arg(short, action = clap::ArgAction::Count)]
    pub verbose: u8,
    /// The command, whose {} stand for the mount
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

/// Arguments of `umount`.
#[derive(Debug, Args)]
pub(crate) struct UmountArgs {
    /// Folders that are mounted on
    #[arg(value_name = "MNT", required_unless_present = "dead")]
    pub targets: Vec<PathBuf>,
    /// Detach it now, open files stay readable
    #[arg(short, long)]
    pub lazy: bool,
    /// Unmount it now, open files fail
    #[arg(short, long, conflicts_with = "lazy")]
    pub force: bool,
    /// Take off only mounts whose daemon is gone; without a folder, all of them
    #[arg(long, conflicts_with_all = ["lazy", "force"])]
    pub dead: bool,
}

/// Arguments of `serve`.
#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// The config file
    #[arg(long, value_name = "FILE", default_value = "/etc/tensorfs/config.toml")]
    pub config: PathBuf,
    /// Check the config file and end
    #[arg(long)]
    pub check: bool,
    /// Say more; twice for debugging
    #[arg(short, action = clap::ArgAction::Count)]
    pub verbose: u8,
}

/// Arguments of a worker of `serve`.
#[derive(Debug, Args)]
pub(crate) struct WorkerArgs {
    /// The name of its mount, for people who list processes
    pub name: String,
    /// Say more; twice for debugging
    #[arg(short, action = clap::ArgAction::Count)]
    pub verbose: u8,
}

/// Arguments of `status`.
#[derive(Debug, Args)]
pub(crate) struct StatusArgs {
    /// Only the mounts on these folders
    #[arg(value_name = "MNT")]
    pub targets: Vec<PathBuf>,
    /// One line a mount: a table on a terminal, and tabs and bytes elsewhere
    #[arg(short, long, conflicts_with = "json")]
    pub short: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `top`.
#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    /// Only the mounts on these folders
    #[arg(value_name = "MNT")]
    pub targets: Vec<PathBuf>,
    /// Time between two updates
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = interval)]
    pub interval: Duration,
    /// Print one table, of one interval, and end
    #[arg(long)]
    pub once: bool,
}

fn interval(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|seconds| (0.1..=3600.0).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| "expected 0.1 to 3600".to_owned())
}

/// Arguments of `heat`.
#[derive(Debug, Args)]
pub(crate) struct HeatArgs {
    /// Folder that is mounted on
    #[arg(value_name = "MNT")]
    pub target: PathBuf,
    /// Maximum number of tensors that are shown of each file
    #[arg(short = 'n', long, value_name = "N", default_value_t = 20)]
    pub lines: usize,
    /// Print JSON, which `warm --heat` reads
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `warm`.
#[derive(Debug, Args)]
#[command(mut_arg("options", takes(&WARM)), after_help = "layout= and format= go with --heat.")]
pub(crate) struct WarmArgs {
    /// A mount or a path on one, whose files are read, or a source, whose shards are read. Shards of a
    /// URL go to the disk cache.
    #[command(flatten)]
    pub source: SourceArgs,
    /// Read only the tensors of this output of `tensorfs heat MNT --json`, and gaps of up to 64 KiB
    /// between them
    #[arg(long, value_name = "FILE")]
    pub heat: Option<PathBuf>,
    /// Whether to draw a progress bar
    #[arg(long, value_enum, default_value_t = When::Auto, default_missing_value = "always", num_args = 0..=1, require_equals = true)]
    pub progress: When,
}

/// Arguments of `cache`.
#[derive(Debug, Args)]
pub(crate) struct CacheArgs {
    /// The action
    #[arg(value_enum)]
    pub action: CacheAction,
    /// With warm, the URL of the source to fill it with
    #[arg(value_name = "URL")]
    pub source: Option<PathBuf>,
    /// With warm, options as for mount
    #[arg(short = 'o', value_name = "OPTIONS")]
    pub options: Vec<String>,
    /// Folder of the cache, as -o cache-dir=; by default that of mounts of this user
    #[arg(long, value_name = "DIR")]
    pub cache_dir: Option<PathBuf>,
    /// With prune, remove what was not used for longest until this much is left; 0 removes all
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub keep: Option<u64>,
    /// Whether to draw a progress bar, with warm
    #[arg(long, value_enum, default_value_t = When::Auto, default_missing_value = "always", num_args = 0..=1, require_equals = true)]
    pub progress: When,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// The actions of `cache`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum CacheAction {
    /// List the objects, and how much of each is there.
    Ls,
    /// Remove files that cannot be used and, with --keep, objects.
    Prune,
    /// Compare all blocks with their checksums.
    Verify,
    /// Read all shards of a remote source into it, or with options of a view its tensors and gaps of
    /// up to 64 KiB between them.
    Warm,
}

fn size(text: &str) -> Result<u64, String> {
    parse_size(text).ok_or_else(|| "expected a size, like 100G".to_owned())
}

/// Arguments of `ls`.
#[derive(Debug, Args)]
#[command(mut_arg("options", takes(&LS)))]
pub(crate) struct LsArgs {
    /// The source.
    #[command(flatten)]
    pub source: SourceArgs,
    /// One line a checkpoint, which is the default for several: a table on a terminal, and tabs and
    /// bytes elsewhere
    #[arg(short, long, conflicts_with = "json")]
    pub short: bool,
    /// All tensors, which is the default for one checkpoint
    #[arg(short, long, conflicts_with_all = ["json", "short"])]
    pub long: bool,
}

/// Arguments of `inspect`.
#[derive(Debug, Args)]
#[command(mut_arg("options", takes(&INSPECT)))]
pub(crate) struct InspectArgs {
    /// The source.
    #[command(flatten)]
    pub source: SourceArgs,
    /// Only this tensor
    pub tensor: Option<String>,
}

/// Arguments of `cat`.
#[derive(Debug, Args)]
#[command(
    mut_arg("options", takes(&CAT)),
    mut_arg("json", |arg| arg.hide(true)),
    after_help = "The bytes are those of a safetensors file: row by row, each element with its lowest \
                  byte first."
)]
pub(crate) struct CatArgs {
    /// The source.
    #[command(flatten)]
    pub source: SourceArgs,
    /// Name of the tensor
    pub tensor: String,
    /// Write a .npy file, as numpy.save does
    #[arg(long)]
    pub npy: bool,
    /// Write to a terminal, too
    #[arg(short, long)]
    pub force: bool,
}

/// Arguments of `index`.
#[derive(Debug, Args)]
#[command(mut_arg("options", takes(&INDEX)))]
pub(crate) struct IndexArgs {
    /// The source.
    #[command(flatten)]
    pub source: SourceArgs,
    /// Read all headers again
    #[arg(long)]
    pub rebuild: bool,
}

/// Arguments of `load`.
#[derive(Debug, Args)]
#[command(mut_arg("options", takes(&LOAD)))]
pub(crate) struct LoadArgs {
    /// The source.
    #[command(flatten)]
    pub source: SourceArgs,
    /// Whose memory it is loaded into: cpu, or cuda:N for GPU N
    #[arg(long, value_name = "DEVICE", default_value = "cpu", value_parser = device)]
    pub device: Device,
    /// Read to a GPU by NVIDIA cuFile (GPUDirect Storage) if possible
    #[arg(long)]
    pub cufile: bool,
    /// Write when each read was queued, read and moved, as Chrome and Perfetto show it
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Whether to draw a progress bar
    #[arg(long, value_enum, default_value_t = When::Auto, default_missing_value = "always", num_args = 0..=1, require_equals = true)]
    pub progress: When,
}

/// The memory that tensors are loaded into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Device {
    /// Host memory.
    Cpu,
    /// The memory of the GPU with this number.
    Cuda(u32),
}

fn device(text: &str) -> Result<Device, String> {
    let number = match text {
        "cpu" => return Ok(Device::Cpu),
        "cuda" => Some(0),
        _ => text.strip_prefix("cuda:").and_then(|number| number.parse().ok()),
    };
    number.map(Device::Cuda).ok_or_else(|| "expected cpu, or cuda:N as in cuda:0".to_owned())
}

/// Arguments of `verify`.
#[derive(Debug, Args)]
#[command(mut_arg("options", takes(&VERIFY)))]
pub(crate) struct VerifyArgs {
    /// The source.
    #[command(flatten)]
    pub source: SourceArgs,
    /// File that lists what the checkpoint holds: safetensors, weight map or manifest
    #[arg(long, value_name = "FILE")]
    pub reference: Option<PathBuf>,
    /// Number of shard files that there have to be
    #[arg(long, value_name = "N")]
    pub expect_shards: Option<u64>,
    /// Write a manifest beside the shards, which later proofs use
    #[arg(long)]
    pub write_manifest: bool,
    /// Record the checksums again where they differ from the recorded ones
    #[arg(long)]
    pub record: bool,
    /// Print the sha256 of every shard as sha256sum does, and the report on standard error
    #[arg(long)]
    pub sha256: bool,
    /// Fail if nothing proves that the last pieces are there
    #[arg(long)]
    pub strict: bool,
    /// Whether to draw a progress bar
    #[arg(long, value_enum, default_value_t = When::Auto, default_missing_value = "always", num_args = 0..=1, require_equals = true)]
    pub progress: When,
}

/// Arguments of `consolidate`.
#[derive(Debug, Args)]
#[command(mut_arg("options", takes(&CONSOLIDATE)))]
pub(crate) struct ConsolidateArgs {
    /// The source.
    #[command(flatten)]
    pub source: SourceArgs,
    /// Folder to write all files to; or one file, by a name that ends in .safetensors, .bt or .tensors
    pub out: PathBuf,
    /// Replace files that are there
    #[arg(short, long)]
    pub force: bool,
    /// Read the files back from the disk and compare every byte
    #[arg(long)]
    pub verify: bool,
    /// Whether to draw a progress bar
    #[arg(long, value_enum, default_value_t = When::Auto, default_missing_value = "always", num_args = 0..=1, require_equals = true)]
    pub progress: When,
}

/// Arguments of `convert`.
#[derive(Debug, Args)]
#[command(mut_arg("options", takes(&CONVERT)))]
pub(crate) struct ConvertArgs {
    /// The checkpoint to convert.
    #[command(flatten)]
    pub source: SourceArgs,
    /// File to write, or folder to write it into
    pub out: PathBuf,
    /// Format to write, if the name of OUT does not say it
    #[arg(long, value_enum)]
    pub to: Option<To>,
    /// Read the file back from the disk and compare
    #[arg(long)]
    pub verify: bool,
    /// Encrypt the new tensorizer file with the key in FILE: 32 bytes, or 64 hexadecimal digits
    #[arg(long, value_name = "FILE", conflicts_with = "passphrase_file")]
    pub key_file: Option<PathBuf>,
    /// Encrypt the new tensorizer file with the passphrase in FILE
    #[arg(long, value_name = "FILE")]
    pub passphrase_file: Option<PathBuf>,
    /// Replace a file that is there
    #[arg(short, long)]
    pub force: bool,
    /// Whether to draw a progress bar
    #[arg(long, value_enum, default_value_t = When::Auto, default_missing_value = "always", num_args = 0..=1, require_equals = true)]
    pub progress: When,
}

/// Arguments of `diff`.
#[derive(Debug, Args)]
#[command(mut_arg("options", takes(&DIFF)))]
pub(crate) struct DiffArgs {
    /// The first checkpoint.
    #[command(flatten)]
    pub source: SourceArgs,
    /// The second checkpoint
    pub other: PathBuf,
    /// Read all bytes, also those whose checksums are recorded
    #[arg(long, conflicts_with = "headers")]
    pub bytes: bool,
    /// Compare names, dtypes and shapes only
    #[arg(long)]
    pub headers: bool,
    /// Whether to draw a progress bar
    #[arg(long, value_enum, default_value_t = When::Auto, default_missing_value = "always", num_args = 0..=1, require_equals = true)]
    pub progress: When,
}

/// Arguments of `report`.
#[derive(Debug, Args)]
#[command(mut_arg("options", takes(&REPORT)))]
pub(crate) struct ReportArgs {
    /// The source.
    #[command(flatten)]
    pub source: SourceArgs,
    /// File to write; an earlier report is replaced
    #[arg(long, value_name = "OUT")]
    pub html: PathBuf,
    /// Replace any file that is there
    #[arg(short, long)]
    pub force: bool,
}

/// Formats that checkpoints are written in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum To {
    /// The file that the bintensors package would write.
    Bintensors,
    /// The file that the safetensors package would write.
    Safetensors,
    /// The file that the tensorizer package would write, in the order of the source.
    Tensorizer,
}

/// Choice of a program or of its user.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum When {
    /// Yes on a terminal, no elsewhere.
    Auto,
    /// Never.
    Never,
    /// Always.
    Always,
}
