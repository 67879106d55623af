//! Finds the source of a path on a tensorfs mount. A process that may read the source can open it directly,
//! without the mount.

use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use nix::libc;
use serde_json::Value;

use crate::error::is_url;
use crate::format::names;
use crate::hash::Digest;
use crate::mountinfo;
use crate::open_options::OpenOptions;
use crate::source::{read_option_file, read_text};
use crate::view::{Files, View};

/// Extended attribute that names the source of each file and folder of a mount.
pub const XATTR_SOURCE: &str = "user.tensorfs.source";

/// Extended attribute of files and folders that a mount shows only to some users, because links lead to them.
/// It is for the daemon of another mount whose source is this mount. Only root can read it, and nobody can set it on a
/// mount.
pub const XATTR_LIMITED: &str = "trusted.tensorfs.limited";

/// Whether a mount shows `path` only to some users, because links lead to it. Also true if the attribute could not be
/// read, so that this is unknown.
pub fn is_limited(path: &Path) -> bool {
    let none = [libc::ENODATA, libc::EOPNOTSUPP, libc::EPERM, libc::ENOSYS];
    match xattr::get(path, XATTR_LIMITED) {
        Ok(found) => found.is_some(),
        Err(error) => !error.raw_os_error().is_some_and(|code| none.contains(&code)),
    }
}

/// The source of a path on a mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountOrigin {
    /// The path of the source: a folder, or a file of the set that the mount shows.
    pub path: PathBuf,
    /// The options with which the mount opened the source.
    pub options: OpenOptions,
    /// Name of the file on the mount, if the file contains only some of the tensors.
    pub part: Option<String>,
}

impl MountOrigin {
    /// The path and the options that open the source directly and give the same result as opening the path on
    /// the mount with `given`. `has_view` tells whether `given` sets an option of a view. Options that are set in
    /// `given` have precedence. `prefer` and `links` come from the mount, because the mount has already chosen between
    /// a file and a set of the same name.
    ///
    /// `None` if opening the source alone cannot give this result. The caller then opens the path on the mount with
    /// `given`. A view of `given` is applied to the source only if the mount has no view of its own. Also, neither the
    /// view nor the proof of the sets may depend on files, because a mount shows other files than its source.
    pub fn open_with(self, given: &OpenOptions, has_view: bool) -> Option<(PathBuf, OpenOptions)> {
        let MountOrigin { path, options: mounted, part } = self;
        if part.is_some() {
            return None;
        }
        let follow = mounted.follow.iter().chain(&given.follow).cloned().collect();
        let of_files = given.expect_shards.is_some() || given.reference.is_some();
        let (zero, state) = given.zero_and_state_or(&mounted);
        let open = OpenOptions {
            follow,
            expect_shards: given.expect_shards.or(mounted.expect_shards),
            config: given.config.clone().or_else(|| mounted.config.clone()),
            zero,
            state,
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

/// Whether an option of the view asks for the original files. `Files::Original` alone does not show this, because
/// commands about tensors set it for any view. The view must also keep all tensors, because this option cannot be
/// combined with other options of a view.
fn shows_files(view: &View) -> bool {
    view.files == Files::Original && view.keeps_tensors()
}

/// Whether `path` lies on a mount that belongs to root or to the caller.
pub fn is_on_mount(path: &Path) -> bool {
    attribute(path).is_some()
}

/// Whether `path` lies on a mount and is always read through it. This is mostly because the mount generated the
/// bytes at `path`.
pub fn is_made(path: &Path) -> bool {
    attribute(path).flatten().is_some_and(|json| json.get("made").is_some())
}

/// The source of `path`, if `path` lies on a mount that belongs to root or to the caller, and if the caller may
/// read the source.
pub fn resolve_mount(path: &Path) -> Option<MountOrigin> {
    resolve(path)?.ok()
}

/// The reason why `path` is read through its mount although the mount names its source: a file that the mount
/// used has changed since, or another version of tensorfs created the mount. `None` for all other paths.
pub fn changed_since_mount(path: &Path) -> Option<String> {
    resolve(path)?.err().flatten()
}

/// The reason why the mount shows no checkpoint at `path`, if the mount showed a checkpoint there earlier, or if it
/// refuses the checkpoint for a reason that only the mount knows. `None` for all other paths.
pub fn missing_on_mount(path: &Path) -> Option<String> {
    let json = attribute(path)??;
    json.get("missing").and_then(Value::as_str).map(str::to_owned)
}

/// The source of `path` for commands about the bytes of the source, `None` if `path` lies on no mount. The view
/// of the options has only its format. The options are returned even if the view of the mount cannot be created
/// again. It is an error if the source is not known, or if the caller may not read it.
pub fn resolve_bytes(path: &Path) -> Option<Result<MountOrigin, &'static str>> {
    let origin = attribute(path)?.and_then(|json| {
        let path = source_in(&json)?;
        let options = OpenOptions::of_bytes_in_json(json.get("view")?)?;
        // For a URL, the server checks whether the caller may read.
        let is_allowed = is_url(&path) || can_read(&path);
        is_allowed.then_some(MountOrigin { path, options, part: None })
    });
    Some(origin.ok_or("its mount does not name a source that you may read"))
}

/// The source of `path`. `None` if `path` lies on no such mount, if it is always read through the mount, or if the
/// mount shows no checkpoint there. The error says which file has changed since the source was mounted. The error is
/// `None` if the caller may not read the source.
fn resolve(path: &Path) -> Option<Result<MountOrigin, Option<String>>> {
    let json = attribute(path)??;
    if json.get("made").is_some() {
        return None;
    }
    if json.get("missing").is_some() {
        return None;
    }
    let source = source_in(&json)?;
    // The mount cuts tensors according to the texts of `config.json` that it has read. These files may have
    // changed since.
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

/// The attribute of the mount that describes the source of `path`. `None` if `path` lies on no such mount.
/// `Some(None)` if `path` lies on such a mount but has no such attribute.
fn attribute(path: &Path) -> Option<Option<Value>> {
    // The descriptor stays open, so that the attribute is read from the same file that was checked.
    let held = std::fs::OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_PATH | libc::O_CLOEXEC)
        .open(path)
        .ok()?;
    // On other file systems, any user may have set the attribute.
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

/// The folders whose `config.json` the mount has read for the files at `source` and below it, with the hash of
/// each text.
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

/// Whether the `config.json` of the folder has this hash. If the mount was created with another `config.json`,
/// that file is checked instead.
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

/// Whether the caller may read the weights at `source`: the file, or all weight files in the folder.
fn can_read(source: &Path) -> bool {
    let Ok(entries) = std::fs::read_dir(source) else {
        return std::fs::File::open(source).is_ok();
    };
    let is_weights = |path: &Path| {
        let name = path.file_name().and_then(std::ffi::OsStr::to_str);
        // Opening a FIFO with the name of a weight file would block.
        name.is_some_and(names::is_weights) && path.is_file()
    };
    let mut paths = entries.filter_map(Result::ok).map(|entry| entry.path());
    paths.all(|path| !is_weights(&path) || std::fs::File::open(path).is_ok())
}
