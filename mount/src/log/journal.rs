//! The socket of the journal for its native protocol, in which messages have fields.

use std::io::{self, IoSlice, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixDatagram;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};

const SOCKET: &str = "/run/systemd/journal/socket";

/// Connects to the journal.
///
/// # Errors
/// If the journal does not listen.
pub(super) fn connect() -> io::Result<UnixDatagram> {
    let socket = UnixDatagram::unbound()?;
    let reached = socket.connect(SOCKET);
    reached.map_err(|e| io::Error::new(e.kind(), format!("{SOCKET}: {e}")))?;
    Ok(socket)
}

/// Sends one message. A message that is too long for the socket is sent as a sealed file in memory.
///
/// # Errors
/// If the journal does not accept the message.
pub(super) fn send(socket: &UnixDatagram, message: &[u8]) -> io::Result<()> {
    match socket.send(message) {
        Ok(_) => Ok(()),
        Err(e) if is_too_long(&e) => send_file(socket, message),
        Err(e) => Err(e),
    }
}

fn is_too_long(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw);
    matches!(errno, Some(Errno::EMSGSIZE | Errno::ENOBUFS))
}

fn send_file(socket: &UnixDatagram, message: &[u8]) -> io::Result<()> {
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    let mut file = std::fs::File::from(memfd_create("tensorfs-log", flags)?);
    file.write_all(message)?;
    // The journal accepts the file only if no process can change it any more.
    fcntl(&file, FcntlArg::F_ADD_SEALS(SealFlag::all()))?;
    let fds: [RawFd; 1] = [file.as_raw_fd()];
    let rights = [ControlMessage::ScmRights(&fds)];
    let data = [IoSlice::new(&[])];
    sendmsg::<()>(socket.as_raw_fd(), &data, &rights, MsgFlags::MSG_NOSIGNAL, None)?;
    Ok(())
}

/// Whether standard error is connected to the journal, as in a service.
pub(super) fn is_stderr() -> bool {
    let Some(stream) = std::env::var("JOURNAL_STREAM").ok() else { return false };
    // The variable has the device and inode numbers of the descriptor itself, so the path must not
    // be opened again.
    let meta = std::fs::metadata("/proc/self/fd/2");
    meta.is_ok_and(|meta| stream == format!("{}:{}", meta.dev(), meta.ino()))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{IoSliceMut, Read};

    use nix::sys::socket::{ControlMessageOwned, recvmsg, setsockopt, sockopt};

    use super::*;

    #[test]
    fn a_message_that_is_too_long_arrives_as_a_sealed_file() {
        let (ours, theirs) = UnixDatagram::pair().unwrap();
        setsockopt(&ours, sockopt::SndBuf, &4096).unwrap();
        let message = vec![b'x'; 1 << 20];
        send(&ours, b"MESSAGE=short\n").unwrap();
        send(&ours, &message).unwrap();
        let mut piece = [0; 64];
        assert_eq!(theirs.recv(&mut piece).unwrap(), 14);
        let mut space = nix::cmsg_space!([RawFd; 1]);
        let mut data = [IoSliceMut::new(&mut piece)];
        let flags = MsgFlags::empty();
        let got = recvmsg::<()>(theirs.as_raw_fd(), &mut data, Some(&mut space), flags).unwrap();
        let Some(ControlMessageOwned::ScmRights(fds)) = got.cmsgs().unwrap().next() else {
            panic!("no descriptor")
        };
        let mut file = File::open(format!("/proc/self/fd/{}", fds[0])).unwrap();
        let mut text = Vec::new();
        file.read_to_end(&mut text).unwrap();
        assert_eq!(text, message);
        let seals = fcntl(&file, FcntlArg::F_GET_SEALS).unwrap();
        assert_eq!(SealFlag::from_bits_truncate(seals), SealFlag::all());
    }
}
