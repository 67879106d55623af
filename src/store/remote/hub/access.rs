//! Requests to the hub: the token, the links to other hosts, and the meaning of refusals.
//!
//! The hub answers a request for a large file with a link to another host. The link is signed and expires after about
//! an hour. Reads of the file use the same link until shortly before it expires. The token is sent to the hub only.

use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use reqwest::header::{self, HeaderMap, HeaderName, HeaderValue};
use reqwest::{Client, Method, Response, StatusCode, Url};
use tokio::sync::OnceCell;

use super::super::credentials::{Variable, is_on};
use super::super::patience::{Trouble, lost_connection, no_answer, unusable};
use super::super::request::Wanted;
use super::super::state::{len_of, replaced, retry_after, text_of};
use super::super::url::is_confidential;
use super::{GIT_DIGITS, HubFile, HubRepository, HubTree, PinnedCommit, SHA256_DIGITS, is_hash};
use crate::error::invalid_input;

/// The URL of the public hub.
const HUB: &str = "https://huggingface.co";

/// Variables that forbid requests to the hub.
const OFFLINE: [&str; 2] = ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"];

/// Time after which a new link is requested. The hub signs links for an hour.
const LINK_FOR: Duration = Duration::from_secs(50 * 60);

/// Maximum number of redirects inside the hub.
const REDIRECTS_MAX: usize = 5;

/// Maximum length in bytes of a file that the server may send as a whole in answer to a range request. Files
/// that the hub stores in Git are shorter.
const WHOLE_LEN_MAX: u64 = 64 << 20;

const ERROR_CODE: HeaderName = HeaderName::from_static("x-error-code");
const ERROR_MESSAGE: HeaderName = HeaderName::from_static("x-error-message");
const REPO_COMMIT: HeaderName = HeaderName::from_static("x-repo-commit");
const LINKED_TAG: HeaderName = HeaderName::from_static("x-linked-etag");
const LINKED_LEN: HeaderName = HeaderName::from_static("x-linked-size");
const RATE_LIMIT: HeaderName = HeaderName::from_static("ratelimit");

/// Access to one repository of the hub.
pub(in crate::store::remote) struct HubAccess {
    pub(super) repository: HubRepository,
    /// The URL of the hub, without a trailing slash.
    base: Url,
    /// The token as a header. Never printed.
    token: Option<HeaderValue>,
    /// The variable or the file that the token comes from.
    token_origin: Option<String>,
    /// The variable that forbids requests, if one is set.
    pub(super) offline: Option<&'static str>,
    /// The hub cache of this user.
    pub(super) cache: Option<PathBuf>,
    /// The commit that was resolved first. A process made by fork(2) uses the commit of its parent.
    pub(super) pinned: PinnedCommit,
    pub(super) tree: OnceCell<HubTree>,
}

/// The answer of the hub to a request for a file.
enum HubAnswer {
    /// The hub's answer with the bytes of the file.
    Here(Response),
    /// A link to the file on another host.
    Elsewhere(Url),
}

impl HubAccess {
    /// The access to `repository` with the settings of the environment variables. Returns it after the URL of the hub.
    ///
    /// # Errors
    /// If a variable has no usable value.
    pub(super) fn new(
        repository: HubRepository,
        variable: Variable<'_>,
        cache: Option<PathBuf>,
        pinned: PinnedCommit,
    ) -> io::Result<(String, HubAccess)> {
        let given = |name: &str| variable(name).filter(|value| !value.is_empty());
        let endpoint = given("HF_ENDPOINT").unwrap_or_else(|| HUB.to_owned());
        let hub = endpoint.trim_end_matches('/').to_owned();
        let base: Url = hub.parse().map_err(|_| invalid_input("HF_ENDPOINT is no URL"))?;
        let is_plain = base.username().is_empty() && !hub.contains(['?', '#', '@']);
        if !["http", "https"].contains(&base.scheme()) || base.host_str().is_none() || !is_plain {
            return Err(invalid_input("HF_ENDPOINT is no URL: expected http(s)://HOST[:PORT]"));
        }
        let (found, token_origin) = token_of(&given).unzip();
        let token = match found.filter(|_| is_confidential(&hub)) {
            None => None,
            Some(token) => {
                let mut header = HeaderValue::try_from(format!("Bearer {token}"))
                    .map_err(|_| invalid_input("the token of the hub is no token"))?;
                header.set_sensitive(true);
                Some(header)
            }
        };
        let offline = OFFLINE.into_iter().find(|name| is_on(&given, name));
        let tree = OnceCell::new();
        let access =
            HubAccess { repository, base, token, token_origin, offline, cache, pinned, tree };
        Ok((hub, access))
    }

    /// The source of the token, in words.
    pub(in crate::store::remote) fn credentials(&self) -> String {
        match &self.token_origin {
            Some(origin) if self.token.is_none() => {
                format!("none: the token of {origin} is only sent over HTTPS")
            }
            Some(origin) => format!("the token of {origin}"),
            None => "none: HF_TOKEN is not set, and there is no token file".to_owned(),
        }
    }

    /// Sends a request once and returns the successful answer, of which the headers have been read. If the
    /// target begins with a slash, it is a file. Otherwise it is a path of the API.
    pub(in crate::store::remote) async fn send(
        &self,
        client: &Client,
        wanted: &Wanted,
        limit: Duration,
    ) -> Result<Response, Trouble> {
        if let Some(name) = self.offline {
            let why = format!("{name} is set, and the hub cache does not have it");
            return Err(Trouble::Final(io::Error::new(io::ErrorKind::NotConnected, why)));
        }
        if wanted.target.starts_with('/') {
            return self.file(client, wanted, limit).await;
        }
        let url = self.url(&wanted.target)?;
        match self.ask(client, url, wanted, None, limit).await? {
            HubAnswer::Here(answer) => Ok(answer),
            HubAnswer::Elsewhere(_) => Err(Trouble::Broken("the hub names another hub".to_owned())),
        }
    }

    fn url(&self, target: &str) -> Result<Url, Trouble> {
        let url = format!("{}/{target}", self.base.as_str().trim_end_matches('/'));
        url.parse().map_err(|_| unusable("is no usable URL"))
    }

    /// Requests bytes of a file, from the hub or from the host of its link.
    async fn file(
        &self,
        client: &Client,
        wanted: &Wanted,
        limit: Duration,
    ) -> Result<Response, Trouble> {
        let known = self.tree.get().and_then(|tree| Some((tree, tree.files.get(&wanted.target)?)));
        let Some((tree, file)) = known else {
            return Err(Trouble::Final(io::ErrorKind::NotFound.into()));
        };
        // Concurrent reads of a file request one link: the first one holds the lock, and the others wait here.
        let mut link = file.link.lock().await;
        if let Some((url, _)) = link.as_ref().filter(|(_, since)| since.elapsed() < LINK_FOR) {
            let url = url.clone();
            drop(link);
            return self.fetch(client, url, wanted, file, limit).await;
        }
        let page = self.repository.page();
        let url = self.url(&format!("{page}/resolve/{}{}", tree.commit, wanted.target))?;
        match self.ask(client, url, wanted, Some((tree, file)), limit).await? {
            HubAnswer::Here(answer) => {
                drop(link);
                part_of(answer, wanted, file, self.host(), limit).await
            }
            HubAnswer::Elsewhere(url) => {
                *link = Some((url.clone(), Instant::now()));
                drop(link);
                self.fetch(client, url, wanted, file, limit).await
            }
        }
    }

    /// Sends a request to the hub and follows redirects inside the hub. `of` is the requested file, if it is one.
    async fn ask(
        &self,
        client: &Client,
        url: Url,
        wanted: &Wanted,
        of: Option<(&HubTree, &HubFile)>,
        limit: Duration,
    ) -> Result<HubAnswer, Trouble> {
        let mut place = url;
        for _ in 0..=REDIRECTS_MAX {
            let mut request = request(wanted.method.clone(), place.clone(), wanted);
            if let Some(token) = &self.token {
                request.headers_mut().insert(header::AUTHORIZATION, token.clone());
            }
            let answer = answer_of(client, request, self.host(), limit).await?;
            if let Some((tree, file)) = of {
                check_named(answer.headers(), tree, file)?;
            }
            if answer.status().is_success() {
                return Ok(HubAnswer::Here(answer));
            }
            if !answer.status().is_redirection() {
                return Err(self.refusal(answer.status(), answer.headers()));
            }
            let next = text_of(answer.headers(), header::LOCATION)
                .and_then(|next| place.join(next).ok())
                .filter(|next| ["http", "https"].contains(&next.scheme()));
            let Some(next) = next else {
                return Err(Trouble::Broken("the hub redirects to no URL".to_owned()));
            };
            if self.base.scheme() == "https" && next.scheme() != "https" {
                return Err(Trouble::Broken("the hub redirects to an insecure URL".to_owned()));
            }
            if next.origin() != self.base.origin() {
                return Ok(HubAnswer::Elsewhere(next));
            }
            place = next;
        }
        Err(Trouble::Broken(format!("the hub redirects more than {REDIRECTS_MAX} times")))
    }

    /// Requests the bytes behind a link. The other host gets no token. It may use an ETag of its own, so the
    /// answer gets the ETag of `file`: the hub made the link for the hash of that file.
    async fn fetch(
        &self,
        client: &Client,
        url: Url,
        wanted: &Wanted,
        file: &HubFile,
        limit: Duration,
    ) -> Result<Response, Trouble> {
        let host = url.host_str().unwrap_or_default().to_owned();
        let request = request(wanted.method.clone(), url.clone(), wanted);
        let mut answer = answer_of(client, request, &host, limit).await?;
        let (status, headers) = (answer.status(), answer.headers());
        let said = format!("{host} answers {} to a link of the hub", status.as_u16());
        if status.is_success() {
            set_tag(answer.headers_mut(), file);
            return Ok(answer);
        }
        match status {
            StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT => {
                Err(Trouble::Passing { why: said, after: wait_of(headers) })
            }
            status if status.is_server_error() => {
                Err(Trouble::Passing { why: said, after: wait_of(headers) })
            }
            StatusCode::RANGE_NOT_SATISFIABLE => Err(replaced()),
            _ => {
                let mut link = file.link.lock().await;
                if link.as_ref().is_some_and(|(known, _)| *known == url) {
                    *link = None;
                }
                Err(Trouble::Broken(said))
            }
        }
    }

    fn host(&self) -> &str {
        self.base.host_str().unwrap_or_default()
    }

    /// Turns an answer of the hub that is not a success into a `Trouble`.
    fn refusal(&self, status: StatusCode, headers: &HeaderMap) -> Trouble {
        let code = text_of(headers, ERROR_CODE)
            .filter(|code| is_plain_error_code(code))
            .unwrap_or_default();
        let number = status.as_u16();
        let answer = if code.is_empty() { number.to_string() } else { format!("{number} {code}") };
        let said = format!("{} answers {answer}", self.host());
        if status == StatusCode::TOO_MANY_REQUESTS || status.is_server_error() {
            return Trouble::Passing { why: said, after: wait_of(headers) };
        }
        let message = text_of(headers, ERROR_MESSAGE).unwrap_or_default().to_lowercase();
        let (kind, why) = self.why_refused(status, code, &message);
        Trouble::Final(io::Error::new(kind, format!("{said}: {why}")))
    }

    fn why_refused(
        &self,
        status: StatusCode,
        code: &str,
        message: &str,
    ) -> (io::ErrorKind, String) {
        let (denied, missing) = (io::ErrorKind::PermissionDenied, io::ErrorKind::NotFound);
        let (id, has_token) = (self.repository.id(), self.token.is_some());
        let is_denied = status == StatusCode::UNAUTHORIZED || status == StatusCode::FORBIDDEN;
        let is_bad_token = message.contains("invalid") && has_token;
        match code {
            "GatedRepo" if has_token => {
                let page = format!(
                    "{}/{}",
                    self.base.as_str().trim_end_matches('/'),
                    self.repository.page()
                );
                (
                    denied,
                    format!(
                        "{id} is gated, and the account of the token has no access yet: ask for it on {page}"
                    ),
                )
            }
            "GatedRepo" => {
                let why = "is gated: set HF_TOKEN to a token of an account that has access";
                (denied, format!("{id} {why}"))
            }
            "RevisionNotFound" => {
                (missing, format!("{id} has no revision {:?}", self.repository.revision()))
            }
            "EntryNotFound" => (missing, "nothing is there".to_owned()),
            "DisabledRepo" => (denied, format!("{id} is disabled")),
            _ if status == StatusCode::UNAUTHORIZED && is_bad_token => {
                (denied, "the token of the hub is not valid".to_owned())
            }
            "RepoNotFound" if has_token => {
                (missing, format!("there is no {id}, or the token does not allow to see it"))
            }
            // Without a token, the hub does not tell a missing repository from a private one.
            _ if is_denied && !has_token => {
                let why = "or it is private: then set HF_TOKEN";
                (missing, format!("there is no {id}, {why}"))
            }
            "RepoNotFound" => {
                (missing, format!("there is no {id}, or it is private: then set HF_TOKEN"))
            }
            _ if is_denied => (denied, "the token of the hub does not allow it".to_owned()),
            _ if status == StatusCode::NOT_FOUND => (missing, "nothing is there".to_owned()),
            _ => (io::ErrorKind::Other, "the request is refused".to_owned()),
        }
    }
}

/// A request with the headers of `wanted`, except its conditions. They are not needed since a commit never
/// changes, and the ETags of other hosts differ.
fn request(method: Method, url: Url, wanted: &Wanted) -> reqwest::Request {
    let mut request = reqwest::Request::new(method, url);
    let headers = request.headers_mut();
    headers.insert(header::ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    for (name, value) in &wanted.headers {
        let is_condition = [header::IF_MATCH, header::IF_UNMODIFIED_SINCE].contains(name);
        if let Some(value) = HeaderValue::from_str(value).ok().filter(|_| !is_condition) {
            headers.insert(name.clone(), value);
        }
    }
    request
}

async fn answer_of(
    client: &reqwest::Client,
    request: reqwest::Request,
    host: &str,
    limit: Duration,
) -> Result<Response, Trouble> {
    match tokio::time::timeout(limit, client.execute(request)).await {
        Ok(answer) => answer.map_err(|e| lost_connection(host, e)),
        Err(_) => Err(no_answer(host, limit)),
    }
}

/// Checks that the headers of the hub's answer name the commit and the state of `file`. Missing headers are accepted.
fn check_named(headers: &HeaderMap, tree: &HubTree, file: &HubFile) -> Result<(), Trouble> {
    let commit = text_of(headers, REPO_COMMIT);
    let len: Option<u64> = text_of(headers, LINKED_LEN).and_then(|len| len.parse().ok());
    // A proxy between the hub and this machine may send an ETag of another form.
    let tag = text_of(headers, LINKED_TAG)
        .or_else(|| text_of(headers, header::ETAG))
        .map(|tag| tag.trim_start_matches("W/").trim_matches('"'))
        .filter(|tag| is_hash(tag, GIT_DIGITS) || is_hash(tag, SHA256_DIGITS));
    let is_other = commit.is_some_and(|commit| commit != tree.commit)
        || len.is_some_and(|len| len != file.state.len)
        || tag.is_some_and(|tag| !tag.eq_ignore_ascii_case(&file.state.tag));
    if is_other { Err(replaced()) } else { Ok(()) }
}

/// An answer of the hub itself to a range request. The hub may send a small file as a whole. Then the wanted
/// range is cut out of it.
async fn part_of(
    mut answer: Response,
    wanted: &Wanted,
    file: &HubFile,
    host: &str,
    limit: Duration,
) -> Result<Response, Trouble> {
    let len = file.state.len;
    let part = wanted
        .range()
        .and_then(|range| range.strip_prefix("bytes=")?.split_once('-'))
        .and_then(|(start, last)| Some((start.parse().ok()?, last.parse().ok()?)));
    let whole = part.is_none_or(|(start, last): (u64, u64)| start == 0 && last + 1 == len);
    let is_encoded = answer.headers().contains_key(header::CONTENT_ENCODING);
    if answer.status() != StatusCode::OK || whole || is_encoded || len > WHOLE_LEN_MAX {
        set_tag(answer.headers_mut(), file);
        return Ok(answer);
    }
    if len_of(answer.headers()).is_some_and(|found| found != len) {
        return Err(replaced());
    }
    let mut bytes = Vec::with_capacity(len as usize);
    loop {
        match tokio::time::timeout(limit, answer.chunk()).await {
            Ok(Ok(None)) => break,
            Ok(Ok(Some(frame))) if bytes.len() + frame.len() <= len as usize => {
                bytes.extend_from_slice(&frame);
            }
            Ok(Ok(Some(_))) => return Err(replaced()),
            Ok(Err(e)) => return Err(lost_connection(host, e)),
            Err(_) => return Err(no_answer(host, limit)),
        }
    }
    let (start, last) = part.unwrap_or_default();
    let why = format!("{host} ended its answer after {} of {len} bytes", bytes.len());
    let taken = bytes
        .get(start as usize..=last as usize)
        .map(<[u8]>::to_vec)
        .filter(|_| bytes.len() as u64 == len)
        .ok_or(Trouble::Passing { why, after: None })?;
    let response = http::Response::builder()
        .status(StatusCode::PARTIAL_CONTENT)
        .header(header::CONTENT_RANGE, format!("bytes {start}-{last}/{len}"))
        .body(taken)
        .map_err(|_| unusable("has no usable name"))?;
    let mut made = Response::from(response);
    set_tag(made.headers_mut(), file);
    Ok(made)
}

/// Sets the ETag of an answer to the one that the listing has for `file`.
fn set_tag(headers: &mut HeaderMap, file: &HubFile) {
    if let Ok(tag) = HeaderValue::from_str(&format!("\"{}\"", file.state.tag)) {
        headers.insert(header::ETAG, tag);
    }
}

/// The pause that the hub asks for, from a header like `ratelimit: "api";r=0;t=55`, where `t` is in seconds.
fn wait_of(headers: &HeaderMap) -> Option<Duration> {
    let of_limit = || {
        let limit = text_of(headers, RATE_LIMIT)?;
        let seconds = limit.split(';').find_map(|part| part.trim().strip_prefix("t="))?;
        seconds.parse().ok().map(Duration::from_secs)
    };
    retry_after(headers).or_else(of_limit)
}

/// Whether the text of a server is a short code that a message may quote.
fn is_plain_error_code(text: &str) -> bool {
    text.len() < 64 && text.chars().all(|c| c.is_ascii_alphanumeric())
}

/// The token of this user and the name of its source. The same places are searched as in the Python package
/// huggingface_hub.
fn token_of(given: Variable<'_>) -> Option<(String, String)> {
    if is_on(given, "HF_HUB_DISABLE_IMPLICIT_TOKEN") {
        return None;
    }
    let trimmed = |token: String| Some(token.trim().to_owned()).filter(|token| !token.is_empty());
    let mut variables = ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"].into_iter();
    let of_variable = variables.find_map(|name| Some((given(name)?, name)));
    if let Some((token, name)) = of_variable
        && let Some(token) = trimmed(token)
    {
        return Some((token, name.to_owned()));
    }
    let of_home = || Some(PathBuf::from(given("HOME")?).join(".cache/huggingface/token"));
    let of_xdg = || Some(PathBuf::from(given("XDG_CACHE_HOME")?).join("huggingface/token"));
    let of_hub = || Some(PathBuf::from(given("HF_HOME")?).join("token"));
    let own = given("HF_TOKEN_PATH").map(PathBuf::from);
    let named = own.or_else(of_hub).or_else(of_xdg).or_else(of_home)?;
    let path = match named.strip_prefix("~") {
        Ok(rest) => PathBuf::from(given("HOME")?).join(rest),
        Err(_) => named,
    };
    match std::fs::read_to_string(&path) {
        Ok(text) => Some((trimmed(text)?, format!("the file {}", crate::error::shown_path(&path)))),
        Err(e) => {
            tracing::debug!("no token of the hub in {}: {e}", crate::error::shown_path(&path));
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access(variables: &[(&str, &str)]) -> io::Result<HubAccess> {
        let (repository, _) = HubRepository::parse("a/b").unwrap();
        let variable = |name: &str| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        HubAccess::new(repository, &variable, None, PinnedCommit::default())
            .map(|(_, access)| access)
    }

    #[test]
    fn the_token_is_that_of_huggingface_hub() {
        let home = tempfile::tempdir().unwrap();
        let at = |name: &str, token: &str| {
            let path = home.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, token).unwrap();
            path.to_str().unwrap().to_owned()
        };
        let root = home.path().to_str().unwrap().to_owned();
        let own = at("own", "hf_own\n");
        at("hub/token", "hf_hub");
        at(".cache/huggingface/token", "hf_home");
        let all = [
            ("HF_TOKEN", " hf_variable "),
            ("HF_TOKEN_PATH", &own),
            ("HF_HOME", &format!("{root}/hub")),
            ("HOME", &root),
        ];
        for (first, expected) in ["hf_variable", "hf_own", "hf_hub", "hf_home"].iter().enumerate() {
            let token = access(&all[first..]).unwrap().token.unwrap();
            assert_eq!(token.to_str().unwrap(), format!("Bearer {expected}"));
            assert!(!format!("{token:?}").contains("hf_"));
        }
        let mut none = all.to_vec();
        none.push(("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1"));
        assert!(access(&none).unwrap().token.is_none());
        assert!(access(&[("HF_TOKEN", "a\nb")]).is_err());
    }

    #[test]
    fn a_refusal_says_what_to_do() {
        let refusal =
            |variables: &[(&str, &str)], status: u16, headers: &[(&'static str, &str)]| {
                let headers: HeaderMap = headers
                    .iter()
                    .map(|(name, value)| (HeaderName::from_static(name), value.parse().unwrap()))
                    .collect();
                access(variables).unwrap().refusal(StatusCode::from_u16(status).unwrap(), &headers)
            };
        let token = [("HF_TOKEN", "hf_x")];
        let why = |trouble| match trouble {
            Trouble::Final(e) => e.to_string(),
            other => panic!("{other:?}"),
        };
        for (variables, status, code, text) in [
            (&token[..], 403, "GatedRepo", "ask for it on https://huggingface.co/a/b"),
            (&[][..], 401, "GatedRepo", "is gated: set HF_TOKEN"),
            (&[][..], 401, "RepoNotFound", "there is no a/b, or it is private"),
            (&token[..], 404, "RepoNotFound", "the token does not allow to see it"),
            (&token[..], 404, "RevisionNotFound", "no revision \"main\""),
            (&token[..], 403, "", "the token of the hub does not allow it"),
            (&token[..], 404, "EntryNotFound", "nothing is there"),
        ] {
            let found = why(refusal(variables, status, &[("x-error-code", code)]));
            assert!(found.contains(text), "{found}");
        }
        let invalid = [("x-error-message", "Invalid credentials in Authorization header")];
        assert!(why(refusal(&token, 401, &invalid)).contains("is not valid"));
        let busy = refusal(&[], 429, &[("ratelimit", "\"resolvers\";r=0;t=55")]);
        let wait = Some(Duration::from_secs(55));
        assert!(matches!(busy, Trouble::Passing { after, .. } if after == wait));
    }

    #[test]
    fn an_endpoint_is_a_url_without_more() {
        for bad in ["hub", "ftp://hub", "https://u:hunter2@hub", "https://hub/?x"] {
            let error = access(&[("HF_ENDPOINT", bad)]).err().unwrap().to_string();
            assert!(error.contains("HF_ENDPOINT") && !error.contains("hunter2"), "{error}");
        }
        let mirror = access(&[("HF_ENDPOINT", "http://127.0.0.1:80/hub/")]).unwrap();
        assert_eq!(mirror.url("api/x").unwrap().as_str(), "http://127.0.0.1/hub/api/x");
    }
}
