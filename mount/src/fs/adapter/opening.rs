//! Opens of files, which the daemon or the kernel serves from then on.

use std::fs::File;
use std::io;
use std::sync::Arc;

use fuser::{Errno, FopenFlags, ReplyOpen};
use tensorfs::Error;

use super::super::node::Node;
use super::super::open_file::{Current, OpenContent, OpenFile};
use super::super::replies::{Timed, logged};
use super::FsState;
use crate::serve::blocking::PendingReply;
use crate::serve::heat::Opener;
use crate::serve::requests::Operation;

/// Maximum number of times that one open request opens the file.
const OPENS_MAX: usize = 2;

/// A file that was opened for a request.
struct Ready {
    opened: Arc<OpenFile>,
    current: Arc<Current>,
    /// Whether the kernel's cached pages of the file are still valid.
    unchanged: bool,
    /// The real file that the kernel may serve by passthrough.
    whole: Option<Arc<File>>,
    /// Why there is no assembled copy, for a file that the kernel serves from a copy.
    lack: Option<String>,
}

impl Ready {
    /// Whether the kernel could serve the file only from a copy, and there is no copy.
    fn lacks_copy(&self) -> bool {
        self.whole.is_none() && matches!(self.current.file, OpenContent::Virtual(_))
    }

    /// The error of an open of `node` if the kernel serves a copy of the file to other programs,
    /// and this open finds no copy.
    fn refused(self, node: &Node) -> Error {
        let lack = self.lack.as_deref().unwrap_or("its content has changed");
        let reason = format!(
            "the kernel serves it from an assembled copy while programs have it open, and {lack}; \
             close it in these programs, or open it again later"
        );
        Error::io(&node.path, "open", io::Error::other(reason))
    }
}

impl FsState {
    /// Opens a file. Only this function accesses the source. `in_use` says that the kernel serves
    /// the file to other programs.
    fn open_file(&self, node: &Node, in_use: bool) -> Result<Ready, Errno> {
        // ESTALE makes the kernel look the name up again, which finds the new file.
        if node.is_outdated_at_open() {
            return Err(Errno::ESTALE);
        }
        let on_fault_storm = || self.store_queue.on_fault_storm(node.ino, node.gate().cloned());
        let opened = node.open(&self.watcher, &self.service, on_fault_storm);
        let (opened, unchanged) = opened.map_err(|error| match error {
            Error::Changed { .. } => Errno::ESTALE,
            _ => logged(Operation::Open, node, &error),
        })?;
        let current = opened.current();
        let mut lack = None;
        let whole = match &current.file {
            // In passthrough, no bytes are compared with checksums.
            _ if node.gate().is_some() => None,
            // If a proved file has changed, its reads must fail with EIO. In passthrough, they
            // would not fail.
            OpenContent::Whole(file) if !file.reader().is_empty() => {
                let source = &file.reader().sources()[0];
                source.open_local_copy();
                // In passthrough, the kernel would wait for a remote file system without a
                // deadline.
                let hangs = source.reads_may_block() && self.common.has_deadline;
                (!source.is_changed() && !hangs).then(|| source.open_bytes()).flatten()
            }
            OpenContent::Virtual(file) if unchanged && in_use => {
                let copy = self.service.copy_in_use(node.listed_version(), file);
                copy.map_err(|reason| lack = Some(reason)).ok()
            }
            OpenContent::Virtual(file) if unchanged => {
                self.service.copy_of(node.listed_version(), file)
            }
            OpenContent::Virtual(_) | OpenContent::Whole(_) | OpenContent::Text(_) => None,
        };
        Ok(Ready { opened, current, unchanged, whole, lack })
    }

    pub(super) fn reply_open(
        &self,
        node: Arc<Node>,
        opener: Opener,
        pending: PendingReply<Timed<ReplyOpen>>,
    ) {
        let ino = node.ino;
        let mut opens = 0;
        let (ready, known, lacks_copy, frozen, mut serving) = loop {
            opens += 1;
            let in_use = self.serving.lock().by_kernel(ino).is_some();
            let ready = self.open_file(&node, in_use);
            let (frozen, serving) = (self.frozen.read(), self.serving.lock());
            let known = serving.by_kernel(ino);
            let lacks_copy = known.is_some() && ready.as_ref().is_ok_and(Ready::lacks_copy);
            // Another thread may have made the copy after this open looked for it, and the kernel
            // may serve that copy to other programs.
            if !lacks_copy || opens == OPENS_MAX {
                break (ready, known, lacks_copy, frozen, serving);
            }
        };
        // Once the deadline has passed, the reply is gone and the opened file is dropped.
        let Some(reply) = pending.take() else { return };
        let ready = match ready {
            // The kernel repeats the lookup, and the process that takes over answers it.
            Ok(_) if *frozen => Err(Errno::ESTALE),
            // The mode of an inode cannot change while the file is open.
            Ok(ready) if lacks_copy => Err(logged(Operation::Open, &node, &ready.refused(&node))),
            ready => ready,
        };
        let Ready { opened, current, unchanged, whole, .. } = match ready {
            Ok(ready) => ready,
            Err(errno) => return reply.error(errno),
        };
        // The kernel allows only one mode for an inode. While the kernel serves the file to other
        // programs, it serves this handle too.
        let by_kernel = match (known, whole) {
            (Some(backing), _) => Some(backing),
            (None, Some(file)) if !serving.is_by_us(ino) => self.backing(&node, &file),
            _ => None,
        };
        match by_kernel {
            Some(backing) => {
                serving.opened_by_kernel(ino, &backing);
                let fh = self.handle(node, opened, Some(backing.clone()), opener);
                backing.reply(reply.ok(), fh);
            }
            None => {
                serving.opened_by_us(ino);
                if let OpenContent::Virtual(file) = &current.file {
                    self.service.read_by_us(node.listed_version(), file, None);
                }
                let fh = self.handle(node, opened, None, opener);
                let mut flags = FopenFlags::FOPEN_NOFLUSH;
                // Without this flag the kernel drops its cached pages.
                flags.set(FopenFlags::FOPEN_KEEP_CACHE, unchanged);
                reply.ok().opened(fh, flags);
            }
        }
    }
}
