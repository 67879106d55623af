//! HTTP servers: the logins in requests, and folders. WebDAV servers list folders. Other servers cannot: there, the
//! weight map names the shards, and files with well-known names are tried.

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::sync::Arc;
use std::time::Instant;

use http::request::Parts;
use reqwest::header::{AUTHORIZATION, HeaderValue};
use reqwest::{Method, StatusCode};

use super::dav::{self, DavState};
use super::listing::{StoreEntries, StoreEntry, look_up_all};
use super::netrc;
use super::request::{Refusal, Requests, Wanted};
use super::shared::RemoteClients;
use super::url::{authority_of, is_confidential};
use crate::error::invalid_input;
use crate::format::names;
use crate::format::weight_map::WeightMap;
use crate::sync::Mutex;

/// Name of the weight map. A URL with such a file below it is a folder.
const WEIGHT_MAP: &str = "model.safetensors.index.json";

/// Name of the only weights file of a small model. A URL with such a file below it is a folder even without a
/// weight map.
const WHOLE: &str = "model.safetensors";

/// Files that may be next to the weights. Those that exist are listed.
const BESIDE: [&str; 12] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "preprocessor_config.json",
    "README.md",
];

/// Endings of names that are files and not folders.
const OF_FILES: [&str; 6] = [".json", ".txt", ".md", ".jinja", ".model", ".py"];

/// Maximum number of bytes of a weight map.
const MAP_LEN_MAX: usize = 256 << 20;

/// An HTTP server.
#[derive(Default)]
pub(super) struct WebAccess {
    /// The user's name and password as an `Authorization` header. Never printed.
    login: Option<HeaderValue>,
    /// Whether the server lists folders by WebDAV.
    dav: Mutex<DavState>,
    /// The names of existing files that were requested, by the keys of their folders. They are listed for servers
    /// that cannot list folders.
    asked: Mutex<HashMap<String, BTreeSet<String>>>,
}

impl WebAccess {
    fn asked_in(&self, key: &str) -> BTreeSet<String> {
        self.asked.lock().get(key).cloned().unwrap_or_default()
    }

    /// Adds the login to a request. Returns whether there is one.
    pub(super) fn sign(&self, parts: &mut Parts) -> bool {
        parts.headers.extend(self.login.clone().map(|login| (AUTHORIZATION, login)));
        self.login.is_some()
    }

    pub(super) fn credentials(&self) -> String {
        let words = match self.login {
            Some(_) => "the login of .netrc for this host",
            None => "none: .netrc has no login for this host",
        };
        words.to_owned()
    }

    pub(super) fn why_denied(&self, refusal: &Refusal) -> &'static str {
        match refusal.status {
            _ if self.login.is_some() => "the login of .netrc does not allow it",
            StatusCode::UNAUTHORIZED => "it asks for a login: add its host to the file .netrc",
            _ => "it is not public",
        }
    }

    /// Whether `key` is a folder: files in it were requested, WebDAV says so, or there is a weight map or a whole
    /// model in it.
    ///
    /// # Errors
    /// If the server refuses a request, or does not answer in time.
    pub(super) async fn is_folder(
        &self,
        requests: &impl Requests,
        key: &str,
        deadline: Instant,
    ) -> io::Result<bool> {
        if !self.asked_in(key).is_empty() {
            return Ok(true);
        }
        if let Some(is_folder) =
            dav::is_folder(requests, &self.dav, &target(key, ""), deadline).await?
        {
            return Ok(is_folder);
        }
        for name in [WEIGHT_MAP, WHOLE] {
            match requests.look(&target(key, name), deadline).await {
                Ok(_) => return Ok(true),
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(e),
            }
        }
        Ok(false)
    }

    /// The files of the folder `key`. A WebDAV server lists all of them. For any other server, they are the files
    /// that the weight map names, those with well-known names, and those that were requested by name before.
    ///
    /// # Errors
    /// `NotFound` if none of the files exists. Also fails if the server refuses a request, or does not answer in time.
    pub(super) async fn list(
        &self,
        requests: &Arc<impl Requests>,
        key: &str,
        deadline: Instant,
    ) -> io::Result<StoreEntries> {
        if let Some(listed) = dav::list(&**requests, &self.dav, &target(key, ""), deadline).await? {
            return whole_listing(requests, key, listed, deadline).await;
        }
        let mut wanted = self.asked_in(key);
        wanted.extend([WEIGHT_MAP, WHOLE].into_iter().chain(BESIDE).map(str::to_owned));
        let map = Wanted::new(Method::GET, target(key, WEIGHT_MAP));
        match requests.answer(&map, MAP_LEN_MAX, deadline).await {
            Ok((_, text)) => {
                let shards = WeightMap::names_in(&text).into_iter();
                // A name with one of these characters would mean something else in a URL.
                wanted.extend(shards.filter(|name| !name.contains(['%', '?', '#', '/'])));
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(e),
        }
        let targets = wanted.into_iter().map(|name| (name.clone(), target(key, &name))).collect();
        let found = look_up_all(requests, targets, may_be_absent, deadline).await?;
        if found.is_empty() { Err(io::ErrorKind::NotFound.into()) } else { Ok(found) }
    }

    /// Notes that the file `key` exists.
    pub(super) fn note_found(&self, key: &str) {
        let (folder, name) = key.rsplit_once('/').unwrap_or(("", key));
        self.asked.lock().entry(folder.to_owned()).or_default().insert(name.to_owned());
    }
}

/// The host with its port that `rest` begins with, which is a URL without its scheme and `://`.
///
/// # Errors
/// If the URL names no host, or has a query, the message says why.
pub(super) fn host_of(rest: &str) -> Result<String, String> {
    let host = authority_of(rest, "names no host")?;
    if rest.contains(['?', '#']) {
        let why = "URLs with `?` or `#` are not supported: name the file or folder itself";
        return Err(why.to_owned());
    }
    Ok(host)
}

/// The server of `authority` at `root`, its URL, and the login for it.
///
/// # Errors
/// If the login is not usable.
pub(super) fn access_of(
    root: &str,
    authority: &str,
    clients: &RemoteClients,
) -> io::Result<(String, WebAccess)> {
    // A login is for a host name without a port.
    let host = match authority.rsplit_once(':') {
        Some((host, port)) if port.bytes().all(|b| b.is_ascii_digit()) => host,
        _ => authority,
    };
    let variable = |name: &str| clients.settings.variable(name);
    let is_secure = is_confidential(root);
    let found = netrc::login_for(host.trim_matches(['[', ']']), is_secure, &variable)?;
    let unusable = |_| invalid_input("the login of .netrc is not usable");
    let signed = found.map(|login| {
        let client = clients.following.get()?;
        let builder = client.get(root).basic_auth(login.user, Some(login.password));
        builder.build().map_err(unusable)
    });
    let login = signed.transpose()?.and_then(|signed| signed.headers().get(AUTHORIZATION).cloned());
    Ok((root.to_owned(), WebAccess { login, ..WebAccess::default() }))
}

/// Whether a URL that ends in `name` is expected to be a file.
pub(super) fn is_file_name(name: &str) -> bool {
    names::is_weights(name)
        || names::is_of_torch(name)
        || OF_FILES.iter().any(|end| name.ends_with(end))
}

/// Whether the error of the file `name` may mean that it does not exist. Some servers answer "forbidden" then.
fn may_be_absent(name: &str, e: &io::Error) -> bool {
    BESIDE.contains(&name) && e.kind() == io::ErrorKind::PermissionDenied
}

/// The path in a URL of the entry `name` of the folder `key`.
pub(super) fn target(key: &str, name: &str) -> String {
    let slash = if key.is_empty() || name.is_empty() { "" } else { "/" };
    format!("/{key}{slash}{name}")
}

/// The entries of a WebDAV listing. The states in the listing are used only if a lookup of the first file returns the
/// same state. Otherwise each file is looked up.
async fn whole_listing(
    requests: &Arc<impl Requests>,
    key: &str,
    listed: Vec<(String, StoreEntry)>,
    deadline: Instant,
) -> io::Result<StoreEntries> {
    let mut found: StoreEntries = listed.into_iter().collect();
    let first = found.iter().find_map(|(name, entry)| match entry {
        StoreEntry::Object(state) => Some((name, state)),
        StoreEntry::Folder => None,
    });
    let Some((name, state)) = first else { return Ok(found) };
    let says_same = match requests.look(&target(key, name), deadline).await {
        Ok(seen) => seen == *state,
        // The file was removed since the listing.
        Err(e) if e.kind() == io::ErrorKind::NotFound => false,
        Err(e) => return Err(e),
    };
    if !says_same {
        let is_file = |(_, entry): &(&String, &StoreEntry)| **entry != StoreEntry::Folder;
        let files = found.iter().filter(is_file).map(|(name, _)| (name.clone(), target(key, name)));
        let seen = look_up_all(requests, files.collect(), may_be_absent, deadline).await?;
        found.retain(|_, entry| *entry == StoreEntry::Folder);
        found.extend(seen);
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_models_are_folders_although_they_have_dots() {
        for name in ["model.safetensors", "a.tensors", "config.json", "pytorch_model.bin"] {
            assert!(is_file_name(name), "{name}");
        }
        for name in ["", "models", "Llama-3.1-8B", "v1.0"] {
            assert!(!is_file_name(name), "{name}");
        }
    }

    #[test]
    fn a_target_begins_with_one_slash() {
        assert_eq!(target("", "a"), "/a");
        assert_eq!(target("b/c", "a"), "/b/c/a");
        assert_eq!(target("b", ""), "/b");
    }
}
