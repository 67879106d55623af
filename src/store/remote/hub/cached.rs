//! Files that the hub cache of this user has already.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use super::super::state::ObjectState;
use super::super::url::escaped_key;
use super::{GIT_DIGITS, HubAccess, HubFile, HubTree, SHA256_DIGITS, is_hash};
use crate::error::shown_path;
use crate::store::hub_cache::read_ref;

/// Maximum depth of the folders in a snapshot.
const DEPTH_MAX: usize = 16;

/// Fills `buf` with the bytes at `offset` of `file`, if the cache has a blob of its hash and length. Symbolic
/// links are followed, since several repositories may share one blob.
pub(super) fn read(hub: &HubAccess, file: &HubFile, offset: u64, buf: &mut [u8]) -> bool {
    let tag = &file.state.tag;
    let path = match (&file.here, &hub.cache) {
        (Some(path), _) => path.clone(),
        (None, Some(cache)) if is_hash(tag, GIT_DIGITS) || is_hash(tag, SHA256_DIGITS) => {
            cache.join(hub.repository.folder()).join("blobs").join(tag)
        }
        _ => return false,
    };
    let Ok(blob) = File::open(path) else { return false };
    let is_it = blob.metadata().is_ok_and(|meta| meta.is_file() && meta.len() == file.state.len);
    is_it && blob.read_exact_at(buf, offset).is_ok()
}

/// The files of the snapshot of the repository in the hub cache. `offline` is the variable that forbids
/// requests to the hub.
///
/// # Errors
/// `NotFound` if the cache has no snapshot.
pub(super) fn tree_of(
    hub: &HubAccess,
    offline: &str,
    pinned: Option<String>,
) -> io::Result<HubTree> {
    let missing = |why: String| {
        Err(io::Error::new(io::ErrorKind::NotFound, format!("{offline} is set, and {why}")))
    };
    let Some(cache) = &hub.cache else { return missing("there is no hub cache".to_owned()) };
    let folder = cache.join(hub.repository.folder());
    let revision = hub.repository.revision();
    let of_name = || read_ref(&folder.join("refs").join(revision));
    let of_hash = || Some(revision.to_owned()).filter(|name| is_hash(name, GIT_DIGITS));
    let commit = pinned.or_else(of_name).or_else(of_hash);
    let snapshot = commit.as_ref().map(|commit| folder.join("snapshots").join(commit));
    let (Some(commit), Some(snapshot)) = (commit, snapshot.filter(|folder| folder.is_dir())) else {
        let (id, cache) = (hub.repository.id(), shown_path(cache));
        return missing(format!("the hub cache {cache} has no snapshot {revision:?} of {id}"));
    };
    let mut files = HashMap::new();
    collect(&snapshot, "", DEPTH_MAX, &mut files)?;
    Ok(HubTree { commit, files })
}

/// Adds all files below `folder` to `files`. Their names get the prefix `prefix`.
fn collect(
    folder: &Path,
    prefix: &str,
    depth: usize,
    files: &mut HashMap<String, HubFile>,
) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let Ok(name) = entry.file_name().into_string() else { continue };
        let (path, key) = (entry.path(), format!("{prefix}{name}"));
        // The link of a removed blob leads nowhere, so the file is left out.
        let Ok(meta) = fs::metadata(&path) else { continue };
        if meta.is_dir() && !entry.file_type()?.is_symlink() && depth > 0 {
            collect(&path, &format!("{key}/"), depth - 1, files)?;
        } else if meta.is_file() {
            let blob = blob_name(&path);
            let sha256 = blob.clone().filter(|name| is_hash(name, SHA256_DIGITS));
            let tag = blob.unwrap_or_else(|| format!("{}-{}", meta.ino(), meta.mtime()));
            let state = ObjectState::new(meta.len(), &tag, Some(meta.mtime()));
            let here = Some(path);
            let file = HubFile { here, ..HubFile::new(key, state, sha256) };
            files.insert(format!("/{}", escaped_key(&file.key)), file);
        }
    }
    Ok(())
}

/// The hash in the name of the blob that the link at `path` leads to.
fn blob_name(path: &Path) -> Option<String> {
    let target: PathBuf = fs::read_link(path).ok()?;
    let name = target.file_name()?.to_str()?;
    (is_hash(name, GIT_DIGITS) || is_hash(name, SHA256_DIGITS)).then(|| name.to_owned())
}
