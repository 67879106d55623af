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
use tensorfs::checkpoint::{Checkpoint, Set, Tree};
use tensorfs::error::shown_path;
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

pub(crate) fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
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
                "source": shown_path(&args.source),
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
    let message = message.replace('\n', "; ");
    if daemon::is_child() {
        let _ = writeln!(io::stdout(), "{message}");
    } else {
        say(&message);
    }
}

/// One line on standard error; where that cannot be written there is nobody to tell.
pub(crate) fn say(message: &str) {
    let _ = writeln!(io::stderr(), "tensorfs: {message}");
}

fn completions(shell: clap_complete::Shell) -> Outcome {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "tensorfs", &mut script);
    print_text(&String::from_utf8_lossy(&script))
}

fn mount(args: &args::Mount) -> Outcome {
    let mut words = args.options.clone();
    words.extend(index_option(args.index_dir.as_deref()));
    let options = Options::parse(&words, args.sloppy).map_err(Failure::Usage)?;
    log::start(args.verbose);
    let source = behind_mount(&args.source).map_or_else(|| args.source.clone(), |b| b.path);
    if args.foreground {
        return daemon::run(&source, &args.target, options).map_err(Failure::Failed);
    }
    if options.rw {
        say("mounted read-only; there is no writing through a mount");
    }
    daemon::run_in_background(&source, &args.target, &words, args.sloppy, args.verbose)
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
            print_text(&String::from_utf8_lossy(&page))
        }
    }
}

/// Scans the source of a query; on a mount, the source behind it, looked at the same way unless
/// `-o` says how.
pub(crate) fn open_source(args: &args::Source, options: Options) -> Result<Tree, Failure> {
    let index = options.index_dir.folder();
    if let Some(Behind { path, view: mounted }) = behind_mount(&args.source) {
        let mut view = options.view;
        if args.options.is_empty() {
            view = View { expect_shards: view.expect_shards, reference: view.reference, ..mounted };
        }
        return Ok(Tree::scan(&path, &View { index, ..view })?);
    }
    Ok(Tree::scan(&args.source, &View { index, ..options.view })?)
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
    let mut notes = tree.skipped.clone();
    for head in tree.families() {
        for (id, proved) in tree.prove(head) {
            let directory = &tree.folders[id].relative;
            notes.extend(proved.notes.iter().map(|note| {
                let place = shown_path(directory);
                if place.is_empty() { note.clone() } else { format!("{place}: {note}") }
            }));
            let sets = proved.sets.into_iter().filter(|set| set.shown_at_parent.is_none());
            found.extend(sets.map(|set| Found { directory: directory.clone(), set }));
        }
    }
    if found.is_empty() {
        let source = tree.source.display();
        return Err(Failure::Failed(format!(
            "{source}: no safetensors or bintensors files here or below"
        )));
    }
    Ok((found, notes))
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
    let printed = if output.is_terminal() {
        writeln!(output, "{value:#}")
    } else {
        writeln!(output, "{value}")
    };
    // A reader that has seen enough is no failure.
    match printed {
        Err(e) if e.kind() != io::ErrorKind::BrokenPipe => {
            Err(Failure::Failed(format!("cannot write: {e}")))
        }
        _ => Ok(()),
    }
}

/// Prints text; a reader that has seen enough is no failure.
pub(crate) fn print_text(text: &str) -> Outcome {
    print_bytes(text.as_bytes())
}

/// Likewise what may be no text.
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
