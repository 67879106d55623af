//! The choice for a source that lies on another mount of tensorfs: the new mount reads either that
//! mount or the source behind it.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tensorfs::internal::error::shown_path;
use tensorfs::internal::mount_origin::{is_on_mount, resolve_mount};
use tensorfs::internal::open_options::OpenOptions;
use tensorfs::internal::source::read_option_file;
use tensorfs::internal::store::hub_cache;

use super::stalled::unless_stalled;
use crate::options::Options;

/// The path that a mount reads. The process that makes the mount chooses it. Processes that take
/// over the mount use the same path, because the other mount may be gone by then.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) enum ReadPath {
    /// The source, which is not on a mount of tensorfs.
    Source,
    /// The source, which is on a mount of tensorfs.
    Mount,
    /// The source behind another mount of tensorfs, and the JSON of the options that open it.
    Behind(OsString, Value),
    /// The snapshot of a model in the hub cache whose name was given as the source, and whether the
    /// snapshot is on a mount of tensorfs. The path is stored because another download may assign a
    /// newer snapshot to the name.
    Snapshot(OsString, bool),
}

impl ReadPath {
    /// Chooses what a new mount of `source` reads. Also returns the chosen path and the options
    /// that open it. `given` is the source as the user gave it: a path, or the name of a model in
    /// the hub cache.
    pub(super) fn find(
        given: &Path,
        source: &Path,
        options: &Options,
    ) -> (ReadPath, (PathBuf, OpenOptions)) {
        let behind = resolve_mount(source);
        match behind.and_then(|origin| origin.open_with(&options.open, options.has_view)) {
            Some((path, open)) => {
                (ReadPath::Behind(path.clone().into(), open.to_json()), (path, open))
            }
            None => {
                let read = match is_on_mount(source) {
                    on_mount if source != given => ReadPath::Snapshot(source.into(), on_mount),
                    true => ReadPath::Mount,
                    false => ReadPath::Source,
                };
                (read, (source.to_owned(), options.open.clone()))
            }
        }
    }

    /// The path that a mount of `source` reads. This is the path of `before`, if there is one.
    /// Otherwise it is `source` itself, or the snapshot of the model that `source` names.
    ///
    /// # Errors
    /// The outer error means that the file system did not answer within `limit`. The inner error
    /// means that `source` names no model.
    pub(super) fn meant(
        before: Option<&ReadPath>,
        source: &Path,
        limit: Option<Duration>,
    ) -> Result<tensorfs::Result<PathBuf>, String> {
        let source = source.to_owned();
        match before {
            Some(read) => Ok(Ok(read.path(&source).to_owned())),
            None if hub_cache::has_form(&source) => {
                unless_stalled(limit, move || hub_cache::resolve(&source))
            }
            None => Ok(Ok(source)),
        }
    }

    /// The path that this choice reads for `source`.
    pub(super) fn path<'a>(&'a self, source: &'a Path) -> &'a Path {
        match self {
            ReadPath::Source | ReadPath::Mount => source,
            ReadPath::Behind(path, _) | ReadPath::Snapshot(path, _) => Path::new(path),
        }
    }

    /// The path and the options that open what a mount of `source` reads.
    ///
    /// # Errors
    /// One line, if the mount of tensorfs at `source` is gone or if a file of the views has changed.
    pub(super) fn open(
        &self,
        source: &Path,
        options: &Options,
    ) -> Result<(PathBuf, OpenOptions), String> {
        let shown = || shown_path(source);
        let open = match self {
            ReadPath::Source | ReadPath::Snapshot(_, false) => options.open.clone(),
            ReadPath::Mount | ReadPath::Snapshot(_, true) if is_on_mount(self.path(source)) => {
                options.open.clone()
            }
            ReadPath::Mount | ReadPath::Snapshot(..) => {
                return Err(format!("{}: the mount that it lay on is gone", shown()));
            }
            ReadPath::Behind(_, json) => {
                let open =
                    OpenOptions::from_json(json, &mut read_option_file).ok_or_else(|| {
                        format!("{}: a file of its views has changed since the mount", shown())
                    })?;
                let OpenOptions { expect_shards, reference, index, secret, .. } =
                    options.open.clone();
                let expect_shards = expect_shards.or(open.expect_shards);
                OpenOptions { expect_shards, reference, index, secret, ..open }
            }
        };
        Ok((self.path(source).to_owned(), open))
    }
}
