//! A small HTTP server for pages of text. The number of clients, their time and the length of their
//! requests are bounded. If there are too many clients, the oldest connection is closed.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::TcpListener;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::sockopt::{ReceiveTimeout, SendTimeout};
use nix::sys::socket::{Shutdown, setsockopt, shutdown};
use nix::sys::time::{TimeVal, TimeValLike};
use tensorfs::internal::sync::Mutex;

use crate::log;
use crate::node::config::MetricsAddress;

/// Maximum number of simultaneous clients.
const CLIENTS_MAX: usize = 16;

/// Maximum time for a client to send its request and receive the reply.
const CLIENT_TIME: Duration = Duration::from_secs(10);

/// Maximum size of a request, in bytes.
const REQUEST_MAX: usize = 8 << 10;

/// Interval between checks for the end of the server.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// A reply.
pub(super) struct HttpReply {
    status: u16,
    kind: &'static str,
    body: String,
}

impl HttpReply {
    pub(super) fn new(status: u16, kind: &'static str, body: &str) -> HttpReply {
        HttpReply { status, kind, body: body.to_owned() }
    }

    pub(super) fn text(status: u16, body: &str) -> HttpReply {
        HttpReply::new(status, "text/plain; charset=utf-8", body)
    }

    fn to_bytes(&self, with_body: bool) -> Vec<u8> {
        let reason = match self.status {
            200 => "OK",
            400 => "Bad Request",
            404 => "Not Found",
            405 => "Method Not Allowed",
            431 => "Request Header Fields Too Large",
            _ => "Service Unavailable",
        };
        let mut text = format!(
            "HTTP/1.1 {} {reason}\r\nContent-Type: {}\r\nContent-Length: {}\r\n\
             Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\n",
            self.status,
            self.kind,
            self.body.len()
        );
        if with_body {
            text.push_str(&self.body);
        }
        text.into_bytes()
    }
}

/// A server that runs. The drop stops it.
pub(super) struct HttpServer {
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    /// The path of the socket, if the server listens on a socket file.
    file: Option<PathBuf>,
}

impl Drop for HttpServer {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        if let Some(file) = &self.file {
            let _ = std::fs::remove_file(file);
        }
    }
}

/// A TCP or Unix connection. Reads and writes have a time limit.
struct HttpStream(File);

type Answer = Arc<dyn Fn(&str) -> HttpReply + Send + Sync>;

impl HttpServer {
    /// Starts a server. `answer` makes the reply for the path of a request.
    ///
    /// # Errors
    /// If the address cannot be used.
    pub(super) fn start(
        address: &MetricsAddress,
        answer: impl Fn(&str) -> HttpReply + Send + Sync + 'static,
    ) -> io::Result<HttpServer> {
        let ends = Arc::new(AtomicBool::new(false));
        let (answer, ending): (Answer, _) = (Arc::new(answer), ends.clone());
        let (work, file): (Box<dyn FnOnce() + Send>, _) = match address {
            MetricsAddress::Tcp(address) => {
                let listener = TcpListener::bind(address)?;
                listener.set_nonblocking(true)?;
                let next = |listener: &TcpListener| Ok(listener.accept()?.0.into());
                (Box::new(move || accept(&listener, next, &answer, &ending)), None)
            }
            MetricsAddress::Unix(path) => {
                let listener = bind_file(path)?;
                listener.set_nonblocking(true)?;
                let next = |listener: &UnixListener| Ok(listener.accept()?.0.into());
                (Box::new(move || accept(&listener, next, &answer, &ending)), Some(path.clone()))
            }
        };
        let thread = log::start_thread("metrics", work)?;
        Ok(HttpServer { ends, thread: Some(thread), file })
    }
}

/// Listens on a socket file. An existing socket file is replaced if no process listens on it.
fn bind_file(path: &Path) -> io::Result<UnixListener> {
    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|meta| meta.file_type().is_socket());
    if is_socket
        && let Err(e) = UnixStream::connect(path)
        && e.kind() == io::ErrorKind::ConnectionRefused
    {
        std::fs::remove_file(path)?;
    }
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o660))?;
    Ok(listener)
}

/// Serves the connections that `next` accepts, until `ends` is set.
fn accept<L: AsFd>(
    listener: &L,
    next: fn(&L) -> io::Result<OwnedFd>,
    answer: &Answer,
    ends: &AtomicBool,
) {
    let clients: Arc<Mutex<VecDeque<(u64, HttpStream)>>> = Arc::default();
    let mut number = 0;
    while !ends.load(Ordering::Relaxed) {
        let mut polled = [PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
        let timeout = PollTimeout::try_from(POLL_INTERVAL).unwrap_or(PollTimeout::ZERO);
        if poll(&mut polled, timeout).is_ok_and(|ready| ready == 0) {
            continue;
        }
        let Ok((stream, kept)) = next(listener).and_then(|s| HttpStream(s.into()).twice()) else {
            // Another error, such as too many open files, may persist, so the loop pauses.
            std::thread::sleep(Duration::from_millis(10));
            continue;
        };
        number += 1;
        let mut open = clients.lock();
        if open.len() >= CLIENTS_MAX
            && let Some((_, oldest)) = open.pop_front()
        {
            oldest.end();
        }
        open.push_back((number, kept));
        drop(open);
        let (answer, others, this) = (answer.clone(), clients.clone(), number);
        let serve = move || {
            let _ = serve(stream, &answer);
            others.lock().retain(|(number, _)| *number != this);
        };
        let thread = std::thread::Builder::new().name("http".to_owned());
        if thread.spawn(serve).is_err() {
            clients.lock().retain(|(other, _)| *other != number);
        }
    }
    clients.lock().iter().for_each(|(_, stream)| stream.end());
}

/// Answers one request.
fn serve(mut stream: HttpStream, answer: &Answer) -> io::Result<()> {
    let deadline = Instant::now() + CLIENT_TIME;
    let mut request = Vec::new();
    let mut piece = [0; 1024];
    while !request.windows(4).any(|end| end == b"\r\n\r\n") {
        if request.len() > REQUEST_MAX {
            let reply = HttpReply::text(431, "the request is too long\n");
            return stream.send(&reply.to_bytes(true), deadline);
        }
        stream.set_timeout(deadline)?;
        match stream.0.read(&mut piece)? {
            0 => return Ok(()),
            len => request.extend_from_slice(&piece[..len]),
        }
    }
    let line = request.split(|&byte| byte == b'\r').next().unwrap_or_default();
    let words: Vec<&str> = str::from_utf8(line).unwrap_or_default().split(' ').collect();
    let (reply, with_body) = match words.as_slice() {
        [method @ ("GET" | "HEAD"), target, version] if version.starts_with("HTTP/1.") => {
            let path = target.split(['?', '#']).next().unwrap_or_default();
            (answer(path), *method == "GET")
        }
        [_, _, version] if version.starts_with("HTTP/1.") => {
            (HttpReply::text(405, "expected GET or HEAD\n"), true)
        }
        _ => (HttpReply::text(400, "expected a request of HTTP/1.1\n"), true),
    };
    stream.send(&reply.to_bytes(with_body), deadline)
}

impl HttpStream {
    /// This stream, and a second handle to it.
    fn twice(self) -> io::Result<(HttpStream, HttpStream)> {
        let other = HttpStream(self.0.try_clone()?);
        Ok((self, other))
    }

    /// Ends the connection. Reads and writes through its other handle fail.
    fn end(&self) {
        let _ = shutdown(self.0.as_raw_fd(), Shutdown::Both);
    }

    /// Makes the next read or write fail if it is not done by `deadline`.
    fn set_timeout(&self, deadline: Instant) -> io::Result<()> {
        let rest = deadline.saturating_duration_since(Instant::now());
        if rest < Duration::from_millis(1) {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let time = TimeVal::milliseconds(rest.as_millis() as i64);
        setsockopt(&self.0, ReceiveTimeout, &time)?;
        Ok(setsockopt(&self.0, SendTimeout, &time)?)
    }

    fn send(&mut self, mut bytes: &[u8], deadline: Instant) -> io::Result<()> {
        while !bytes.is_empty() {
            self.set_timeout(deadline)?;
            let sent = self.0.write(bytes)?;
            bytes = &bytes[sent..];
        }
        Ok(())
    }
}
