//! The commit of a repository, and the files of that commit.

use std::collections::HashMap;
use std::io;
use std::time::Instant;

use reqsign_core::time::Timestamp;
use reqwest::header::{self, HeaderMap};
use reqwest::{Method, Url};
use serde::Deserialize;

use super::super::listing::{StoreEntries, StoreEntry};
use super::super::request::{Requests, Wanted};
use super::super::state::{ObjectState, text_of};
use super::super::url::{escaped_key, escaped_value};
use super::{GIT_DIGITS, HubAccess, HubFile, HubTree, SHA256_DIGITS, cached, is_hash};
use crate::error::invalid_data;
use crate::source::MemoryParts;
use crate::version::Version;

/// Maximum length in bytes of one page of a listing. A page has 1000 files, with names of at most 4096 bytes.
const PAGE_LEN_MAX: usize = 16 << 20;

/// Maximum number of pages of a repository, which is 200,000 files.
const PAGES_MAX: usize = 200;

/// The files of the repository. They are requested once.
///
/// # Errors
/// If the hub refuses the request, or does not answer in time.
async fn tree_of<'a>(
    hub: &'a HubAccess,
    requests: &impl Requests,
    deadline: Instant,
) -> io::Result<&'a HubTree> {
    let tree = hub.tree.get_or_try_init(|| load(hub, requests, deadline)).await?;
    *hub.pinned.lock() = Some(tree.commit.clone());
    Ok(tree)
}

/// The state of the file `key`. `None` if it is a folder.
///
/// # Errors
/// `NotFound` if there is no such file or folder. Also the errors of `tree_of`.
pub(in crate::store::remote) async fn look(
    hub: &HubAccess,
    requests: &impl Requests,
    key: &str,
    deadline: Instant,
) -> io::Result<Option<ObjectState>> {
    let tree = tree_of(hub, requests, deadline).await?;
    if let Some(file) = tree.file(key) {
        return Ok(Some(file.state.clone()));
    }
    let below = format!("{key}/");
    let is_folder = tree.files.values().any(|file| file.key.starts_with(&below));
    let missing = || io::Error::new(io::ErrorKind::NotFound, "nothing is there");
    if is_folder { Ok(None) } else { Err(missing()) }
}

/// The entries of the folder `key`, by name.
///
/// # Errors
/// The errors of `tree_of`.
pub(in crate::store::remote) async fn list(
    hub: &HubAccess,
    requests: &impl Requests,
    key: &str,
    deadline: Instant,
) -> io::Result<StoreEntries> {
    let tree = tree_of(hub, requests, deadline).await?;
    let prefix = if key.is_empty() { String::new() } else { format!("{key}/") };
    let mut entries = StoreEntries::new();
    for file in tree.files.values() {
        match file.key.strip_prefix(&prefix).map(|rest| (rest, rest.split_once('/'))) {
            Some((name, None)) => {
                entries.insert(name.to_owned(), StoreEntry::Object(file.state.clone()));
            }
            Some((_, Some((folder, _)))) => {
                drop(entries.insert(folder.to_owned(), StoreEntry::Folder))
            }
            None => {}
        }
    }
    Ok(entries)
}

/// Fills `parts` with the bytes at `offset` of the file `key` in `version`, if the hub cache of this user has
/// the file. Returns whether it does.
///
/// # Errors
/// The errors of `tree_of`.
pub(in crate::store::remote) async fn read_cached(
    hub: &HubAccess,
    requests: &impl Requests,
    key: &str,
    version: &Version,
    offset: u64,
    parts: &mut MemoryParts<'_>,
    deadline: Instant,
) -> io::Result<bool> {
    let file = tree_of(hub, requests, deadline).await?.file(key);
    let is_it = |file: &&HubFile| file.state.is_of(version);
    let Some(file) = file.filter(is_it) else { return Ok(false) };
    let mut at = offset;
    for part in parts.all_mut() {
        if !part.is_empty() && !cached::read(hub, file, at, part) {
            return Ok(false);
        }
        at += part.len() as u64;
    }
    Ok(true)
}

/// The state of the file `key` in the resolved commit, and its SHA-256.
pub(in crate::store::remote) fn sha256_of(
    hub: &HubAccess,
    key: &str,
) -> Option<(ObjectState, String)> {
    let file = hub.tree.get()?.file(key)?;
    Some((file.state.clone(), file.sha256.clone()?))
}

impl HubTree {
    fn file(&self, key: &str) -> Option<&HubFile> {
        self.files.get(&target(key))
    }
}

fn target(key: &str) -> String {
    format!("/{}", escaped_key(key))
}

/// The API's answer about a revision.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct HubRevision {
    sha: String,
    last_modified: Option<String>,
}

/// An entry of the API's listing of files.
#[derive(Deserialize)]
struct HubEntry {
    #[serde(rename = "type")]
    kind: String,
    path: String,
    #[serde(default)]
    oid: String,
    #[serde(default)]
    size: u64,
    lfs: Option<HubLargeFile>,
}

#[derive(Deserialize)]
struct HubLargeFile {
    oid: String,
    size: u64,
}

async fn load(hub: &HubAccess, requests: &impl Requests, deadline: Instant) -> io::Result<HubTree> {
    let pinned = hub.pinned.lock().clone();
    if let Some(name) = hub.offline {
        return cached::tree_of(hub, name, pinned);
    }
    let (id, kind) = (hub.repository.id(), hub.repository.kind());
    let revision = pinned.unwrap_or_else(|| hub.repository.revision().to_owned());
    let about = format!("api/{kind}/{id}/revision/{}", escaped_value(&revision));
    let wanted = Wanted::new(Method::GET, about);
    let (_, text) = requests.answer(&wanted, PAGE_LEN_MAX, deadline).await?;
    let found: HubRevision = serde_json::from_slice(&text)
        .map_err(|e| invalid_data(format!("the hub tells no commit: {e}")))?;
    if !is_hash(&found.sha, GIT_DIGITS) {
        return Err(invalid_data("the hub tells no commit: its name is no hash"));
    }
    let time = found.last_modified.as_deref();
    let modified = time.and_then(|time| time.parse().ok()).map(Timestamp::as_second);
    let mut files = HashMap::new();
    let mut next = Some(format!("api/{kind}/{id}/tree/{}?recursive=true", found.sha));
    for _ in 0..PAGES_MAX {
        let Some(page) = next.take() else { break };
        let wanted = Wanted::new(Method::GET, page);
        let (headers, text) = requests.answer(&wanted, PAGE_LEN_MAX, deadline).await?;
        let entries: Vec<HubEntry> = serde_json::from_slice(&text)
            .map_err(|e| invalid_data(format!("the hub lists no files: {e}")))?;
        let listed = entries.into_iter().filter_map(|entry| file_of(entry, modified));
        files.extend(listed.map(|file| (target(&file.key), file)));
        next = next_page(&headers)?;
    }
    if next.is_some() {
        return Err(invalid_data(format!(
            "the repository has more than {PAGES_MAX} pages of files"
        )));
    }
    Ok(HubTree { commit: found.sha, files })
}

/// The file of an entry. `None` for a folder, and for a name that is not valid in a folder.
fn file_of(entry: HubEntry, modified: Option<i64>) -> Option<HubFile> {
    let is_name = |name: &str| !["", ".", ".."].contains(&name) && !name.contains('\0');
    if entry.kind != "file" || !entry.path.split('/').all(is_name) {
        return None;
    }
    let (len, tag, sha256) = match entry.lfs {
        Some(lfs) => {
            let sha256 = lfs.oid.trim_start_matches("sha256:").to_ascii_lowercase();
            (lfs.size, sha256.clone(), Some(sha256).filter(|hash| is_hash(hash, SHA256_DIGITS)))
        }
        None => (entry.size, entry.oid, None),
    };
    Some(HubFile::new(entry.path, ObjectState::new(len, &tag, modified), sha256))
}

/// The request target of the next page of a listing, from the header `Link`.
fn next_page(headers: &HeaderMap) -> io::Result<Option<String>> {
    let links = text_of(headers, header::LINK).unwrap_or_default().split(',');
    let mut next = links.filter(|link| link.contains("rel=\"next\"") || link.contains("rel=next"));
    let Some(next) = next.next_back() else { return Ok(None) };
    let link = next.split_once('<').and_then(|(_, rest)| rest.split_once('>'));
    let url: Option<Url> = link.and_then(|(url, _)| url.parse().ok());
    let target = url.and_then(|url| {
        // The URL of a hub may have a path before `/api/`.
        let (path, query) = (url.path(), url.query()?);
        let start = path.find("/api/")?;
        Some(format!("{}?{query}", &path[start + 1..]))
    });
    let why = "the listing is cut off, and has no link to the rest";
    target.map(Some).ok_or_else(|| invalid_data(why))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_a_file_with_its_hash_and_its_length() {
        let large = "ab".repeat(32);
        let text = format!(
            r#"[{{"type":"directory","oid":"1","size":0,"path":"sub"}},
            {{"type":"file","oid":"{git}","size":3,"path":"config.json"}},
            {{"type":"file","oid":"{git}","size":135,"path":"sub/m.safetensors","xetHash":"x",
              "lfs":{{"oid":"{large}","size":9000000000,"pointerSize":135}}}},
            {{"type":"file","oid":"{git}","size":3,"path":"../x"}}]"#,
            git = "1".repeat(40)
        );
        let entries: Vec<HubEntry> = serde_json::from_str(&text).unwrap();
        let files: Vec<HubFile> =
            entries.into_iter().filter_map(|entry| file_of(entry, Some(7))).collect();
        let seen: Vec<_> = files
            .iter()
            .map(|file| (file.key.as_str(), file.state.len, file.sha256.as_deref()))
            .collect();
        let expected =
            [("config.json", 3, None), ("sub/m.safetensors", 9_000_000_000, Some(large.as_str()))];
        assert_eq!(seen, expected);
        assert_eq!(files[1].state, ObjectState::new(9_000_000_000, &large, Some(7)));
    }

    #[test]
    fn the_next_page_is_asked_of_the_same_hub() {
        let next = |link: &str| {
            let headers = [(header::LINK, link.parse().unwrap())].into_iter().collect();
            next_page(&headers)
        };
        let link = "<https://hub/x/api/models/a/b/tree/1?cursor=Zg%3D&limit=1>; rel=\"next\"";
        assert_eq!(next(link).unwrap().unwrap(), "api/models/a/b/tree/1?cursor=Zg%3D&limit=1");
        assert_eq!(next("<https://hub/api/x?y>; rel=\"prev\"").unwrap(), None);
        assert_eq!(next_page(&HeaderMap::new()).unwrap(), None);
        next("<nothing>; rel=\"next\"").unwrap_err();
    }
}
