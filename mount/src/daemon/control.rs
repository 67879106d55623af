//! The daemon's side of the control socket of a mount. It answers a request, one line of JSON, with
//! one line of JSON. The owner of the mount and root may ask.

use std::fs::{DirBuilder, Permissions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::sockopt::PeerCredentials;
use nix::sys::socket::{Shutdown, getsockopt, shutdown};
use serde_json::{Value, json};
use tensorfs::UnknownWord;
use tensorfs::internal::clock::unix_now;
use tensorfs::internal::error::{real_name, shown_path};
use tensorfs::internal::sync::Mutex;

use super::client::{
    Question, RequestRefusal, euid, folders, is_private, remove_if_stale, sockets,
};
use super::connection;
use super::status::Told;
use crate::fs::access::supplementary_groups;

/// Maximum time for one request of a client.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(2);

/// Maximum number of simultaneous connections. A further connection closes the oldest one, so that
/// silent clients do not block other clients.
const CLIENTS_MAX: usize = 16;

/// Maximum number of connections of users who are neither root nor the owner.
const OTHERS_MAX: usize = 8;

/// Maximum size of a request, in bytes.
const REQUEST_MAX: usize = 4096;

/// The user on the other side of a connection.
#[derive(Clone, Debug)]
pub(crate) struct ControlPeer {
    pub uid: u32,
    /// Primary and supplementary groups.
    pub gids: Vec<u32>,
}

impl ControlPeer {
    fn of(stream: &UnixStream) -> nix::Result<ControlPeer> {
        let peer = getsockopt(stream, PeerCredentials)?;
        let mut gids = vec![peer.gid()];
        gids.extend(supplementary_groups(peer.pid(), peer.uid()));
        Ok(ControlPeer { uid: peer.uid(), gids })
    }

    /// Whether the user may learn all facts: root, and the user of this process.
    pub(crate) fn is_trusted(&self) -> bool {
        self.uid == 0 || self.uid == euid()
    }
}

/// Facts about a mount, for the name of its control socket and for the beginning of every reply.
pub(crate) struct MountFacts {
    /// The mount point.
    pub target: PathBuf,
    /// Path of the source.
    pub source: PathBuf,
    /// Minor number of the mount's device.
    pub minor: u32,
    /// Whether users who are not trusted may send requests.
    pub is_public: bool,
}

/// Paths of the sockets of this process. `exit` removes these files itself, because it drops no values.
static OPEN: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// The control socket of a running mount. The drop removes it.
#[derive(Debug)]
pub(crate) struct Control {
    path: PathBuf,
    listener: Arc<UnixListener>,
}

impl Drop for Control {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
        OPEN.lock().retain(|path| *path != self.path);
        // This wakes the thread, which then ends.
        let _ = shutdown(self.listener.as_raw_fd(), Shutdown::Both);
    }
}

/// Closes the connections, removes the sockets, and ends the process with exit status 0.
pub(crate) fn exit() -> ! {
    connection::let_go();
    for path in OPEN.lock().drain(..) {
        let _ = std::fs::remove_file(path);
    }
    crate::log::flush();
    std::process::exit(0)
}

/// Answers requests about `mount` with the result of `reply`, which must not block. Users who are
/// not trusted can connect only if the mount is public. `reply` must restrict what these users
/// learn.
///
/// # Errors
/// The reason why there is no socket.
pub(crate) fn serve(
    mount: MountFacts,
    reply: impl Fn(Question, &ControlPeer) -> Value + Send + Sync + 'static,
) -> io::Result<Control> {
    let mut failure = io::ErrorKind::NotFound.into();
    for folder in folders(euid()) {
        // Other users can enter only the socket folder of root.
        let is_public = mount.is_public && euid() == 0;
        let made = make_folder(&folder, is_public);
        match made.and_then(|()| listen(&folder, mount.minor, is_public)) {
            Ok((path, listener)) => return start(mount, reply, path, listener),
            Err(e) => failure = io::Error::new(e.kind(), format!("{}: {e}", shown_path(&folder))),
        }
    }
    Err(failure)
}

fn make_folder(folder: &Path, is_public: bool) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
        _ => is_private(folder, euid())?,
    }
    if is_public {
        // The file names in this folder are only numbers, and each socket has a mode of its own.
        std::fs::set_permissions(folder, Permissions::from_mode(0o755))?;
    }
    Ok(())
}

fn listen(folder: &Path, minor: u32, is_public: bool) -> io::Result<(PathBuf, UnixListener)> {
    sweep(folder);
    let path = folder.join(format!("{minor}-{}.sock", std::process::id()));
    // No other running mount has this device number and this pid, so an existing file is stale.
    let _ = std::fs::remove_file(&path);
    let listener = UnixListener::bind(&path)?;
    let mode = if is_public { 0o666 } else { 0o600 };
    let ready = std::fs::set_permissions(&path, Permissions::from_mode(mode))
        .and_then(|()| listener.set_nonblocking(true));
    if let Err(e) = ready {
        let _ = std::fs::remove_file(&path);
        return Err(e);
    }
    Ok((path, listener))
}

/// Removes the sockets of daemons that were killed from a folder of this user.
fn sweep(folder: &Path) {
    for (_, path) in sockets(folder) {
        remove_if_stale(&path);
    }
}

fn start(
    mount: MountFacts,
    reply: impl Fn(Question, &ControlPeer) -> Value + Send + Sync + 'static,
    path: PathBuf,
    listener: UnixListener,
) -> io::Result<Control> {
    OPEN.lock().push(path.clone());
    let control = Control { path, listener: Arc::new(listener) };
    let listener = control.listener.clone();
    let is_public = mount.is_public;
    let (started, started_unix) = (Instant::now(), unix_now());
    let answer = move |request: &[u8], peer: &ControlPeer| {
        let request: Value = serde_json::from_slice(request).unwrap_or_default();
        let question = request.get("do").and_then(Value::as_str).unwrap_or_default();
        match question.parse() {
            Ok(question) if peer.is_trusted() => json!(Told {
                target: real_name(&mount.target),
                source: real_name(&mount.source),
                pid: std::process::id(),
                started_unix,
                uptime_s: started.elapsed().as_secs(),
                facts: reply(question, peer),
            }),
            Ok(question) => reply(question, peer),
            Err(UnknownWord(_)) => {
                json!(RequestRefusal { error: "expected {\"do\":\"status\"}".into() })
            }
        }
    };
    let thread = std::thread::Builder::new().name("control".to_owned());
    thread.spawn(move || {
        Server { listener, clients: Vec::new(), is_public, answer: Box::new(answer) }.run()
    })?;
    Ok(control)
}

/// Makes the reply to a request.
type StatusSource = Box<dyn Fn(&[u8], &ControlPeer) -> Value + Send>;

/// One thread answers all clients. No client can make it wait.
struct Server {
    listener: Arc<UnixListener>,
    /// The clients, the oldest first.
    clients: Vec<Client>,
    /// Whether users who are not trusted may send requests.
    is_public: bool,
    answer: StatusSource,
}

/// A connection, with the part of the request that was read so far, or the part of the reply that
/// is not sent yet.
struct Client {
    stream: UnixStream,
    peer: ControlPeer,
    deadline: Instant,
    request: Vec<u8>,
    reply: Option<Vec<u8>>,
}

impl Server {
    fn run(mut self) {
        loop {
            match self.wait() {
                // The socket was shut down. `accept` does not report this, because it does not wait.
                Ok(events) if events.contains(PollFlags::POLLHUP) => return,
                Ok(events) if events.is_empty() => {}
                Ok(_) => match self.accept() {
                    Ok(()) => {}
                    // Perhaps no descriptor is free. Closing other connections frees one.
                    Err(e) => {
                        tracing::debug!("control socket: {e}");
                        std::thread::sleep(Duration::from_millis(100));
                    }
                },
                Err(e) => {
                    tracing::warn!("the control socket has stopped: {e}");
                    return;
                }
            }
            let answer = &self.answer;
            let now = Instant::now();
            self.clients.retain_mut(|client| {
                client.deadline > now && matches!(client.advance(answer), Err(e) if waits(&e))
            });
        }
    }

    /// Waits until a client can be served or a client's deadline has passed. Returns the events of
    /// the listener.
    fn wait(&self) -> io::Result<PollFlags> {
        let listener = PollFd::new(self.listener.as_fd(), PollFlags::POLLIN);
        let clients = self.clients.iter().map(|client| {
            let wanted =
                if client.reply.is_some() { PollFlags::POLLOUT } else { PollFlags::POLLIN };
            PollFd::new(client.stream.as_fd(), wanted)
        });
        let mut all: Vec<_> = std::iter::once(listener).chain(clients).collect();
        let next = self.clients.iter().map(|client| client.deadline).min();
        let timeout = next.map_or(PollTimeout::NONE, |deadline| {
            // The time is rounded up. With 0 ms, the loop would spin during the last millisecond.
            let rest = deadline.saturating_duration_since(Instant::now()).as_millis() + 1;
            PollTimeout::try_from(rest).unwrap_or(PollTimeout::MAX)
        });
        match poll(&mut all, timeout) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(e) => return Err(e.into()),
        }
        Ok(all[0].revents().unwrap_or(PollFlags::POLLIN))
    }

    fn accept(&mut self) -> io::Result<()> {
        loop {
            let stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                Err(e) if waits(&e) => return Ok(()),
                Err(e) => return Err(e),
            };
            let Ok(peer) = ControlPeer::of(&stream) else { continue };
            if !self.is_public && !peer.is_trusted() {
                continue;
            }
            stream.set_nonblocking(true)?;
            // Connections of other users do not count against the limit for the owner and root.
            let is_trusted = peer.is_trusted();
            let most = if is_trusted { CLIENTS_MAX } else { OTHERS_MAX };
            let mut alike = (0..self.clients.len())
                .filter(|index| self.clients[*index].peer.is_trusted() == is_trusted);
            let oldest = alike.next().filter(|_| alike.count() + 1 >= most);
            if let Some(oldest) = oldest {
                // If the oldest client has sent its request already, it gets its reply before its
                // connection is closed.
                let _ = self.clients.remove(oldest).advance(&self.answer);
            }
            let deadline = Instant::now() + CLIENT_TIMEOUT;
            self.clients.push(Client { stream, peer, deadline, request: Vec::new(), reply: None });
        }
    }
}

/// Whether `e` only means that the call would block now.
fn waits(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

impl Client {
    /// Reads and writes as much as possible without blocking. On an error for which `waits` is
    /// true, the rest is done later. On any other error, the connection is closed.
    fn advance(&mut self, answer: &StatusSource) -> io::Result<()> {
        let mut piece = [0; 512];
        while self.reply.is_none() {
            let len = self.stream.read(&mut piece)?;
            self.request.extend_from_slice(&piece[..len]);
            let line = self.request.split(|&byte| byte == b'\n').next().unwrap_or_default();
            let is_whole = line.len() < self.request.len();
            if line.len() > REQUEST_MAX || (len == 0 && !is_whole) {
                return Ok(());
            }
            if is_whole {
                self.reply = Some(format!("{}\n", answer(line, &self.peer)).into_bytes());
            }
        }
        let reply = self.reply.get_or_insert_default();
        while !reply.is_empty() {
            let sent = self.stream.write(reply)?;
            reply.drain(..sent);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemon::client::{LISTEN_DELAY_MAX, Reply, ask};

    fn serve_in(folder: &Path, minor: u32) -> Control {
        let (path, listener) = listen(folder, minor, false).unwrap();
        let (target, source) = ("/mnt/a".into(), "/data".into());
        let facts = MountFacts { target, source, minor, is_public: false };
        start(facts, |_, _| json!({ "counters": { "reads": 7 } }), path, listener).unwrap()
    }

    fn ask_in(folder: &Path) -> Reply<Told<Value>> {
        let paths: Vec<_> = sockets(folder).into_iter().map(|(_, path)| path).collect();
        ask(euid(), &paths, Question::Status, Instant::now() + CLIENT_TIMEOUT)
    }

    fn said(stream: &mut UnixStream) -> String {
        let mut text = String::new();
        let _ = stream.read_to_string(&mut text);
        text
    }

    #[test]
    fn a_status_is_told_with_what_the_mount_is() {
        let folder = tempfile::tempdir().unwrap();
        let _control = serve_in(folder.path(), 51);
        let Reply::Answer(pid, told) = ask_in(folder.path()) else { panic!() };
        assert_eq!(pid, std::process::id() as i32);
        assert_eq!(told.facts["counters"]["reads"], 7);
        assert_eq!((told.target.as_str(), told.source.as_str()), ("/mnt/a", "/data"));
        assert!(told.started_unix > 0);
    }

    // A regression: a daemon that was stopped after its mount had gone took all the time, if the
    // kernel had given the number of its device to another mount.
    #[test]
    fn older_daemons_with_the_same_device_number_do_not_delay_the_answer() {
        let folder = tempfile::tempdir().unwrap();
        let silent = |pid: u32| UnixListener::bind(folder.path().join(format!("51-{pid}.sock")));
        let _silent: Vec<_> = (1..=16).map(|pid| silent(pid).unwrap()).collect();
        // Longer than the precision of a file system's times.
        std::thread::sleep(Duration::from_millis(20));
        let _control = serve_in(folder.path(), 51);
        let started = Instant::now();
        let Reply::Answer(_, told) = ask_in(folder.path()) else { panic!() };
        assert_eq!(told.facts["counters"]["reads"], 7);
        assert!(started.elapsed() < CLIENT_TIMEOUT / 2);
    }

    #[test]
    fn clients_that_say_nothing_keep_nobody_out() {
        let folder = tempfile::tempdir().unwrap();
        let control = serve_in(folder.path(), 51);
        let silent: Vec<_> = (0..50).map(|_| UnixStream::connect(&control.path).unwrap()).collect();
        let started = Instant::now();
        assert!(matches!(ask_in(folder.path()), Reply::Answer(..)));
        assert!(started.elapsed() < CLIENT_TIMEOUT / 2);
        // Each of the silent connections gets closed in the end.
        for mut stream in silent {
            assert_eq!(said(&mut stream), "");
        }
        assert!(started.elapsed() < CLIENT_TIMEOUT * 2);
    }

    // A regression: clients that connected while others were accepted were disconnected and had to
    // retry.
    #[test]
    fn clients_that_ask_at_once_are_all_answered() {
        let folder = tempfile::tempdir().unwrap();
        let (path, listener) = listen(folder.path(), 51, false).unwrap();
        let answer: StatusSource = Box::new(|_, _| json!(7));
        let mut server =
            Server { listener: Arc::new(listener), clients: Vec::new(), is_public: false, answer };
        let connect = |_| {
            let mut stream = UnixStream::connect(&path).unwrap();
            stream.write_all(b"{\"do\":\"status\"}\n").unwrap();
            stream
        };
        let asking: Vec<_> = (0..3 * CLIENTS_MAX).map(connect).collect();
        server.accept().unwrap();
        assert_eq!(server.clients.len(), CLIENTS_MAX);
        server.clients.iter_mut().for_each(|client| client.advance(&server.answer).unwrap());
        drop(server);
        for mut stream in asking {
            assert_eq!(said(&mut stream), "7\n");
        }
    }

    #[test]
    fn a_bad_request_gets_an_error_and_an_endless_one_the_end() {
        let folder = tempfile::tempdir().unwrap();
        let control = serve_in(folder.path(), 51);
        for request in ["{}\n", "status\n", "\n", "{\"do\":\"stop\"}\n"] {
            let mut stream = UnixStream::connect(&control.path).unwrap();
            stream.write_all(request.as_bytes()).unwrap();
            assert!(said(&mut stream).contains("expected"), "{request}");
        }
        let mut stream = UnixStream::connect(&control.path).unwrap();
        let _ = stream.write_all(&[b'x'; 2 * REQUEST_MAX]);
        assert_eq!(said(&mut stream), "");
    }

    #[test]
    fn a_socket_goes_with_its_mount_and_a_leftover_with_the_next_one() {
        let folder = tempfile::tempdir().unwrap();
        drop(serve_in(folder.path(), 51));
        assert!(sockets(folder.path()).is_empty());
        // The standard library does not remove the socket file of a dropped listener.
        drop(UnixListener::bind(folder.path().join("9-1.sock")).unwrap());
        assert!(matches!(ask_in(folder.path()), Reply::Leftover));
        std::thread::sleep(LISTEN_DELAY_MAX + Duration::from_millis(100));
        let _one = serve_in(folder.path(), 51);
        let _two = serve_in(folder.path(), 52);
        let mut left: Vec<_> = sockets(folder.path()).into_iter().map(|(of, _)| of).collect();
        left.sort_unstable();
        assert_eq!(left, [51, 52]);
    }

    // A regression: after the drop of the socket, the thread ran in a loop without waiting.
    #[test]
    fn the_thread_of_a_socket_ends_with_its_mount() {
        let folder = tempfile::tempdir().unwrap();
        let control = serve_in(folder.path(), 51);
        assert!(matches!(ask_in(folder.path()), Reply::Answer(..)));
        let listener = Arc::downgrade(&control.listener);
        drop(control);
        let until = Instant::now() + CLIENT_TIMEOUT;
        while listener.strong_count() > 0 {
            assert!(Instant::now() < until, "the thread still runs");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_folder_that_others_may_enter_or_a_link_to_one_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        make_folder(&path, false).unwrap();
        make_folder(&path, false).unwrap();
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(make_folder(&link, false).unwrap_err().to_string().contains("not a folder"));
        std::fs::set_permissions(&path, Permissions::from_mode(0o770)).unwrap();
        assert!(make_folder(&path, false).unwrap_err().to_string().contains("0700"));
    }
}
