//! Mounts in the background: a child serves the mount, and the parent returns the child's outcome
//! once the mount answers.

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

/// Arguments that make a process the child: it serves and reports on its standard output, which is
/// a pipe to the parent.
const CHILD: [&str; 2] = ["internal", "daemon"];

/// The same for a child that ends with its parent.
const CHILD_OF_RUN: [&str; 2] = ["internal", "run-daemon"];

/// The line by which the child reports that the mount answers.
const READY: &str = "ready";

/// Longest time that opening a log file may take if there is no system log.
const LOG_LIMIT: Duration = Duration::from_secs(10);

/// How long the parent waits for the end of a child that has reported a failure.
const END_LIMIT: Duration = Duration::from_secs(2);

/// Starts the child and waits until its mount answers. The child serves until the unmount, or until
/// `lifeline` ends.
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
    // The child reports failures on standard output, and logs warnings.
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
            // A child that waits for a source can end only once the source answers.
            let started = Instant::now();
            while child.try_wait().map_err(fail)?.is_none() && started.elapsed() < END_LIMIT {
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(reason.to_owned())
        }
    }
}

/// As the child, first closes the caller's descriptors and then sends `line` to the parent, so that
/// none is open when the parent returns.
pub(crate) fn report(line: &str) -> std::io::Result<()> {
    let mut parent = File::from(std::io::stdout().as_fd().try_clone_to_owned()?);
    inherited::let_go()?;
    parent.write_all(format!("{line}\n").as_bytes())
}

/// Mounts and serves until it is unmounted. With `is_child` reports to the parent once the
/// mount answers.
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
    /// Minor number of its device.
    pub minor: Option<u32>,
    /// Warnings for the user, one a line. The log has them already.
    warnings: Vec<String>,
    /// Hands it over to another process.
    pub giver: Giver,
}

/// Mounts, calls `tell` once the mount answers, and serves until it is unmounted. From then
/// on the signals of `ending` take it off; until then they end the process. With `handed` it takes
/// over that mount instead, which must have the same source, target and options.
///
/// # Errors
/// One line with the reason, also that of `tell`. Nothing stays mounted.
pub(crate) fn serve(
    source: &Path,
    target: &Path,
    mut options: Options,
    handed: Option<Handed>,
    tell: impl FnOnce(&LiveMount) -> Result<(), String>,
) -> Result<(), String> {
    tensorfs::internal::source::raise_limit();
    options.make_absolute().map_err(|e| format!("the working directory is gone: {e}"))?;
    let (log_file, given) = (options.log.clone(), words_of(&options));
    if let Some(file) = &log_file {
        let opened = file.clone();
        unless_stalled(options.io_timeout, move || log::to_file(&opened))
            .and_then(|opened| opened.map_err(|e| format!("cannot log there: {e}")))
            .map_err(|why| format!("log={}: {why}", shown_path(file)))?;
    }
    log_in(options.log_format, log_file.is_some())?;
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
        // With `log=FILE` the warnings go to that file; the user at the terminal needs them too.
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

/// The options that differ from the defaults, as words for the log.
fn words_of(options: &Options) -> String {
    let (given, defaults) = (options.to_json(), Options::default().to_json());
    let defaults = Options::words(&defaults);
    let words: Vec<String> = Options::words(&given)
        .into_iter()
        .filter(|word| !defaults.contains(word))
        .map(|word| shown(&word))
        .collect();
    if words.is_empty() { "ro".to_owned() } else { words.join(",") }
}

/// Chooses the form of further log lines.
///
/// # Errors
/// One line with the reason why they cannot have it.
pub(crate) fn log_in(format: LogFormat, is_file: bool) -> Result<(), String> {
    match format {
        LogFormat::Json => log::write_json(true),
        LogFormat::Journal => log::to_journal().map_err(|e| format!("log-format=journal: {e}"))?,
        LogFormat::Auto if !is_file => log::to_journal_of_service(),
        LogFormat::Auto | LogFormat::Human => {}
    }
    Ok(())
}

/// Changes the form of further log lines, after `log_in`. The process logs to no file.
///
/// # Errors
/// One line with the reason why they cannot have it. They keep the form that they had.
pub(crate) fn change_log(format: LogFormat) -> Result<(), String> {
    if format != LogFormat::Journal {
        log::to_stderr().map_err(|e| format!("log-format={format}: {e}"))?;
    }
    log_in(format, false)?;
    log::write_json(format == LogFormat::Json);
    Ok(())
}

/// Leaves terminal, session and working directory, closes the caller's descriptors, and reports
/// success to the parent. With `system_log` the log goes to the system log from now on, or to a file
/// that answers in that time; with fields if that is wanted too. `warnings` were printed on standard error, and go to the log too.
fn detach_from_parent(
    system_log: Option<(Duration, bool)>,
    warnings: &[String],
) -> std::io::Result<()> {
    setsid()?;
    std::env::set_current_dir("/")?;
    if let Some((limit, with_fields)) = system_log {
        match log::to_system_log(limit, with_fields)? {
            LogTarget::System => {}
            // In a container every mount logs to such a file, so this is no warning.
            LogTarget::Fallback(note) if tracing::enabled!(tracing::Level::INFO) => log::say(&note),
            LogTarget::Fallback(_) => {}
            LogTarget::Nowhere(warning) => log::say(&warning),
        }
        warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
    }
    // The log holds all warnings before the command returns.
    log::flush();
    report(READY)
}
