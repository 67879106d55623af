//! Finds the source of a path on a tensorfs mount: a process that can read the source does not need
//! the mount.

use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use nix::libc;
use serde_json::Value;

use crate::error::is_url;
use crate::format::{TrainingState, names};
use crate::hash::Digest;
use crate::mountinfo;
use crate::open_options::{OpenOptions, ZeroWeights};
use crate::source::{read_option_file, read_text};
use crate::view::{Files, View};

/// Extended attribute of the files and folders of a mount, with the source of each.
pub const XATTR_SOURCE: &str = "user.tensorfs.source";

/// Extended attribute of what a mount shows by a link to some users only, for a daemon that shows the
/// mount to others. Only root sees it, and nobody can set it on a mount.
pub const XATTR_LIMITED: &str = "trusted.tensorfs.limited";

/// Whether a mount shows `path` to some users only, because links lead to it.
pub fn is_limited(path: &Path) -> bool {
    let none = [libc::ENODATA, libc::EOPNOTSUPP, libc::EPERM, libc::ENOSYS];
    match xattr::get(path, XATTR_LIMITED) {
        Ok(found) => found.is_some(),
        Err(error) => !error.raw_os_error().is_some_and(|code| none.contains(&code)),
    }
}

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

impl MountOrigin {
    /// The path and the options that show what `given` makes of what the mount shows. `has_view`:
    /// whether `given` has any option of views. How the source is found follows from the mount, the
    /// rest from `given`. The mount has chosen between a file and a set of the same name already.
    ///
    /// `None` if the source alone does not show that: then the path on the mount is opened with
    /// `given`. A view is put on the source only if the mount has none, and if neither it nor the
    /// proof of its sets depends on files: a mount shows other ones than its source.
    pub fn open_with(self, given: &OpenOptions, has_view: bool) -> Option<(PathBuf, OpenOptions)> {
        let MountOrigin { path, options: mounted, part } = self;
        if part.is_some() {
            return None;
        }
        let follow = mounted.follow.iter().chain(&given.follow).cloned().collect();
        let of_files = given.expect_shards.is_some() || given.reference.is_some();
        let open = OpenOptions {
            follow,
            expect_shards: given.expect_shards.or(mounted.expect_shards),
            config: given.config.clone().or_else(|| mounted.config.clone()),
            zero: if given.zero == ZeroWeights::default() { mounted.zero } else { given.zero },
            state: if given.state == TrainingState::default() {
                mounted.state
            } else {
                given.state
            },
            reference: given.reference.clone(),
            index: given.index.clone(),
            disk_cache: given.disk_cache.clone(),
            remote: given.remote.clone(),
            secret: given.secret.clone(),
            ..mounted
        };
        if !has_view {
            return Some((path, open));
        }
        let OpenOptions { view, views, hub, .. } = given;
        let has_own = open.view != View::default() || open.views.is_some() || open.hub;
        let views_of_files =
            views.iter().flat_map(|views| views.iter()).any(|(_, it)| shows_files(it));
        let can_compose = !(has_own || of_files || *hub || shows_files(view) || views_of_files);
        can_compose
            .then(|| (path, OpenOptions { view: view.clone(), views: views.clone(), ..open }))
    }
}

/// Whether the view shows the files that it finds. Commands about tensors choose `Files::Original` for
/// any view, which as an option excludes other options.
fn shows_files(view: &View) -> bool {
    view.files == Files::Original && view.keeps_tensors()
}

/// Whether `path` lies on a mount of root or of the caller.
pub fn is_on_mount(path: &Path) -> bool {
    attribute(path).is_some()
}

/// Whether `path` lies on a mount, which has made it.
pub fn is_made(path: &Path) -> bool {
    attribute(path).flatten().is_some_and(|json| json.get("made").is_some())
}

/// The source behind `path`, if `path` lies on a mount of root or of the caller, and the caller may
/// read the source.
pub fn resolve_mount(path: &Path) -> Option<MountOrigin> {
    resolve(path)?.ok()
}

/// Why `path` is read through its mount, although the mount names its source: the mount was made by
/// files that have changed since. `None` for all other paths.
pub fn changed_since_mount(path: &Path) -> Option<String> {
    resolve(path)?.err().flatten()
}

/// Why the mount shows no checkpoint at `path`, if it has shown one or refuses one for what it knows
/// itself. `None` for all other paths.
pub fn missing_on_mount(path: &Path) -> Option<String> {
    let json = attribute(path)??;
    json.get("missing").and_then(Value::as_str).map(str::to_owned)
}

/// The source behind `path` for commands about the bytes of the source, `None` if `path` lies on no
/// mount. The options have no view but the format, and are there even if the view of the mount
/// cannot be made again. The error says that the source is not known, or that the caller may not
/// read it.
pub fn resolve_bytes(path: &Path) -> Option<Result<MountOrigin, &'static str>> {
    let origin = attribute(path)?.and_then(|json| {
        let path = source_in(&json)?;
        let options = OpenOptions::of_bytes_in_json(json.get("view")?)?;
        // A server says itself who may read.
        let is_allowed = is_url(&path) || can_read(&path);
        is_allowed.then_some(MountOrigin { path, options, part: None })
    });
    Some(origin.ok_or("its mount does not name a source that you may read"))
}

/// The source behind `path`. `None` if `path` lies on no such mount, or is always read through it,
/// or shows no checkpoint there.
/// The error says what has changed since the mount; it is `None` if the caller may not read the
/// source.
fn resolve(path: &Path) -> Option<Result<MountOrigin, Option<String>>> {
    let json = attribute(path)??;
    if json.get("made").is_some() {
        return None;
    }
    if json.get("missing").is_some() {
        return None;
    }
    let source = source_in(&json)?;
    // The mount cuts tensors by the texts that it read, which may have changed since.
    let given = json.pointer("/view/config").and_then(Value::as_str).map(Path::new);
    let is_same = |pair: &(PathBuf, String)| is_unchanged(&pair.0, &pair.1, given);
    if !configs_in(&json, &source)?.iter().all(is_same) {
        return Some(Err(Some("config.json has changed since the mount".to_owned())));
    }
    let Some(options) = OpenOptions::from_json(json.get("view")?, &mut read_option_file) else {
        let why = "a file of its views has changed since the mount, or another version mounted it";
        return Some(Err(Some(why.to_owned())));
    };
    let part = json.get("part").and_then(Value::as_str).map(str::to_owned);
    let is_readable = can_read(&source);
    let origin = MountOrigin { path: source, options, part };
    Some(if is_readable { Ok(origin) } else { Err(None) })
}

/// The text of the mount about the source of `path`. `None` if `path` lies on no such mount; then
/// `Some(None)` if the mount says nothing.
fn attribute(path: &Path) -> Option<Option<Value>> {
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
    Some(json.ok().flatten().and_then(|json| serde_json::from_slice(&json).ok()))
}

/// The folder or the file that `json` names.
fn source_in(json: &Value) -> Option<PathBuf> {
    let mut source = PathBuf::from(json.get("source")?.as_str()?);
    if let Some(file) = json.get("file").and_then(Value::as_str) {
        source.push(file);
    }
    Some(source)
}

/// The folders whose `config.json` the mount has read, for what lies at `source` and below, and the
/// hash of each text.
fn configs_in(json: &Value, source: &Path) -> Option<Vec<(PathBuf, String)>> {
    let mut configs = Vec::new();
    if let Some(digest) = json.get("config").and_then(Value::as_str) {
        let folder = if source.is_dir() { source } else { source.parent()? };
        configs.push((folder.to_owned(), digest.to_owned()));
    }
    for (folder, digest) in json.get("configs").and_then(Value::as_object).into_iter().flatten() {
        configs.push((folder.into(), digest.as_str()?.to_owned()));
    }
    Some(configs)
}

/// Whether the `config.json` of the folder, or the one that the mount was given, has this hash.
fn is_unchanged(folder: &Path, digest: &str, given: Option<&Path>) -> bool {
    let file = match given {
        Some(given) if given.is_dir() && given.join("config.json").exists() => {
            given.join("config.json")
        }
        Some(given) if given.ends_with("config.json") => given.to_owned(),
        _ => folder.join("config.json"),
    };
    let text = read_text(&file);
    text.is_ok_and(|(_, text)| Digest::of(&text).to_string() == digest)
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
