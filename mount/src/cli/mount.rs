//! `tensorfs mount`: mounts a source, and serves it in the background or from this process.

use super::args;
use super::output::{Failure, Outcome};
use super::sources::index_option;
use crate::daemon::background;
use crate::log;
use crate::options::Options;

pub(super) fn run(args: &args::MountArgs) -> Outcome {
    let (words, options) = start(args)?;
    if args.foreground {
        return background::run(&args.source, &args.target, options, false)
            .map_err(Failure::Failed);
    }
    if options.rw {
        log::note("mounted read-only; there is no writing through a mount");
    }
    background::run_in_background(
        &args.source,
        &args.target,
        &words,
        args.sloppy,
        args.verbose,
        None,
    )
    .map_err(Failure::Failed)
}

/// Serves a mount. A parent process waits for the report on standard output that the mount answers.
pub(super) fn daemon(args: &args::MountArgs) -> Outcome {
    let (_, options) = start(args)?;
    background::run(&args.source, &args.target, options, true).map_err(Failure::Failed)
}

/// Starts the log. Returns the options as strings and as parsed options.
fn start(args: &args::MountArgs) -> Result<(Vec<String>, Options), Failure> {
    log::never_wait().map_err(|e| Failure::Failed(format!("cannot start a thread: {e}")))?;
    let mut words = args.options.clone();
    words.extend(index_option(args.index_dir.as_deref()));
    words.extend(args.log_format.as_ref().map(|format| format!("log-format={format}")));
    let options = Options::parse(&words, args.sloppy).map_err(Failure::Usage)?;
    log::start(args.verbose);
    Ok((words, options))
}
