//! Replies to the kernel: attributes, errors, and the error of a source that does not answer.

use std::time::Duration;

use fuser::{
    Errno, FileAttr, FileType, INodeNo, ReplyAttr, ReplyData, ReplyDirectory, ReplyDirectoryPlus,
    ReplyEntry, ReplyOpen, ReplyStatfs, ReplyXattr,
};
use tensorfs::Error;

use super::attributes::Common;
use super::node::{Node, NodeKind};
use crate::serve::blocking::Fail;

/// How long the kernel keeps names and attributes: files of the source may be replaced.
pub(super) const TTL: Duration = Duration::from_secs(1);

macro_rules! fail {
    ($($reply:ty),*) => {
        $(impl Fail for $reply {
            fn fail(self) {
                self.error(Errno::EIO);
            }
        })*
    };
}

fail!(
    ReplyData,
    ReplyEntry,
    ReplyOpen,
    ReplyXattr,
    ReplyStatfs,
    ReplyDirectory,
    ReplyDirectoryPlus
);

/// A getattr reply, with the known attributes as the answer if the source does not answer.
pub(super) struct KnownAttr {
    pub(super) reply: ReplyAttr,
    pub(super) known: FileAttr,
}

impl Fail for KnownAttr {
    fn fail(self) {
        self.reply.attr(&TTL, &self.known);
    }
}

/// The attributes of `node`.
pub(super) fn attr_of(common: &Common, node: &Node) -> FileAttr {
    let (kind, bits) = match node.kind {
        NodeKind::Folder => (FileType::Directory, 0o555),
        NodeKind::File { .. } => (FileType::RegularFile, 0o444),
    };
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
        perm: (bits & !common.umask) as u16,
        nlink: if kind == FileType::Directory { 2 } else { 1 },
        uid: common.uid,
        gid: common.gid,
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

/// The errno of a failed operation, after a line in the log.
pub(super) fn logged(error: &Error) -> Errno {
    tracing::error!("{error}");
    match error {
        Error::Io { source, .. } => source.raw_os_error().map_or(Errno::EIO, Errno::from_i32),
        Error::Usage { .. } => Errno::EINVAL,
        Error::OutOfMemory { .. } => Errno::ENOMEM,
        _ => Errno::EIO,
    }
}

/// Every failed read returns EIO. A changed source and a checksum mismatch were logged when they
/// were first seen.
pub(super) fn logged_as_eio(error: &Error) -> Errno {
    match error {
        Error::Changed { .. } | Error::Refused { .. } => tracing::debug!("{error}"),
        _ => tracing::error!("{error}"),
    }
    Errno::EIO
}

pub(super) fn reply_xattr(value: Option<&[u8]>, size: u32, reply: ReplyXattr) {
    match value {
        None => reply.error(Errno::NO_XATTR),
        Some(value) if size == 0 => reply.size(value.len() as u32),
        Some(value) if value.len() > size as usize => reply.error(Errno::ERANGE),
        Some(value) => reply.data(value),
    }
}
