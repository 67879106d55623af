//! The folder of a disk cache: whether it can be used, the files in it, and their removal.
//!
//! Only files whose names have the form that the cache gives them are removed.

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

/// If no size is set, the cache leaves 1 / `FREE_PART` of the file system free, and at least `FREE_MIN` bytes.
const FREE_PART: u64 = 10;
const FREE_MIN: u64 = 1 << 30;

/// Length in bytes of the file that tests whether the file system supports holes (sparse files).
const PROBE_LEN: u64 = 1 << 20;

/// Age from which files that belong to no object are taken for leftovers of a killed process.
const LEFT_AGE: Duration = Duration::from_secs(3600);

const IRREGULAR: &str = "is not a regular file";

/// Whether a folder can be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum FolderUse {
    /// Objects can be read and added.
    Usable,
    /// The objects in the folder can be read. None can be added, for the reason in the string.
    ReadOnly(String),
    /// Nothing in the folder is used, for the reason in the string.
    Unusable(String),
}

/// Creates the folder if it does not exist, and returns whether it can be used.
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

fn device_of(path: &Path) -> Option<u64> {
    std::fs::metadata(path).ok().map(|meta| meta.dev())
}

/// The mount point of the file system of the folder: the uppermost folder above it with the same device.
pub(super) fn mount_point_of(folder: &Path) -> Option<PathBuf> {
    let device = device_of(folder)?;
    let same = folder.ancestors().take_while(|above| device_of(above) == Some(device));
    same.last().map(Path::to_owned)
}

/// Whether a file system is mounted on `point`.
pub(super) fn is_mounted(point: &Path) -> bool {
    point.parent().is_none_or(|above| device_of(point).is_some_and(|d| Some(d) != device_of(above)))
}

/// Whether the file system of the folder supports files with holes.
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
    /// The data file that belongs to the map, and data files that killed processes have left.
    data: Vec<PathBuf>,
    /// Space on the disk that all these files take, in bytes.
    space: u64,
    /// Time of the last use of the object.
    used: Option<SystemTime>,
    /// Time of the last change of any of these files.
    changed: Option<SystemTime>,
}

impl ObjectFiles {
    /// Removes the files. Another process may remove some of them at the same time. A process that has the files open
    /// finds no more blocks in them. The exception is a data file that a process serves as a local file: it keeps its
    /// bytes.
    fn remove(&self) -> io::Result<()> {
        let data: Vec<DataFile<'_>> = self.data.iter().map(|path| DataFile::open(path)).collect();
        self.map.iter().try_for_each(|path| gone_is_fine(std::fs::remove_file(path)))?;
        data.into_iter().try_for_each(DataFile::remove)
    }

    /// Whether a process serves the data file as a local file. Such a file keeps its bytes until that process
    /// ends, even after its name was removed.
    fn is_served(&self) -> bool {
        self.data.iter().any(|path| DataFile::open(path).is_served)
    }

    /// Whether no map belongs to the files, and they are too old to be files that a process is creating now.
    fn is_left(&self) -> bool {
        self.map.is_none() && is_old(self.changed)
    }
}

/// A data file of an object, opened for its removal.
struct DataFile<'a> {
    path: &'a Path,
    /// The file with an exclusive lock, which keeps other processes from beginning to serve it as a local file.
    /// `None` if the lock was not obtained.
    locked: Option<File>,
    is_served: bool,
}

impl DataFile<'_> {
    fn open(path: &Path) -> DataFile<'_> {
        // In a shared folder, another user may have put a symbolic link or a FIFO at this path.
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC;
        let opened = OpenOptions::new().write(true).custom_flags(flags).open(path);
        let is_own = |it: &Metadata| it.is_file() && it.nlink() == 1;
        let own = opened.ok().filter(|file| file.metadata().is_ok_and(|it| is_own(&it)));
        let tried = own.map(|file| (file.try_lock(), file));
        let is_served = matches!(tried, Some((Err(TryLockError::WouldBlock), _)));
        let locked = tried.and_then(|(locked, file)| locked.is_ok().then_some(file));
        DataFile { path, locked, is_served }
    }

    /// Removes the file. If no process serves it as a local file, its space is freed even while a process has it open.
    fn remove(self) -> io::Result<()> {
        // A process that begins to serve the file first locks it and then checks that the name still exists. So
        // the name is unlinked here before the file is truncated.
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

/// The files in the folder.
#[derive(Debug, Default)]
struct FolderFiles {
    /// The files of each object, by the digest of its key.
    objects: BTreeMap<String, ObjectFiles>,
    temporary: Vec<PathBuf>,
    /// Folders, links and special files with names of files of an object. They are neither read nor removed.
    irregular: Vec<PathBuf>,
}

fn files_in(folder: &Path) -> io::Result<FolderFiles> {
    let mut found = FolderFiles::default();
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let Some(name) = entry.file_name().to_str().map(str::to_owned) else { continue };
        let parts: Vec<&str> = name.split('.').collect();
        let (digest, is_map) = match parts.as_slice() {
            [digest, MAP] if is_hex(digest, 32) => (*digest, true),
            [digest, nonce, DATA] if is_hex(digest, 32) && is_hex(nonce, 16) => (*digest, false),
            ["", number, TEMPORARY] if is_hex(number, 16) => {
                found.temporary.push(entry.path());
                continue;
            }
            _ => continue,
        };
        // Another process may have removed the file.
        let Ok(meta) = entry.metadata() else { continue };
        if !meta.is_file() {
            found.irregular.push(entry.path());
            continue;
        }
        let files = found.objects.entry(digest.to_owned()).or_default();
        files.space += meta.blocks() * 512;
        files.changed = files.changed.max(meta.modified().ok());
        if is_map {
            (files.map, files.used) = (Some(entry.path()), meta.modified().ok());
        } else {
            files.data.push(entry.path());
        }
    }
    Ok(found)
}

fn is_hex(word: &str, len: usize) -> bool {
    let hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    word.len() == len && word.bytes().all(hex)
}

/// The outcome of `make_room`.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RoomMade {
    /// Number of objects that were removed.
    pub(super) objects: u64,
    /// Whether there is enough room now.
    pub(super) is_enough: bool,
}

/// Removes objects, the least recently used first, until there is room for `wanted` bytes. The object with the
/// digest `kept` is not removed.
pub(super) fn make_room(place: &DiskCachePlace, kept: Digest, wanted: u64) -> RoomMade {
    let mut made = RoomMade::default();
    let Some(_one_at_a_time) = lock(&place.folder) else {
        // Another process makes room at this moment.
        made.is_enough = true;
        return made;
    };
    let Ok(found) = files_in(&place.folder) else { return made };
    remove_left(&found);
    let objects = &found.objects;
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
        // The removal of a file that a process serves would free no space until that process ends.
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

/// Removes files that killed processes have left. Returns the space in bytes of those that belong to an object.
fn remove_left(found: &FolderFiles) -> u64 {
    for path in &found.temporary {
        let modified = std::fs::symlink_metadata(path).and_then(|meta| meta.modified());
        if is_old(modified.ok()) {
            let _ = std::fs::remove_file(path);
        }
    }
    let left = found.objects.values().filter(|files| files.is_left() && files.remove().is_ok());
    left.map(|files| files.space).sum()
}

/// An object in a disk cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptObject {
    /// URL of the object.
    pub url: String,
    /// Length of the object in bytes.
    pub len: u64,
    /// Number of its bytes that are in the cache.
    pub bytes: u64,
    /// Space in bytes that its files take on the disk.
    pub space: u64,
    /// Time since its last use.
    pub age: Duration,
}

/// The objects in a disk cache.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeptObjects {
    /// The objects that this version of tensorfs can read, the most recently used first.
    pub objects: Vec<KeptObject>,
    /// Number of objects in the file formats of other versions of tensorfs.
    pub of_other_versions: u64,
    /// Space in bytes that their files take on the disk.
    pub space_of_other_versions: u64,
}

/// The objects in the cache at `folder`. Empty if the folder does not exist.
///
/// # Errors
/// If the folder cannot be read.
pub fn kept_objects(folder: &Path) -> io::Result<KeptObjects> {
    let mut kept = KeptObjects::default();
    let unusable = each_object(folder, |files, object| {
        let mut bytes = 0;
        object.each_sum(|block, _| {
            let of_block = object.bytes_of(&(block..block + 1));
            bytes += of_block.end - of_block.start;
        })?;
        kept.objects.push(KeptObject {
            url: object.key().url.clone(),
            len: object.key().len,
            bytes,
            space: files.space,
            age: files.used.and_then(|used| used.elapsed().ok()).unwrap_or_default(),
        });
        Ok(())
    })?;
    for map in unusable {
        if map.is_of_other_version() {
            kept.of_other_versions += 1;
            kept.space_of_other_versions += map.space;
        } else {
            tracing::debug!("{}: {}", real_name(&map.path), map.why);
        }
    }
    kept.objects.sort_by(|a, b| (a.age, &a.url).cmp(&(b.age, &b.url)));
    Ok(kept)
}

/// The number of bytes of `ranges` that the cache at `folder` has of the object at `url` in `version`. `ranges`
/// are in ascending order. The result is 0 if the cache has only other versions.
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

/// A map in a disk cache that cannot be used.
#[derive(Debug)]
pub struct UnusableMap {
    /// Path of the map.
    pub path: PathBuf,
    /// The reason.
    pub why: io::Error,
    /// Space in bytes that the files of the object take on the disk.
    space: u64,
}

impl UnusableMap {
    fn is_of_other_version(&self) -> bool {
        self.why.kind() == io::ErrorKind::Unsupported
    }
}

/// Calls `act` with each object that can be opened. Returns the maps of the others, and of those for which `act` failed.
fn each_object(
    folder: &Path,
    mut act: impl FnMut(&ObjectFiles, &CachedObject) -> io::Result<()>,
) -> io::Result<Vec<UnusableMap>> {
    let FolderFiles { objects, irregular, .. } =
        match check_folder(folder).and_then(|()| files_in(folder)) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            found => found?,
        };
    let why = || io::Error::other(IRREGULAR);
    let unread = irregular.into_iter().map(|path| UnusableMap { path, why: why(), space: 0 });
    let mut unusable: Vec<UnusableMap> = unread.collect();
    for files in objects.values() {
        let Some(map) = &files.map else { continue };
        let acted = CachedObject::open_there(map, None).and_then(|object| act(files, &object));
        // Another process may have removed the object.
        if let Err(why) = acted
            && modified(map).is_some()
        {
            unusable.push(UnusableMap { path: map.clone(), why, space: files.space });
        }
    }
    Ok(unusable)
}

/// The outcome of `prune`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pruned {
    /// Number of objects that were removed.
    pub objects: u64,
    /// Space that was freed, in bytes.
    pub freed: u64,
    /// Space that the remaining objects take, in bytes.
    pub left: u64,
    /// Folders, links and special files with names of files of an object. They were not removed.
    pub irregular: Vec<PathBuf>,
}

/// Removes objects of the cache at `folder`, the least recently used first, until all objects together take at
/// most `keep` bytes. Also removes damaged objects, and files that killed processes have left. Objects of other versions
/// of tensorfs are not damaged.
///
/// # Errors
/// If the folder cannot be read, or a file cannot be removed.
pub fn prune(folder: &Path, keep: u64) -> io::Result<Pruned> {
    let listed = match check_folder(folder).and_then(|()| files_in(folder)) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Pruned::default()),
        found => found?,
    };
    Ok(Pruned { irregular: listed.irregular.clone(), ..prune_listed(&listed, keep)? })
}

/// Prunes the files of a listing. Other processes may remove any of these files meanwhile.
fn prune_listed(listed: &FolderFiles, keep: u64) -> io::Result<Pruned> {
    let mut pruned = Pruned::default();
    let all: u64 = listed.objects.values().map(|files| files.space).sum();
    pruned.freed = remove_left(listed);
    let mut rest: Vec<&ObjectFiles> = Vec::new();
    for files in listed.objects.values() {
        let Some(map) = &files.map else { continue };
        match CachedObject::open_there(map, None) {
            // Another process has removed the object.
            Err(e) if e.kind() == io::ErrorKind::NotFound => pruned.freed += files.space,
            Err(e) if e.kind() == io::ErrorKind::InvalidData => {
                files.remove()?;
                pruned.freed += files.space;
                pruned.objects += 1;
            }
            Err(e) if e.kind() == io::ErrorKind::Unsupported => rest.push(files),
            Err(e) => return Err(e),
            Ok(object) => {
                let other = files.data.iter().filter(|path| **path != object.data_path);
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
    /// URL of the object.
    pub url: String,
    /// Number of its bytes that are in the cache and match their checksums.
    pub right: u64,
    /// Number of blocks that did not match their checksum. They are removed from the map.
    pub damaged: u64,
}

/// Compares all blocks in the cache at `folder` with their checksums, and calls `each` with the outcome of each
/// object. Returns the maps that cannot be read. Objects of other versions of tensorfs are left out.
///
/// # Errors
/// If the folder cannot be read.
pub fn verify(folder: &Path, mut each: impl FnMut(VerifiedObject)) -> io::Result<Vec<UnusableMap>> {
    let mut memory = PieceMemory::new();
    let mut unusable = each_object(folder, |_, object| {
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
    })?;
    unusable.retain(|map| !map.is_of_other_version());
    Ok(unusable)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::disk_cache::object::ObjectKey;

    /// A folder with two objects, and its listing.
    fn listed() -> (tempfile::TempDir, FolderFiles) {
        let folder = tempfile::tempdir().unwrap();
        for number in 0..2 {
            let key = ObjectKey::new("s3://b/object", [1, number, 1 << 20, 0, 0]);
            CachedObject::open(folder.path(), &key).unwrap();
        }
        let found = files_in(folder.path()).unwrap();
        (folder, found)
    }

    #[test]
    fn files_that_another_process_removes_meanwhile_are_no_error() {
        let (folder, found) = listed();
        assert_eq!(found.objects.len(), 2);
        for files in found.objects.values() {
            files.remove().unwrap();
            files.remove().unwrap();
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        let (folder, found) = listed();
        let maps: Vec<_> = found.objects.values().filter_map(|files| files.map.as_ref()).collect();
        std::fs::remove_file(maps[0]).unwrap();
        assert_eq!(prune_listed(&found, 0).unwrap().objects, 1);
        assert!(!maps[1].exists());
        drop(folder);
    }
}
