//! Memory maps of whole files.

use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::num::NonZeroUsize;
use std::ptr::NonNull;

use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};

/// A whole file in a shared read-only mapping, as safetensors maps it.
#[derive(Debug)]
pub(super) struct Map {
    start: NonNull<c_void>,
    len: usize,
}

impl Map {
    /// Maps all of `file`.
    pub(super) fn new(file: &File) -> io::Result<Map> {
        let len = usize::try_from(file.metadata()?.len()).map_err(io::Error::other)?;
        let Some(size) = NonZeroUsize::new(len) else {
            return Err(io::Error::other("an empty file cannot be mapped"));
        };
        // SAFETY: the kernel chooses the place, so the mapping replaces nothing; it is unmapped
        // when the `Map` is dropped and not before.
        let start =
            unsafe { mmap(None, size, ProtFlags::PROT_READ, MapFlags::MAP_SHARED, file, 0) };
        Ok(Map { start: start?, len })
    }

    /// Copies the bytes at `offset` into `target`. If they cannot be read, SIGBUS ends the process,
    /// as for every program that reads a mapping.
    pub(super) fn copy(&self, offset: usize, target: &mut [u8]) {
        let end = offset.checked_add(target.len()).filter(|end| *end <= self.len);
        assert!(end.is_some(), "{} bytes at {offset} of {}", target.len(), self.len);
        // SAFETY: the bytes lie inside the mapping, as checked, and `target` is memory of our
        // own. No reference to mapped bytes is made, so it does not matter who changes the file.
        unsafe {
            let source = self.start.as_ptr().cast::<u8>().add(offset);
            std::ptr::copy_nonoverlapping(source, target.as_mut_ptr(), target.len());
        }
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: `new` made this mapping, and nothing refers to it after the drop.
        let _ = unsafe { munmap(self.start, self.len) };
    }
}
