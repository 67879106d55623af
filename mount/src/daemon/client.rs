//! The client side of the control socket of a mount: finds the socket and sends requests.
//!
//! The name of a socket has the minor number of the mount's device and the pid of the daemon
//! (`51-1234.sock`). So a client finds the socket from the mount table of any namespace.

use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use nix::errno::Errno;
use nix::sys::socket::sockopt::{PeerCredentials, ReceiveTimeout, SendTimeout};
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, UnixAddr, UnixCredentials, connect, getsockopt, setsockopt,
    socket,
};
use nix::sys::time::TimeVal;
use nix::unistd::geteuid;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tensorfs::words;

/// Maximum size in bytes of a reply that a client accepts. The other side may be a program of
/// another user.
const REPLY_MAX: usize = 16 << 20;

/// Minimum age at which a socket that refuses connections counts as stale. A younger socket may
/// belong to a daemon that does not listen yet.
pub(super) const LISTEN_DELAY_MAX: Duration = Duration::from_secs(1);

words! {
    /// A request, by its word in the message.
    pub(crate) enum Question {
        /// Requests the status of the mount.
        Status = "status",
        /// Requests the counters of the reads of each tensor.
        Heat = "heat",
    }
}

/// The result of a request to the socket of a mount.
#[derive(Debug)]
pub(crate) enum Reply<T> {
    /// The pid and the answer of the daemon. The pid is 0 if the daemon is in another pid
    /// namespace.
    Answer(i32, T),
    /// The daemon refuses to answer this user, for this reason.
    Refused(String),
    /// The daemon with this pid has not answered in time.
    Silence(i32),
    /// There is a socket, but its daemon was killed.
    Leftover,
    /// There is no socket.
    Nothing,
}

/// The answer to a request that the daemon refuses.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct RequestRefusal {
    pub error: String,
}

/// Folders for the sockets of user `uid`, in the order of preference.
pub(super) fn folders(uid: u32) -> Vec<PathBuf> {
    if uid == 0 {
        return vec!["/run/tensorfs".into()];
    }
    let mut bases = Vec::new();
    if uid == geteuid().as_raw() {
        bases.extend(std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from));
    }
    bases.push(format!("/run/user/{uid}").into());
    // Folders that other users may write to or that another user owns are not used.
    bases.retain(|base| base.is_absolute() && is_private(base, uid).is_ok());
    bases.dedup();
    let mut folders: Vec<_> = bases.into_iter().map(|base| base.join("tensorfs")).collect();
    folders.push(format!("/tmp/tensorfs-{uid}").into());
    folders
}

/// Checks that `folder` is a folder and not a link, and that only user `uid` may enter it. Other
/// users may enter the folder of root, but not change it.
pub(super) fn is_private(folder: &Path, uid: u32) -> io::Result<()> {
    let meta = std::fs::symlink_metadata(folder)?;
    let problem = match () {
        () if !meta.is_dir() => "not a folder",
        () if meta.uid() != uid => "belongs to another user",
        () if uid == 0 && meta.mode() & 0o022 == 0 => return Ok(()),
        () if meta.mode() & 0o077 != 0 => "open to other users; its mode should be 0700",
        () => return Ok(()),
    };
    Err(io::Error::new(io::ErrorKind::PermissionDenied, problem))
}

/// The sockets in `folder`, the youngest first, each with the minor number of its mount's device.
///
/// The kernel gives the device number of an unmounted mount to the next mount. The daemon of the
/// unmounted mount may still run and not answer. It must not use up the time limit before the
/// daemon of the new mount is asked, so the youngest socket comes first.
pub(super) fn sockets(folder: &Path) -> Vec<(u32, PathBuf)> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
    let sockets = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_socket()));
    let named = sockets.filter_map(|entry| {
        let name = entry.file_name();
        let (minor, _) = name.to_str()?.strip_suffix(".sock")?.split_once('-')?;
        Some((entry.metadata().ok()?.modified().ok()?, minor.parse().ok()?, entry.path()))
    });
    let mut by_age: Vec<(SystemTime, u32, PathBuf)> = named.collect();
    by_age.sort_unstable();
    by_age.into_iter().rev().map(|(_, minor, path)| (minor, path)).collect()
}

/// Removes a socket of this user if its daemon has ended.
pub(super) fn remove_if_stale(path: &Path) {
    let age = |meta: std::fs::Metadata| {
        SystemTime::now()
            .duration_since(meta.modified().ok()?)
            .ok()
            .filter(|_| meta.uid() == euid())
    };
    let old =
        std::fs::symlink_metadata(path).ok().and_then(age).is_some_and(|a| a > LISTEN_DELAY_MAX);
    // A socket without a listener refuses at once, so a short time limit is enough.
    if old && matches!(reach(path, Duration::from_millis(1)), Err(Errno::ECONNREFUSED)) {
        let _ = std::fs::remove_file(path);
    }
}

pub(super) fn euid() -> u32 {
    geteuid().as_raw()
}

/// All sockets of user `owner`, the youngest of a folder first, each with the minor number of its
/// mount's device.
pub(crate) fn sockets_of(owner: u32) -> Vec<(u32, PathBuf)> {
    let folders = folders(owner).into_iter();
    folders.filter(|folder| is_private(folder, owner).is_ok()).flat_map(|f| sockets(&f)).collect()
}

/// Whether the daemon of the mount `minor` of user `owner` was killed but cannot end, because one
/// of its threads waits for a file system. The kernel keeps the connection until that thread ends,
/// and readers of the mount wait until then.
pub(crate) fn is_killed_but_waits(owner: u32, minor: u32) -> bool {
    let sockets = sockets_of(owner).into_iter().filter(|(of, _)| *of == minor);
    // A daemon that has taken over the mount has a socket too.
    let mut pids = sockets.map(|(_, path)| pid_in_name(&path)).peekable();
    pids.peek().is_some() && pids.all(|pid| pid.is_some_and(is_exiting))
}

/// The pid in the name of a socket.
fn pid_in_name(path: &Path) -> Option<u32> {
    path.file_stem()?.to_str()?.split_once('-')?.1.parse().ok()
}

/// Whether the process has begun to end. The flag PF_EXITING (linux/sched.h) in `/proc/PID/stat`
/// says so. Does not wait for the process.
pub(crate) fn is_exiting(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
    let flags = fields.split_whitespace().nth(6).and_then(|flags| flags.parse::<u32>().ok());
    flags.is_some_and(|flags| flags & 0x4 != 0)
}

/// Sends `question` to a mount of user `owner` through the sockets `paths`, with the time limit
/// `deadline`. Removes sockets of this user whose daemons were killed.
pub(crate) fn ask<T: DeserializeOwned>(
    owner: u32,
    paths: &[PathBuf],
    question: Question,
    deadline: Instant,
) -> Reply<T> {
    let mut found = Reply::Nothing;
    for path in paths {
        match ask_at(path, owner, question, deadline) {
            answer @ (Reply::Answer(..) | Reply::Refused(_)) => return answer,
            Reply::Silence(pid) => found = Reply::Silence(pid),
            Reply::Leftover => {
                remove_if_stale(path);
                if matches!(found, Reply::Nothing) {
                    found = Reply::Leftover;
                }
            }
            Reply::Nothing => {}
        }
    }
    found
}

fn ask_at<T: DeserializeOwned>(
    path: &Path,
    owner: u32,
    question: Question,
    deadline: Instant,
) -> Reply<T> {
    loop {
        let (stream, peer) = match reach(path, rest_until(deadline)) {
            Ok(reached) => reached,
            Err(Errno::ECONNREFUSED) => return Reply::Leftover,
            Err(Errno::EAGAIN) => return Reply::Silence(0),
            Err(_) => return Reply::Nothing,
        };
        // The owner of the folder could place a socket of any program there, but the kernel reports
        // the true user of the other side.
        if peer.uid() != owner {
            return Reply::Nothing;
        }
        match converse(stream, question, deadline) {
            Ok(Ok(answer)) => return Reply::Answer(peer.pid(), answer),
            Ok(Err(RequestRefusal { error })) => return Reply::Refused(error),
            // The daemon has too many clients or is ending. Another attempt shows which of the two
            // is true.
            Err(e) if is_hung_up(&e) && Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(_) => return Reply::Silence(peer.pid()),
        }
    }
}

fn is_hung_up(e: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(e.kind(), BrokenPipe | ConnectionReset | UnexpectedEof)
}

/// The time until `deadline`, but at least 1 ms, because a timeout of 0 would mean no limit.
fn rest_until(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1))
}

fn converse<T: DeserializeOwned>(
    mut stream: UnixStream,
    question: Question,
    deadline: Instant,
) -> io::Result<Result<T, RequestRefusal>> {
    stream.write_all(format!("{{\"do\":\"{question}\"}}\n").as_bytes())?;
    let mut reply = Vec::new();
    let mut piece = vec![0; 64 << 10];
    while reply.last() != Some(&b'\n') {
        if Instant::now() >= deadline || reply.len() > REPLY_MAX {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(rest_until(deadline)))?;
        match stream.read(&mut piece) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(len) => reply.extend_from_slice(&piece[..len]),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    if let Ok(refusal) = serde_json::from_slice(&reply) {
        return Ok(Err(refusal));
    }
    // A reply of another structure counts as no answer.
    serde_json::from_slice(&reply).map(Ok).map_err(|_| io::ErrorKind::InvalidData.into())
}

/// Connects within `limit`. A daemon that is stopped accepts no connection, and connecting blocks
/// once the backlog of its socket is full.
fn reach(path: &Path, limit: Duration) -> nix::Result<(UnixStream, UnixCredentials)> {
    let flags = SockFlag::SOCK_CLOEXEC;
    let stream = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    let limit = i64::try_from(limit.as_micros()).unwrap_or(i64::MAX);
    let time = TimeVal::new(limit / 1_000_000, limit % 1_000_000);
    setsockopt(&stream, SendTimeout, &time)?;
    setsockopt(&stream, ReceiveTimeout, &time)?;
    connect(stream.as_raw_fd(), &UnixAddr::new(path)?)?;
    let peer = getsockopt(&stream, PeerCredentials)?;
    Ok((UnixStream::from(stream), peer))
}
