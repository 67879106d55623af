//! Mounts in the background. A child process serves the mount, and the parent returns once the
//! child reports that the mount answers, or an error.

use std::fs::File;
use std::io::{BufRead, BufReader, PipeReader, Write};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::unistd::setsid;
use tensorfs::internal::error::{shown, shown_path};

use super::handover::{Giver, Handed, Received};
use super::stalled::unless_stalled;
use super::{ending, inherited, session};
use crate::log;
use crate::log::LogTarget;
use crate::options::{LogFormat, Options};

/// Arguments that make a process the child. The child serves the mount and reports to its parent
/// through its standard output, which is a pipe.
const CHILD: [&str; 2] = ["internal", "daemon"];

/// Arguments for a child that ends when its parent ends.
const CHILD_OF_RUN: [&str; 2] = ["internal", "run-daemon"];

/// The line by which the child reports that the mount answers.
const READY: &str = "ready";

/// Maximum time to open a log file, on a machine without a system log.
const LOG_LIMIT: Duration = Duration::from_secs(10);

/// Maximum time for which the parent waits for the end of a child that has reported an error.
const END_LIMIT: Duration = Duration::from_secs(2);

/// Starts the child and waits until its mount answers. The child serves until the unmount, or until
/// the writing end of `lifeline` is closed.
///
/// # Errors
/// The error of the child. Nothing stays mounted.
pub(crate) fn run_in_background(
    source: &Path,
    target: &Path,
    options: &[String],
    sloppy: bool,
    verbose: u8,
    lifeline: Option<PipeReader>,
) -> Result<(), String> {
    let fail = |e: std::io::Error| format!("cannot start the daemon: {e}");
    let program = std::env::current_exe().map_err(fail)?;
    let mut command = Command::new(program);
    let words = if lifeline.is_some() { CHILD_OF_RUN } else { CHILD };
    command.arg0("tensorfs").args(words).args(sloppy.then_some("--sloppy"));
    command.args((0..verbose).map(|_| "-v"));
    for option in options {
        command.arg("-o").arg(option);
    }
    command.arg("--").arg(source).arg(target);
    // The child reports errors on standard output and logs warnings on standard error.
    if log::is_quiet() {
        command.stderr(Stdio::null());
    }
    command.stdin(lifeline.map_or_else(Stdio::null, Stdio::from));
    let mut child = command.stdout(Stdio::piped()).spawn().map_err(fail)?;
    let mut report = String::new();
    if let Some(output) = child.stdout.take() {
        BufReader::new(output).read_line(&mut report).map_err(fail)?;
    }
    match report.trim_end() {
        READY => Ok(()),
        "" => {
            let status = child.wait().map_err(fail)?;
            Err(format!("the daemon ended before the mount answered ({status})"))
        }
        reason => {
            // A child that waits for the source cannot end before the source answers.
            let started = Instant::now();
            while child.try_wait().map_err(fail)?.is_none() && started.elapsed() < END_LIMIT {
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(reason.to_owned())
        }
    }
}

/// Called by the child: first closes the descriptors of the caller, then sends `line` to the
/// parent. So none of these descriptors is open when the parent returns.
pub(crate) fn report(line: &str) -> std::io::Result<()> {
    let mut parent = File::from(std::io::stdout().as_fd().try_clone_to_owned()?);
    inherited::let_go()?;
    parent.write_all(format!("{line}\n").as_bytes())
}

/// Mounts, and serves until the unmount. With `is_child`, the process reports to its parent once
/// the mount answers.
///
/// # Errors
/// One line with the reason. Nothing stays mounted.
pub(crate) fn run(
    source: &Path,
    target: &Path,
    options: Options,
    is_child: bool,
) -> Result<(), String> {
    inherited::note_descriptors();
    if is_child {
        inherited::restore_ignored();
    }
    let limit = options.io_timeout.map_or(LOG_LIMIT, |limit| limit.min(LOG_LIMIT));
    let format = options.log_format;
    let to_system = options.log.is_none() && format != LogFormat::Journal;
    let log = to_system.then_some((limit, format == LogFormat::Auto));
    serve(source, target, options, None, |plan| {
        if is_child {
            detach_from_parent(log, &plan.warnings)
                .map_err(|e| format!("cannot go to the background: {e}"))?;
        } else {
            log::flush();
        }
        let (source, target) = (shown_path(&plan.source), shown_path(&plan.target));
        ending::notify(sd_notify::NotifyState::Ready, format!("serving {source} on {target}"));
        Ok(())
    })
}

/// A mount that answers.
pub(crate) struct LiveMount {
    /// Absolute path of the source.
    pub source: PathBuf,
    /// The mount point, as in the mount table.
    pub target: PathBuf,
    /// Minor number of the mount's device.
    pub minor: Option<u32>,
    /// Warnings for the user, one on each line. They are in the log already.
    warnings: Vec<String>,
    /// Hands the mount over to another process.
    pub giver: Giver,
}

/// Mounts, calls `tell` once the mount answers, and serves until the unmount. Until `tell` is
/// called, the signals of `ending` end the process. From that call on, they unmount. With `handed`,
/// this process takes over the mount in `handed` instead. That mount must have the same source,
/// target and options.
///
/// # Errors
/// One line with the reason, which may be the error of `tell`. Nothing stays mounted.
pub(crate) fn serve(
    source: &Path,
    target: &Path,
    mut options: Options,
    handed: Option<Handed>,
    tell: impl FnOnce(&LiveMount) -> Result<(), String>,
) -> Result<(), String> {
    tensorfs::internal::source::raise_limit();
    options.make_absolute().map_err(|e| format!("the working directory is gone: {e}"))?;
    let (log_file, given) = (options.log.clone(), non_default_options(&options));
    if let Some(file) = &log_file {
        let opened = file.clone();
        unless_stalled(options.io_timeout, move || log::to_file(&opened))
            .and_then(|opened| opened.map_err(|e| format!("cannot log there: {e}")))
            .map_err(|why| format!("log={}: {why}", shown_path(file)))?;
    }
    set_log_format(options.log_format, log_file.is_some())?;
    log::set_mount(target);
    let received = handed
        .map(|handed| Received::read(handed, source, target, &options))
        .transpose()
        .map_err(|why| format!("cannot be taken over: {why}"))?;
    let mut plan = match &received {
        Some(received) => session::plan_takeover(source, target, received, options)?,
        None => session::plan(source, target, options)?,
    };
    plan.open_assembler(received.is_none())?;
    let warnings = plan.warnings();
    if log_file.is_some() && tracing::enabled!(tracing::Level::WARN) {
        // With `log=FILE`, the warnings go to that file. The user at the terminal needs them as
        // well.
        warnings.iter().for_each(|warning| log::say(warning));
    }
    let (source, target) = (plan.source.clone(), plan.target.clone());
    ending::block_signals();
    let running = match received {
        Some(received) => session::take_over(plan, received)?,
        None => session::start(plan)?,
    };
    let (minor, giver) = (running.minor, running.giver());
    let mount = LiveMount { source, target, minor, warnings, giver };
    let (source, target) = (shown_path(&mount.source), shown_path(&mount.target));
    if let Err(e) = tell(&mount) {
        running.take_off();
        return Err(e);
    }
    let pid = std::process::id();
    tracing::info!("{source}: mounted on {target}, pid {pid}, options {given}");
    let ended = running.serve();
    let why = match &ended {
        Err(why) => why,
        Ok(()) if ending::was_signalled() => "a signal",
        Ok(()) => "it was unmounted, or given to another process",
    };
    tracing::info!("{source}: no longer served on {target}, pid {pid}: {why}");
    ended
}

/// The options that differ from their defaults, as text for the log.
fn non_default_options(options: &Options) -> String {
    let (given, defaults) = (options.to_json(), Options::default().to_json());
    let defaults = Options::words(&defaults);
    let words: Vec<String> = Options::words(&given)
        .into_iter()
        .filter(|word| !defaults.contains(word))
        .map(|word| shown(&word))
        .collect();
    if words.is_empty() { "ro".to_owned() } else { words.join(",") }
}

/// Sets the format of further log lines.
///
/// # Errors
/// One line with the reason why the format cannot be used.
pub(crate) fn set_log_format(format: LogFormat, is_file: bool) -> Result<(), String> {
    match format {
        LogFormat::Json => log::write_json(true),
        LogFormat::Journal => log::to_journal().map_err(|e| format!("log-format=journal: {e}"))?,
        LogFormat::Auto if !is_file => log::to_journal_of_service(),
        LogFormat::Auto | LogFormat::Human => {}
    }
    Ok(())
}

/// Changes the format of further log lines after `set_log_format`. Must not be called by a process that
/// logs to a file.
///
/// # Errors
/// One line with the reason why the format cannot be used. The old format stays.
pub(crate) fn change_log_format(format: LogFormat) -> Result<(), String> {
    if format != LogFormat::Journal {
        log::to_stderr().map_err(|e| format!("log-format={format}: {e}"))?;
    }
    set_log_format(format, false)?;
    log::write_json(format == LogFormat::Json);
    Ok(())
}

/// Detaches from the terminal, the session and the working directory, closes the descriptors of the caller, and reports
/// success to the parent. With `system_log`, further log lines go to the system log, or to a file if there is no system
/// log. The value of `system_log` is the time limit for opening that file, and whether log lines have fields.
/// `warnings` were printed on standard error, and are now logged as well.
fn detach_from_parent(
    system_log: Option<(Duration, bool)>,
    warnings: &[String],
) -> std::io::Result<()> {
    setsid()?;
    std::env::set_current_dir("/")?;
    if let Some((limit, with_fields)) = system_log {
        match log::to_system_log(limit, with_fields)? {
            LogTarget::System => {}
            // In a container, every mount logs to this file, so the note is not a warning.
            LogTarget::Fallback(note) if tracing::enabled!(tracing::Level::INFO) => log::say(&note),
            LogTarget::Fallback(_) => {}
            LogTarget::Nowhere(warning) => log::say(&warning),
        }
        warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
    }
    // All warnings must be in the log before the command returns.
    log::flush();
    report(READY)
}
