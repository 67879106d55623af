//! The folder of a disk cache: whether it can be used, what lies in it, and what is removed.
//!
//! Only files with names of the cache are removed.

use std::collections::BTreeMap;
use std::fs::{DirBuilder, File, Metadata, OpenOptions, TryLockError};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use nix::fcntl::{Flock, FlockArg};
use nix::libc;
use nix::sys::statvfs::statvfs;

use super::object::{
    BlockReach, CachedObject, DATA, MAP, ObjectKey, TEMPORARY, gone_is_fine, temporary_name,
};
use super::pieces::{PieceMemory, pieces_of};
use crate::atomic_file::TemporaryFile;
use crate::error::real_name;
use crate::hash::Digest;
use crate::index::check_folder;
use crate::open_options::DiskCachePlace;
use crate::version::Version;

/// 1 / `FREE_PART` of the file system stays free, at least `FREE_MIN` bytes, if no size is set.
const FREE_PART: u64 = 10;
const FREE_MIN: u64 = 1 << 30;

/// Length of a file that shows whether the file system has holes.
const PROBE_LEN: u64 = 1 << 20;

/// Age from which files that belong to no object count as left behind.
const LEFT_AGE: Duration = Duration::from_secs(3600);

/// Whether a folder can be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum FolderUse {
    /// It can.
    Usable,
    /// Its objects can be read; nothing can be added, for this reason.
    ReadOnly(String),
    /// Nothing in it counts, for this reason.
    Unusable(String),
}

/// Makes the folder if it is not there, and says whether it can be used.
pub(super) fn folder_use(folder: &Path) -> FolderUse {
    let made = DirBuilder::new().recursive(true).mode(0o700).create(folder);
    if let Err(e) = made.and_then(|()| check_folder(folder)) {
        return FolderUse::Unusable(e.to_string());
    }
    match has_holes(folder) {
        Ok(true) => FolderUse::Usable,
        Ok(false) => FolderUse::ReadOnly("its file system has no files with holes".to_owned()),
        Err(e) => FolderUse::ReadOnly(e.to_string()),
    }
}

/// Whether files of the folder can have holes.
fn has_holes(folder: &Path) -> io::Result<bool> {
    let number = getrandom::u64().map_err(|e| io::Error::other(e.to_string()))?;
    let mut options = OpenOptions::new();
    options.write(true).create_new(true).mode(0o600);
    let probe = TemporaryFile::create(folder.join(temporary_name(number)), &options)?;
    probe.file().set_len(PROBE_LEN)?;
    Ok(probe.file().metadata()?.blocks() * 512 < PROBE_LEN)
}

/// The files of one object.
#[derive(Debug, Default)]
struct ObjectFiles {
    map: Option<PathBuf>,
    /// The file of the map, and files that killed processes have left.
    data: Vec<PathBuf>,
    /// Space that all take, in bytes.
    space: u64,
    /// Time of the last use.
    used: Option<SystemTime>,
    /// Time of the last change of any of the files.
    changed: Option<SystemTime>,
}

impl ObjectFiles {
    /// Removes the files, some of which another process may remove now. Those who have them open find no
    /// more blocks there, unless they serve the bytes as a local file.
    fn remove(&self) -> io::Result<()> {
        let data: Vec<DataFile<'_>> = self.data.iter().map(|path| DataFile::open(path)).collect();
        self.map.iter().try_for_each(|path| gone_is_fine(std::fs::remove_file(path)))?;
        data.into_iter().try_for_each(DataFile::remove)
    }

    /// Whether a process serves the bytes as a local file: they stay until it ends, also without a name.
    fn is_served(&self) -> bool {
        self.data.iter().any(|path| DataFile::open(path).is_served)
    }

    /// Whether they belong to nothing, and nobody makes them now.
    fn is_left(&self) -> bool {
        self.map.is_none() && is_old(self.changed)
    }
}

/// A file with the bytes of an object that is to be removed.
struct DataFile<'a> {
    path: &'a Path,
    /// Its lock keeps other processes from serving the bytes as a local file. `None` if one does so.
    locked: Option<File>,
    is_served: bool,
}

impl DataFile<'_> {
    fn open(path: &Path) -> DataFile<'_> {
        // In a shared folder another user may have made the path a symbolic link or a FIFO.
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC;
        let opened = OpenOptions::new().write(true).custom_flags(flags).open(path);
        let is_own = |it: &Metadata| it.is_file() && it.nlink() == 1;
        let own = opened.ok().filter(|file| file.metadata().is_ok_and(|it| is_own(&it)));
        let tried = own.map(|file| (file.try_lock(), file));
        let is_served = matches!(tried, Some((Err(TryLockError::WouldBlock), _)));
        let locked = tried.and_then(|(locked, file)| locked.is_ok().then_some(file));
        DataFile { path, locked, is_served }
    }

    /// Removes it. Bytes that nobody serves are freed, also while a process has the file open.
    fn remove(self) -> io::Result<()> {
        // A process that begins to serve the bytes looks for the name once it has the lock. So the
        // name is unlinked before the file is truncated.
        gone_is_fine(std::fs::remove_file(self.path))?;
        if let Some(file) = &self.locked {
            let _ = file.set_len(0);
        }
        Ok(())
    }
}

fn is_old(time: Option<SystemTime>) -> bool {
    time.and_then(|time| time.elapsed().ok()).is_some_and(|age| age > LEFT_AGE)
}

/// The files in the folder, by object, and those that are not whole.
fn files_in(folder: &Path) -> io::Result<(BTreeMap<String, ObjectFiles>, Vec<PathBuf>)> {
    let (mut objects, mut temporary) = (BTreeMap::<String, ObjectFiles>::new(), Vec::new());
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let Some(name) = entry.file_name().to_str().map(str::to_owned) else { continue };
        let parts: Vec<&str> = name.split('.').collect();
        let (digest, is_map) = match parts.as_slice() {
            [digest, MAP] if is_hex(digest, 32) => (*digest, true),
            [digest, nonce, DATA] if is_hex(digest, 32) && is_hex(nonce, 16) => (*digest, false),
            ["", number, TEMPORARY] if is_hex(number, 16) => {
                temporary.push(entry.path());
                continue;
            }
            _ => continue,
        };
        // Another process may have removed it.
        let Ok(meta) = entry.metadata() else { continue };
        let files = objects.entry(digest.to_owned()).or_default();
        files.space += meta.blocks() * 512;
        files.changed = files.changed.max(meta.modified().ok());
        if is_map {
            (files.map, files.used) = (Some(entry.path()), meta.modified().ok());
        } else {
            files.data.push(entry.path());
        }
    }
    Ok((objects, temporary))
}

fn is_hex(word: &str, len: usize) -> bool {
    let hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    word.len() == len && word.bytes().all(hex)
}

/// The outcome of making room.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RoomMade {
    /// Objects that were removed.
    pub(super) objects: u64,
    /// Whether there is room now.
    pub(super) is_enough: bool,
}

/// Removes objects, the least recently used first, until there is room for `wanted` bytes. The object
/// `kept` stays.
pub(super) fn make_room(place: &DiskCachePlace, kept: Digest, wanted: u64) -> RoomMade {
    let mut made = RoomMade::default();
    let Some(_one_at_a_time) = lock(&place.folder) else {
        // Another process makes room now.
        made.is_enough = true;
        return made;
    };
    let Ok((objects, temporary)) = files_in(&place.folder) else { return made };
    remove_left(&objects, &temporary);
    let kept = kept.to_string();
    let mut used: u64 = objects.values().map(|files| files.space).sum();
    let mut by_age: Vec<_> = objects.iter().filter(|(digest, _)| **digest != kept).collect();
    by_age.sort_by_key(|(_, files)| files.used);
    let mut oldest_first = by_age.into_iter();
    loop {
        let has_room = match place.size {
            Some(size) => used.saturating_add(wanted) <= size,
            None => has_free_space(&place.folder, wanted),
        };
        if has_room {
            made.is_enough = true;
            return made;
        }
        let Some((_, files)) = oldest_first.next() else { return made };
        // Bytes that a process serves keep their space until it ends.
        if files.map.is_some() && !files.is_served() && files.remove().is_ok() {
            made.objects += 1;
            used -= files.space;
        }
    }
}

fn has_free_space(folder: &Path, wanted: u64) -> bool {
    let Ok(stat) = statvfs(folder) else { return true };
    let unit = stat.fragment_size();
    let (free, all) = (stat.blocks_available() * unit, stat.blocks() * unit);
    free.saturating_sub(wanted) >= (all / FREE_PART).max(FREE_MIN)
}

fn lock(folder: &Path) -> Option<Flock<File>> {
    Flock::lock(File::open(folder).ok()?, FlockArg::LockExclusiveNonblock).ok()
}

/// Removes files that killed processes have left. Returns their space.
fn remove_left(objects: &BTreeMap<String, ObjectFiles>, temporary: &[PathBuf]) -> u64 {
    for path in temporary {
        let modified = std::fs::symlink_metadata(path).and_then(|meta| meta.modified());
        if is_old(modified.ok()) {
            let _ = std::fs::remove_file(path);
        }
    }
    let left = objects.values().filter(|files| files.is_left() && files.remove().is_ok());
    left.map(|files| files.space).sum()
}

/// An object that a disk cache keeps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptObject {
    /// Its URL.
    pub url: String,
    /// Its length in bytes.
    pub len: u64,
    /// Bytes of it that are there.
    pub bytes: u64,
    /// Space that it takes on the disk.
    pub space: u64,
    /// Seconds since it was used.
    pub age: Duration,
}

/// The objects in the cache at `folder`, those used last first. None if there is no such folder.
///
/// # Errors
/// If the folder cannot be read.
pub fn kept_objects(folder: &Path) -> io::Result<Vec<KeptObject>> {
    let mut kept = Vec::new();
    each_object(folder, |files, object| {
        let mut bytes = 0;
        object.each_sum(|block, _| {
            let of_block = object.bytes_of(&(block..block + 1));
            bytes += of_block.end - of_block.start;
        })?;
        kept.push(KeptObject {
            url: object.key().url.clone(),
            len: object.key().len,
            bytes,
            space: files.space,
            age: files.used.and_then(|used| used.elapsed().ok()).unwrap_or_default(),
        });
        Ok(())
    })?;
    kept.sort_by(|a, b| (a.age, &a.url).cmp(&(b.age, &b.url)));
    Ok(kept)
}

/// How many bytes of `ranges`, which are in order, the cache at `folder` has of the object at `url` in
/// `version`. None if it has other versions only.
///
/// # Errors
/// If the folder or the files of the object cannot be read.
pub fn kept_bytes(
    folder: &Path,
    url: &Path,
    version: &Version,
    ranges: &[Range<u64>],
) -> io::Result<u64> {
    let Some(url) = url.to_str() else { return Ok(0) };
    let key = ObjectKey::new(url, version.content_words());
    let there = check_folder(folder)
        .and_then(|()| CachedObject::open_there(&key.map_in(folder), Some(&key)));
    let object = match there {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(0),
        found => found?,
    };
    let (mut bytes, mut rest) = (0, ranges);
    object.each_sum(|block, _| {
        let kept = object.bytes_of(&(block..block + 1));
        let passed = rest.iter().take_while(|range| range.end <= kept.start).count();
        rest = rest.get(passed..).unwrap_or_default();
        let inside = rest.iter().take_while(|range| range.start < kept.end);
        bytes += inside.map(|it| it.end.min(kept.end) - it.start.max(kept.start)).sum::<u64>();
    })?;
    Ok(bytes)
}

/// Calls `act` with each object that can be opened. Errors of one object end nothing.
fn each_object(
    folder: &Path,
    mut act: impl FnMut(&ObjectFiles, &CachedObject) -> io::Result<()>,
) -> io::Result<()> {
    let objects = match check_folder(folder).and_then(|()| files_in(folder)) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        found => found?.0,
    };
    for files in objects.values() {
        let Some(map) = &files.map else { continue };
        let acted = CachedObject::open_there(map, None).and_then(|object| act(files, &object));
        if let Err(e) = acted {
            tracing::debug!("{}: {e}", real_name(map));
        }
    }
    Ok(())
}

/// The outcome of `prune`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pruned {
    /// Objects that were removed.
    pub objects: u64,
    /// Space that is free now, in bytes.
    pub freed: u64,
    /// Space that the rest takes, in bytes.
    pub left: u64,
}

/// Removes objects of the cache at `folder`, the least recently used first, until they take at most
/// `keep` bytes; also files that cannot be used, and such that killed processes have left.
///
/// # Errors
/// If the folder cannot be read, or a file not removed.
pub fn prune(folder: &Path, keep: u64) -> io::Result<Pruned> {
    let (objects, temporary) = match check_folder(folder).and_then(|()| files_in(folder)) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Pruned::default()),
        found => found?,
    };
    prune_listed(&objects, &temporary, keep)
}

/// Prunes what a listing has found. Other processes may remove any of it meanwhile.
fn prune_listed(
    objects: &BTreeMap<String, ObjectFiles>,
    temporary: &[PathBuf],
    keep: u64,
) -> io::Result<Pruned> {
    let mut pruned = Pruned::default();
    let all: u64 = objects.values().map(|files| files.space).sum();
    pruned.freed = remove_left(objects, temporary);
    let mut rest: Vec<&ObjectFiles> = Vec::new();
    for files in objects.values() {
        let Some(map) = &files.map else { continue };
        match CachedObject::open_there(map, None) {
            // Another process has removed it.
            Err(e) if e.kind() == io::ErrorKind::NotFound => pruned.freed += files.space,
            Err(e) if e.kind() == io::ErrorKind::InvalidData => {
                files.remove()?;
                pruned.freed += files.space;
                pruned.objects += 1;
            }
            Err(e) => return Err(e),
            Ok(object) => {
                let other = files.data.iter().filter(|path| *path != object.data_path());
                for path in other.filter(|path| is_old(modified(path))) {
                    DataFile::open(path).remove()?;
                }
                rest.push(files);
            }
        }
    }
    rest.sort_by_key(|files| files.used);
    for files in rest {
        if all - pruned.freed <= keep {
            break;
        }
        files.remove()?;
        pruned.freed += files.space;
        pruned.objects += 1;
    }
    pruned.left = all - pruned.freed;
    Ok(pruned)
}

fn modified(path: &Path) -> Option<SystemTime> {
    std::fs::symlink_metadata(path).ok()?.modified().ok()
}

/// The outcome of `verify` for one object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerifiedObject {
    /// Its URL.
    pub url: String,
    /// Bytes of it that are there and have their checksums.
    pub right: u64,
    /// Blocks that had not their checksum. They count no more.
    pub damaged: u64,
}

/// Compares all blocks in the cache at `folder` with their checksums, and calls `each` with the outcome
/// of each object.
///
/// # Errors
/// If the folder cannot be read.
pub fn verify(folder: &Path, mut each: impl FnMut(VerifiedObject)) -> io::Result<()> {
    let mut memory = PieceMemory::new();
    each_object(folder, |_, object| {
        let mut verified = VerifiedObject { url: object.key().url.clone(), right: 0, damaged: 0 };
        for piece in pieces_of(&object.blocks()) {
            if object.sums(&piece, BlockReach::Disk)?.iter().all(|sum| *sum == [0; 16]) {
                continue;
            }
            let len_of = |run: &Range<u64>| {
                let bytes = object.bytes_of(run);
                bytes.end - bytes.start
            };
            let (start, len) = (object.bytes_of(&piece).start, len_of(&piece));
            let taken = object.take(&piece, start, memory.bytes(len), BlockReach::Disk);
            verified.right += len - taken.missing.iter().map(len_of).sum::<u64>();
            verified.damaged += taken.damaged;
        }
        each(verified);
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::disk_cache::object::ObjectKey;

    /// A folder with two objects, and its listing.
    fn listed() -> (tempfile::TempDir, BTreeMap<String, ObjectFiles>) {
        let folder = tempfile::tempdir().unwrap();
        for number in 0..2 {
            let key = ObjectKey::new("s3://b/object", [1, number, 1 << 20, 0, 0]);
            CachedObject::open(folder.path(), &key).unwrap();
        }
        let (objects, _) = files_in(folder.path()).unwrap();
        (folder, objects)
    }

    #[test]
    fn files_that_another_process_removes_meanwhile_are_no_error() {
        let (folder, objects) = listed();
        assert_eq!(objects.len(), 2);
        for files in objects.values() {
            files.remove().unwrap();
            files.remove().unwrap();
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        let (folder, objects) = listed();
        let maps: Vec<_> = objects.values().filter_map(|files| files.map.as_ref()).collect();
        std::fs::remove_file(maps[0]).unwrap();
        assert_eq!(prune_listed(&objects, &[], 0).unwrap().objects, 1);
        assert!(!maps[1].exists());
        drop(folder);
    }
}
