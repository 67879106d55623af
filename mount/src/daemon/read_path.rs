//! The choice of a mount whose source lies on another mount of tensorfs: that mount, or the source
//! behind it.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tensorfs::internal::error::shown_path;
use tensorfs::internal::mount_origin::{is_on_mount, resolve_mount};
use tensorfs::internal::open_options::OpenOptions;
use tensorfs::internal::source::read_option_file;

use crate::options::Options;

/// The path that a mount reads. The process that makes the mount chooses it, and those that take the
/// mount over keep to it: the other mount may be gone by then.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) enum ReadPath {
    /// The source, which lies on no mount of tensorfs.
    Source,
    /// The source, which lies on such a mount.
    Mount,
    /// The source behind that mount, and the JSON of the options that open it.
    Behind(OsString, Value),
}

impl ReadPath {
    /// The choice for a new mount of `source`, and the path and the options that open it.
    pub(super) fn find(source: &Path, options: &Options) -> (ReadPath, (PathBuf, OpenOptions)) {
        let behind = resolve_mount(source);
        match behind.and_then(|origin| origin.open_with(&options.open, options.has_view)) {
            Some((path, open)) => {
                (ReadPath::Behind(path.clone().into(), open.to_json()), (path, open))
            }
            None => {
                let read = if is_on_mount(source) { ReadPath::Mount } else { ReadPath::Source };
                (read, (source.to_owned(), options.open.clone()))
            }
        }
    }

    /// The path that it reads for `source`.
    pub(super) fn path<'a>(&'a self, source: &'a Path) -> &'a Path {
        match self {
            ReadPath::Source | ReadPath::Mount => source,
            ReadPath::Behind(path, _) => Path::new(path),
        }
    }

    /// The path and the options that open what a mount of `source` has read so far.
    ///
    /// # Errors
    /// One line if there is no mount of tensorfs at `source` any more, or if a file of the views has
    /// changed.
    pub(super) fn open(
        &self,
        source: &Path,
        options: &Options,
    ) -> Result<(PathBuf, OpenOptions), String> {
        let shown = || shown_path(source);
        let open = match self {
            ReadPath::Source => options.open.clone(),
            ReadPath::Mount if is_on_mount(source) => options.open.clone(),
            ReadPath::Mount => {
                return Err(format!("{}: the mount that it lay on is gone", shown()));
            }
            ReadPath::Behind(_, json) => {
                let open =
                    OpenOptions::from_json(json, &mut read_option_file).ok_or_else(|| {
                        format!("{}: a file of its views has changed since the mount", shown())
                    })?;
                let OpenOptions { expect_shards, reference, index, secret, .. } =
                    options.open.clone();
                OpenOptions { expect_shards, reference, index, secret, ..open }
            }
        };
        Ok((self.path(source).to_owned(), open))
    }
}
