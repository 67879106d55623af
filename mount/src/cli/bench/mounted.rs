//! The mounts that the bench makes. Each has a daemon of the same program and a temporary folder.
//! The mount and the folder are removed in every case.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::libc;
use nix::time::{ClockId, clock_getcpuclockid, clock_gettime};
use nix::unistd::Pid;
use serde_json::json;
use tensorfs::internal::error::{real_name, shown_path};
use tensorfs::internal::mountinfo;
use tensorfs::internal::system_memory::of_process;

use super::worker::{Trouble, check_stopped, wait};
use crate::cli::seen;
use crate::daemon::attach::{Detach, detach};
use crate::options::escape;

/// Time for which the mount may be busy before it is unmounted lazily.
const BUSY_TIMEOUT: Duration = Duration::from_secs(2);

/// Time limit for the daemon to end after the unmount.
const END_TIMEOUT: Duration = Duration::from_secs(5);

/// A mount and the daemon that serves it.
#[derive(Debug)]
pub(super) struct Mounted {
    /// Folder with the mount point and the files that the daemon writes.
    home: PathBuf,
    target: PathBuf,
    daemon: Child,
    clock: Option<ClockId>,
}

impl Mounted {
    /// Mounts `source` and waits until the mount answers.
    pub(super) fn start(
        source: &Path,
        options: &[String],
        limit: Duration,
    ) -> Result<Mounted, Trouble> {
        let template = std::env::temp_dir().join("tensorfs-bench-XXXXXX");
        let made = nix::unistd::mkdtemp(&template).map_err(|e| failed(&template, e.into()))?;
        // Paths in the mount table contain no links, so this path must not contain any.
        let home = fs::canonicalize(&made).map_err(|e| failed(&made, e))?;
        match spawn(&home, source, options) {
            Ok((daemon, ready)) => {
                let pid = Pid::from_raw(daemon.id() as libc::pid_t);
                let clock = clock_getcpuclockid(pid).ok();
                let mut mounted = Mounted { target: home.join("mnt"), home, daemon, clock };
                mounted.wait_until_ready(&ready, limit)?;
                Ok(mounted)
            }
            Err(e) => {
                let _ = fs::remove_dir_all(&home);
                Err(failed(source, e))
            }
        }
    }

    fn wait_until_ready(&mut self, ready: &UnixDatagram, limit: Duration) -> Result<(), Trouble> {
        let deadline = Instant::now() + limit;
        let mut message = [0; 4096];
        loop {
            check_stopped()?;
            if let Ok(len) = ready.recv(&mut message)
                && message[..len].split(|&byte| byte == b'\n').any(|line| line == b"READY=1")
            {
                return Ok(());
            }
            if let Some(status) = self.daemon.try_wait()? {
                let said = fs::read_to_string(self.home.join("stderr")).unwrap_or_default();
                let last = said.trim_end().lines().last().map(str::to_owned);
                let line = last.unwrap_or_else(|| format!("the daemon ended ({status})"));
                let reason = line.strip_prefix("tensorfs: ").unwrap_or(&line);
                return Err(Trouble::Failed(reason.to_owned()));
            }
            if Instant::now() > deadline {
                let seconds = limit.as_secs();
                return Err(Trouble::Failed(format!("no mount after {seconds} s")));
            }
        }
    }

    /// The root of the mount.
    pub(super) fn path(&self) -> &Path {
        &self.target
    }

    /// Processor time that all threads of the daemon have used.
    pub(super) fn cpu(&self) -> Option<Duration> {
        clock_gettime(self.clock?).ok().map(Duration::from)
    }

    /// Resets the daemon's peak memory. Returns false if this process may not do that.
    pub(super) fn reset_peak(&self) -> bool {
        fs::write(self.proc("clear_refs"), "5").is_ok()
    }

    /// Peak resident memory since `reset_peak`, in bytes.
    pub(super) fn peak(&self) -> Option<u64> {
        of_process(self.daemon.id(), "VmHWM")
    }

    /// The pid of the daemon.
    pub(super) fn pid(&self) -> u32 {
        self.daemon.id()
    }

    /// The read-ahead counters of the daemon, by name. Empty if the daemon does not answer.
    pub(super) fn read_ahead(&self) -> BTreeMap<String, u64> {
        let Ok(Some(mount)) = mountinfo::ours_at(&self.target) else { return BTreeMap::new() };
        let seen = seen::ask(vec![mount], seen::LIMIT, false);
        let counters = json!(seen.first().and_then(|one| one.counters()));
        let named = counters.as_object().into_iter().flatten();
        let ahead = named.filter(|(name, _)| name.starts_with("prefetch"));
        ahead.filter_map(|(name, count)| Some((name.clone(), count.as_u64()?))).collect()
    }

    /// The kernel's readahead window for the mount, in KiB.
    pub(super) fn readahead_kib(&self) -> Option<u64> {
        let minor = mountinfo::ours_at(&self.target).ok()??.minor;
        super::machine::readahead_kib(0, u64::from(minor))
    }

    fn proc(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/{name}", self.daemon.id()))
    }

    fn is_mounted(&self) -> bool {
        mountinfo::at(&self.target).is_ok_and(|mounts| !mounts.is_empty())
    }

    fn unmount(&self) {
        let deadline = Instant::now() + BUSY_TIMEOUT;
        while self.is_mounted() {
            let busy = detach(&self.target, Detach::Clean)
                .is_err_and(|e| e.kind() == io::ErrorKind::ResourceBusy);
            if !busy || Instant::now() > deadline {
                break;
            }
            // A file indexer may have the mount open for a moment, so this is repeated.
            std::thread::sleep(Duration::from_millis(20));
        }
        if self.is_mounted() {
            let _ = detach(&self.target, Detach::Lazy);
        }
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        self.unmount();
        if !matches!(wait(&mut self.daemon, END_TIMEOUT), Ok(Some(_))) {
            let _ = self.daemon.kill();
            let _ = wait(&mut self.daemon, END_TIMEOUT);
            self.unmount();
        }
        // If the mount remains, the folder remains too, because removing it would also descend into
        // the mount.
        if self.is_mounted() {
            crate::log::say(&format!("{}: cannot unmount", shown_path(&self.target)));
        } else if let Err(e) = fs::remove_dir_all(&self.home) {
            crate::log::say(&format!("{}: {e}", shown_path(&self.home)));
        }
    }
}

fn failed(path: &Path, error: io::Error) -> Trouble {
    Trouble::Failed(format!("{}: {error}", shown_path(path)))
}

/// Starts the daemon as a child of this process. Also returns the socket on which the daemon
/// reports that it is ready.
fn spawn(home: &Path, source: &Path, options: &[String]) -> io::Result<(Child, UnixDatagram)> {
    let target = home.join("mnt");
    fs::create_dir(&target)?;
    let notify = home.join("notify");
    let ready = UnixDatagram::bind(&notify)?;
    ready.set_read_timeout(Some(Duration::from_millis(10)))?;
    let mut command = Command::new(std::env::current_exe()?);
    command.arg0("tensorfs").args(["mount", "--foreground"]).env("NOTIFY_SOCKET", &notify);
    for option in options {
        command.arg("-o").arg(option);
    }
    let logs = |option: &String| {
        crate::options::Options::parse(&[option], true).is_ok_and(|options| options.log.is_some())
    };
    if !options.iter().any(logs) {
        let log = home.join("log");
        command.arg("-o").arg(format!("log={}", escape(&real_name(&log))));
    }
    // A temporary checkpoint needs no index in the user's cache folder. `-o index-dir=` has
    // precedence.
    command.env(tensorfs::internal::index::STORE_VARIABLE, "none");
    command.arg("--").arg(source).arg(target).stdin(Stdio::null()).stdout(Stdio::null());
    // The child gets its own process group, so that only the bench receives Ctrl-C.
    let child = command.stderr(File::create(home.join("stderr"))?).process_group(0).spawn()?;
    Ok((child, ready))
}
