//! Open descriptors that one process sends to another in messages.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, recvmsg,
    sendmsg, socketpair,
};

/// Maximum number of descriptors in one message: the limit of the kernel.
const FDS_MAX: usize = 253;

/// Sends a message with `fds`. Never waits.
///
/// # Errors
/// If the other side has closed the socket, or if the message cannot be sent without waiting.
pub(crate) fn send(socket: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let fds: Vec<RawFd> = fds.iter().map(|fd| fd.as_raw_fd()).collect();
    let with_fds = [ControlMessage::ScmRights(&fds)];
    let rights = if fds.is_empty() { &[] } else { &with_fds[..] };
    let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
    let data = [IoSlice::new(bytes)];
    sendmsg::<()>(socket.as_fd().as_raw_fd(), &data, rights, flags, None)?;
    Ok(())
}

/// Receives the next message into `bytes`. Returns its length and its descriptors. If `wait` is
/// false and there is no message, the error is `WouldBlock`.
///
/// # Errors
/// If there is no message.
pub(crate) fn receive(
    socket: impl AsFd,
    bytes: &mut [u8],
    wait: bool,
) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut flags = MsgFlags::MSG_CMSG_CLOEXEC;
    flags.set(MsgFlags::MSG_DONTWAIT, !wait);
    let mut space = nix::cmsg_space!([RawFd; FDS_MAX]);
    let mut data = [IoSliceMut::new(bytes)];
    let number = socket.as_fd().as_raw_fd();
    let message = loop {
        match recvmsg::<()>(number, &mut data, Some(&mut space), flags) {
            Err(Errno::EINTR) => {}
            received => break received?,
        }
    };
    let mut fds = Vec::new();
    for control in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(numbers) = control {
            // SAFETY: the kernel made these descriptors for the message just received, and nothing
            // else owns them.
            let own = |fd| unsafe { OwnedFd::from_raw_fd(fd) };
            fds.extend(numbers.into_iter().map(own));
        }
    }
    Ok((message.bytes, fds))
}

/// Open files that are sent through processes which must not wait for the file systems of these
/// files.
///
/// A process that closes a file of a FUSE file system waits for the answer of that file system,
/// which may never come. The end of a process and the start of a program in it close files too. So
/// the files are in the queue of a socket: no process has them open, and the kernel releases them
/// without waiting.
#[derive(Debug)]
pub(crate) struct Parcel {
    read: OwnedFd,
    /// The other end must stay open: a service manager drops a socket whose other end is closed.
    write: OwnedFd,
}

impl Parcel {
    /// # Errors
    /// If the system refuses the sockets, or if the queue cannot take all files.
    pub(crate) fn pack(files: Vec<OwnedFd>) -> io::Result<Parcel> {
        let flags = SockFlag::SOCK_CLOEXEC;
        let (read, write) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags)?;
        let fds: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
        let sent = fds.chunks(FDS_MAX).try_for_each(|fds| send(&write, b".", fds));
        // Closing the files may wait for their file systems, so another thread closes them.
        std::thread::Builder::new().name("close".to_owned()).spawn(move || drop(files))?;
        sent.map(|()| Parcel { read, write })
    }

    /// # Errors
    /// If no descriptor is free.
    pub(crate) fn unpack(self) -> io::Result<Vec<OwnedFd>> {
        let mut files = Vec::new();
        loop {
            match receive(&self.read, &mut [0], false) {
                Ok((_, fds)) => files.extend(fds),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(files),
                Err(e) => return Err(e),
            }
        }
    }

    pub(crate) fn into_descriptors(self) -> [OwnedFd; 2] {
        [self.read, self.write]
    }

    pub(crate) fn from_descriptors([read, write]: [OwnedFd; 2]) -> Parcel {
        Parcel { read, write }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read, Seek, Write};

    use super::*;

    #[test]
    fn a_parcel_has_its_files_in_their_order_also_more_than_a_message_takes() {
        let file = |number: usize| {
            let mut file = tempfile::tempfile().unwrap();
            write!(file, "{number}").unwrap();
            OwnedFd::from(file)
        };
        for count in [0, 1, FDS_MAX + 2] {
            let sent = Parcel::pack((0..count).map(file).collect()).unwrap();
            let received = Parcel::from_descriptors(sent.into_descriptors());
            let files = received.unpack().unwrap();
            assert_eq!(files.len(), count);
            for (number, file) in files.into_iter().enumerate() {
                let (mut file, mut text) = (File::from(file), String::new());
                file.rewind().unwrap();
                file.read_to_string(&mut text).unwrap();
                assert_eq!(text, number.to_string());
            }
        }
    }
}
