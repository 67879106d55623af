//! A new file that is written at any offset, past the page cache if possible.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, FcntlArg, OFlag, fallocate, fcntl};
use nix::libc;

use super::tensor_writer;
use crate::atomic_file::name_of_open;
use crate::source::FileSystem;
use crate::sync::Mutex;

/// Alignment in bytes of offsets, lengths and memory of writes past the page cache.
pub(super) const ALIGN: usize = 4096;

/// Files with fewer bytes than this are written through the page cache.
const DIRECT_MIN: u64 = 16 << 20;

/// A file that is being written.
pub(super) struct Target<'a> {
    file: &'a File,
    /// Whether writes go past the page cache.
    direct: AtomicBool,
    /// The offset and the bytes of the end of the file, if they do not fill a block.
    tail: Mutex<Option<(u64, Vec<u8>)>>,
}

impl<'a> Target<'a> {
    /// Prepares `file`, which is in `folder`, for `len` bytes. Reserves space for them, so that a full disk is
    /// reported at once.
    ///
    /// # Errors
    /// The errors of the file system.
    pub(super) fn new(file: &'a File, folder: &Path, len: u64) -> io::Result<Target<'a>> {
        let file_system = reserve_space(file, folder, len)?;
        let may = len >= DIRECT_MIN && file_system.is_local() && !file_system.is_in_memory();
        let direct = may && set_direct(file, true);
        Ok(Target { file, direct: AtomicBool::new(direct), tail: Mutex::default() })
    }

    /// Whether writes go past the page cache.
    pub(super) fn is_direct(&self) -> bool {
        self.direct.load(Ordering::Relaxed)
    }

    /// Writes `bytes` at `offset`, a multiple of `ALIGN`. If their length is not a multiple of `ALIGN`, they
    /// must be the last bytes of the file. All bytes are in the file after `finish`.
    ///
    /// # Errors
    /// The errors of the file system.
    pub(super) fn write(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        if self.is_direct() && bytes.as_ptr().addr().is_multiple_of(ALIGN) {
            let (blocks, tail) = bytes.split_at(bytes.len() / ALIGN * ALIGN);
            match self.file.write_all_at(blocks, offset) {
                // The device needs a larger alignment.
                Err(e) if e.raw_os_error() == Some(Errno::EINVAL as i32) => self.leave_direct()?,
                Err(e) => return Err(e),
                Ok(()) => {
                    if !tail.is_empty() {
                        *self.tail.lock() = Some((offset + blocks.len() as u64, tail.to_vec()));
                    }
                    return Ok(());
                }
            }
        }
        self.file.write_all_at(bytes, offset)
    }

    /// Switches to writes through the page cache.
    fn leave_direct(&self) -> io::Result<()> {
        if self.direct.swap(false, Ordering::Relaxed) && !set_direct(self.file, false) {
            return Err(io::Error::other("the file stays open for direct writes only"));
        }
        Ok(())
    }

    /// Writes the end of the file, and waits until the disk has all bytes.
    ///
    /// # Errors
    /// The errors of the file system.
    pub(super) fn finish(&self) -> io::Result<()> {
        if let Some((offset, tail)) = self.tail.lock().take() {
            self.leave_direct()?;
            self.file.write_all_at(&tail, offset)?;
        }
        self.file.sync_all()
    }

    /// Prepares reads that come from the disk if possible, and not from the page cache.
    pub(super) fn read_back(&self) {
        let _ = self.leave_direct();
        read_back(self.file);
    }

    /// Reads bytes of the finished file.
    ///
    /// # Errors
    /// The errors of the file system.
    pub(super) fn read(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        self.file.read_exact_at(bytes, offset)
    }
}

/// Maximum number of parts of blocks that `UnalignedTarget` keeps in memory.
const EDGES_MAX: usize = 256;

/// A file that is written in parts, which begin and end inside blocks. Whole blocks of a part are written past the page
/// cache, if the file system supports that, and if the memory of the part is aligned with the file: its address and its
/// offset in the file have the same remainder modulo `ALIGN`.
#[derive(Debug)]
pub(super) struct UnalignedTarget {
    file: File,
    /// The same file, opened with O_DIRECT.
    direct: Option<File>,
    /// Whether the device has refused a write past the page cache.
    is_refused: AtomicBool,
    /// The first and last bytes of parts, which do not fill a block, with their offsets. They are collected and written
    /// together, because a write to the page cache waits for all writes of the file past the page cache.
    edges: Mutex<Vec<(u64, Vec<u8>)>>,
}

impl UnalignedTarget {
    /// `file`, which is written through the page cache at first.
    ///
    /// # Errors
    /// If the process has no file descriptor left.
    pub(super) fn cached(file: &File) -> io::Result<UnalignedTarget> {
        let file = file.try_clone()?;
        Ok(UnalignedTarget {
            file,
            direct: None,
            is_refused: AtomicBool::default(),
            edges: Mutex::default(),
        })
    }

    /// Prepares the file, which is new and in `folder`, for `len` bytes. Reserves space for them, so that a
    /// full disk is reported at once. A long file is written past the page cache from now on.
    ///
    /// # Errors
    /// The errors of the file system.
    pub(super) fn reserve(&mut self, folder: &Path, len: u64) -> io::Result<()> {
        let file_system = reserve_space(&self.file, folder, len)?;
        let is_long = len >= DIRECT_MIN && file_system.is_local() && !file_system.is_in_memory();
        if is_long && self.direct.is_none() {
            let mut options = OpenOptions::new();
            options.write(true).custom_flags(libc::O_DIRECT);
            self.direct = options.open(name_of_open(&self.file)).ok();
        }
        Ok(())
    }

    /// Writes blocks past the page cache. Returns whether the device accepted them.
    fn write_blocks(&self, blocks: &[u8], offset: u64) -> io::Result<bool> {
        let Some(direct) = &self.direct else { return Ok(false) };
        if self.is_refused.load(Ordering::Relaxed) {
            return Ok(false);
        }
        match direct.write_all_at(blocks, offset) {
            Ok(()) => Ok(true),
            // The device needs a larger alignment.
            Err(e) if e.raw_os_error() == Some(Errno::EINVAL as i32) => {
                self.is_refused.store(true, Ordering::Relaxed);
                Ok(false)
            }
            Err(e) => Err(e),
        }
    }

    fn write_edges(&self, edges: &mut Vec<(u64, Vec<u8>)>) -> io::Result<()> {
        edges.drain(..).try_for_each(|(offset, bytes)| self.file.write_all_at(&bytes, offset))
    }
}

impl tensor_writer::WriteAt for UnalignedTarget {
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let front_len = (offset.next_multiple_of(ALIGN as u64) - offset) as usize;
        let middle = bytes.get(front_len..).unwrap_or_default();
        let (blocks, back) = middle.split_at(middle.len() / ALIGN * ALIGN);
        let blocks_start = offset + front_len as u64;
        let is_aligned = !blocks.is_empty() && blocks.as_ptr().addr().is_multiple_of(ALIGN);
        if !is_aligned || !self.write_blocks(blocks, blocks_start)? {
            return FileExt::write_all_at(&self.file, bytes, offset);
        }
        let edges = [(offset, &bytes[..front_len]), (blocks_start + blocks.len() as u64, back)];
        let mut waiting = self.edges.lock();
        for (offset, bytes) in edges.into_iter().filter(|(_, bytes)| !bytes.is_empty()) {
            waiting.push((offset, bytes.to_vec()));
        }
        if waiting.len() > EDGES_MAX { self.write_edges(&mut waiting) } else { Ok(()) }
    }

    fn flush(&self) -> io::Result<()> {
        self.write_edges(&mut self.edges.lock())
    }

    fn block_len(&self) -> Option<usize> {
        self.direct.as_ref().map(|_| ALIGN)
    }
}

/// Reserves space for `len` bytes in `file`, a new file in `folder`, so that a full disk is reported at once.
///
/// # Errors
/// The errors of the file system.
pub(super) fn reserve_space(file: &File, folder: &Path, len: u64) -> io::Result<FileSystem> {
    let file_system = FileSystem::at(folder);
    // In memory file systems, fallocate(2) would allocate pages before the bytes exist, which takes time. For these
    // file systems, the check of free space is exact.
    if file_system.is_in_memory() {
        file.set_len(len)?;
    } else {
        reserve(file, len)?;
    }
    Ok(file_system)
}

/// Removes the pages of `file` from the page cache, so that it is read from the disk.
pub(super) fn read_back(file: &File) {
    let advice = nix::fcntl::PosixFadviseAdvice::POSIX_FADV_DONTNEED;
    let _ = nix::fcntl::posix_fadvise(file, 0, 0, advice);
}

/// Turns writes past the page cache on or off. Returns whether the file system did so.
fn set_direct(file: &File, on: bool) -> bool {
    let Ok(flags) = fcntl(file, FcntlArg::F_GETFL) else { return false };
    let mut flags = OFlag::from_bits_retain(flags);
    flags.set(OFlag::O_DIRECT, on);
    fcntl(file, FcntlArg::F_SETFL(flags)).is_ok()
}

fn reserve(file: &File, len: u64) -> io::Result<()> {
    let signed = i64::try_from(len).map_err(io::Error::other)?;
    if len == 0 {
        return Ok(());
    }
    match fallocate(file, FallocateFlags::empty(), 0, signed) {
        Ok(()) => Ok(()),
        Err(e @ (Errno::ENOSPC | Errno::EDQUOT | Errno::EFBIG | Errno::EIO)) => Err(e.into()),
        // Not all file systems support fallocate(2).
        Err(_) => file.set_len(len),
    }
}

#[cfg(test)]
mod tests {
    use super::super::tensor_writer::WriteAt as _;
    use super::*;

    #[test]
    fn parts_that_begin_within_blocks_make_the_file_in_any_order_and_on_any_path() {
        let folder = tempfile::tempdir().unwrap();
        let len = DIRECT_MIN as usize + 12_345;
        let expected: Vec<u8> = (0..len as u32).map(|byte| ((byte * 37) >> 9) as u8).collect();
        // There are more edges than are kept, parts inside one block, and parts of many blocks.
        let mut starts = vec![0];
        for step in (0_usize..).map(|number| 1 + number * 7919 % 30_011) {
            match starts[starts.len() - 1] + step {
                start if start < len => starts.push(start),
                _ => break,
            }
        }
        assert!(starts.len() > 2 * EDGES_MAX);
        starts.push(len);
        for is_reserved in [true, false] {
            let path = folder.path().join("file");
            let file = File::create_new(&path).unwrap();
            let mut target = UnalignedTarget::cached(&file).unwrap();
            if is_reserved {
                target.reserve(folder.path(), len as u64).unwrap();
            }
            // The memory of a part has the same offset inside a block as its place in the file, plus `shift` bytes.
            let write = |number: usize, shift: usize| {
                let (start, end) = (starts[number], starts[number + 1]);
                let mut memory = vec![0; end - start + 2 * ALIGN];
                let phase = (start + shift) % ALIGN;
                let first = (phase + ALIGN - memory.as_ptr().addr() % ALIGN) % ALIGN;
                let bytes = &mut memory[first..first + end - start];
                bytes.copy_from_slice(&expected[start..end]);
                target.write_all_at(bytes, start as u64).unwrap();
            };
            let count = starts.len() - 1;
            (0..count).step_by(5).for_each(|number| write(number, 1));
            std::thread::scope(|scope| {
                for thread in 0..3 {
                    let numbers = (thread..count).step_by(3).filter(|number| number % 5 != 0);
                    let write = &write;
                    scope.spawn(move || numbers.rev().for_each(|number| write(number, 0)));
                }
            });
            target.flush().unwrap();
            assert!(std::fs::read(&path).unwrap() == expected, "reserved: {is_reserved}");
            std::fs::remove_file(&path).unwrap();
        }
    }
}
