//! The streams that log lines are written to.

use std::fs::{File, Metadata, Permissions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{OFlag, openat};
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::stat::Mode;
use nix::unistd::geteuid;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};

use super::line::Line;
use super::{as_json, for_journal, journal};

/// The socket of the system log. journald listens on it too.
const SYSLOG: &str = "/dev/log";

/// The syslog facility of the lines: daemon.
const FACILITY: u32 = 3 << 3;

/// Name of the log file in the folder that the daemon creates.
const FILE_NAME: &str = "tensorfs.log";

/// The target of a daemon's log.
#[derive(Clone, Debug, Default)]
pub(super) enum Destination {
    #[default]
    Stderr,
    SystemLog,
    /// journald, by its native protocol.
    Journal,
    File(PathBuf),
    /// A file in a folder that only this user can write to. The folder is created if it does not
    /// exist.
    Private {
        folder: PathBuf,
        /// The user's folder that contains this folder, if there is one.
        home: Option<PathBuf>,
    },
    /// No target until a system log appears.
    Nowhere,
}

impl Destination {
    /// Opens the destination.
    ///
    /// # Errors
    /// If the destination cannot be opened.
    pub(super) fn open(&self) -> io::Result<Output> {
        match self {
            Destination::Stderr => Ok(Output::stderr()),
            Destination::SystemLog => connect().map(|socket| Output::SystemLog(Some(socket))),
            Destination::Journal => journal::connect().map(|socket| Output::Journal(Some(socket))),
            Destination::Nowhere => Ok(Output::SystemLog(None)),
            Destination::File(path) => {
                // With O_NOCTTY, a terminal does not become the controlling terminal of the daemon.
                let mut options = File::options();
                options.append(true).create(true).custom_flags(libc::O_NOCTTY);
                // Lines contain paths of the source, which not all users may learn.
                options.mode(0o640);
                options.open(path).map(Output::File)
            }
            Destination::Private { folder, home } => {
                open_private(folder, home.as_deref()).map(Output::File)
            }
        }
    }

    /// The path of the file, if the destination is a file.
    pub(super) fn path(&self) -> Option<PathBuf> {
        match self {
            Destination::File(path) => Some(path.clone()),
            Destination::Private { folder, .. } => Some(folder.join(FILE_NAME)),
            Destination::Stderr
            | Destination::SystemLog
            | Destination::Journal
            | Destination::Nowhere => None,
        }
    }
}

/// Files for the log on a machine without a system log, in the order of preference.
pub(super) fn fallback_files() -> Vec<Destination> {
    let mut files = Vec::new();
    if geteuid().is_root() {
        files.push(Destination::File("/var/log/tensorfs.log".into()));
    } else {
        let folder = |name| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
        let state = folder("XDG_STATE_HOME").map(|home| (home.join("tensorfs"), home));
        let home = || folder("HOME").map(|home| (home.join(".local/state/tensorfs"), home));
        let of_user = state.or_else(home);
        files.extend(
            of_user.map(|(folder, home)| Destination::Private { folder, home: Some(home) }),
        );
    }
    let folder = std::env::temp_dir().join(format!("tensorfs-{}", geteuid()));
    files.push(Destination::Private { folder, home: None });
    files
}

/// Opens the log file in `folder`, which is created if it does not exist. Does not follow links
/// that other users made.
fn open_private(folder: &Path, home: Option<&Path>) -> io::Result<File> {
    if let Some(home) = home {
        // If other users can write to this folder, they could place links in it.
        is_of_user(&metadata_of_nearest(home)?, 0o002)?;
        if let Some(parent) = folder.parent() {
            std::fs::create_dir_all(parent)?;
        }
    }
    match std::fs::DirBuilder::new().mode(0o700).create(folder) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
        _ => {}
    }
    let flags = libc::O_DIRECTORY | libc::O_NOFOLLOW;
    let folder = File::options().read(true).custom_flags(flags).open(folder)?;
    let meta = folder.metadata()?;
    if home.is_some() && is_of_user(&meta, 0).is_ok() && meta.mode() & 0o022 != 0 {
        folder.set_permissions(Permissions::from_mode(0o700))?;
    }
    is_of_user(&folder.metadata()?, 0o022)?;
    let flags = OFlag::O_WRONLY
        | OFlag::O_APPEND
        | OFlag::O_CREAT
        | OFlag::O_NOFOLLOW
        | OFlag::O_CLOEXEC
        | OFlag::O_NOCTTY
        | OFlag::O_NONBLOCK;
    let file = File::from(openat(&folder, FILE_NAME, flags, Mode::from_bits_truncate(0o600))?);
    let meta = file.metadata()?;
    if !meta.is_file() || meta.uid() != geteuid().as_raw() {
        return Err(io::Error::other("it is no regular file of this user"));
    }
    Ok(file)
}

/// The metadata of `folder`, or if it does not exist, of the nearest existing folder above it.
fn metadata_of_nearest(folder: &Path) -> io::Result<Metadata> {
    match (std::fs::metadata(folder), folder.parent()) {
        (Err(e), Some(parent)) if e.kind() == io::ErrorKind::NotFound => {
            metadata_of_nearest(parent)
        }
        (found, _) => found,
    }
}

/// Fails if a folder belongs to another user, or if other users have any of the rights `denied`.
fn is_of_user(meta: &Metadata, denied: u32) -> io::Result<()> {
    let problem = match () {
        () if meta.uid() != geteuid().as_raw() => "the folder belongs to another user",
        () if meta.mode() & denied != 0 => "other users can write to the folder",
        () => return Ok(()),
    };
    Err(io::Error::new(io::ErrorKind::PermissionDenied, problem))
}

/// An open stream for log lines.
pub(super) enum Output {
    Stderr,
    /// The socket of the system log. `None` if it was not there at the last attempt.
    SystemLog(Option<UnixDatagram>),
    /// The socket of the journal. `None` if it was not there at the last attempt.
    Journal(Option<UnixDatagram>),
    File(File),
}

impl Output {
    pub(super) fn stderr() -> Output {
        Output::Stderr
    }

    /// Device and inode number of the file. `None` if the stream is not a file.
    pub(super) fn identity(&self) -> Option<(u64, u64)> {
        match self {
            Output::File(file) => file.metadata().ok().map(|meta| (meta.dev(), meta.ino())),
            Output::Stderr | Output::SystemLog(_) | Output::Journal(_) => None,
        }
    }

    /// Writes a line. May block without limit.
    ///
    /// # Errors
    /// If the line cannot be written.
    pub(super) fn write(&mut self, line: &Line) -> io::Result<()> {
        let pid = std::process::id();
        match self {
            // `std::io::Stderr` is not used here: its lock would block other threads.
            Output::Stderr => write_all(io::stderr().as_fd(), on_stderr(line).as_bytes()),
            Output::File(file) => {
                let text = match as_json(line) {
                    Some(json) => format!("{json}\n"),
                    None => format!("{} tensorfs[{pid}]: {}\n", now(), line.text),
                };
                write_all(file.as_fd(), text.as_bytes())
            }
            Output::SystemLog(socket) => {
                let json = as_json(line);
                let text = json.as_ref().unwrap_or(&line.text);
                let message = format!("<{}>tensorfs[{pid}]: {text}", FACILITY | line.severity);
                if let Some(open) = socket
                    && open.send(message.as_bytes()).is_ok()
                {
                    return Ok(());
                }
                // A system log that was restarted listens on a new socket.
                *socket = None;
                socket.insert(connect()?).send(message.as_bytes()).map(|_| ())
            }
            Output::Journal(socket) => {
                let message = for_journal(line);
                if let Some(open) = socket
                    && journal::send(open, &message).is_ok()
                {
                    return Ok(());
                }
                *socket = None;
                journal::send(socket.insert(journal::connect()?), &message)
            }
        }
    }
}

/// The text of a line for standard error.
pub(super) fn on_stderr(line: &Line) -> String {
    if let Some(json) = as_json(line) {
        format!("{json}\n")
    // The journal reads the severity from a prefix of the line.
    } else if std::env::var_os("JOURNAL_STREAM").is_some() {
        format!("<{}>{}\n", line.severity, line.text)
    } else {
        format!("tensorfs: {}\n", line.text)
    }
}

/// Writes a line to standard error, if standard error accepts data within `limit`.
pub(super) fn write_in_time(line: &str, limit: Duration) {
    let stderr = io::stderr();
    let timeout = PollTimeout::try_from(limit).unwrap_or(PollTimeout::MAX);
    let mut polled = [PollFd::new(stderr.as_fd(), PollFlags::POLLOUT)];
    if poll(&mut polled, timeout).is_ok_and(|ready| ready > 0) {
        // A ready pipe accepts PIPE_BUF bytes without blocking.
        let line = &line.as_bytes()[..line.len().min(libc::PIPE_BUF)];
        let _ = nix::unistd::write(stderr.as_fd(), line);
    }
}

fn write_all(stream: BorrowedFd<'_>, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match nix::unistd::write(stream, bytes) {
            Ok(len) => bytes = &bytes[len..],
            Err(Errno::EINTR) => {}
            // Another process may have set the stream to non-blocking.
            Err(Errno::EAGAIN) => {
                let mut polled = [PollFd::new(stream, PollFlags::POLLOUT)];
                let _ = poll(&mut polled, PollTimeout::NONE);
            }
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

fn connect() -> io::Result<UnixDatagram> {
    let socket = UnixDatagram::unbound()?;
    socket.connect(SYSLOG)?;
    Ok(socket)
}

pub(super) fn now() -> String {
    let mut text = String::new();
    let _ = SystemTime.format_time(&mut Writer::new(&mut text));
    text
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn the_file_of_a_private_folder_is_made_for_its_user_only() {
        let temp = tempfile::tempdir().unwrap();
        let folder = temp.path().join("tensorfs-1");
        for _ in 0..2 {
            let file = open_private(&folder, None).unwrap();
            assert_eq!(file.metadata().unwrap().mode() & 0o777, 0o600);
        }
        assert_eq!(std::fs::metadata(&folder).unwrap().mode() & 0o777, 0o700);
    }

    #[test]
    fn a_link_that_is_planted_is_not_followed() {
        let temp = tempfile::tempdir().unwrap();
        let (victim, folder) = (temp.path().join("victim"), temp.path().join("tensorfs-1"));
        std::fs::create_dir(&victim).unwrap();
        symlink(&victim, &folder).unwrap();
        assert!(open_private(&folder, None).is_err());
        assert_eq!(std::fs::read_dir(&victim).unwrap().count(), 0);
        std::fs::remove_file(&folder).unwrap();
        std::fs::create_dir(&folder).unwrap();
        symlink(victim.join("file"), folder.join(FILE_NAME)).unwrap();
        assert!(open_private(&folder, None).is_err());
        assert!(!victim.join("file").exists());
    }

    #[test]
    fn a_folder_of_the_users_own_home_that_others_could_write_to_is_closed_to_them() {
        let temp = tempfile::tempdir().unwrap();
        // The specification of XDG_STATE_HOME requires that missing folders are created.
        let state = temp.path().join("not/there");
        let folder = state.join("tensorfs");
        open_private(&folder, Some(&state)).unwrap();
        for mode in [0o775, 0o777] {
            std::fs::set_permissions(&folder, Permissions::from_mode(mode)).unwrap();
            open_private(&folder, Some(&state)).unwrap();
            assert_eq!(std::fs::metadata(&folder).unwrap().mode() & 0o777, 0o700);
        }
    }

    #[test]
    fn a_pipe_of_the_name_of_the_log_file_keeps_nobody_and_is_refused() {
        let temp = tempfile::tempdir().unwrap();
        let folder = temp.path().join("tensorfs-1");
        open_private(&folder, None).unwrap();
        std::fs::remove_file(folder.join(FILE_NAME)).unwrap();
        nix::unistd::mkfifo(&folder.join(FILE_NAME), Mode::S_IRWXU).unwrap();
        assert!(open_private(&folder, None).is_err());
        // With a reader, the FIFO could be opened.
        let mut options = File::options();
        options.read(true).custom_flags(libc::O_NONBLOCK);
        let _reader = options.open(folder.join(FILE_NAME)).unwrap();
        assert!(open_private(&folder, None).is_err());
    }

    #[test]
    fn a_folder_that_others_can_write_to_is_not_used() {
        let temp = tempfile::tempdir().unwrap();
        let folder = temp.path().join("tensorfs-1");
        std::fs::create_dir(&folder).unwrap();
        std::fs::set_permissions(&folder, Permissions::from_mode(0o777)).unwrap();
        let error = open_private(&folder, None).unwrap_err();
        assert_eq!(error.to_string(), "other users can write to the folder");
        std::fs::set_permissions(temp.path(), Permissions::from_mode(0o1777)).unwrap();
        let below = temp.path().join(".local/state/tensorfs");
        assert!(open_private(&below, Some(temp.path())).is_err());
        assert!(!below.exists());
    }
}
