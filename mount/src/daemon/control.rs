//! The control socket of a mount, the daemon's end: it answers one line of JSON to one line of JSON,
//! for the mount's owner and for root.

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
use crate::fs::access::further_groups;

/// How long a client may take over one request.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(2);

/// Maximum number of connections at once. One more ends the oldest, so that silent clients do not
/// block others.
const CLIENTS_MAX: usize = 16;

/// Maximum number of connections of users who are neither root nor the owner.
const OTHERS_MAX: usize = 8;

/// Longest request, in bytes.
const REQUEST_MAX: usize = 4096;

/// The user at the other end of a connection.
#[derive(Clone, Debug)]
pub(crate) struct ControlPeer {
    pub uid: u32,
    /// Primary and further groups.
    pub gids: Vec<u32>,
}

impl ControlPeer {
    fn of(stream: &UnixStream) -> nix::Result<ControlPeer> {
        let peer = getsockopt(stream, PeerCredentials)?;
        let mut gids = vec![peer.gid()];
        gids.extend(further_groups(peer.pid(), peer.uid()));
        Ok(ControlPeer { uid: peer.uid(), gids })
    }

    /// Whether it may know everything: root, and the user of this process.
    pub(crate) fn is_trusted(&self) -> bool {
        self.uid == 0 || self.uid == euid()
    }
}

/// Facts about a mount: they name its socket and begin every reply.
pub(crate) struct MountFacts {
    /// The mount point.
    pub target: PathBuf,
    /// The source.
    pub source: PathBuf,
    /// Minor number of its device.
    pub minor: u32,
    /// Whether other users may ask.
    pub is_public: bool,
}

/// The sockets of this process, for `exit`, which drops nothing.
static OPEN: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// The socket of a running mount; removed when this is dropped.
#[derive(Debug)]
pub(crate) struct Control {
    path: PathBuf,
    listener: Arc<UnixListener>,
}

impl Drop for Control {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
        OPEN.lock().retain(|path| *path != self.path);
        // Wakes the thread, whose accept then fails.
        let _ = shutdown(self.listener.as_raw_fd(), Shutdown::Both);
    }
}

/// Closes the connections, removes the sockets and ends the process with success.
pub(crate) fn exit() -> ! {
    connection::let_go();
    for path in OPEN.lock().drain(..) {
        let _ = std::fs::remove_file(path);
    }
    crate::log::flush();
    std::process::exit(0)
}

/// Answers requests about `mount` with the result of `reply`, which must not block. Users that are
/// not trusted reach it only if the mount is public, and `reply` must know what they may know.
///
/// # Errors
/// The reason why there is no socket.
pub(crate) fn serve(
    mount: MountFacts,
    reply: impl Fn(Question, &ControlPeer) -> Value + Send + Sync + 'static,
) -> io::Result<Control> {
    let mut failure = io::ErrorKind::NotFound.into();
    for folder in folders(euid()) {
        // Others can reach sockets of root only.
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
        // The names in it are numbers, and each socket has its own mode.
        std::fs::set_permissions(folder, Permissions::from_mode(0o755))?;
    }
    Ok(())
}

fn listen(folder: &Path, minor: u32, is_public: bool) -> io::Result<(PathBuf, UnixListener)> {
    sweep(folder);
    let path = folder.join(format!("{minor}-{}.sock", std::process::id()));
    // No other running mount has this device and this pid.
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

/// Removes sockets of killed daemons from a folder of this user.
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

/// One thread for all clients. No client can make it wait.
struct Server {
    listener: Arc<UnixListener>,
    /// The oldest first.
    clients: Vec<Client>,
    /// Whether users who are not trusted may ask.
    is_public: bool,
    answer: StatusSource,
}

/// A connection: the request as far as it has come, then the reply as far as it is not sent.
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
                Ok(false) => {}
                Ok(true) => match self.accept() {
                    Ok(()) => {}
                    Err(e) if e.raw_os_error() == Some(nix::libc::EINVAL) => return,
                    // Possibly no descriptor is free; closing other connections frees one.
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

    /// Waits until a client can be served or is past its deadline. Returns whether a new client is
    /// waiting.
    fn wait(&self) -> io::Result<bool> {
        let listener = PollFd::new(self.listener.as_fd(), PollFlags::POLLIN);
        let clients = self.clients.iter().map(|client| {
            let wanted =
                if client.reply.is_some() { PollFlags::POLLOUT } else { PollFlags::POLLIN };
            PollFd::new(client.stream.as_fd(), wanted)
        });
        let mut all: Vec<_> = std::iter::once(listener).chain(clients).collect();
        let next = self.clients.iter().map(|client| client.deadline).min();
        let timeout = next.map_or(PollTimeout::NONE, |deadline| {
            // Rounded up: with 0 ms the loop would spin during the last millisecond.
            let rest = deadline.saturating_duration_since(Instant::now()).as_millis() + 1;
            PollTimeout::try_from(rest).unwrap_or(PollTimeout::MAX)
        });
        match poll(&mut all, timeout) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(e) => return Err(e.into()),
        }
        Ok(all[0].any().unwrap_or(true))
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
            // Other users take no room from the owner and from root.
            let is_trusted = peer.is_trusted();
            let most = if is_trusted { CLIENTS_MAX } else { OTHERS_MAX };
            let mut alike = (0..self.clients.len())
                .filter(|index| self.clients[*index].peer.is_trusted() == is_trusted);
            let oldest = alike.next().filter(|_| alike.count() + 1 >= most);
            if let Some(oldest) = oldest {
                // It may have sent its request already: then it gets its reply first.
                let _ = self.clients.remove(oldest).advance(&self.answer);
            }
            let deadline = Instant::now() + CLIENT_TIMEOUT;
            self.clients.push(Client { stream, peer, deadline, request: Vec::new(), reply: None });
        }
    }
}

/// Whether `e` only means that nothing can be done now.
fn waits(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

impl Client {
    /// Reads and writes as much as possible now. If `waits` accepts the error, there is more to do;
    /// otherwise the connection is closed.
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
    use crate::daemon::client::{MAKING_TIME, Reply, ask};

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

    #[test]
    fn clients_that_say_nothing_keep_nobody_out() {
        let folder = tempfile::tempdir().unwrap();
        let control = serve_in(folder.path(), 51);
        let silent: Vec<_> = (0..50).map(|_| UnixStream::connect(&control.path).unwrap()).collect();
        let started = Instant::now();
        assert!(matches!(ask_in(folder.path()), Reply::Answer(..)));
        assert!(started.elapsed() < CLIENT_TIMEOUT / 2);
        // Each connection is closed in the end.
        for mut stream in silent {
            assert_eq!(said(&mut stream), "");
        }
        assert!(started.elapsed() < CLIENT_TIMEOUT * 2);
    }

    // Clients that came while others were accepted used to be disconnected, and had to retry.
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
        // std does not remove the file of a dropped listener.
        drop(UnixListener::bind(folder.path().join("9-1.sock")).unwrap());
        assert!(matches!(ask_in(folder.path()), Reply::Leftover));
        std::thread::sleep(MAKING_TIME + Duration::from_millis(100));
        let _one = serve_in(folder.path(), 51);
        let _two = serve_in(folder.path(), 52);
        let mut left: Vec<_> = sockets(folder.path()).into_iter().map(|(of, _)| of).collect();
        left.sort_unstable();
        assert_eq!(left, [51, 52]);
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
