//! Mirrors a folder through FUSE, read-only. The kernel must not cache anything, so every request arrives here. Each
//! request goes through `Faults` before it is answered.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, UNIX_EPOCH};

use fuser::{
    Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, LockOwner,
    OpenFlags, ReplyAttr, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyOpen,
    ReplyStatfs, Request,
};
use nix::libc;

use crate::faults::{self, Answer, Faults};

/// Identity of a node: a path, and the number of the file there. A file that replaces another one is a new node.
type Key = (PathBuf, u64);

#[derive(Default)]
struct Table {
    /// Paths relative to the root. The path of node `n` is at index `n - 1`. Nodes are never removed.
    paths: Vec<PathBuf>,
    numbers: HashMap<Key, u64>,
    files: HashMap<u64, Arc<File>>,
}

struct Shared {
    root: PathBuf,
    faults: Arc<Faults>,
    /// The time for which the kernel may cache names and attributes.
    ttl: Duration,
    table: Mutex<Table>,
    next_handle: AtomicU64,
}

/// The file system.
pub(crate) struct Mirror(Arc<Shared>);

impl Mirror {
    pub(crate) fn new(root: &Path, faults: Arc<Faults>, ttl: Duration) -> Mirror {
        let table = Table { paths: vec![PathBuf::new()], ..Table::default() };
        let table = Mutex::new(table);
        Mirror(Arc::new(Shared { root: root.into(), faults, ttl, table, next_handle: 1.into() }))
    }
}

impl Shared {
    fn table(&self) -> std::sync::MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Path of a node, relative to the root.
    fn path(&self, ino: INodeNo) -> PathBuf {
        self.table().paths[ino.0 as usize - 1].clone()
    }

    /// The attributes of the file or folder at `path`, with the number of its node.
    fn attr(&self, path: &Path) -> io::Result<FileAttr> {
        let meta = fs::symlink_metadata(self.root.join(path))?;
        let mut table = self.table();
        let Table { paths, numbers, .. } = &mut *table;
        let number = if path.as_os_str().is_empty() {
            1
        } else {
            *numbers.entry((path.to_owned(), meta.ino())).or_insert_with(|| {
                paths.push(path.to_owned());
                paths.len() as u64
            })
        };
        Ok(attr_of(number, &meta))
    }

    fn read(&self, fh: FileHandle, offset: u64, size: u32, answer: Answer) -> io::Result<Vec<u8>> {
        let file = self.table().files.get(&fh.0).cloned();
        let file = file.ok_or(io::Error::from_raw_os_error(libc::EBADF))?;
        let wanted = match answer {
            Answer::Eio => return Err(io::Error::from_raw_os_error(libc::EIO)),
            // At least one byte, because an empty answer would mean the end of the file.
            Answer::Short => (size / 3).max(1),
            Answer::Right => size,
        };
        let mut data = vec![0; wanted as usize];
        let mut len = 0;
        while len < data.len() {
            match file.read_at(&mut data[len..], offset + len as u64)? {
                0 => break,
                n => len += n,
            }
        }
        data.truncate(len);
        Ok(data)
    }
}

fn attr_of(number: u64, meta: &Metadata) -> FileAttr {
    let time = |seconds: i64, nanoseconds: i64| {
        UNIX_EPOCH + Duration::new(seconds.unsigned_abs(), nanoseconds as u32)
    };
    FileAttr {
        ino: INodeNo(number),
        size: meta.len(),
        blocks: meta.blocks(),
        atime: time(meta.atime(), meta.atime_nsec()),
        mtime: time(meta.mtime(), meta.mtime_nsec()),
        ctime: time(meta.ctime(), meta.ctime_nsec()),
        crtime: UNIX_EPOCH,
        kind: FileType::from_std(meta.file_type()).unwrap_or(FileType::RegularFile),
        perm: (meta.mode() & 0o7777) as u16,
        nlink: meta.nlink() as u32,
        uid: meta.uid(),
        gid: meta.gid(),
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

fn errno(error: &io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::EIO, Errno::from_i32)
}

/// Returns the result of `work`, or EIO if the request has to fail.
fn unless_eio<T>(answer: Answer, work: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    if answer == Answer::Eio { Err(io::Error::from_raw_os_error(libc::EIO)) } else { work() }
}

impl Filesystem for Mirror {
    fn lookup(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let path = self.0.path(parent).join(name);
        let (shared, at) = (self.0.clone(), path.clone());
        let job = move |answer| match unless_eio(answer, || shared.attr(&at)) {
            Ok(attr) => reply.entry(&shared.ttl, &attr, Generation(0)),
            Err(e) => reply.error(errno(&e)),
        };
        self.0.faults.meet(faults::Request::Lookup, &path, Box::new(job));
    }

    fn getattr(&self, _req: &Request, ino: INodeNo, fh: Option<FileHandle>, reply: ReplyAttr) {
        let path = self.0.path(ino);
        let (shared, at) = (self.0.clone(), path.clone());
        let job = move |answer| {
            // An open file stays the same file, even if another file has its name now.
            let file = fh.and_then(|fh| shared.table().files.get(&fh.0).cloned());
            let attr = unless_eio(answer, || match file {
                Some(file) => Ok(attr_of(ino.0, &file.metadata()?)),
                None => Ok(attr_of(ino.0, &fs::symlink_metadata(shared.root.join(&at))?)),
            });
            match attr {
                Ok(attr) => reply.attr(&shared.ttl, &attr),
                Err(e) => reply.error(errno(&e)),
            }
        };
        self.0.faults.meet(faults::Request::Getattr, &path, Box::new(job));
    }

    fn readlink(&self, _req: &Request, ino: INodeNo, reply: ReplyData) {
        match fs::read_link(self.0.root.join(self.0.path(ino))) {
            Ok(target) => reply.data(target.as_os_str().as_bytes()),
            Err(e) => reply.error(errno(&e)),
        }
    }

    fn open(&self, _req: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let path = self.0.path(ino);
        if flags.0 & libc::O_DIRECT != 0 && self.0.faults.refuses_direct(&path) {
            return reply.error(Errno::EINVAL);
        }
        let (shared, at) = (self.0.clone(), path.clone());
        let job = move |answer| match unless_eio(answer, || File::open(shared.root.join(&at))) {
            Ok(file) => {
                let fh = shared.next_handle.fetch_add(1, Ordering::Relaxed);
                shared.table().files.insert(fh, Arc::new(file));
                // Direct I/O bypasses the page cache, so that every read arrives here.
                reply.opened(FileHandle(fh), FopenFlags::FOPEN_DIRECT_IO);
            }
            Err(e) => reply.error(errno(&e)),
        };
        self.0.faults.meet(faults::Request::Open, &path, Box::new(job));
    }

    fn read(
        &self,
        _req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let path = self.0.path(ino);
        self.0.faults.note_range(&path, offset, size);
        let shared = self.0.clone();
        let job = move |answer| match shared.read(fh, offset, size, answer) {
            Ok(data) => reply.data(&data),
            Err(e) => reply.error(errno(&e)),
        };
        self.0.faults.meet_read(&path, offset, Box::new(job));
    }

    fn flush(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        _lock_owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        let job = move |answer| match answer {
            Answer::Eio => reply.error(Errno::EIO),
            Answer::Right | Answer::Short => reply.ok(),
        };
        self.0.faults.meet(faults::Request::Flush, &self.0.path(ino), Box::new(job));
    }

    fn release(
        &self,
        _req: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        self.0.table().files.remove(&fh.0);
        reply.ok();
    }

    fn statfs(&self, _req: &Request, ino: INodeNo, reply: ReplyStatfs) {
        let job = move |answer| match answer {
            Answer::Eio => reply.error(Errno::EIO),
            Answer::Right | Answer::Short => reply.statfs(0, 0, 0, 0, 0, 512, 255, 0),
        };
        self.0.faults.meet(faults::Request::Statfs, &self.0.path(ino), Box::new(job));
    }

    fn readdir(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let path = self.0.path(ino);
        let (shared, at) = (self.0.clone(), path.clone());
        let list = move || -> io::Result<Vec<_>> {
            let mut names = Vec::new();
            for entry in fs::read_dir(shared.root.join(&at))? {
                names.push(entry?.file_name());
            }
            names.sort();
            Ok(names)
        };
        let (shared, folder) = (self.0.clone(), path.clone());
        let job = move |answer| {
            let names = match unless_eio(answer, list) {
                Ok(names) => names,
                Err(e) => return reply.error(errno(&e)),
            };
            for (at, name) in names.iter().enumerate().skip(offset as usize) {
                // Entries that were removed in the meantime are left out.
                let Ok(attr) = shared.attr(&folder.join(name)) else { continue };
                if reply.add(attr.ino, at as u64 + 1, attr.kind, name) {
                    break;
                }
            }
            reply.ok();
        };
        self.0.faults.meet(faults::Request::Readdir, &path, Box::new(job));
    }
}
