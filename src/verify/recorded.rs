//! The recorded checksums of a folder.

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::checkpoint::Checkpoint;
use crate::error::{ErrorKind, Result, shown_path};
use crate::hash::Digest;
use crate::index::{IndexStore, SUMS_EXTENSION, ShardSums, Sums, file_name};
use crate::io::{Read, read_all_stored};
use crate::store::Store;
use crate::version::Version;

use super::mismatch::Mismatch;
use super::stored::ShardPlace;

/// Maximum number of chunks of one folder that have checksums. All of them are in memory at the
/// same time.
const PARTS_MAX: usize = 16 << 20;

/// The checksums of a folder that earlier runs have recorded.
#[derive(Clone, Debug)]
pub struct Recorded {
    store: Option<IndexStore>,
    folder: PathBuf,
    sums: Sums,
    /// The reason why the existing file of checksums is not used, if there is one.
    doubt: Option<String>,
}

impl Recorded {
    /// Loads the checksums of `folder` from the store in the folder `store`. Without a store there
    /// are none.
    pub fn load(store: Option<&Path>, folder: &Path) -> Recorded {
        let store = store.map(|folder| IndexStore::new(folder.to_owned()));
        let mut recorded =
            Recorded { store, folder: folder.to_owned(), sums: Sums::default(), doubt: None };
        if let Some(store) = &recorded.store {
            let name = recorded.file_name();
            match store.read(&name).map(|bytes| recorded.decode(&bytes)) {
                Ok(Ok(sums)) => recorded.sums = sums,
                Ok(Err(doubt)) => recorded.doubt = Some(format!("it {doubt}")),
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => recorded.doubt = Some(format!("it cannot be read: {e}")),
            }
        }
        recorded
    }

    /// The folder of the store.
    pub fn store(&self) -> Option<&Path> {
        self.store.as_ref().map(IndexStore::folder)
    }

    /// The checksums of the shard called `name`.
    pub fn of(&self, name: &str) -> Option<&Arc<ShardSums>> {
        self.sums.shard(name)
    }

    /// Refuses a checkpoint if a shard has no checksums here, if its file was replaced or has
    /// another length, or if its header has another checksum. Reads the headers.
    ///
    /// # Errors
    /// The refusal, with advice, or the reason why a header cannot be read.
    pub fn admit(&self, checkpoint: &Checkpoint) -> Result<()> {
        let refused = |kind: ErrorKind, name: &str, message| {
            Err(checkpoint.refused(kind.fault(message).in_file(name)))
        };
        // This buffer holds one chunk at a time.
        let mut bytes = Vec::new();
        for (source, shard) in checkpoint.sources().iter().zip(&checkpoint.source_catalog().shards)
        {
            let now = source.version().lasting();
            let of_file = |known: &&Arc<ShardSums>| {
                !is_another_file(&known.version, &now) && known.version.len == shard.file_len
            };
            let Some(known) = self.of(&shard.name).filter(of_file) else {
                let message = self.how_to(checkpoint);
                return refused(ErrorKind::NotRecorded, &shard.name, message);
            };
            for described in &shard.described {
                for chunk in known.boundaries.chunks_of(described.clone()) {
                    let inside =
                        chunk.range.start.max(described.start)..chunk.range.end.min(described.end);
                    bytes.resize((inside.end - inside.start) as usize, 0);
                    read_all_stored(&mut [Read {
                        source,
                        offset: inside.start,
                        target: &mut bytes,
                    }])?;
                    let found = Digest::of(&bytes);
                    if inside != chunk.range || found != known.digests[chunk.number] {
                        let digests = Some((known.digests[chunk.number], found));
                        let mismatch =
                            Mismatch::new(known, &now, ShardPlace::Header, inside, digests);
                        return Err(checkpoint.refused(mismatch.fault()));
                    }
                }
            }
        }
        Ok(())
    }

    fn how_to(&self, checkpoint: &Checkpoint) -> String {
        let path = shown_path(&checkpoint.path());
        match &self.store {
            Some(store) => format!(
                "no checksums of it as it is now are recorded in {}: run `tensorfs verify \
                 {path}` with the same options first, and then mount with verify=read",
                shown_path(store.folder())
            ),
            None => "there is no folder of checksums: give --index-dir DIR, or set HOME".to_owned(),
        }
    }

    /// The number of shards that have checksums, and the time at which the last of them were
    /// recorded, in seconds since 1970.
    pub fn extent(&self) -> Option<(usize, i64)> {
        let last = self.sums.shards.iter().map(|shard| shard.recorded).max()?;
        Some((self.sums.shards.len(), last))
    }

    /// The path of an existing file of checksums that is not used, and the reason.
    pub fn doubt(&self) -> Option<String> {
        let path = self.store.as_ref()?.path(&self.file_name());
        self.doubt.as_ref().map(|doubt| format!("{}: not used: {doubt}", shown_path(&path)))
    }

    fn file_name(&self) -> String {
        file_name(&[self.folder.as_os_str().as_bytes()], SUMS_EXTENSION)
    }

    fn decode(&self, bytes: &[u8]) -> Result<Sums, &'static str> {
        let sums = Sums::decode(bytes)?;
        let own = sums.folder == self.folder.as_os_str().as_bytes();
        own.then_some(sums).ok_or("is about another folder")
    }

    /// Records `fresh`, and replaces earlier checksums of the same shards. Checksums that other
    /// processes have recorded in the meantime are kept.
    ///
    /// # Errors
    /// The reason why the checksums were not recorded.
    pub fn keep(&self, fresh: Vec<ShardSums>) -> Result<(), String> {
        if fresh.is_empty() {
            return Ok(());
        }
        let none = || "there is no folder for them: give --index-dir DIR, or set HOME".to_owned();
        let store = self.store.as_ref().ok_or_else(none)?;
        let mut refused = None;
        let change = |before: io::Result<Vec<u8>>| {
            let before = before.ok().and_then(|bytes| self.decode(&bytes).ok());
            let folder = self.folder.as_os_str().as_bytes().to_vec();
            let mut sums = before.clone().unwrap_or(Sums { folder, shards: Vec::new() });
            for shard in fresh {
                let there = sums.shard(&shard.name);
                if there == self.of(&shard.name) {
                    sums.put(shard);
                } else if there.is_some_and(|there| there.digests != shard.digests) {
                    refused = Some(format!(
                        "{}: another process has recorded others meanwhile; verify again",
                        shard.name
                    ));
                }
            }
            let folder_store = Store::of(&self.folder);
            let gone = |name: &str| {
                let there = folder_store.version(&self.folder.join(name));
                there.is_err_and(|e| e.kind() == io::ErrorKind::NotFound)
            };
            sums.shards.retain(|shard| !gone(&shard.name));
            let parts: usize = sums.shards.iter().map(|shard| shard.boundaries.chunks_len()).sum();
            let encoded = (parts <= PARTS_MAX).then(|| sums.encode()).flatten();
            if encoded.is_none() {
                refused = Some(format!("checksums of {parts} parts would be too many"));
            }
            encoded.filter(|_| before.as_ref() != Some(&sums))
        };
        let path = shown_path(&store.path(&self.file_name()));
        store.update(&self.file_name(), change).map_err(|e| format!("{path}: {e}"))?;
        refused.map_or(Ok(()), Err)
    }
}

/// Whether the file with the version `before` was replaced or saved again. The sign is a new
/// modification time together with another inode or another length. Without this sign, the bytes
/// are expected to be those of the record.
pub(super) fn is_another_file(before: &Version, now: &Version) -> bool {
    before.modified() != now.modified() && (before.file() != now.file() || before.len != now.len)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::BlockBoundaries;
    use crate::version::tests::version;

    fn sums(folder: &Path, name: &str, digest: u8) -> ShardSums {
        std::fs::write(folder.join(name), b"").unwrap();
        let version = version(1, 9, 5, 5);
        let boundaries = Arc::new(BlockBoundaries::new([9]).unwrap());
        let digests = vec![Digest([digest; 16])];
        ShardSums { name: name.to_owned(), version, recorded: 0, boundaries, digests }
    }

    #[test]
    fn what_is_recorded_meanwhile_by_others_stays() {
        let temporary = tempfile::tempdir().unwrap();
        let (folder, store) = (temporary.path().join("a"), temporary.path().join("store"));
        std::fs::create_dir(&folder).unwrap();
        let load = || Recorded::load(Some(&store), &folder);
        let (first, second) = (load(), load());
        first.keep(vec![sums(&folder, "a", 1), sums(&folder, "b", 2)]).unwrap();
        // An equal record is no conflict, and a different record is one. A shard without a record
        // is recorded.
        second.keep(vec![sums(&folder, "b", 2), sums(&folder, "c", 3)]).unwrap();
        assert!(second.keep(vec![sums(&folder, "a", 9)]).unwrap_err().contains("another process"));
        let digest = |name: &str| load().of(name).unwrap().digests[0].0[0];
        assert_eq!(["a", "b", "c"].map(digest), [1, 2, 3]);
        load().keep(vec![sums(&folder, "a", 9)]).unwrap();
        assert_eq!(["a", "b", "c"].map(digest), [9, 2, 3]);
        // Records of deleted files are removed at the next change.
        std::fs::remove_file(folder.join("c")).unwrap();
        load().keep(vec![sums(&folder, "d", 4)]).unwrap();
        assert!(load().of("c").is_none() && load().of("d").is_some());
    }

    #[test]
    fn a_damaged_file_is_told_and_replaced() {
        let temporary = tempfile::tempdir().unwrap();
        let (folder, store) = (temporary.path().join("a"), temporary.path().join("store"));
        std::fs::create_dir(&folder).unwrap();
        let load = || Recorded::load(Some(&store), &folder);
        load().keep(vec![sums(&folder, "a", 1)]).unwrap();
        let path = store.join(load().file_name());
        let mut bytes = std::fs::read(&path).unwrap();
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        let damaged = load();
        assert!(damaged.of("a").is_none());
        assert!(damaged.doubt().unwrap().contains("does not match its checksum"));
        damaged.keep(vec![sums(&folder, "a", 2)]).unwrap();
        assert!(load().doubt().is_none() && load().of("a").is_some());
    }

    #[test]
    fn without_a_store_nothing_is_kept_and_nothing_fails_but_that() {
        let recorded = Recorded::load(None, Path::new("/nowhere"));
        assert!(recorded.doubt().is_none() && recorded.of("a").is_none());
        recorded.keep(Vec::new()).unwrap();
        let temporary = tempfile::tempdir().unwrap();
        assert!(recorded.keep(vec![sums(temporary.path(), "a", 1)]).is_err());
    }

    #[test]
    fn a_file_counts_as_saved_anew_by_time_and_inode_or_length() {
        let before = version(1, 9, 5, 5);
        let now = |ino, len, modified| version(ino, len, modified, 8);
        assert!(is_another_file(&before, &now(2, 9, 6)) && is_another_file(&before, &now(1, 8, 6)));
        for same in [now(1, 9, 5), now(2, 9, 5), now(1, 9, 6), now(1, 8, 5)] {
            assert!(!is_another_file(&before, &same));
        }
    }
}
