//! The mounts of tensorfs as their daemons report them. This process never accesses a mount point,
//! because a daemon that hangs would block it.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::unistd::geteuid;
use serde::{Serialize, Serializer};
use tensorfs::internal::counters::CounterValues;
use tensorfs::internal::error::real_name;
use tensorfs::internal::mountinfo::{self, Mount};
use tensorfs::internal::system_memory::of_process;
use tensorfs::words;

use crate::daemon::client::{self, Question, Reply};
use crate::daemon::stalled::run_until;
use crate::daemon::status::{Listable, Status, Told};

/// Time limit for the answer of a daemon.
pub(super) const LIMIT: Duration = Duration::from_secs(2);

/// Arguments that make a process check whether a mount is dead. The path of the mount follows them.
const PROBE: [&str; 3] = ["internal", "probe-dead", "--"];

/// Exit status of that process if the mount is dead.
const DEAD: u8 = 3;

words! {
    /// The state of a mount.
    pub(super) enum MountState {
        /// Its daemon answers.
        Running = "running",
        /// The daemon answers, but the mount is not in the mount table: the mount was unmounted while files are open,
        /// or it is in another mount namespace.
        Detached = "detached",
        /// The mount has no control socket, but it is not dead.
        NoSocket = "no-socket",
        /// The daemon of the mount runs and does not answer.
        NoAnswer = "no-answer",
        /// The daemon of the mount has ended.
        Dead = "dead",
        /// The mount belongs to another user.
        NotYours = "not-yours",
    }
}

impl MountState {
    /// The state as text for people.
    pub(super) fn text(self) -> &'static str {
        match self {
            MountState::Running => "running",
            MountState::Detached => "detached: unmounted with files open, or in another namespace",
            MountState::NoSocket => "mounted; its daemon has no control socket",
            MountState::NoAnswer => "its daemon does not answer",
            MountState::Dead => "dead: its daemon is gone; take it off with `tensorfs umount`",
            MountState::NotYours => "not yours: another user's",
        }
    }
}

/// A mount and the report of its daemon, in the form of `--json`.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Seen {
    /// Minor number of the mount's device, which is unique.
    #[serde(skip)]
    pub minor: u32,
    /// The mount point.
    #[serde(serialize_with = "as_name")]
    pub target: PathBuf,
    pub state: MountState,
    pub owner: Option<u32>,
    /// Path of the source. `None` for a mount of another user.
    pub source: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<Memory>,
    /// For a mount of another user: the folders of models that this user may list.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub models: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub started_unix: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uptime_s: Option<u64>,
    #[serde(flatten)]
    pub status: Option<Status>,
    /// Time of the daemon's answer.
    #[serde(skip)]
    pub asked: Instant,
}

/// Resident memory of a process in bytes: its current value and its maximum.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Memory {
    pub rss: Option<u64>,
    pub peak: Option<u64>,
}

fn as_name<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&real_name(path))
}

impl Seen {
    /// The counters of the mount's daemon.
    pub(super) fn counters(&self) -> Option<&CounterValues> {
        Some(&self.status.as_ref()?.service.counters)
    }

    /// A mount whose daemon does not report. `pid` is the process of the daemon, or 0 if that is
    /// not known.
    pub(super) fn silent(mount: Mount, state: MountState, pid: i32) -> Seen {
        let pid = (pid > 0).then_some(pid);
        Seen {
            minor: mount.minor,
            target: mount.target,
            state,
            owner: mount.owner,
            source: (state != MountState::NotYours).then_some(mount.source),
            pid,
            memory: pid.map(|pid| Memory {
                rss: of_process(pid.unsigned_abs(), "VmRSS"),
                peak: of_process(pid.unsigned_abs(), "VmHWM"),
            }),
            models: None,
            started_unix: None,
            uptime_s: None,
            status: None,
            asked: Instant::now(),
        }
    }

    /// A mount whose daemon has reported.
    pub(super) fn told(mount: Mount, state: MountState, pid: i32, told: Told<Status>) -> Seen {
        let silent = Seen::silent(mount, state, pid);
        Seen {
            source: Some(told.source),
            // The pid that the kernel reports is preferred to the pid in the report.
            pid: silent.pid.or(i32::try_from(told.pid).ok()),
            started_unix: Some(told.started_unix),
            uptime_s: Some(told.uptime_s),
            status: Some(told.facts),
            ..silent
        }
    }
}

/// The tensorfs mount on `path`, which may be a link to the mount point. Does not access the mount
/// point.
pub(super) fn find(mounts: &[Mount], path: &Path) -> Option<Mount> {
    // `components` drops trailing slashes and dots.
    let mut path = PathBuf::from_iter(std::path::absolute(path).ok()?.components());
    // The limit is the same as the kernel's limit for links.
    for _ in 0..40 {
        let on = |path: &Path| mounts.iter().rev().find(|mount| mount.target == path).cloned();
        if let Some(mount) = on(&path) {
            return Some(mount);
        }
        let parent = std::fs::canonicalize(path.parent()?).ok()?;
        path = parent.join(path.file_name()?);
        if let Some(mount) = on(&path) {
            return Some(mount);
        }
        path = parent.join(std::fs::read_link(&path).ok()?);
    }
    None
}

/// Asks the daemons of `mounts`, and those daemons of this user whose mounts are not in the mount
/// table, at most for `limit`. With `probe`, also checks whether mounts without a socket are dead.
pub(super) fn look(mounts: Vec<Mount>, limit: Duration, probe: bool) -> Vec<Seen> {
    let owner = geteuid().as_raw();
    let is_known = |minor: u32| mounts.iter().any(|mount| mount.minor == minor);
    let mut sockets = client::sockets_of(owner);
    sockets.retain(|(minor, _)| !is_known(*minor));
    let mut seen = ask(mounts, limit, probe);
    let deadline = Instant::now() + limit;
    let ask_one = |(minor, path): (u32, PathBuf)| {
        let reply = client::ask(owner, &[path], Question::Status, deadline);
        let Reply::Answer(pid, told @ Told::<Status> { .. }) = reply else { return None };
        let target = PathBuf::from(&told.target);
        let mount = Mount { minor, target, owner: Some(owner), ..Mount::default() };
        Some(Seen::told(mount, MountState::Detached, pid, told))
    };
    std::thread::scope(|scope| {
        let asked: Vec<_> =
            sockets.into_iter().map(|socket| scope.spawn(|| ask_one(socket))).collect();
        seen.extend(asked.into_iter().filter_map(|thread| thread.join().ok().flatten()));
    });
    seen
}

/// Asks the daemons of `mounts`, all at the same time. Mounts that were unmounted in the meantime
/// are left out.
pub(super) fn ask(mounts: Vec<Mount>, limit: Duration, probe: bool) -> Vec<Seen> {
    let mut seen = ask_each(mounts, limit, probe);
    if seen.iter().any(|one| one.state != MountState::Running) {
        let table = mountinfo::ours().unwrap_or_default();
        seen.retain(|one| {
            one.state == MountState::Running
                || table
                    .iter()
                    .any(|mount| (mount.minor, &mount.target) == (one.minor, &one.target))
        });
    }
    seen
}

fn ask_each(mounts: Vec<Mount>, limit: Duration, probe: bool) -> Vec<Seen> {
    let mut owners: Vec<u32> = mounts.iter().filter_map(|mount| mount.owner).collect();
    owners.sort_unstable();
    owners.dedup();
    let deadline = Instant::now() + limit;
    let of_owner = |owner: u32| {
        client::sockets_of(owner).into_iter().map(move |(minor, path)| (owner, minor, path))
    };
    let sockets: Vec<_> = owners.into_iter().flat_map(of_owner).collect();
    let ask_one = |mount: Mount| {
        let ours = |(owner, minor, _): &&(u32, u32, PathBuf)| {
            mount.owner == Some(*owner) && mount.minor == *minor
        };
        let paths: Vec<PathBuf> = sockets.iter().filter(ours).map(|s| s.2.clone()).collect();
        inspect(mount, &paths, deadline, probe)
    };
    std::thread::scope(|scope| {
        let asked: Vec<_> =
            mounts.into_iter().map(|mount| scope.spawn(|| ask_one(mount))).collect();
        asked.into_iter().filter_map(|thread| thread.join().ok()).collect()
    })
}

fn inspect(mount: Mount, sockets: &[PathBuf], deadline: Instant, probe: bool) -> Seen {
    let (user, owner) = (geteuid(), mount.owner.unwrap_or_default());
    let is_ours = owner == user.as_raw();
    if !is_ours && !user.is_root() {
        // The daemon may report the names of models that this user may list.
        let models = match client::ask(owner, sockets, Question::Status, deadline) {
            Reply::Answer(_, Listable { models }) => Some(models),
            _ => None,
        };
        return Seen { models, ..Seen::silent(mount, MountState::NotYours, 0) };
    }
    let state = match client::ask(owner, sockets, Question::Status, deadline) {
        Reply::Answer(pid, told) => return Seen::told(mount, MountState::Running, pid, told),
        Reply::Silence(pid) => return Seen::silent(mount, MountState::NoAnswer, pid),
        Reply::Leftover => MountState::Dead,
        // Only a user who may access the mount can find out whether the mount is dead.
        Reply::Nothing if probe && is_ours => probe_from_outside(&mount.target, deadline),
        Reply::Nothing | Reply::Refused(_) => MountState::NoSocket,
    };
    Seen::silent(mount, state, 0)
}

/// Returns the dead mounts among `mounts`. A mount that does not answer within `limit` is not dead.
pub(super) fn dead(mounts: Vec<Mount>, limit: Duration) -> Vec<Mount> {
    let deadline = Instant::now() + limit;
    let is_dead = |mount: &Mount| {
        client::is_killed_but_waits(mount.owner.unwrap_or_default(), mount.minor)
            || probe_from_outside(&mount.target, deadline) == MountState::Dead
    };
    std::thread::scope(|scope| {
        let probe = |mount: Mount| scope.spawn(move || is_dead(&mount).then_some(mount));
        let probes: Vec<_> = mounts.into_iter().map(probe).collect();
        probes.into_iter().filter_map(|probe| probe.join().ok().flatten()).collect()
    })
}

/// The work of the probe: its exit status says whether the mount on `target` is dead.
pub(super) fn answer_probe(target: &Path) -> ExitCode {
    // The kernel does not cache the answer to statvfs, so it always asks the daemon.
    match nix::sys::statvfs::statvfs(target) {
        Err(Errno::ENOTCONN | Errno::ECONNABORTED) => ExitCode::from(DEAD),
        _ => ExitCode::SUCCESS,
    }
}

/// Checks a mount without a socket from another process, because a process that waits for a hanging
/// daemon cannot end.
fn probe_from_outside(target: &Path, deadline: Instant) -> MountState {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("tensorfs").args(PROBE).arg(target);
    match run_until(command, deadline) {
        Ok(Some(probe)) if probe.status.code() == Some(DEAD.into()) => MountState::Dead,
        Ok(Some(_)) | Err(_) => MountState::NoSocket,
        Ok(None) => MountState::NoAnswer,
    }
}
