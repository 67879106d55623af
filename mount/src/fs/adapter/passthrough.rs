//! Passthrough: files that the kernel reads without the daemon.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use fuser::{InitFlags, KernelConfig};

use super::super::backing::Backing;
use super::super::node::Node;
use super::FsState;
use crate::serve::kernel::Feature;

impl FsState {
    /// Asks the kernel for passthrough of whole files.
    pub(super) fn passthrough(&self, config: &mut KernelConfig) -> Feature {
        if !self.common.passthrough {
            return Feature::Off;
        }
        if !self.common.is_root {
            return Feature::Refused("mounted without root".to_owned());
        }
        // At stack depth 1, the backing files have to lie on a disk file system, and an overlay may
        // be mounted on top of the mount.
        let can = config.add_capabilities(InitFlags::FUSE_PASSTHROUGH).is_ok()
            && config.set_max_stack_depth(1).is_ok();
        if can { Feature::On } else { Feature::Refused("the kernel is too old".to_owned()) }
    }

    /// Registers a real file for passthrough. `None` if the kernel refuses it.
    pub(super) fn backing(&self, node: &Node, file: &File) -> Option<Arc<Backing>> {
        if !self.passthrough.load(Ordering::Relaxed) {
            return None;
        }
        match Backing::register(&self.connection, file) {
            Ok(backing) => Some(Arc::new(backing)),
            Err(e) => {
                if node.is_virtual() {
                    self.service.copy_refused(&e);
                }
                // Missing rights affect all files, so passthrough is turned off. Another error may
                // come from the file system of this file alone.
                if e.kind() == io::ErrorKind::PermissionDenied
                    && self.passthrough.swap(false, Ordering::Relaxed)
                {
                    tracing::warn!("the kernel does not serve whole files by itself here: {e}");
                }
                None
            }
        }
    }
}
