//! Modules above `source`, `store` and `io` must not use types and calls for files of the local machine.

use super::scan::code_paths;
use super::{SourceFile, compiled_files};

/// The modules above `source`, `store` and `io`. They may use only paths of a store, versions and ranges.
const ROOMS: &[&str] = &[
    "src/cache",
    "src/checkpoint/",
    "src/consolidate",
    "src/loader/",
    "src/reader/",
    "src/verify",
    "mount/src/fs/",
    "mount/src/serve/",
];

/// Names of the local kind of store, and paths (by their first segments) of calls that take a path or a descriptor of
/// the local machine.
const LOCAL_KIND: &[&str] = &["FileSystem", "LocalFile", "OpenFolder", "local_version"];
const LOCAL_CALLS: &[&[&str]] = &[
    &["std", "fs"],
    &["std", "os", "unix", "fs"],
    &["nix", "fcntl"],
    &["nix", "sys", "inotify"],
    &["nix", "sys", "stat"],
    &["nix", "sys", "statfs"],
];

/// The files that may name them, with the reason.
const EXCEPTIONS: &[(&str, &str)] = &[
    ("src/checkpoint/files.rs", "opens a file whose descriptor the caller has"),
    ("src/checkpoint/small_files.rs", "config= refuses folders of the kernel"),
    ("src/consolidate.rs", "writes to this machine"),
    ("src/consolidate/copy.rs", "writes to this machine"),
    ("src/consolidate/folder.rs", "writes to this machine"),
    ("src/consolidate/journal.rs", "writes to this machine"),
    ("src/consolidate/outline.rs", "the modes of folders; other stores have none"),
    ("src/consolidate/target.rs", "writes to this machine"),
    ("src/consolidate/tensor_writer.rs", "writes to this machine"),
    ("src/consolidate/tensorizer.rs", "writes to this machine"),
    ("src/loader/cufile.rs", "cuFile reads descriptors; asks local()"),
    ("mount/src/fs/access.rs", "permission bits; nobody may read another store by them"),
    ("mount/src/fs/adapter/takeover.rs", "passes descriptors on; asks local()"),
    ("mount/src/fs/adapter/opening.rs", "the kernel serves descriptors; asks local()"),
    ("mount/src/fs/adapter/passthrough.rs", "the kernel serves descriptors"),
    ("mount/src/fs/attributes.rs", "permission bits; nobody may read another store by them"),
    ("mount/src/fs/backing.rs", "the kernel serves descriptors"),
    ("mount/src/fs/open_file.rs", "reads a file that grows; asks local()"),
    ("mount/src/fs/survey.rs", "access= by permission bits and links; asks is_local()"),
    ("mount/src/serve/assemble/copy.rs", "writes to this machine"),
    ("mount/src/serve/assemble/entry.rs", "writes to this machine"),
    ("mount/src/serve/assemble/folder.rs", "writes to this machine"),
    ("mount/src/serve/assemble/mod.rs", "writes to this machine"),
    ("mount/src/serve/file_events.rs", "inotify and leases; asked for local files"),
    ("mount/src/serve/folder_events.rs", "inotify; asked for folders of the local store"),
    ("mount/src/serve/heat.rs", "reads /proc"),
    ("mount/src/serve/kernel.rs", "reads and sets /sys"),
    ("mount/src/serve/service.rs", "passes on assembled copies"),
];

/// The files of modules above the seam that name local files without being an exception, and the exceptions that name
/// no local files.
pub(crate) fn seam_violations(files: &[SourceFile]) -> Vec<String> {
    let mut violations = Vec::new();
    for (file, tokens) in ROOMS.iter().flat_map(|room| compiled_files(files, room)) {
        let is_excepted = EXCEPTIONS.iter().any(|(path, _)| *path == file.path);
        let paths = code_paths(&tokens);
        let found = paths.iter().find(|path| {
            let segments = || path.segments.iter().map(String::as_str);
            let is_call = |call: &&[&str]| segments().zip(call.iter()).all(|(a, b)| a == *b);
            segments().any(|segment| LOCAL_KIND.contains(&segment))
                || LOCAL_CALLS.iter().any(|call| path.segments.len() >= call.len() && is_call(call))
        });
        match found {
            Some(path) if !is_excepted => {
                let what = format!(
                    "`{}` is of files of this machine: ask the source or the store",
                    path.segments.join("::")
                );
                violations.push(file.violation(path.line, &what));
            }
            None if is_excepted => {
                violations.push(file.violation(1, "is no exception of the byte seam any more"));
            }
            _ => {}
        }
    }
    violations
}
