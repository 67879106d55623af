//! The commands, each in a file of its own.

mod args;
mod bench;
mod cache;
mod cat;
mod columns;
mod completion;
mod consolidate;
mod convert;
mod demo;
mod diff;
mod doctor;
pub(crate) mod generator;
mod heat;
mod index;
pub(crate) mod internal;
mod load;
mod man;
mod mount;
pub(crate) mod mount_helper;
mod output;
mod query;
mod report;
mod run;
mod saved;
mod seen;
mod serve;
mod sources;
mod status;
mod stopping;
mod top;
mod umount;
mod verify;
mod warm;

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{ArgMatches, CommandFactory, FromArgMatches, Parser, ValueEnum};
use tensorfs::internal::error::{expect_local_path, real_name, shown, shown_argument, shown_path};

use crate::daemon::stalled::{READ_ONE, probe_path, unless_stalled};
use crate::log;
use crate::options::Options;
use args::{Cli, Command};
use output::{Failure, Outcome, print_bytes, print_clap};

/// The arguments of the process. `--progress` without `=` takes no value, because a path may follow. If the next word
/// is a value of `--progress`, the two words are joined by `=`.
fn arguments() -> Vec<OsString> {
    let mut joined: Vec<OsString> = Vec::new();
    for arg in std::env::args_os() {
        let value = arg.to_str().filter(|value| args::When::from_str(value, false).is_ok());
        match (joined.last_mut(), value) {
            (Some(last), Some(value)) if *last == "--progress" => last.push(format!("={value}")),
            _ => joined.push(arg),
        }
    }
    joined
}

/// Prints the help, the version, or the error in the arguments. The arguments are escaped, because
/// they may contain file names, and URLs among them are shown without secrets.
fn usage(error: clap::Error) -> ExitCode {
    let args = arguments().into_iter().map(|arg| shown_argument(&arg.to_string_lossy()));
    print_usage(&Cli::try_parse_from(args).err().unwrap_or(error))
}

fn print_usage(error: &clap::Error) -> ExitCode {
    if let Err(failure) = print_clap(error) {
        return finish(Err(failure), log::say);
    }
    u8::try_from(error.exit_code()).map_or(ExitCode::FAILURE, ExitCode::from)
}

/// The arguments that `refuse_urls` checks only for `bench`. For other commands, they may be URLs,
/// or they name files to write, which have checks of their own that refuse URLs.
const MAY_BE_URL: [&str; 6] = ["source", "other", "file", "reference", "out", "html"];

/// Variables with the path of a folder.
const FOLDER_VARIABLES: [&str; 2] = ["TENSORFS_INDEX_DIR", "TENSORFS_CACHE_DIR"];

/// Refuses URLs in arguments and variables that are paths of this machine.
fn refuse_urls(matches: &ArgMatches) -> Outcome {
    for name in FOLDER_VARIABLES {
        let folder = PathBuf::from(std::env::var_os(name).unwrap_or_default());
        expect_local_path(&folder).map_err(|why| Failure::Usage(format!("{name}: {why}")))?;
    }
    let Some((name, given)) = matches.subcommand() else { return Ok(()) };
    let is_path = |id: &&clap::Id| name == "bench" || !MAY_BE_URL.contains(&id.as_str());
    let paths = given.ids().filter(is_path).filter_map(|id| {
        // Arguments that are no paths have another type.
        given.try_get_many::<PathBuf>(id.as_str()).ok().flatten()
    });
    paths.flatten().try_for_each(|path| expect_local_path(path).map_err(Failure::Usage))
}

pub(crate) fn main() -> ExitCode {
    let matches = match Cli::command().try_get_matches_from(arguments()) {
        Ok(matches) => matches,
        Err(error) => return usage(error),
    };
    let mut cli = match Cli::from_arg_matches(&matches) {
        Ok(cli) => cli,
        Err(error) => return usage(error),
    };
    if cli.quiet {
        log::be_quiet();
    }
    if let Err(failure) = refuse_urls(&matches) {
        let refused = match source_of(&mut cli.command) {
            Some(source) => in_json(source, Err(failure)),
            None => Err(failure),
        };
        return finish(refused, log::say);
    }
    let status = match source_of(&mut cli.command).cloned() {
        Some(source) => in_time(cli.command, &source),
        None => carry_out(cli.command),
    };
    stopping::end_if_stopped();
    status
}

/// Runs a command that reads `source`. The command fails if the source does not answer within
/// `io-timeout=`.
fn in_time(command: Command, source: &args::SourceArgs) -> ExitCode {
    if matches!(command, Command::Consolidate(_) | Command::Convert(_)) {
        stopping::take_signals();
    }
    let limit = Options::io_timeout_in(&source.options);
    let mut paths = vec![source.source.clone()];
    let is_diff = match &command {
        Command::Diff(args) => {
            paths.push(args.other.clone());
            true
        }
        _ => false,
    };
    // A probe is another process, so a file system that does not answer cannot keep this process
    // from ending.
    let probe = |path: &PathBuf| {
        probe_path(path, READ_ONE, limit).map_err(|why| format!("{}: {why}", shown_path(path)))
    };
    let probed = if limit.is_some() { paths.iter().try_for_each(probe) } else { Ok(()) };
    let done = probed.and_then(|()| {
        let done = unless_stalled(limit, move || carry_out(command));
        let named: Vec<String> = paths.iter().map(|path| shown_path(path)).collect();
        done.map_err(|why| format!("{}: {why}", named.join(" or ")))
    });
    done.unwrap_or_else(|why| {
        let failed = in_json(source, Err(Failure::Failed(why)));
        finish(if is_diff { as_trouble(failed) } else { failed }, log::say)
    })
}

fn carry_out(mut command: Command) -> ExitCode {
    if let Err(failure) = resolve_sources(&mut command) {
        return finish(Err(failure), log::say);
    }
    let outcome = match command {
        Command::Bench(args) => bench::run(&args),
        Command::Demo(args) => demo::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Mount(args) => mount::run(&args),
        Command::Run(args) => match run::run(&args) {
            Ok(status) => return status,
            Err(failure) => Err(failure),
        },
        Command::Umount(args) => umount::run(&args),
        Command::Serve(args) => serve::run(&args),
        Command::Status(args) => status::run(&args),
        Command::Top(args) => top::run(&args),
        Command::Heat(args) => told_in_json(args.json, &args.target, heat::run(&args)),
        Command::Warm(args) => in_json(&args.source, warm::run(&args)),
        Command::Cache(args) => {
            let folder = args.cache_dir.clone().unwrap_or_default();
            told_in_json(args.json, &folder, cache::run(&args))
        }
        Command::Ls(args) => in_json(&args.source, query::ls(&args)),
        Command::Inspect(args) => in_json(&args.source, query::inspect(&args)),
        Command::Index(args) => in_json(&args.source, index::run(&args)),
        Command::Load(args) => in_json(&args.source, load::run(&args)),
        Command::Verify(args) => in_json(&args.source, verify::run(&args)),
        Command::Consolidate(args) => in_json(&args.source, consolidate::run(&args)),
        Command::Convert(args) => in_json(&args.source, convert::run(&args)),
        Command::Cat(args) => cat::run(&args),
        Command::Diff(args) => as_trouble(in_json(&args.source, diff::run(&args))),
        Command::Report(args) => in_json(&args.source, report::run(&args)),
        Command::Completions { shell } => completion::run(shell),
        Command::Man { folder } => man(folder.as_deref()),
    };
    finish(outcome, log::say)
}

/// The arguments about the source of a command. `None` for commands without a source, and for a
/// mount, which has deadlines of its own.
fn source_of(command: &mut Command) -> Option<&mut args::SourceArgs> {
    Some(match command {
        Command::Cat(args) => &mut args.source,
        Command::Consolidate(args) => &mut args.source,
        Command::Convert(args) => &mut args.source,
        Command::Diff(args) => &mut args.source,
        Command::Index(args) => &mut args.source,
        Command::Inspect(args) => &mut args.source,
        Command::Load(args) => &mut args.source,
        Command::Ls(args) => &mut args.source,
        Command::Report(args) => &mut args.source,
        Command::Verify(args) => &mut args.source,
        Command::Warm(args) => &mut args.source,
        Command::Bench(_)
        | Command::Demo(_)
        | Command::Doctor(_)
        | Command::Mount(_)
        | Command::Run(_)
        | Command::Umount(_)
        | Command::Serve(_)
        | Command::Status(_)
        | Command::Top(_)
        | Command::Heat(_)
        | Command::Cache(_)
        | Command::Completions { .. }
        | Command::Man { .. } => return None,
    })
}

/// Replaces names of hub models in the sources of a command by their paths. A mount does this
/// itself, with its own deadline.
fn resolve_sources(command: &mut Command) -> Outcome {
    match command {
        Command::Bench(args) => {
            let found = args.source.iter_mut().try_for_each(sources::resolve);
            return bench::in_json(args, found);
        }
        Command::Diff(args) => {
            let first = sources::resolve(&mut args.source.source);
            let found = first.and_then(|()| sources::resolve(&mut args.other));
            return as_trouble(in_json(&args.source, found));
        }
        Command::Run(args) => return sources::resolve(&mut args.source),
        _ => {}
    }
    let Some(source) = source_of(command) else { return Ok(()) };
    let found = sources::resolve(&mut source.source);
    in_json(source, found)
}

/// The exit status of a command with this outcome. `complain` gets one line about an error.
fn finish(outcome: Outcome, complain: impl FnOnce(&str)) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            if !matches!(failure, Failure::Told) {
                complain(&shown(&failure.message().replace('\n', "; ")));
            }
            ExitCode::from(if matches!(failure, Failure::Usage(_)) { 2 } else { 1 })
        }
    }
}

/// If JSON was requested and nothing is printed yet, prints the error as JSON too.
fn in_json(args: &args::SourceArgs, outcome: Outcome) -> Outcome {
    told_in_json(args.json, &args.source, outcome)
}

/// Does the work of `in_json` for any command. `source` is the path that the command was given.
fn told_in_json(json: bool, source: &Path, outcome: Outcome) -> Outcome {
    let report = serde_json::json!({ "source": real_name(source), "sets": [], "notes": [] });
    output::in_json(json, report, outcome)
}

/// The outcome of a command whose exit status 1 means that a difference was found. An error gets the exit status 2.
fn as_trouble(outcome: Outcome) -> Outcome {
    outcome.map_err(|failure| match failure {
        Failure::Told => failure,
        _ => Failure::Usage(failure.message()),
    })
}

fn man(folder: Option<&Path>) -> Outcome {
    let failed = |e: io::Error| Failure::Failed(format!("cannot write the manual: {e}"));
    match folder {
        Some(folder) => man::write_pages(Cli::command(), folder).map_err(failed),
        None => print_bytes(&man::page(Cli::command()).map_err(failed)?),
    }
}
