//! The connection to the kernel: its handshake, the threads that read requests from it, and how
//! another process takes it over.
//!
//! fuser starts each session with the handshake of a new connection, and its threads run until the
//! connection ends. A takeover must neither repeat the handshake nor wait for the end of the
//! connection, so this module works around both facts. fuser performs the handshake on a socket in
//! place of the connection, so that it also serves a connection whose handshake is already done. To
//! stop the threads, a file replaces the connection under the same descriptor number. Reads of that
//! file fail, so each thread ends once it has dispatched its request. Late replies are written to
//! that file, and this module passes them on to the kernel.

#![expect(clippy::host_endian_bytes, reason = "the kernel uses the byte order of the machine")]

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, IoSlice, Read, Write};
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fuser::{Config, Session, SessionACL};
use nix::fcntl::OFlag;
use nix::libc;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use nix::unistd::dup3;
use serde::{Deserialize, Serialize};

use crate::fs::adapter::TensorFs;

/// Name of the device of FUSE in its folder.
const DEVICE_NAME: &str = "fuse";

/// Maximum size of a handshake message, in bytes.
const INIT_MAX: usize = 64 << 10;

/// Size in bytes of the header of a reply or notification: length, error or code, number of the
/// request.
const HEADER: usize = 16;

/// The notification codes FUSE_NOTIFY_INVAL_INODE and FUSE_NOTIFY_INVAL_ENTRY.
const INVALIDATE: i32 = 2;
const INVALIDATE_NAME: i32 = 3;

/// The notification code FUSE_NOTIFY_STORE.
const STORE: i32 = 4;

/// The notification code FUSE_NOTIFY_RESEND.
const RESEND: i32 = 7;

/// Offset of the upper half of the flags in an INIT request, and the bit FUSE_HAS_RESEND in that
/// half.
const HAS_RESEND: (usize, u32) = (56, 1 << 7);

/// Maximum time for the threads to end. They do not block.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// Interval between checks for threads that end and for late replies.
const TICK: Duration = Duration::from_micros(500);

/// Maximum interval between two checks for late replies.
const TICK_MAX: Duration = Duration::from_millis(50);

/// The FUSE_INIT exchange of a connection, which is done only once.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub(crate) struct FuseInit {
    request: Vec<u8>,
    reply: Vec<u8>,
}

impl FuseInit {
    /// Whether the kernel can send unanswered requests again, to another process.
    pub(crate) fn can_resend(&self) -> bool {
        let (offset, flag) = HAS_RESEND;
        let word = self.request.get(offset..offset + 4).and_then(|word| word.first_chunk());
        // Kernels have this feature since 6.9. Tests turn it off.
        let hidden = std::env::var_os("TENSORFS_NO_RESEND").is_some();
        !hidden && word.is_some_and(|word| u32::from_ne_bytes(*word) & flag != 0)
    }
}

/// A session of fuser on a connection.
pub(crate) struct OpenSession {
    session: Session<TensorFs>,
    /// The handshake between the kernel and fuser.
    pub(crate) handshake: FuseInit,
}

/// Starts to serve `connection` with `threads` threads. If another process has served the
/// connection before, `done` is the handshake of that process.
///
/// # Errors
/// If the connection has ended, or if this version would answer the handshake differently.
pub(crate) fn open_session(
    fs: TensorFs,
    connection: &OwnedFd,
    threads: usize,
    done: Option<&FuseInit>,
) -> io::Result<OpenSession> {
    let flags = SockFlag::SOCK_CLOEXEC;
    let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags)?;
    let mut device = File::from(connection.try_clone()?);
    let mut ours = File::from(ours);
    let request = match done {
        Some(done) => done.request.clone(),
        None => read_message(&mut device)?,
    };
    ours.write_all(&request)?;
    let mut config = Config::default();
    config.n_threads = Some(threads);
    // The kernel enforces access. `All` only means that fuser adds no check of its own.
    let session = Session::from_fd(fs, theirs, SessionACL::All, config)?;
    let reply = read_message(&mut ours)?;
    match done {
        Some(done) if done.reply != reply => {
            let reason = "this version asks the kernel for other features than the running one";
            return Err(io::Error::other(reason));
        }
        Some(_) => {}
        None => device.write_all(&reply)?,
    }
    put_in_place(connection.as_fd(), session.as_fd().as_raw_fd())?;
    Ok(OpenSession { session, handshake: FuseInit { request, reply } })
}

fn read_message(file: &mut File) -> io::Result<Vec<u8>> {
    let mut message = vec![0; INIT_MAX];
    let len = loop {
        match file.read(&mut message) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            read => break read?,
        }
    };
    message.truncate(len);
    Ok(message)
}

/// Makes the open descriptor `number` refer to `file`.
fn put_in_place(file: BorrowedFd<'_>, number: RawFd) -> io::Result<()> {
    // SAFETY: `ManuallyDrop` leaves the number to its owner, which keeps it open while it serves.
    let mut place = ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(number) });
    dup3(file, &mut place, OFlag::O_CLOEXEC)?;
    Ok(())
}

/// Closes every connection of this process. When the last process closes a connection, the
/// connection ends and readers of its mount get errors.
///
/// The end of the process would close the connections too, but only after the last of its threads has
/// ended. A thread that waits for a source ends only once the source answers.
pub(crate) fn let_go() {
    let Ok(nothing) = File::open("/dev/null") else { return };
    let entries = std::fs::read_dir("/proc/self/fd").into_iter().flatten().filter_map(Result::ok);
    // The numbers are collected before any descriptor is closed, because the descriptor of this
    // folder is among them.
    let numbers: Vec<RawFd> =
        entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    for number in numbers {
        let path = std::fs::read_link(format!("/proc/self/fd/{number}"));
        if path.is_ok_and(|path| path.ends_with(DEVICE_NAME)) {
            // The descriptor number stays open, because another thread may still read from or write
            // to it.
            let _ = put_in_place(nothing.as_fd(), number);
        }
    }
}

impl OpenSession {
    /// Number of the session's descriptor, for `StoppedReads::begin`.
    pub(crate) fn number(&self) -> RawFd {
        self.session.as_fd().as_raw_fd()
    }

    /// Serves until the connection ends or the reads are stopped.
    ///
    /// # Errors
    /// The reason why the connection ended, unless the mount was unmounted.
    pub(crate) fn run(self) -> io::Result<()> {
        self.session.run()
    }
}

/// A session whose threads have ended, and whose late replies still reach the kernel.
pub(crate) struct StoppedReads {
    /// Set to end the thread that sends late replies.
    over: Arc<AtomicBool>,
    /// The thread that sends late replies to the kernel.
    late: JoinHandle<()>,
}

impl StoppedReads {
    /// Ends the threads of the session whose descriptor is `number`, without losing a request.
    /// Requests that were read are dispatched, and all other requests stay in the kernel. Waits
    /// until `ended` returns true.
    ///
    /// # Errors
    /// If a thread does not end in time. The session then continues.
    pub(crate) fn begin(
        connection: &Arc<OwnedFd>,
        number: RawFd,
        ended: impl Fn() -> bool,
    ) -> io::Result<StoppedReads> {
        let late = File::from(memfd_create(c"tensorfs-replies", MFdFlags::MFD_CLOEXEC)?);
        let sink = File::options()
            .append(true)
            .custom_flags(libc::O_CLOEXEC)
            .open(format!("/proc/self/fd/{}", late.as_raw_fd()))?;
        ignore_wake_up()?;
        let over = Arc::new(AtomicBool::new(false));
        let (to, done) = (File::from(connection.try_clone()?), over.clone());
        let pass_on = move || pass_on(&late, &to, &done);
        let late = std::thread::Builder::new().name("late".to_owned()).spawn(pass_on)?;
        put_in_place(sink.as_fd(), number)?;
        let started = Instant::now();
        while !ended() {
            if started.elapsed() > STOP_TIMEOUT {
                put_in_place(connection.as_fd(), number)?;
                return Err(io::Error::other("a thread of the server does not end"));
            }
            wake_readers();
            std::thread::sleep(TICK);
        }
        Ok(StoppedReads { over, late })
    }

    /// Sends all replies that exist now, and then returns. Later replies are dropped.
    pub(crate) fn end(self) {
        self.over.store(true, Ordering::SeqCst);
        let _ = self.late.join();
    }
}

/// Sends to the kernel the replies that are appended to the file `late`.
fn pass_on(late: &File, to: &File, over: &AtomicBool) {
    let (mut offset, mut pause) = (0, TICK);
    loop {
        let last = over.load(Ordering::SeqCst);
        pause = (pause * 2).min(TICK_MAX);
        while let Some(reply) = next_reply(late, offset) {
            (offset, pause) = (offset + reply.len() as u64, TICK);
            let mut to = to;
            // The kernel may no longer wait for this reply.
            if let Err(e) = to.write(&reply) {
                tracing::debug!("a late reply is dropped: {e}");
            }
        }
        if last {
            return;
        }
        std::thread::sleep(pause);
    }
}

/// The reply at `offset`. Each reply is appended by one write.
fn next_reply(late: &File, offset: u64) -> Option<Vec<u8>> {
    let mut len = [0; 4];
    late.read_exact_at(&mut len, offset).ok()?;
    let mut reply = vec![0; (u32::from_ne_bytes(len) as usize).max(HEADER)];
    late.read_exact_at(&mut reply, offset).ok()?;
    Some(reply)
}

/// The signal that makes a blocked read return. Programs ignore it by default.
const WAKE_UP: Signal = Signal::SIGURG;

/// Unblocks `WAKE_UP`, which may be blocked, in this thread and in the threads that it starts.
pub(crate) fn allow_wake_up() {
    let _ = SigSet::from(WAKE_UP).thread_unblock();
}

/// Sets a handler for `WAKE_UP` that does nothing, so that the signal only interrupts system calls.
fn ignore_wake_up() -> io::Result<()> {
    extern "C" fn nothing(_: libc::c_int) {}
    let action = SigAction::new(SigHandler::Handler(nothing), SaFlags::empty(), SigSet::empty());
    // SAFETY: the handler does nothing, so it is safe at any time.
    unsafe { sigaction(WAKE_UP, &action) }?;
    Ok(())
}

/// Interrupts the reads of fuser's threads.
fn wake_readers() {
    let Ok(threads) = std::fs::read_dir("/proc/self/task") else { return };
    for thread in threads.flatten() {
        let name = std::fs::read_to_string(thread.path().join("comm")).unwrap_or_default();
        let id = thread.file_name().to_str().and_then(|id| id.parse::<libc::pid_t>().ok());
        if let Some(id) = id.filter(|_| name.starts_with("fuser-")) {
            // SAFETY: the call has no memory operands. If the thread has ended in the meantime, the
            // call fails, which does no harm.
            unsafe {
                libc::syscall(libc::SYS_tgkill, libc::getpid(), id, WAKE_UP as libc::c_int);
            }
        }
    }
}

/// Sends messages to the kernel that are not replies.
#[derive(Clone)]
pub(crate) struct Notifications(Arc<OwnedFd>);

impl Notifications {
    pub(crate) fn on(connection: &Arc<OwnedFd>) -> Notifications {
        Notifications(connection.clone())
    }

    /// Makes the kernel drop its cached pages and attributes of an inode.
    ///
    /// # Errors
    /// If the kernel refuses the message. It is no error if the kernel does not know the inode.
    pub(crate) fn invalidate(&self, ino: u64) -> io::Result<()> {
        let mut body = ino.to_ne_bytes().to_vec();
        // The range is from offset 0 to the end.
        body.extend([0; 16]);
        self.send(INVALIDATE, &[&body])
    }

    /// Makes the kernel drop the attributes of an inode, and keep its pages.
    ///
    /// # Errors
    /// The errors of `invalidate`.
    pub(crate) fn invalidate_attributes(&self, ino: u64) -> io::Result<()> {
        // A negative offset means that no pages are dropped.
        let body = [ino.to_ne_bytes(), (-1i64).to_ne_bytes(), [0; 8]].concat();
        self.send(INVALIDATE, &[&body])
    }

    /// Makes the kernel look up the name in this folder again.
    ///
    /// # Errors
    /// The errors of `invalidate`.
    pub(crate) fn invalidate_name(&self, folder: u64, name: &OsStr) -> io::Result<()> {
        let mut body = folder.to_ne_bytes().to_vec();
        body.extend((name.len() as u32).to_ne_bytes());
        body.extend([0; 4]);
        body.extend(name.as_encoded_bytes());
        body.push(0);
        self.send(INVALIDATE_NAME, &[&body])
    }

    /// Puts bytes at an offset of an inode into the kernel's page cache.
    ///
    /// # Errors
    /// The errors of `invalidate`.
    pub(crate) fn store(&self, ino: u64, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let mut body = [ino.to_ne_bytes(), offset.to_ne_bytes()].concat();
        body.extend((bytes.len() as u32).to_ne_bytes());
        body.extend([0; 4]);
        self.send(STORE, &[&body, bytes])
    }

    /// Makes the kernel send all requests again that were read but not answered.
    ///
    /// # Errors
    /// If the kernel refuses it.
    pub(crate) fn resend(&self) -> io::Result<()> {
        self.send(RESEND, &[])
    }

    fn send(&self, code: i32, body: &[&[u8]]) -> io::Result<()> {
        let len = HEADER + body.iter().map(|part| part.len()).sum::<usize>();
        let mut header = (len as u32).to_ne_bytes().to_vec();
        header.extend(code.to_ne_bytes());
        // Number 0 means that the message is not a reply.
        header.extend([0; 8]);
        let parts: Vec<_> =
            std::iter::once(&header[..]).chain(body.iter().copied()).map(IoSlice::new).collect();
        match nix::sys::uio::writev(&self.0, &parts) {
            Ok(_) | Err(nix::errno::Errno::ENOENT) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }
}
