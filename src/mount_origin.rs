//! Finds the source of a path on a tensorfs mount: a process that can read the source does not need
//! the mount.

use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use nix::libc;
use serde_json::Value;

use crate::format::names;
use crate::hash::Digest;
use crate::mountinfo;
use crate::open_options::OpenOptions;
use crate::source::{read_option_file, read_text};

/// Extended attribute of the files and folders of a mount, with the source of each.
pub const XATTR_SOURCE: &str = "user.tensorfs.source";

/// The source behind a path on a mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountOrigin {
    /// The source: a folder, or a file of the set that is shown.
    pub path: PathBuf,
    /// Options that the mount opened it with.
    pub options: OpenOptions,
    /// Name of the file on the mount, if it holds some of the tensors only.
    pub part: Option<String>,
}

/// The source behind `path`, if `path` lies on a mount of root or of the caller, and the caller may
/// read the source.
pub fn resolve_mount(path: &Path) -> Option<MountOrigin> {
    // The descriptor is held, so that the attribute is read from the file that was checked.
    let held = std::fs::OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_PATH | libc::O_CLOEXEC)
        .open(path)
        .ok()?;
    // On other file systems any user may have written the attribute.
    if !mountinfo::is_on_ours(&held) {
        return None;
    }
    let json = xattr::get_deref(format!("/proc/self/fd/{}", held.as_raw_fd()), XATTR_SOURCE);
    let json = json.ok()??;
    let json: Value = serde_json::from_slice(&json).ok()?;
    let mut source = PathBuf::from(json.get("source")?.as_str()?);
    if let Some(file) = json.get("file").and_then(Value::as_str) {
        source.push(file);
    }
    // The mount cuts tensors by the text that it read, which may have changed since.
    if let Some(digest) = json.get("config").and_then(Value::as_str) {
        let folder = if source.is_dir() { &*source } else { source.parent()? };
        let (_, text) = read_text(&folder.join("config.json")).ok()?;
        (Digest::of(&text).to_string() == digest).then_some(())?;
    }
    let options = OpenOptions::from_json(json.get("view")?, &mut read_option_file)?;
    let part = json.get("part").and_then(Value::as_str).map(str::to_owned);
    can_read(&source).then_some(MountOrigin { path: source, options, part })
}

/// Whether the caller may read the weights at `source`: the file, or all in the folder.
fn can_read(source: &Path) -> bool {
    let Ok(entries) = std::fs::read_dir(source) else {
        return std::fs::File::open(source).is_ok();
    };
    let is_weights = |path: &Path| {
        let name = path.file_name().and_then(std::ffi::OsStr::to_str);
        // Opening a FIFO of such a name would block.
        name.is_some_and(names::is_weights) && path.is_file()
    };
    let mut paths = entries.filter_map(Result::ok).map(|entry| entry.path());
    paths.all(|path| !is_weights(&path) || std::fs::File::open(path).is_ok())
}
