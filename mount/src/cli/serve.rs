//! `tensorfs serve`: serves all mounts of a config, each in a process of its own.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tensorfs::internal::checkpoint::Tree;
use tensorfs::internal::error::{counted, shown_path};
use tensorfs::internal::store::hub_cache;

use super::args;
use super::output::{Failure, Outcome, print_text};
use crate::daemon::stalled::{READ_NONE, probe_path, unless_stalled};
use crate::daemon::{background, inherited, place};
use crate::fs::sharing::{Sharing, idle_rule};
use crate::log;
use crate::node::config::{Config, ConfigError, MountConfig};
use crate::node::supervisor::{Supervisor, take_signals};
use crate::node::worker;
use crate::options::Options;

/// Time limit of `--check` for each path.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);

pub(super) fn run(args: &args::ServeArgs) -> Outcome {
    let config = Config::read(&args.config).map_err(|error| match error {
        ConfigError::Unreadable(message) => Failure::Failed(message),
        ConfigError::Wrong(message) => Failure::Usage(message),
    })?;
    if args.check {
        let file = shown_path(&args.config);
        check_places(&config).map_err(|why| Failure::Usage(format!("{file}: {why}")))?;
        config.mounts.iter().for_each(warn_of_idle_rules);
        return print_text(&format!(
            "{file}: correct, {}\n",
            counted(config.mounts.len(), "mount")
        ));
    }
    // The service may reload the config from another working directory, so the path must be
    // absolute.
    let failed = |e: std::io::Error| Failure::Failed(format!("cannot start: {e}"));
    let file = std::path::absolute(&args.config).map_err(failed)?;
    inherited::note_descriptors();
    tensorfs::internal::source::raise_limit();
    let signals = take_signals().map_err(failed)?;
    log::never_wait().map_err(failed)?;
    log::start(args.verbose.saturating_add(1));
    background::set_log_format(config.service.log_format, false).map_err(Failure::Failed)?;
    Supervisor::new(&file, config, args.verbose).run(&signals).map_err(Failure::Failed)
}

/// Refuses mounts that contain their source or lie in it, and two mounts on the same folder by
/// different paths. Other mounts are left to the service, which retries those that fail.
fn check_places(config: &Config) -> Result<(), String> {
    // If a path does not exist or does not answer, the mount itself reports that.
    let real = |path: &Path| {
        let answers = probe_path(path, READ_NONE, Some(ANSWER_LIMIT)).is_ok();
        let real = answers.then(|| std::fs::canonicalize(path).ok());
        real.flatten().unwrap_or_else(|| path.to_owned())
    };
    let mut targets: Vec<(PathBuf, &str)> = Vec::new();
    for mount in &config.mounts {
        let (name, source) = (&mount.name, mount.source.clone());
        // The service may use another hub cache than this user.
        let meant = unless_stalled(Some(ANSWER_LIMIT), move || hub_cache::resolve(&source));
        let source = meant.ok().and_then(Result::ok).unwrap_or_else(|| mount.source.clone());
        let (source, target) = (real(&source), real(&mount.target));
        let place = shown_path(&target);
        check_kinds(mount, &target).map_err(|why| format!("mount {name}: {why}"))?;
        if target.starts_with(&source) {
            let source = shown_path(&source);
            return Err(format!(
                "mount {name}: its target {place} lies inside its source {source}"
            ));
        }
        if source.starts_with(&target) {
            let source = shown_path(&source);
            return Err(format!("mount {name}: its source {source} lies on its target {place}"));
        }
        if let Some((_, other)) = targets.iter().find(|(other, _)| *other == target) {
            return Err(format!("mount {name}: {place} is the target of mount {other} too"));
        }
        targets.push((target, name));
    }
    Ok(())
}

/// Refuses a target that is not a folder, and a path of `config=` that does not exist or lies in the
/// mount.
fn check_kinds(mount: &MountConfig, target: &Path) -> Result<(), String> {
    let Ok(options) = Options::parse(&[&mount.options], false) else { return Ok(()) };
    let found = |path: &Path| {
        let answers = probe_path(path, READ_NONE, Some(ANSWER_LIMIT)).is_ok();
        answers.then(|| std::fs::metadata(path))
    };
    if let Some(Ok(found)) = found(target)
        && !found.is_dir()
    {
        return Err(format!("its target {} is no folder", shown_path(target)));
    }
    if let Some(config) = &options.open.config
        && let Some(found) = found(config)
    {
        place::check_config(&options.open, target)?;
        found.map_err(|e| format!("config={}: {e}", shown_path(config)))?;
    }
    Ok(())
}

/// Warns about rules of `access=` that match nothing in the source. If the source does not exist
/// yet or does not answer, this cannot be checked.
fn warn_of_idle_rules(mount: &MountConfig) {
    let Ok(options) = Options::parse(&[&mount.options], false) else { return };
    let (limit, source) = (options.io_timeout, mount.source.clone());
    if options.access.is_empty() || probe_path(&source, READ_NONE, limit).is_err() {
        return;
    }
    let idle = move || {
        let tree = Tree::scan(&source, &options.open).ok()?;
        Some(Sharing::new(&options, 0, 0).idle_rules(&tree))
    };
    for glob in unless_stalled(limit, idle).ok().flatten().unwrap_or_default() {
        log::say(&format!("mount {}: {}", mount.name, idle_rule(&glob)));
    }
}

/// Serves one mount for a supervisor. The errors go to the supervisor.
pub(super) fn work(args: &args::WorkerArgs) -> Outcome {
    log::never_wait().map_err(|e| Failure::Failed(format!("cannot start a thread: {e}")))?;
    log::start(args.verbose);
    worker::run().map_err(|_| Failure::Told)
}
