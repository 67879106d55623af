//! Replies to the kernel: attributes, errors, and the answer for a source that does not answer in
//! time.

use std::time::Duration;

use fuser::{
    Errno, FileAttr, FileType, INodeNo, ReplyAttr, ReplyData, ReplyDirectory, ReplyDirectoryPlus,
    ReplyEntry, ReplyOpen, ReplyStatfs, ReplyXattr,
};
use tensorfs::{Error, ErrorKind};

use super::attributes::Common;
use super::node::Node;
use crate::serve::blocking::Fail;
use crate::serve::requests::{Operation, RequestTimer};

/// How long the kernel may cache names and attributes. It is short because files of the source may
/// be replaced.
pub(super) const TTL: Duration = Duration::from_secs(1);

/// A reply to a request, with the timer that counts and times the request.
pub(super) struct Timed<R> {
    pub(super) reply: R,
    pub(super) timer: RequestTimer,
}

impl<R> Timed<R> {
    /// The reply, for a successful answer.
    pub(super) fn ok(self) -> R {
        self.timer.succeeded();
        self.reply
    }
}

/// Whether an errno is a regular answer and not a failure: the name or attribute does not exist, or
/// the value does not fit.
fn is_answer(errno: Errno) -> bool {
    [Errno::ENOENT, Errno::NO_XATTR, Errno::ERANGE].iter().any(|known| known.code() == errno.code())
}

macro_rules! fail {
    ($($reply:ty),*) => {
        $(
            impl Timed<$reply> {
                /// Replies with an error.
                pub(super) fn error(self, errno: Errno) {
                    if is_answer(errno) {
                        return self.ok().error(errno);
                    }
                    drop(self.timer);
                    self.reply.error(errno);
                }
            }

            impl Fail for Timed<$reply> {
                fn fail(self) {
                    self.error(Errno::EIO);
                }
            }
        )*
    };
}

fail!(
    ReplyAttr,
    ReplyData,
    ReplyEntry,
    ReplyOpen,
    ReplyXattr,
    ReplyStatfs,
    ReplyDirectory,
    ReplyDirectoryPlus
);

/// A reply to getattr. If the source does not answer in time, the attributes in memory are the
/// answer.
pub(super) struct KnownAttr {
    pub(super) reply: Timed<ReplyAttr>,
    pub(super) known: FileAttr,
}

impl Fail for KnownAttr {
    fn fail(self) {
        // The source did not answer, so the request counts as failed although the kernel gets old
        // attributes.
        drop(self.reply.timer);
        self.reply.reply.attr(&TTL, &self.known);
    }
}

/// A reply that is made from the last listing if the source does not answer in time.
pub(super) struct ReplyFromListing<R> {
    reply: R,
    /// Sends the answer, or an error if there is none. The second argument says whether the source
    /// has missed the deadline.
    answer: Box<dyn FnOnce(R, bool) + Send>,
}

impl<R> ReplyFromListing<R> {
    pub(super) fn new(
        reply: R,
        answer: impl FnOnce(R, bool) + Send + 'static,
    ) -> ReplyFromListing<R> {
        ReplyFromListing { reply, answer: Box::new(answer) }
    }

    /// The reply, to be answered from the source.
    pub(super) fn into_reply(self) -> R {
        self.reply
    }

    /// Sends the answer from the last listing. The source has not missed the deadline.
    pub(super) fn give(self) {
        (self.answer)(self.reply, false);
    }
}

impl<R: Send + 'static> Fail for ReplyFromListing<R> {
    fn fail(self) {
        (self.answer)(self.reply, true);
    }
}

/// The attributes of `node`.
pub(super) fn attr_of(common: &Common, node: &Node) -> FileAttr {
    let kind = if node.is_folder() { FileType::Directory } else { FileType::RegularFile };
    let rights = common.sharing.rights_of(node.access().as_deref(), node.is_folder());
    let mtime = node.mtime();
    FileAttr {
        ino: INodeNo(node.ino),
        size: node.len(),
        blocks: node.len().div_ceil(512),
        atime: mtime,
        mtime,
        ctime: mtime,
        crtime: mtime,
        kind,
        perm: rights.mode as u16,
        nlink: if kind == FileType::Directory { 2 } else { 1 },
        uid: rights.uid,
        gid: rights.gid,
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

/// Logs a failed operation on `node` and returns its errno.
pub(super) fn logged(operation: Operation, node: &Node, error: &Error) -> Errno {
    let (file, model) = node.log_names();
    tracing::error!(op = operation.as_str(), file, model, "{error}");
    match error {
        Error::Io { source, .. } => source.raw_os_error().map_or(Errno::EIO, Errno::from_i32),
        Error::Usage { .. } => Errno::EINVAL,
        Error::OutOfMemory { .. } => Errno::ENOMEM,
        _ => Errno::EIO,
    }
}

/// Every failed read returns EIO. A changed source and a checksum mismatch were logged when they
/// were found. Bytes that cannot be decrypted are logged here.
pub(super) fn logged_as_eio(node: &Node, error: &Error) -> Errno {
    let is_logged = match error {
        Error::Changed { .. } => true,
        Error::Refused { fault, .. } => fault.kind != ErrorKind::DecryptFailed,
        _ => false,
    };
    if is_logged {
        tracing::debug!("{error}");
    } else {
        logged(Operation::Read, node, error);
    }
    Errno::EIO
}

pub(super) fn reply_xattr(value: Option<&[u8]>, size: u32, reply: Timed<ReplyXattr>) {
    match value {
        None => reply.error(Errno::NO_XATTR),
        Some(value) if size == 0 => reply.ok().size(value.len() as u32),
        Some(value) if value.len() > size as usize => reply.error(Errno::ERANGE),
        Some(value) => reply.ok().data(value),
    }
}
