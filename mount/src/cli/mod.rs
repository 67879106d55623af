//! The commands, one file each.

mod args;
mod bench;
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
mod mount;
pub(crate) mod mount_helper;
mod output;
mod query;
mod report;
mod saved;
mod serve;
mod sources;
mod status;
mod stopping;
mod top;
mod umount;
mod verify;
mod warm;

use std::io;
use std::path::Path;
use std::process::ExitCode;

use clap::{CommandFactory, Parser};
use tensorfs::internal::error::{real_name, shown};

use crate::log;
use args::{Cli, Command};
use output::{Failure, Outcome, print_bytes, print_json};

/// Prints help, the version, or the error in the arguments. Arguments are shown escaped, since they
/// may be names of files.
fn usage(error: clap::Error) -> ExitCode {
    let args = std::env::args_os().map(|arg| shown(&arg.to_string_lossy()));
    print_usage(&Cli::try_parse_from(args).err().unwrap_or(error))
}

fn print_usage(error: &clap::Error) -> ExitCode {
    let _ = error.print();
    u8::try_from(error.exit_code()).map_or(ExitCode::FAILURE, ExitCode::from)
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
        Command::Mount(args) => mount::run(&args),
        Command::Umount(args) => umount::run(&args),
        Command::Serve(args) => serve::run(&args),
        Command::Status(args) => status::run(&args),
        Command::Top(args) => top::run(&args),
        Command::Heat(args) => heat::run(&args),
        Command::Warm(args) => in_json(&args.source, warm::run(&args)),
        Command::Ls(args) => in_json(&args.source, query::ls(&args)),
        Command::Inspect(args) => in_json(&args.source, query::inspect(&args)),
        Command::Index(args) => in_json(&args.source, index::run(&args)),
        Command::Load(args) => in_json(&args.source, load::run(&args)),
        Command::Verify(args) => in_json(&args.source, verify::run(&args)),
        Command::Consolidate(args) => in_json(&args.source, consolidate::run(&args)),
        Command::Convert(args) => in_json(&args.source, convert::run(&args)),
        Command::Diff(args) => as_trouble(in_json(&args.source, diff::run(&args))),
        Command::Report(args) => in_json(&args.source, report::run(&args)),
        Command::Completions { shell } => completions(shell),
        Command::Man { folder } => man(folder.as_deref()),
    };
    finish(outcome, log::say)
}

/// The exit status of a command that ended so; `complain` gets one line about a failure.
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

/// If JSON was requested and nothing is printed yet, prints the failure as JSON too.
fn in_json(args: &args::SourceArgs, outcome: Outcome) -> Outcome {
    match &outcome {
        Err(failure) if args.json && !matches!(failure, Failure::Told) => {
            let json = serde_json::json!({
                "source": real_name(&args.source),
                "ok": false,
                "class": failure.kind().as_str(),
                "error": failure.message(),
                "sets": [],
                "notes": [],
            });
            // The failure goes to standard error even if this cannot be printed.
            let _ = print_json(&json);
        }
        _ => {}
    }
    outcome
}

/// For a command that tells by its exit status 1 that things differ: a failure has the status 2.
fn as_trouble(outcome: Outcome) -> Outcome {
    outcome.map_err(|failure| match failure {
        Failure::Told => failure,
        _ => Failure::Usage(failure.message()),
    })
}

fn completions(shell: clap_complete::Shell) -> Outcome {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "tensorfs", &mut script);
    print_bytes(&script)
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
