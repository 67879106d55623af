//! The commands, one file each, and what they share.

pub(crate) mod bench;
mod convert;
mod demo;
mod doctor;
mod index;
mod load;
mod query;
mod saved;
pub(crate) mod status;
mod top;
mod umount;
mod verify;

use std::ffi::OsStr;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use clap::{CommandFactory, Parser};
use serde_json::Value;
use tensorfs::Class;
use tensorfs::checkpoint::{Checkpoint, FolderId, Set, Tree};
use tensorfs::error::{is_hidden, real_name, shown, shown_lines, shown_path};
use tensorfs::format::Format;
use tensorfs::source::{Behind, behind_mount};
use tensorfs::view::{Arrangement, View};

use crate::args::{self, Cli, Command};
use crate::options::Options;
use crate::{daemon, log};

/// Why a command did not do what it was asked for.
pub(crate) enum Failure {
    /// The request makes no sense.
    Usage(String),
    /// It could not be done.
    Failed(String),
    /// The library refused, or failed.
    Error(tensorfs::Error),
    /// It could not be done, and the output says why.
    Told,
}

impl Failure {
    fn message(&self) -> String {
        match self {
            Failure::Usage(message) | Failure::Failed(message) => message.clone(),
            Failure::Error(error) => error.to_string(),
            Failure::Told => String::new(),
        }
    }

    fn class(&self) -> Class {
        match self {
            Failure::Usage(_) | Failure::Told => Class::Usage,
            Failure::Failed(_) => Class::Io,
            Failure::Error(error) => error.class(),
        }
    }
}

impl From<tensorfs::Error> for Failure {
    fn from(error: tensorfs::Error) -> Self {
        Failure::Error(error)
    }
}

/// Result of a command.
pub(crate) type Outcome = Result<(), Failure>;

/// Prints help, the version, or what is wrong with the arguments. These may be names of files, so
/// they are shown escaped.
fn usage(error: clap::Error) -> ExitCode {
    let args = std::env::args_os().map(|arg| shown(&arg.to_string_lossy()));
    let shown = Cli::try_parse_from(args).err().unwrap_or(error);
    let _ = shown.print();
    u8::try_from(shown.exit_code()).map_or(ExitCode::FAILURE, ExitCode::from)
}

pub(crate) fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return usage(error),
    };
    let outcome = match cli.command {
        Command::Bench(args) => bench::run(&args),
        Command::Demo(args) => demo::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Mount(args) => mount(&args),
        Command::Umount(args) => umount::run(&args),
        Command::Status(args) => status::run(&args),
        Command::Top(args) => top::run(&args),
        Command::Ls(args) => in_json(&args.source, query::ls(&args)),
        Command::Inspect(args) => in_json(&args.source, query::inspect(&args)),
        Command::Index(args) => in_json(&args.source, index::run(&args)),
        Command::Load(args) => in_json(&args.source, load::run(&args)),
        Command::Verify(args) => in_json(&args.source, verify::run(&args)),
        Command::Convert(args) => in_json(&args.source, convert::run(&args)),
        Command::Completions { shell } => completions(shell),
        Command::Man { folder } => man(folder.as_deref()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            if !matches!(failure, Failure::Told) {
                complain(&failure.message());
            }
            ExitCode::from(if matches!(failure, Failure::Usage(_)) { 2 } else { 1 })
        }
    }
}

/// Where JSON was asked for and nothing printed yet, prints the failure as JSON too.
fn in_json(args: &args::Source, outcome: Outcome) -> Outcome {
    match &outcome {
        Err(failure) if args.json && !matches!(failure, Failure::Told) => {
            let json = serde_json::json!({
                "source": real_name(&args.source),
                "ok": false,
                "class": failure.class().as_str(),
                "error": failure.message(),
                "sets": [],
                "notes": [],
            });
            // The outcome itself is said on standard error whether or not this can be printed.
            let _ = print_json(&json);
        }
        _ => {}
    }
    outcome
}

/// One line on standard error, unless a parent waits for it on standard output.
fn complain(message: &str) {
    let message = shown(&message.replace('\n', "; "));
    if daemon::is_child() {
        let _ = daemon::report(&message);
    } else {
        say(&message);
    }
}

/// One line on standard error.
pub(crate) fn say(message: &str) {
    log::say(message);
}

fn completions(shell: clap_complete::Shell) -> Outcome {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "tensorfs", &mut script);
    print_bytes(&script)
}

fn mount(args: &args::Mount) -> Outcome {
    log::never_wait().map_err(|e| Failure::Failed(format!("cannot start a thread: {e}")))?;
    let mut words = args.options.clone();
    words.extend(index_option(args.index_dir.as_deref()));
    let options = Options::parse(&words, args.sloppy).map_err(Failure::Usage)?;
    log::start(args.verbose);
    if args.foreground {
        return daemon::run(&args.source, &args.target, options).map_err(Failure::Failed);
    }
    if options.rw {
        say("mounted read-only; there is no writing through a mount");
    }
    daemon::run_in_background(&args.source, &args.target, &words, args.sloppy, args.verbose)
        .map_err(Failure::Failed)
}

/// `--index-dir` as a mount option.
fn index_option(folder: Option<&OsStr>) -> Option<String> {
    folder.map(|folder| format!("index-dir={}", crate::options::escape(&folder.to_string_lossy())))
}

fn man(folder: Option<&Path>) -> Outcome {
    let failed = |e: io::Error| Failure::Failed(format!("cannot write the manual: {e}"));
    match folder {
        Some(folder) => clap_mangen::generate_to(Cli::command(), folder).map_err(failed),
        None => {
            let mut page = Vec::new();
            clap_mangen::Man::new(Cli::command()).render(&mut page).map_err(failed)?;
            print_bytes(&page)
        }
    }
}

/// Scans the source of a query; on a mount, the source behind it, looked at the same way unless
/// `-o` says how.
pub(crate) fn open_source(args: &args::Source, options: Options) -> Result<Tree, Failure> {
    let index = options.index_dir.folder();
    let (mut path, mut view) = (args.source.clone(), options.view);
    if let Some(Behind { path: source, view: mounted }) = behind_mount(&args.source) {
        path = source;
        if args.options.is_empty() {
            view = View { expect_shards: view.expect_shards, reference: view.reference, ..mounted };
        }
    }
    let tree = Tree::scan(&path, &View { index, ..view })?;
    // A source without any checkpoint is refused with the same summary.
    if let Some(summary) = tree.left_out.summary().filter(|_| !tree.families().is_empty()) {
        say(&format!("{}: {summary}", shown_path(&tree.source)));
    }
    Ok(tree)
}

/// Parses `-o` of a query.
pub(crate) fn query_options(args: &args::Source) -> Result<Options, Failure> {
    log::start(args.verbose);
    tensorfs::source::raise_limit();
    let mut words = args.options.clone();
    words.extend(index_option(args.index_dir.as_deref()));
    Options::parse(&words, false).map_err(Failure::Usage)
}

/// A set and the folder that it lies in, below the source.
pub(crate) struct Found {
    pub(crate) directory: PathBuf,
    pub(crate) set: Set,
}

/// Proves everything in `tree`. Returns the sets that count and the notes.
pub(crate) fn prove_all(tree: &Tree) -> Result<(Vec<Found>, Vec<String>), Failure> {
    let mut found = Vec::new();
    let mut notes = skipped_notes(tree);
    for head in tree.families() {
        let (sets, more) = prove_family(tree, head);
        found.extend(sets);
        notes.extend(more);
    }
    if found.is_empty() {
        return Err(Failure::Failed(tree.nothing_found()));
    }
    Ok((found, notes))
}

/// Notes about what the scan of `tree` left out.
pub(crate) fn skipped_notes(tree: &Tree) -> Vec<String> {
    tree.left_out.lines.iter().cloned().chain(tree.left_out.summary()).collect()
}

/// Proves the family of folders of which `head` is the top. Returns the sets that count and the
/// notes.
pub(crate) fn prove_family(tree: &Tree, head: FolderId) -> (Vec<Found>, Vec<String>) {
    let (mut found, mut notes) = (Vec::new(), Vec::new());
    for (id, proved) in tree.prove(head) {
        let directory = &tree.folder(id).relative;
        notes.extend(proved.notes.iter().map(|note| {
            let place = shown_path(directory);
            if place.is_empty() { note.clone() } else { format!("{place}: {note}") }
        }));
        let sets = proved.sets.into_iter().filter(|set| set.shown_at_parent.is_none());
        found.extend(sets.map(|set| Found { directory: directory.clone(), set }));
    }
    (found, notes)
}

/// The one checkpoint of the source, and the notes about it. Whether a mount could show it as one
/// file does not matter.
pub(crate) fn one_checkpoint(
    args: &args::Source,
    mut options: Options,
) -> Result<(Arc<Checkpoint>, Vec<String>), Failure> {
    options.view =
        View { arrangement: Arrangement::Original, format: Format::default(), ..options.view };
    let tree = open_source(args, options)?;
    let (found, notes) = prove_all(&tree)?;
    match <[Found; 1]>::try_from(found) {
        Ok([Found { set, .. }]) => Ok((set.outcome?, notes)),
        Err(found) => {
            let name = |found: &Found| {
                // A file of the set names it, also where the set is shown under another name.
                let file = found.set.files.first().unwrap_or(&found.set.name);
                shown_path(&found.directory.join(file))
            };
            let names: Vec<String> = found.iter().take(4).map(name).collect();
            Err(Failure::Usage(format!(
                "{}: {} checkpoints here, name one of them: {}{}",
                shown_path(&args.source),
                found.len(),
                names.join(", "),
                if found.len() > names.len() { ", ..." } else { "" }
            )))
        }
    }
}

/// Prints `value` on one line or, for a terminal, indented.
pub(crate) fn print_json(value: &Value) -> Outcome {
    use std::io::IsTerminal;
    let mut output = io::stdout().lock();
    let text = if output.is_terminal() { format!("{value:#}") } else { value.to_string() };
    let printed = writeln!(output, "{}", plain_json(&text));
    // A reader that has seen enough is no failure.
    match printed {
        Err(e) if e.kind() != io::ErrorKind::BrokenPipe => {
            Err(Failure::Failed(format!("cannot write: {e}")))
        }
        _ => Ok(()),
    }
}

/// The same JSON with everything escaped that a terminal would not show as itself: serialising
/// escapes only the first 32 characters.
fn plain_json(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    for c in text.chars() {
        if is_hidden(c) && c != '\n' {
            let mut units = [0; 2];
            let units = c.encode_utf16(&mut units).iter();
            plain.extend(units.map(|unit| format!("\\u{unit:04x}")));
        } else {
            plain.push(c);
        }
    }
    plain
}

/// Prints lines for people; a reader that has seen enough is no failure. Names within a line have
/// to be `shown` before: what ends a line is not escaped here.
pub(crate) fn print_text(text: &str) -> Outcome {
    print_bytes(shown_lines(text).as_bytes())
}

/// Prints bytes as they are, for programs; a reader that has seen enough is no failure.
pub(crate) fn print_bytes(bytes: &[u8]) -> Outcome {
    match io::stdout().lock().write_all(bytes) {
        Err(e) if e.kind() != io::ErrorKind::BrokenPipe => {
            Err(Failure::Failed(format!("cannot write: {e}")))
        }
        _ => Ok(()),
    }
}

/// `bytes` with a unit, for people.
pub(crate) fn human(bytes: u64) -> String {
    indicatif::DecimalBytes(bytes).to_string()
}
