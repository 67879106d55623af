//! The folder in which indexes, checksums and records of views are stored.
//!
//! Its files are not part of a checkpoint. If a file cannot be read, it is treated as missing. If a
//! file cannot be written, it is left out. Files appear by a rename, so each is complete or
//! missing, even if several processes write it at the same time. A file is read only if no user
//! other than this user and root could have written it. No file is written where other users could
//! replace it. Only files with a name that tensorfs gives are removed.

use std::fs::{DirBuilder, File, Metadata, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::libc;

use crate::atomic_file::TemporaryFile;
use crate::error::expect_local_path;
use crate::hash::Digest;

use super::frame::FILE_LEN_MAX;

/// Maximum number of files, and of their bytes. If there are more, the oldest files are removed: first records of
/// views, then indexes, then checksums.
const FILES_MAX: usize = 4096;
const BYTES_MAX: u64 = 4 << 30;

/// Up to this number of files, the store does not add up their sizes.
const FILES_UNCOUNTED: usize = 64;

/// Extensions of files in the store, apart from records of views.
const EXTENSIONS: [&str; 2] = ["index", "sums"];

/// Extension of records of views. The name of such a record begins with the name of its index.
pub(super) const VIEW_EXTENSION: &str = "view";

/// Suffix of files that are being written.
const TEMPORARY: &str = ".tmp";

/// Age at which a temporary file counts as abandoned by its writer.
const TEMPORARY_AGE: Duration = Duration::from_secs(3600);

/// Maximum time for which an update waits for another update, and the time between its attempts.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);
const LOCK_INTERVAL: Duration = Duration::from_millis(10);

/// Environment variable with the path of the folder.
pub const STORE_VARIABLE: &str = "TENSORFS_INDEX_DIR";

/// A folder of indexes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IndexStore {
    folder: PathBuf,
}

impl IndexStore {
    /// The store in `folder`. The first write creates the folder.
    pub fn new(folder: PathBuf) -> IndexStore {
        IndexStore { folder }
    }

    /// The store of this user. Its folder is the first of these that applies:
    /// `$TENSORFS_INDEX_DIR`, `$XDG_CACHE_HOME/tensorfs`, `/var/cache/tensorfs` for root,
    /// `~/.cache/tensorfs`. `None` if none of them applies, or if the value of the variable is
    /// `none`.
    pub fn of_user() -> Option<IndexStore> {
        let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        if let Some(folder) = variable(STORE_VARIABLE) {
            let folder = (folder != "none").then_some(folder)?;
            if let Err(why) = expect_local_path(folder.as_ref()) {
                tracing::warn!("{STORE_VARIABLE}: {why}; no index is kept");
                return None;
            }
            // A daemon changes its working directory, so the path must be absolute.
            return std::path::absolute(folder).ok().map(IndexStore::new);
        }
        folder_of_user().map(IndexStore::new)
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Path of the file `name`. The file may be missing.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Reads the file `name`.
    ///
    /// # Errors
    /// The reason why the file is not used. `NotFound` if it does not exist.
    pub fn read(&self, name: &str) -> io::Result<Vec<u8>> {
        check_folder(&self.folder)?;
        let mut file = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC)
            .open(self.path(name))?;
        let meta = file.metadata()?;
        if !meta.is_file() || !is_private(&meta) {
            return Err(io::Error::other("others may have written it"));
        }
        if meta.len() > FILE_LEN_MAX {
            return Err(io::Error::other("it is too long"));
        }
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(meta.len() as usize)?;
        file.read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    /// Writes the file `name`.
    ///
    /// # Errors
    /// The reason why the file was not written. No incomplete file is left.
    pub fn write(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        self.put(name, bytes, false)
    }

    /// Replaces the file `name` by the result of `change`. There is no other copy of the data of
    /// this file. So only one process updates at a time, and a crash leaves the old file or the new
    /// file. If `change` returns `None`, the file is not changed.
    ///
    /// # Errors
    /// The reason why the file was not written. No incomplete file is left.
    pub fn update(
        &self,
        name: &str,
        change: impl FnOnce(io::Result<Vec<u8>>) -> Option<Vec<u8>>,
    ) -> io::Result<()> {
        self.make_folder()?;
        let _one_at_a_time = self.lock();
        change(self.read(name)).map_or(Ok(()), |bytes| self.put(name, &bytes, true))
    }

    /// Locks the folder against other updates. `None` if the lock is not free in time. The update then continues
    /// without the lock, and at worst one of two updates is lost.
    fn lock(&self) -> Option<Flock<File>> {
        let started = Instant::now();
        let mut folder = File::open(&self.folder).ok()?;
        loop {
            match Flock::lock(folder, FlockArg::LockExclusiveNonblock) {
                Ok(lock) => return Some(lock),
                Err((same, Errno::EWOULDBLOCK)) if started.elapsed() < LOCK_TIMEOUT => {
                    folder = same;
                    std::thread::sleep(LOCK_INTERVAL);
                }
                Err(_) => return None,
            }
        }
    }

    fn make_folder(&self) -> io::Result<()> {
        DirBuilder::new().recursive(true).mode(0o700).create(&self.folder)?;
        check_folder(&self.folder)
    }

    /// Writes a file. If `synced` is set, its bytes are on the disk before the file gets its name.
    fn put(&self, name: &str, bytes: &[u8], synced: bool) -> io::Result<()> {
        self.make_folder()?;
        let mut options = OpenOptions::new();
        options.write(true).create_new(true).mode(0o600);
        let temporary = self.path(&temporary_name(name));
        let written = TemporaryFile::create(temporary, &options).and_then(|mut temporary| {
            temporary.file().write_all(bytes)?;
            if synced {
                temporary.file().sync_all()?;
            }
            temporary.publish(&self.path(name), true)
        });
        self.make_room();
        written
    }

    /// Removes the file `name`. Returns whether it existed.
    pub fn remove(&self, name: &str) -> bool {
        std::fs::remove_file(self.path(name)).is_ok()
    }

    /// Removes the records of views that belong to the index file `name`.
    pub fn remove_views(&self, name: &str) {
        let stem = name.split('.').next().unwrap_or_default();
        let Ok(entries) = std::fs::read_dir(&self.folder) else { return };
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        for name in names.filter(|name| is_view(name) && name.starts_with(stem)) {
            let _ = std::fs::remove_file(self.path(&name));
        }
    }

    /// Removes the oldest files if there are too many. Also removes temporary files of writers that
    /// were killed.
    fn make_room(&self) {
        let Ok(entries) = std::fs::read_dir(&self.folder) else { return };
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let (temporary, kept): (Vec<String>, Vec<String>) =
            names.filter(|name| is_ours(name)).partition(|name| name.ends_with(TEMPORARY));
        for path in temporary.iter().map(|name| self.path(name)) {
            let meta = std::fs::symlink_metadata(&path);
            let old =
                |modified: SystemTime| modified.elapsed().is_ok_and(|age| age > TEMPORARY_AGE);
            if meta.and_then(|meta| meta.modified()).is_ok_and(old) {
                let _ = std::fs::remove_file(path);
            }
        }
        if kept.len() > FILES_UNCOUNTED {
            self.remove_oldest(&kept);
        }
    }

    fn remove_oldest(&self, names: &[String]) {
        let file = |name: &String| {
            let path = self.path(name);
            let meta = std::fs::symlink_metadata(&path).ok()?;
            // Records of views can be made again from an index, and an index from the headers.
            // Checksums cannot be made again if the bytes have changed, so they are removed last.
            let turn = if is_view(name) { 0 } else { 1 + u8::from(name.ends_with(".sums")) };
            Some((turn, meta.modified().ok()?, meta.len(), path))
        };
        let mut files: Vec<(u8, SystemTime, u64, PathBuf)> =
            names.iter().filter_map(file).collect();
        files.sort_unstable();
        let (mut count, mut bytes) =
            (files.len(), files.iter().map(|(_, _, len, _)| len).sum::<u64>());
        for (_, _, len, path) in files {
            if count <= FILES_MAX && bytes <= BYTES_MAX {
                break;
            }
            let _ = std::fs::remove_file(path);
            count -= 1;
            bytes -= len;
        }
    }
}

/// The file name for `parts`. A part must not have a zero byte, because zero bytes separate the
/// parts.
pub(crate) fn file_name(parts: &[&[u8]], extension: &str) -> String {
    format!("{}.{extension}", Digest::of(&parts.join(&0)))
}

/// The folder of tensorfs among the caches of this user. It is the first of these that applies:
/// `$XDG_CACHE_HOME/tensorfs`, `/var/cache/tensorfs` for root, `~/.cache/tensorfs`. `None` if none
/// of them applies.
pub fn folder_of_user() -> Option<PathBuf> {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    // The XDG specification requires that relative paths are ignored.
    let absolute = |name| variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
    if let Some(cache) = absolute("XDG_CACHE_HOME") {
        return Some(cache.join("tensorfs"));
    }
    if nix::unistd::geteuid().is_root() {
        return Some("/var/cache/tensorfs".into());
    }
    absolute("HOME").map(|home| home.join(".cache/tensorfs"))
}

/// Refuses a folder in which other users could replace files of this user.
///
/// # Errors
/// Other users could replace files, or there is no such folder.
pub(crate) fn check_folder(folder: &Path) -> io::Result<()> {
    let meta = std::fs::metadata(folder)?;
    let sticky = meta.mode() & libc::S_ISVTX != 0;
    if !is_trusted(meta.uid()) || (others_write(meta.mode()) && !sticky) {
        return Err(io::Error::other("others may write to its folder"));
    }
    Ok(())
}

/// Whether no user other than this user and root could have written the file.
pub(crate) fn is_private(meta: &Metadata) -> bool {
    is_trusted(meta.uid()) && !others_write(meta.mode())
}

/// Whether files of the user `uid` are trusted: it is this user or root.
fn is_trusted(uid: u32) -> bool {
    uid == nix::unistd::geteuid().as_raw() || uid == 0
}

fn others_write(mode: u32) -> bool {
    mode & 0o022 != 0
}

/// Whether a file of this name was written by tensorfs. Such a name is a digest with an extension,
/// or two digests with the extension of records of views, or the name that `temporary_name` makes
/// of either. The folder may have other files.
fn is_ours(name: &str) -> bool {
    let kept = match name.strip_suffix(TEMPORARY) {
        None => Some(name),
        Some(stem) => stem.strip_prefix('.').and_then(|stem| stem.split('-').next()),
    };
    let parts = kept.and_then(|kept| kept.split_once('.'));
    let is_index = parts
        .is_some_and(|(digest, extension)| is_digest(digest) && EXTENSIONS.contains(&extension));
    is_index || kept.is_some_and(is_view)
}

/// Whether the name is that of a record of a view.
fn is_view(name: &str) -> bool {
    let mut parts = name.split('.');
    let digests = parts.next().is_some_and(is_digest) && parts.next().is_some_and(is_digest);
    digests && parts.next() == Some(VIEW_EXTENSION) && parts.next().is_none()
}

fn is_digest(word: &str) -> bool {
    let hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    word.len() == 32 && word.bytes().all(hex)
}

/// A name for a temporary file that no other writer uses.
fn temporary_name(name: &str) -> String {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let nanos = std::time::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_nanos());
    format!(".{name}-{}-{number}-{nanos}{TEMPORARY}", std::process::id())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    const NAME: &str = "0123456789abcdef0123456789abcdef.index";

    fn store() -> (tempfile::TempDir, IndexStore) {
        let folder = tempfile::tempdir().unwrap();
        let store = IndexStore::new(folder.path().join("a/b"));
        (folder, store)
    }

    fn chmod(path: &Path, mode: u32) {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }

    fn names(store: &IndexStore) -> Vec<String> {
        let entries = std::fs::read_dir(store.folder()).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn what_is_written_is_read_back_and_only_its_owner_may_read_it() {
        let (_home, store) = store();
        store.write(NAME, b"one").unwrap();
        store.write(NAME, b"two").unwrap();
        assert_eq!(store.read(NAME).unwrap(), b"two");
        assert_eq!(names(&store), [NAME]);
        let mode = |path: &Path| std::fs::metadata(path).unwrap().mode() & 0o777;
        assert_eq!((mode(store.folder()), mode(&store.path(NAME))), (0o700, 0o600));
        assert!(store.remove(NAME) && !store.remove(NAME));
        assert_eq!(store.read(NAME).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn what_others_could_have_written_is_not_read() {
        let (_home, store) = store();
        store.write(NAME, b"good").unwrap();
        for mode in [0o620, 0o602] {
            chmod(&store.path(NAME), mode);
            assert!(store.read(NAME).is_err(), "a file of mode {mode:o}");
        }
        chmod(&store.path(NAME), 0o644);
        for (mode, good) in [(0o770, false), (0o777, false), (0o1777, true), (0o755, true)] {
            chmod(store.folder(), mode);
            assert_eq!(store.read(NAME).is_ok(), good, "a folder of mode {mode:o}");
            assert_eq!(store.write(NAME, b"good").is_ok(), good, "a folder of mode {mode:o}");
            assert_eq!(names(&store), [NAME]);
        }
    }

    #[test]
    fn what_another_user_owns_is_neither_read_nor_written() {
        if !nix::unistd::geteuid().is_root() {
            return println!("needs root");
        }
        let (_home, store) = store();
        store.write(NAME, b"good").unwrap();
        std::os::unix::fs::chown(store.path(NAME), Some(65534), None).unwrap();
        assert!(store.read(NAME).is_err());
        store.write(NAME, b"new").unwrap();
        assert_eq!(store.read(NAME).unwrap(), b"new");
        std::os::unix::fs::chown(store.folder(), Some(65534), None).unwrap();
        assert!(store.read(NAME).is_err() && store.write(NAME, b"newer").is_err());
        assert_eq!(std::fs::read(store.path(NAME)).unwrap(), b"new");
    }

    #[test]
    fn a_link_in_the_place_of_a_file_is_neither_followed_nor_written_through() {
        let (home, store) = store();
        let target = home.path().join("target");
        std::fs::write(&target, b"other").unwrap();
        std::fs::create_dir_all(store.folder()).unwrap();
        symlink(&target, store.path(NAME)).unwrap();
        assert!(store.read(NAME).is_err());
        store.write(NAME, b"ours").unwrap();
        assert_eq!(std::fs::read(&target).unwrap(), b"other");
        assert_eq!(store.read(NAME).unwrap(), b"ours");
    }

    #[test]
    fn what_is_no_regular_file_is_not_waited_for() {
        let (_home, store) = store();
        std::fs::create_dir_all(store.folder()).unwrap();
        nix::unistd::mkfifo(&store.path(NAME), nix::sys::stat::Mode::from_bits_retain(0o600))
            .unwrap();
        assert!(store.read(NAME).is_err());
    }

    #[test]
    fn only_files_with_names_of_ours_make_room() {
        let (_home, store) = store();
        std::fs::create_dir_all(store.folder()).unwrap();
        let before = SystemTime::now() - 2 * TEMPORARY_AGE;
        let make = |name: &str| {
            let file = File::create(store.path(name)).unwrap();
            file.set_modified(before).unwrap();
        };
        let others = ["book.index", "work.tmp", ".work.index-1-2-3.tmp", "0123.index"];
        others.iter().for_each(|name| make(name));
        for number in 0..FILES_MAX + 10 {
            make(&format!("{number:032x}.{}", EXTENSIONS[number % 2]));
        }
        make(&temporary_name(NAME));
        File::create(store.path(&temporary_name(NAME))).unwrap();
        store.write(NAME, b"new").unwrap();
        let left = names(&store);
        let ours = left.iter().filter(|name| is_ours(name) && !name.ends_with(TEMPORARY)).count();
        assert_eq!(ours, FILES_MAX);
        // A new temporary file is kept, because its writer may still be running.
        assert_eq!(left.len(), FILES_MAX + others.len() + 1);
        assert!(others.iter().all(|name| store.path(name).exists()));
        assert_eq!(store.read(NAME).unwrap(), b"new");
    }

    #[test]
    fn a_name_is_ours_only_in_full() {
        assert!(is_ours(NAME) && is_ours(&temporary_name(NAME)));
        let view = IndexStore::view_name(NAME, Digest::of(b"view"));
        assert!(is_ours(&view) && is_ours(&temporary_name(&view)) && is_view(&view));
        let stem = view.strip_suffix(".view").unwrap();
        for name in
            [stem, &view[1..], &view[33..], &format!("{view}.view"), &format!("{stem}.sums")]
        {
            assert!(!is_ours(name), "{name}");
        }
        let upper = NAME.to_uppercase();
        for name in ["", ".tmp", "..tmp", "a.index", &upper, &NAME[1..], &format!("{NAME}.x")] {
            assert!(!is_ours(name), "{name}");
        }
    }

    #[test]
    fn updates_at_the_same_time_lose_nothing() {
        let (_home, store) = store();
        std::thread::scope(|scope| {
            for number in 0..16u8 {
                let store = &store;
                scope.spawn(move || {
                    let add = |before: io::Result<Vec<u8>>| {
                        let mut bytes = before.unwrap_or_default();
                        bytes.push(number);
                        Some(bytes)
                    };
                    store.update(NAME, add).unwrap();
                });
            }
        });
        let mut bytes = store.read(NAME).unwrap();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..16).collect::<Vec<u8>>());
        assert_eq!(names(&store), [NAME]);
    }

    #[test]
    fn records_of_views_make_way_before_indexes() {
        let (_home, store) = store();
        store.write(NAME, b"kept").unwrap();
        let before = SystemTime::now() - 2 * TEMPORARY_AGE;
        File::options().write(true).open(store.path(NAME)).unwrap().set_modified(before).unwrap();
        for number in 0..FILES_MAX {
            let name = IndexStore::view_name(NAME, Digest::of(&number.to_le_bytes()));
            std::fs::write(store.path(&name), b"").unwrap();
        }
        let other = "f".repeat(32) + ".index";
        store.write(&other, b"").unwrap();
        assert_eq!(names(&store).len(), FILES_MAX);
        assert!(store.read(NAME).is_ok() && store.read(&other).is_ok());
        store.remove_views(NAME);
        assert_eq!(names(&store), [NAME.to_owned(), other]);
    }

    #[test]
    fn checksums_make_way_after_indexes() {
        let (_home, store) = store();
        let sums = format!("{}.sums", "0".repeat(32));
        store.write(&sums, b"kept").unwrap();
        for number in 0..FILES_MAX {
            std::fs::write(store.path(&format!("{number:032x}.index")), b"").unwrap();
        }
        store.write(NAME, b"").unwrap();
        assert_eq!(names(&store).len(), FILES_MAX);
        assert_eq!(store.read(&sums).unwrap(), b"kept");
    }
}
