//! Listings of folders by WebDAV servers.

use std::io;
use std::time::{Duration, Instant};

use reqsign_core::time::Timestamp;
use reqwest::Method;
use reqwest::header::HeaderName;

use super::listing::{StoreEntry, is_entry_name};
use super::multistatus::{DavResponse, responses_in};
use super::request::{Requests, Wanted};
use super::state::ObjectState;
use super::url::normalize_escapes;
use crate::error::invalid_data;
use crate::sync::Mutex;

/// Maximum length of a listing in bytes.
const LISTING_LEN_MAX: usize = 64 << 20;

const DEPTH: HeaderName = HeaderName::from_static("depth");

/// Time limit of the first listing request to a server. A server without WebDAV may never answer such a request.
const FIRST_LIMIT: Duration = Duration::from_secs(5);

/// Whether an HTTP server lists folders by WebDAV.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum DavState {
    /// The server has not been asked for a listing yet.
    #[default]
    Unknown,
    /// The server has listed a folder.
    Lists,
    /// The server has not answered a listing request in the way of WebDAV.
    ListsNothing,
}

/// The entries of the folder at `target`, which is the path of a URL. The names of the entries are escaped.
/// `None` if the server does not list the folder.
///
/// # Errors
/// If the server does not answer in time, or its answer is not a valid listing.
pub(super) async fn list(
    requests: &impl Requests,
    dav: &Mutex<DavState>,
    target: &str,
    deadline: Instant,
) -> io::Result<Option<Vec<(String, StoreEntry)>>> {
    let Some(text) = ask(requests, dav, target, "1", deadline).await? else { return Ok(None) };
    Ok(entries_of(parse(&text)?, target))
}

/// Whether the object at `target` is a folder. `None` if the server does not say.
///
/// # Errors
/// If the server does not answer in time, or its answer is not a valid listing.
pub(super) async fn is_folder(
    requests: &impl Requests,
    dav: &Mutex<DavState>,
    target: &str,
    deadline: Instant,
) -> io::Result<Option<bool>> {
    let Some(text) = ask(requests, dav, target, "0", deadline).await? else { return Ok(None) };
    Ok(Some(parse(&text)?.iter().any(|(_, entry)| *entry == StoreEntry::Folder)))
}

async fn ask(
    requests: &impl Requests,
    dav: &Mutex<DavState>,
    target: &str,
    depth: &str,
    deadline: Instant,
) -> io::Result<Option<Vec<u8>>> {
    let Ok(method) = Method::from_bytes(b"PROPFIND") else { return Ok(None) };
    let before = *dav.lock();
    let until = match before {
        DavState::ListsNothing => return Ok(None),
        DavState::Unknown => deadline.min(Instant::now() + FIRST_LIMIT),
        DavState::Lists => deadline,
    };
    let mut wanted = Wanted::new(method, format!("{}/", target.trim_end_matches('/')));
    wanted.headers.push((DEPTH, depth.to_owned()));
    let (after, answer) = match requests.answer(&wanted, LISTING_LEN_MAX, until).await {
        Ok((_, text)) if is_listing(&text) => (DavState::Lists, Ok(Some(text))),
        Ok(_) => (DavState::ListsNothing, Ok(None)),
        Err(e) => match e.kind() {
            // The folder does not exist, or this user may not list it.
            io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied => (before, Ok(None)),
            io::ErrorKind::NotConnected => (before, Err(e)),
            _ if before == DavState::Lists => (before, Err(e)),
            // The server may still support WebDAV. A later listing tries again.
            io::ErrorKind::TimedOut => {
                let host = requests.host();
                tracing::warn!("{host}: no listing of WebDAV in time; the weight map counts ({e})");
                (before, Ok(None))
            }
            _ => (DavState::ListsNothing, Ok(None)),
        },
    };
    let mut state = dav.lock();
    // Another request may have changed the state meanwhile.
    if *state == before {
        *state = after;
    }
    answer
}

fn is_listing(text: &[u8]) -> bool {
    let start = &text[..text.len().min(512)];
    start.windows(b"multistatus".len()).any(|window| window == b"multistatus")
}

/// The places in a listing. Each has its path from the root, split into names, and its kind.
fn parse(text: &[u8]) -> io::Result<Vec<(Vec<String>, StoreEntry)>> {
    let bad = |why: String| invalid_data(format!("the listing is not that of WebDAV: {why}"));
    let text = std::str::from_utf8(text).map_err(|e| bad(e.to_string()))?;
    Ok(responses_in(text).map_err(bad)?.into_iter().filter_map(entry_of).collect())
}

/// The entries of the listed folder, by name. `None` if the listing does not describe a folder.
fn entries_of(
    listed: Vec<(Vec<String>, StoreEntry)>,
    target: &str,
) -> Option<Vec<(String, StoreEntry)>> {
    // Behind a reverse proxy, a server may know the folder by another path than the request. Only the last name
    // of the two paths has to be equal.
    let (folder, kind) = listed.iter().min_by_key(|(path, _)| path.len())?.clone();
    let asked = names_of(target)?;
    let is_asked = asked.last().is_none_or(|name| folder.last() == Some(name));
    if kind != StoreEntry::Folder || !is_asked {
        return None;
    }
    let below = |(path, entry): (Vec<String>, StoreEntry)| match path.strip_prefix(&*folder)? {
        [name] => Some((name.clone(), entry)),
        _ => None,
    };
    Some(listed.into_iter().filter_map(below).collect())
}

fn entry_of(response: DavResponse) -> Option<(Vec<String>, StoreEntry)> {
    let href = response.href.as_str();
    // The `href` may be a full URL.
    let path =
        href.split_once("://").map_or(href, |(_, rest)| rest.split_once('/').unwrap_or(("", "")).1);
    let names = names_of(path)?;
    if response.is_folder {
        return Some((names, StoreEntry::Folder));
    }
    let len = response.len.parse().ok()?;
    let modified = Timestamp::parse_rfc2822(&response.modified).ok();
    let state = ObjectState::new(len, &response.tag, modified.map(Timestamp::as_second));
    Some((names, StoreEntry::Object(state)))
}

/// The names in a path, all escaped in the same way. `None` if one of them is not valid in a folder.
fn names_of(path: &str) -> Option<Vec<String>> {
    let parts = path.split('/').filter(|part| !part.is_empty());
    parts.map(normalize_escapes).map(|name| is_entry_name(&name).then_some(name)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LISTING: &str = r#"<?xml version="1.0" encoding="utf-8"?>
        <D:multistatus xmlns:D="DAV:" xmlns:ns0="DAV:">
        <D:response xmlns:lp1="DAV:"><D:href>/dav/a%20b/</D:href><D:propstat><D:prop>
        <lp1:resourcetype><D:collection/></lp1:resourcetype><lp1:getetag>"0"</lp1:getetag>
        </D:prop><D:status>HTTP/1.1 200 OK</D:status></D:propstat></D:response>
        <D:response><D:href>https://host:1/dav/a%20b/x%2by.bin</D:href>
        <D:propstat><D:prop><D:getcontentlength/></D:prop><D:status>HTTP/1.1 404 Not Found</D:status></D:propstat>
        <D:propstat><D:prop><D:resourcetype></D:resourcetype><D:displayname>x</D:displayname>
        <D:getcontentlength>7</D:getcontentlength><D:getetag>"e-1"</D:getetag>
        <D:getlastmodified>Wed, 21 Oct 2015 07:28:00 GMT</D:getlastmodified>
        </D:prop><D:status>HTTP/1.1 200 OK</D:status></D:propstat></D:response>
        <D:response><D:href>/dav/a b/sub/</D:href><D:propstat><D:prop><D:resourcetype><D:collection xmlns:D="DAV:"/>
        </D:resourcetype></D:prop></D:propstat></D:response>
        <D:response><D:href>/dav/a%20b/%2E%2E/secret</D:href><D:propstat><D:prop>
        <D:getcontentlength>1</D:getcontentlength></D:prop></D:propstat></D:response>
        <D:response><D:href>/dav/a%20b/sub/deep</D:href><D:propstat><D:prop>
        <D:getcontentlength>1</D:getcontentlength></D:prop></D:propstat></D:response>
        <D:response><D:href>/dav/a%20b/no-length</D:href><D:propstat><D:prop><D:resourcetype/></D:prop></D:propstat>
        </D:response></D:multistatus>"#;

    #[test]
    fn a_listing_has_the_files_and_folders_of_one_folder() {
        let listed = || parse(LISTING.as_bytes()).unwrap();
        let entries = entries_of(listed(), "/models/a%20b").unwrap();
        let state = ObjectState::new(7, "e-1", Some(1_445_412_480));
        let file = ("x%2By.bin".to_owned(), StoreEntry::Object(state));
        assert_eq!(entries, [file, ("sub".to_owned(), StoreEntry::Folder)]);
        assert_eq!(entries_of(listed(), "/dav/another"), None);
    }

    #[test]
    fn a_listing_of_a_file_and_a_text_that_is_none_have_no_entries() {
        let file = LISTING.replace("<D:collection/>", "");
        assert_eq!(entries_of(parse(file.as_bytes()).unwrap(), "/dav/a%20b"), None);
        assert_eq!(entries_of(Vec::new(), "/dav"), None);
        assert!(is_listing(LISTING.as_bytes()) && !is_listing(b"<html></html>"));
        parse(b"<D:multistatus><D:response>").unwrap_err();
    }
}
