//! The channel between the supervisor and a worker. Each packet has one JSON message, and may carry
//! open descriptors.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use nix::unistd::dup2_stdin;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::daemon::descriptors;

/// Maximum size of a message in bytes. It is less than the default size of a socket's buffer.
const MESSAGE_MAX: usize = 128 << 10;

/// A command that the supervisor sends to a worker.
#[derive(Debug, Deserialize, PartialEq, Serialize)]
#[serde(tag = "do", rename_all = "kebab-case")]
pub(super) enum Order {
    /// Mount, or take over the mount whose descriptors come with this message. This is the first
    /// message.
    Start { source: PathBuf, target: PathBuf, options: String },
    /// Answer with `Report::Pong`.
    Ping,
    /// Close the log file and open it again by its path.
    ReopenLog,
    /// Unmount and end.
    Stop,
    /// Answer with `Report::Prepared` once a handover can run without waiting for the source.
    Prepare,
    /// Stop reading requests, and answer with `Report::State`.
    HandOver,
    /// End without an unmount. This order follows `Report::State`.
    Give,
}

/// A message that a worker sends to the supervisor.
#[derive(Debug, Deserialize, PartialEq, Serialize)]
#[serde(tag = "is", rename_all = "kebab-case")]
pub(super) enum Report {
    /// The mount answers. `target` is its path in the mount table, and `minor` is the minor number of
    /// its device.
    Ready { target: PathBuf, minor: Option<u32> },
    /// Another process has unmounted the mount. The worker ends.
    Unmounted,
    /// The worker ends, for this reason.
    Failed { message: String },
    /// The answer to `Order::Ping`.
    Pong,
    /// The answer to `Order::Prepare`.
    Prepared,
    /// The answer to `Order::HandOver`. It carries the descriptors with which another worker takes
    /// over the mount.
    State,
    /// The answer to `Order::Give`: all requests are answered, or the next worker will get them.
    Given,
    /// The mount cannot be handed over, for this reason.
    NotHandedOver { message: String },
}

/// One end of a channel.
#[derive(Debug)]
pub(super) struct Channel {
    socket: OwnedFd,
}

impl Channel {
    /// Makes a channel. The second value is the other end, which the child gets as its standard
    /// input.
    ///
    /// # Errors
    /// If no descriptor is free.
    pub(super) fn pair() -> io::Result<(Channel, OwnedFd)> {
        let flags = SockFlag::SOCK_CLOEXEC;
        let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags)?;
        Ok((Channel { socket: ours }, theirs))
    }

    /// The channel on the standard input of this process. Standard input becomes `/dev/null`.
    ///
    /// # Errors
    /// If standard input is not a socket.
    pub(super) fn from_stdin() -> io::Result<Channel> {
        let socket = io::stdin().as_fd().try_clone_to_owned()?;
        nix::sys::socket::getsockname::<nix::sys::socket::UnixAddr>(socket.as_raw_fd())?;
        dup2_stdin(File::open("/dev/null")?)?;
        Ok(Channel { socket })
    }

    /// Sends `message` with `fds`. Never waits: if the other end does not accept messages, that is
    /// an error.
    ///
    /// # Errors
    /// If the other end is closed, or if the message cannot be sent without waiting.
    pub(super) fn send(&self, message: &impl Serialize, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let bytes = serde_json::to_vec(message)?;
        if bytes.len() > MESSAGE_MAX {
            let reason = format!("a message of {} bytes; at most {MESSAGE_MAX}", bytes.len());
            return Err(io::Error::other(reason));
        }
        descriptors::send(&self.socket, &bytes, fds)
    }

    /// The next message and its descriptors. `None` if the other end is closed. If `wait` is false
    /// and there is no message, the error is `WouldBlock`.
    ///
    /// # Errors
    /// If there is no message, or if it is not valid.
    pub(super) fn receive<M: DeserializeOwned>(
        &self,
        wait: bool,
    ) -> io::Result<Option<(M, Vec<OwnedFd>)>> {
        let mut bytes = vec![0; MESSAGE_MAX];
        let (len, fds) = match descriptors::receive(&self.socket, &mut bytes, wait) {
            Err(e) if e.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
            received => received?,
        };
        if len == 0 {
            return Ok(None);
        }
        Ok(Some((serde_json::from_slice(&bytes[..len])?, fds)))
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read, Seek, Write};

    use super::*;

    fn ends() -> (Channel, Channel) {
        let (ours, theirs) = Channel::pair().unwrap();
        (ours, Channel { socket: theirs })
    }

    #[test]
    fn messages_arrive_one_by_one_with_their_descriptors() {
        let (ours, theirs) = ends();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"weights").unwrap();
        ours.send(&Order::Ping, &[file.as_fd()]).unwrap();
        ours.send(&Order::Stop, &[]).unwrap();
        let (order, fds) = theirs.receive::<Order>(true).unwrap().unwrap();
        assert_eq!((order, fds.len()), (Order::Ping, 1));
        let mut same = File::from(fds.into_iter().next().unwrap());
        let mut text = String::new();
        same.rewind().unwrap();
        same.read_to_string(&mut text).unwrap();
        assert_eq!(text, "weights");
        let (order, fds) = theirs.receive::<Order>(true).unwrap().unwrap();
        assert_eq!((order, fds.len()), (Order::Stop, 0));
        let none = theirs.receive::<Order>(false).unwrap_err();
        assert_eq!(none.kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn the_end_of_the_peer_is_told_apart_from_silence() {
        let (ours, theirs) = ends();
        ours.send(&Order::Ping, &[]).unwrap();
        drop(ours);
        assert!(theirs.receive::<Order>(true).unwrap().is_some());
        assert!(theirs.receive::<Order>(true).unwrap().is_none());
        assert!(theirs.send(&Report::Pong, &[]).is_err());
    }

    #[test]
    fn a_peer_that_takes_no_messages_holds_nobody_up() {
        let (ours, _theirs) = ends();
        let full = (0..1_000_000).find_map(|_| ours.send(&Order::Ping, &[]).err()).unwrap();
        assert_eq!(full.kind(), io::ErrorKind::WouldBlock);
    }
}
