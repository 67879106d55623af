//! `tensorfs serve`: all mounts of a config, each in a process of its own.

use tensorfs::internal::error::{counted, shown_path};

use super::args;
use super::output::{Failure, Outcome, print_text};
use crate::daemon::{background, inherited};
use crate::log;
use crate::node::config::{Config, ConfigError};
use crate::node::supervisor::{Supervisor, take_signals};
use crate::node::worker;

pub(super) fn run(args: &args::ServeArgs) -> Outcome {
    let config = Config::read(&args.config).map_err(|error| match error {
        ConfigError::Unreadable(message) => Failure::Failed(message),
        ConfigError::Wrong(message) => Failure::Usage(message),
    })?;
    if args.check {
        let file = shown_path(&args.config);
        return print_text(&format!(
            "{file}: correct, {}\n",
            counted(config.mounts.len(), "mount")
        ));
    }
    // A relative path would name another file once the service reloads it elsewhere.
    let failed = |e: std::io::Error| Failure::Failed(format!("cannot start: {e}"));
    let file = std::path::absolute(&args.config).map_err(failed)?;
    inherited::note_descriptors();
    tensorfs::internal::source::raise_limit();
    let signals = take_signals().map_err(failed)?;
    log::never_wait().map_err(failed)?;
    log::start(args.verbose.saturating_add(1));
    background::log_in(config.service.log_format, false).map_err(Failure::Failed)?;
    Supervisor::new(&file, config, args.verbose).run(&signals).map_err(Failure::Failed)
}

/// Serves one mount for a supervisor, which has its errors.
pub(super) fn work(args: &args::WorkerArgs) -> Outcome {
    log::never_wait().map_err(|e| Failure::Failed(format!("cannot start a thread: {e}")))?;
    log::start(args.verbose);
    worker::run().map_err(|_| Failure::Told)
}
