//! Repositories of the Hugging Face hub: `hf://[models/|datasets/]ORG/NAME[@REVISION]`.
//!
//! The revision is resolved to a commit once. One listing of this commit has the length and the hash of each
//! file, so later lookups need no request.

mod access;
mod cached;
pub(super) mod tree;

use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use reqwest::Url;

use super::credentials::Variable;
use super::state::ObjectState;
use crate::error::invalid_input;
use crate::format::names::{self, is_hub_name};
use crate::store::hub_cache;
use crate::sync::Mutex;

pub(super) use access::HubAccess;

/// The expected form of a URL, for messages.
const EXPECTED: &str = "expected hf://[models/|datasets/]ORG/NAME[@REVISION][/PATH]";

/// Kinds of repositories.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HubKind {
    Models,
    Datasets,
}

/// A repository and the revision that the user wrote.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HubRepository {
    kind: HubKind,
    organization: String,
    name: String,
    revision: Option<String>,
}

impl HubRepository {
    /// Parses `rest`, a URL without its `hf://`. Returns the repository, and the part of `rest` that names it.
    ///
    /// # Errors
    /// If the URL has another form, the message says why.
    pub(super) fn parse(rest: &str) -> Result<(HubRepository, String), String> {
        let parts: Vec<&str> = rest.split('/').filter(|part| !["", "."].contains(part)).collect();
        let (kind, first) = match parts.first() {
            Some(&"models") => (HubKind::Models, 1),
            Some(&"datasets") => (HubKind::Datasets, 1),
            Some(&("spaces" | "kernels" | "buckets")) => {
                return Err("only models and datasets of the hub are supported".to_owned());
            }
            _ => (HubKind::Models, 0),
        };
        let (Some(organization), Some(named)) = (parts.get(first), parts.get(first + 1)) else {
            return Err(format!("names no repository: {EXPECTED}"));
        };
        let (name, revision) = match named.split_once('@') {
            Some((name, revision)) => (name, Some(revision)),
            None => (*named, None),
        };
        if [organization, &name].into_iter().any(|name| name.is_empty() || !is_hub_name(name)) {
            return Err(format!("is no repository of the hub: {EXPECTED}"));
        }
        // The name of a reference that is not a branch has three parts, for example `refs/pr/1`.
        let parts_end = first + if revision == Some("refs") { 4 } else { 2 };
        let revision = match revision {
            Some("refs") => {
                parts.get(first + 2..parts_end).map(|rest| format!("refs/{}", rest.join("/")))
            }
            Some(revision) => Some(revision.replace("%2F", "/").replace("%2f", "/")),
            None => None,
        };
        let is_plain = |revision: &str| {
            let is_part = |part: &str| !["", ".", ".."].contains(&part);
            revision.split('/').all(is_part) && !revision.chars().any(char::is_control)
        };
        if named.contains('@') && !revision.as_deref().is_some_and(is_plain) {
            return Err(format!("has no usable revision after the `@`: {EXPECTED}"));
        }
        let (organization, name) = ((*organization).to_owned(), name.to_owned());
        let repository = HubRepository { kind, organization, name, revision };
        Ok((repository, parts[..parts_end].join("/")))
    }

    /// `ORG/NAME`.
    fn id(&self) -> String {
        format!("{}/{}", self.organization, self.name)
    }

    /// The revision: a branch, a tag or a commit.
    fn revision(&self) -> &str {
        self.revision.as_deref().unwrap_or("main")
    }

    /// The name of the repository's kind in paths of the API.
    fn kind(&self) -> &'static str {
        match self.kind {
            HubKind::Models => "models",
            HubKind::Datasets => "datasets",
        }
    }

    /// The path of the repository's page. It is also the first part of the paths of its files.
    fn page(&self) -> String {
        match self.kind {
            HubKind::Models => self.id(),
            HubKind::Datasets => format!("datasets/{}", self.id()),
        }
    }

    /// The name of the repository's folder in a hub cache.
    fn folder(&self) -> String {
        let folder = names::hub_model(&[&self.organization, &self.name]);
        match self.kind {
            HubKind::Models => folder,
            HubKind::Datasets => folder.replacen("models", "datasets", 1),
        }
    }
}

/// The commit that a repository was resolved to, if it was. A child made by fork(2) keeps it.
pub(super) type PinnedCommit = Arc<Mutex<Option<String>>>;

/// The URL of the hub, and the access to the repository that `authority` names.
///
/// # Errors
/// If a variable has no usable value.
pub(super) fn access_of(
    authority: &str,
    variable: Variable<'_>,
    pinned: &PinnedCommit,
) -> io::Result<(String, HubAccess)> {
    let (repository, _) = HubRepository::parse(authority).map_err(invalid_input)?;
    let cache = hub_cache::cache_of(&|name| hub_cache::variable(name).map(PathBuf::from));
    HubAccess::new(repository, variable, cache, pinned.clone())
}

/// All files of one commit.
pub(super) struct HubTree {
    commit: String,
    /// The files by their request target: a `/` and the escaped name.
    files: HashMap<String, HubFile>,
}

/// A file of a commit.
pub(super) struct HubFile {
    /// Name of the file in the repository.
    key: String,
    /// Length, ETag and time. The ETag is the SHA-256 of a large file, and the Git hash of any other file.
    state: ObjectState,
    sha256: Option<String>,
    /// Path in the hub cache, if the file is read from there.
    here: Option<PathBuf>,
    /// The link that the hub returned, and the time at which it did.
    link: tokio::sync::Mutex<Option<(Url, Instant)>>,
}

impl HubFile {
    fn new(key: String, state: ObjectState, sha256: Option<String>) -> HubFile {
        HubFile { key, state, sha256, here: None, link: tokio::sync::Mutex::default() }
    }
}

/// Whether `text` is a hash of exactly `digits` hexadecimal digits.
fn is_hash(text: &str, digits: usize) -> bool {
    text.len() == digits && text.bytes().all(|b| b.is_ascii_hexdigit())
}

/// Number of hexadecimal digits of the hash of a commit, or of a file in Git.
const GIT_DIGITS: usize = 40;

/// Number of hexadecimal digits of a SHA-256.
const SHA256_DIGITS: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_names_a_repository_a_revision_and_a_path() {
        for (rest, kind, id, revision, root) in [
            ("a/b", HubKind::Models, "a/b", "main", "a/b"),
            ("models/a/b/x/y", HubKind::Models, "a/b", "main", "models/a/b"),
            ("datasets/a/b@v1/x", HubKind::Datasets, "a/b", "v1", "datasets/a/b@v1"),
            ("a//b.c@refs/pr/7/x", HubKind::Models, "a/b.c", "refs/pr/7", "a/b.c@refs/pr/7"),
            ("a/b@x%2Fy", HubKind::Models, "a/b", "x/y", "a/b@x%2Fy"),
        ] {
            let (found, found_root) = HubRepository::parse(rest).unwrap();
            assert_eq!((found.kind, found.id().as_str()), (kind, id), "{rest}");
            assert_eq!((found.revision(), found_root.as_str()), (revision, root), "{rest}");
        }
        for rest in [
            "",
            "gpt2",
            "models/gpt2",
            "spaces/a/b",
            "a/b@",
            "a/b@refs",
            "a/b@refs/pr",
            "a/b c",
            "a/b@..",
            "a/b@x%2F..",
            "hunter2@a/b",
            "a/..",
        ] {
            let why = HubRepository::parse(rest).unwrap_err();
            assert!(!why.contains("hunter2"), "{why}");
        }
    }

    #[test]
    fn a_repository_has_a_page_and_a_folder_of_a_cache() {
        let names = |rest| {
            let (repository, _) = HubRepository::parse(rest).unwrap();
            (repository.page(), repository.folder())
        };
        assert_eq!(names("a/b@v1"), ("a/b".into(), "models--a--b".into()));
        assert_eq!(names("datasets/a/b"), ("datasets/a/b".into(), "datasets--a--b".into()));
    }
}
