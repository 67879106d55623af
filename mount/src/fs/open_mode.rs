//! The mode of each open file: served by the kernel (passthrough) or by the daemon. The kernel
//! allows only one mode for an inode, so the first open decides.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

/// The modes of the open files, by inode number. `B` is the registration of a file that the kernel
/// serves.
pub(crate) struct OpenModes<B>(HashMap<u64, OpenMode<B>>);

enum OpenMode<B> {
    /// The kernel serves the file while this registration exists.
    Kernel(Weak<B>),
    /// The daemon serves the file, with this number of open handles.
    Daemon(usize),
}

impl<B> Default for OpenModes<B> {
    fn default() -> Self {
        OpenModes(HashMap::new())
    }
}

impl<B> OpenModes<B> {
    /// The registration by which the kernel serves a file. `None` if the daemon serves it.
    pub(crate) fn by_kernel(&self, ino: u64) -> Option<Arc<B>> {
        match self.0.get(&ino)? {
            OpenMode::Kernel(backing) => backing.upgrade(),
            OpenMode::Daemon(_) => None,
        }
    }

    /// Whether the daemon serves the file.
    pub(crate) fn is_by_us(&self, ino: u64) -> bool {
        matches!(self.0.get(&ino), Some(OpenMode::Daemon(_)))
    }

    /// Notes that the file is opened and that the kernel serves it by `backing`.
    pub(crate) fn opened_by_kernel(&mut self, ino: u64, backing: &Arc<B>) {
        self.0.insert(ino, OpenMode::Kernel(Arc::downgrade(backing)));
    }

    /// Notes that the file is opened and that the daemon serves it.
    pub(crate) fn opened_by_us(&mut self, ino: u64) {
        match self.0.get_mut(&ino) {
            Some(OpenMode::Daemon(handles)) => *handles += 1,
            _ => drop(self.0.insert(ino, OpenMode::Daemon(1))),
        }
    }

    /// Notes that a handle that the kernel served was closed. The caller must have dropped the
    /// handle's reference to the registration.
    pub(crate) fn closed_by_kernel(&mut self, ino: u64) {
        if matches!(self.0.get(&ino), Some(OpenMode::Kernel(backing)) if backing.strong_count() == 0)
        {
            self.0.remove(&ino);
        }
    }

    /// Notes that a handle that the daemon served was closed. Once no handle of the file is left,
    /// the next open may use passthrough.
    pub(crate) fn closed_by_us(&mut self, ino: u64) {
        let Some(OpenMode::Daemon(handles)) = self.0.get_mut(&ino) else { return };
        *handles -= 1;
        if *handles == 0 {
            self.0.remove(&ino);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_kept_of_files_that_nobody_has_open() {
        let mut serving = OpenModes::default();
        let backing = Arc::new(());
        for ino in [1, 1, 2] {
            serving.opened_by_us(ino);
            serving.opened_by_kernel(ino + 10, &backing);
        }
        serving.closed_by_us(1);
        serving.closed_by_kernel(11);
        assert!(serving.is_by_us(1) && serving.by_kernel(11).is_some());
        assert!(!serving.is_by_us(11) && serving.by_kernel(1).is_none());
        serving.closed_by_us(1);
        serving.closed_by_us(2);
        drop(backing);
        assert!(serving.by_kernel(11).is_none());
        // Another open came in between, and since then the daemon serves the file.
        serving.opened_by_us(12);
        serving.closed_by_kernel(11);
        serving.closed_by_kernel(12);
        assert!(serving.is_by_us(12));
        serving.closed_by_us(12);
        assert!(serving.0.is_empty());
    }
}
