//! Files that the kernel serves by passthrough. A registration belongs to the FUSE connection, not
//! to the process. It stays valid when another process takes over the connection.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use fuser::{BackingId, FileHandle, FopenFlags, ReplyOpen};

mod request {
    use nix::ioctl_write_ptr;

    // The request FUSE_DEV_IOC_BACKING_CLOSE.
    ioctl_write_ptr!(backing_close, 229, 2, u32);
}

/// The registration of a file with the kernel. The drop ends it.
#[derive(Debug)]
pub(super) struct Backing {
    id: u32,
    connection: Arc<OwnedFd>,
}

impl Backing {
    /// Registers `file`.
    ///
    /// # Errors
    /// The reason why the kernel refuses it.
    pub(super) fn register(connection: &Arc<OwnedFd>, file: &File) -> io::Result<Backing> {
        let id = BackingId::create_raw(connection, file)?;
        Ok(Backing { id, connection: connection.clone() })
    }

    /// The registration `id`, which another process made on this connection.
    pub(super) fn adopted(connection: &Arc<OwnedFd>, id: u32) -> Backing {
        Backing { id, connection: connection.clone() }
    }

    /// The number of the registration.
    pub(super) fn id(&self) -> u32 {
        self.id
    }

    /// Answers an open request: the kernel serves handle `fh` from this file.
    pub(super) fn reply(&self, reply: ReplyOpen, fh: FileHandle) {
        // SAFETY: the registration is open on the connection of `reply` for as long as `self`
        // exists, and `into_raw` keeps the value from closing it.
        let id = unsafe { reply.wrap_backing(self.id) };
        reply.opened_passthrough(fh, FopenFlags::FOPEN_NOFLUSH, &id);
        id.into_raw();
    }
}

impl Drop for Backing {
    fn drop(&mut self) {
        // SAFETY: the kernel reads one `u32`, which lives until the call returns.
        let closed = unsafe { request::backing_close(self.connection.as_raw_fd(), &self.id) };
        if let Err(e) = closed {
            tracing::debug!("a file that the kernel served stays registered: {e}");
        }
    }
}
