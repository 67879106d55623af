//! One server: authenticated requests to it with retries, and the meaning of its refusals.

use std::io;
use std::ops::Range;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use reqwest::header::{self, HeaderMap, HeaderName, HeaderValue};
use reqwest::{Method, Response, StatusCode};
use tokio::sync::{Semaphore, SemaphorePermit};

use super::access::Access;
use super::hedging;
use super::patience::{Pace, Patience, Trouble, lost_connection, no_answer, unusable};
use super::request::{Refusal, Requests, Wanted};
use super::shared::{RemoteClients, RemoteProcess};
use super::state::{
    ObjectState, check_answer, content_range, len_of, replaced, retry_after, text_of,
};
use crate::error::{invalid_data, invalid_input};
use crate::source::MemoryParts;
use crate::store::remote_status::{EndpointCounters, counters_of};
use crate::version::Version;

/// Maximum number of bytes of an error answer that are read.
const ERROR_LEN_MAX: usize = 64 << 10;

/// The header in which Azure names the reason of a refusal.
const AZURE_CODE: HeaderName = HeaderName::from_static("x-ms-error-code");

/// A server.
pub(super) struct Endpoint {
    /// The URL up to the name of an object.
    base: String,
    /// The host, for messages.
    pub(super) host: String,
    /// The whole address in a normalized form, because two servers may share a host.
    pub(super) address: String,
    pub(super) access: Access,
    pub(super) clients: Arc<RemoteClients>,
    slots: Arc<Semaphore>,
    counters: Arc<EndpointCounters>,
}

impl Endpoint {
    pub(super) fn new(
        base: String,
        access: Access,
        clients: Arc<RemoteClients>,
    ) -> io::Result<Endpoint> {
        let url: reqwest::Url = base
            .replace("{region}", "region")
            .parse()
            .map_err(|_| invalid_input("is no usable URL"))?;
        let own: Option<reqwest::Url> = access.base().and_then(|own| own.parse().ok());
        let named = own.as_ref().unwrap_or(&url);
        let host = match (named.host_str(), named.port()) {
            (Some(host), Some(port)) => format!("{host}:{port}"),
            (host, _) => host.unwrap_or_default().to_owned(),
        };
        let slots = RemoteProcess::get()?.slots_of(&host);
        let counters = counters_of(&host);
        let address = url.as_str().trim_end_matches('/').to_owned();
        Ok(Endpoint { base, host, address, access, clients, slots, counters })
    }

    /// Sends a request once and returns the successful answer, of which the headers have been read.
    pub(super) async fn send(&self, wanted: &Wanted, limit: Duration) -> Result<Response, Trouble> {
        self.counters.requests.add(1);
        let sent = Instant::now();
        if let Some(hub) = self.access.hub() {
            let client = self.clients.direct.get().map_err(Trouble::Final)?;
            let answer = hub.send(client, wanted, limit).await?;
            self.counters.first_byte.add(sent.elapsed());
            return Ok(answer);
        }
        let (request, is_signed) = self.request(wanted).await?;
        // The client removes a login when it follows a redirect to another host.
        let is_web = matches!(self.access, Access::Web(_));
        let lazy = if is_web { &self.clients.following } else { &*self.clients.direct };
        let client = lazy.get().map_err(Trouble::Final)?;
        let mut answer = match tokio::time::timeout(limit, client.execute(request)).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(e)) => return Err(self.lost(e)),
            Err(_) => return Err(self.late(limit)),
        };
        self.counters.first_byte.add(sent.elapsed());
        if answer.status().is_success() {
            self.access.name_state(answer.headers_mut());
            Ok(answer)
        } else {
            Err(self.refusal(answer, is_signed).await)
        }
    }

    /// Sends a request once, like `send`. If the answer takes much longer than earlier answers of the server, a
    /// second copy of the request is sent. The first answer is used.
    async fn send_twice_if_slow(
        &self,
        wanted: &Wanted,
        limit: Duration,
    ) -> Result<Response, Trouble> {
        let mut first = pin!(self.send(wanted, limit));
        let Some(delay) = hedging::delay(&self.counters) else { return first.await };
        if let Ok(answer) = tokio::time::timeout(delay, &mut first).await {
            return answer;
        }
        // If the server has the maximum number of requests already, no second copy is sent.
        let Ok(_slot) = self.slots.try_acquire() else { return first.await };
        if hedging::delay(&self.counters).is_none() {
            return first.await;
        }
        self.counters.hedges.add(1);
        hedging::first_success(first, self.send(wanted, limit)).await
    }

    /// The HTTP request for `wanted`, and whether it is signed.
    async fn request(&self, wanted: &Wanted) -> Result<(reqwest::Request, bool), Trouble> {
        let base = self.access.base().unwrap_or_else(|| self.base.clone());
        let url: reqwest::Url =
            format!("{base}{}", wanted.target).parse().map_err(|_| unusable("is no usable URL"))?;
        let mut builder = http::Request::builder().method(wanted.method.clone()).uri(url.as_str());
        for (name, value) in &wanted.headers {
            builder = builder.header(name, value);
        }
        let (mut parts, ()) =
            builder.body(()).map_err(|_| unusable("is no usable URL"))?.into_parts();
        let is_signed = self.access.sign(&self.clients, &mut parts).await?;
        // The signature may be part of the URL.
        let url = parts.uri.to_string().parse().map_err(|_| unusable("is no usable URL"))?;
        let mut request = reqwest::Request::new(parts.method, url);
        *request.headers_mut() = parts.headers;
        // Proxies may change this header, so it is not signed.
        request.headers_mut().insert(header::ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        Ok((request, is_signed))
    }

    /// Number of bytes in flight that keep the server busy. `None` before that is measured.
    pub(super) fn wanted_in_flight(&self) -> Option<u64> {
        self.counters.bandwidth.lock().wanted_in_flight()
    }

    fn lost(&self, e: reqwest::Error) -> Trouble {
        lost_connection(&self.host, e)
    }

    fn late(&self, limit: Duration) -> Trouble {
        no_answer(&self.host, limit)
    }

    /// Turns an answer that is not a success into a `Trouble`.
    async fn refusal(&self, answer: Response, is_signed: bool) -> Trouble {
        let (status, headers) = (answer.status(), answer.headers().clone());
        let code = match text_of(&headers, AZURE_CODE).filter(|code| is_code(code)) {
            Some(code) => code.to_owned(),
            None => code_of(answer).await,
        };
        let number = status.as_u16();
        let answer = if code.is_empty() { number.to_string() } else { format!("{number} {code}") };
        let said = format!("{} answers {answer}", self.host);
        let refused = |kind, why: String| Trouble::Final(io::Error::new(kind, why));
        let refusal = Refusal { status, headers, code, is_signed, said };
        if let Some(trouble) = self.access.mend(&self.clients, &refusal).await {
            return trouble;
        }
        let Refusal { headers, code, said, .. } = &refusal;
        let passing = |after| Trouble::Passing { why: said.clone(), after };
        match status {
            StatusCode::PRECONDITION_FAILED | StatusCode::RANGE_NOT_SATISFIABLE => replaced(),
            StatusCode::NOT_FOUND | StatusCode::GONE => {
                let why = match code.as_str() {
                    "NoSuchBucket" => "there is no such bucket",
                    "ContainerNotFound" => "there is no such container",
                    _ => "nothing is there",
                };
                refused(io::ErrorKind::NotFound, format!("{said}: {why}"))
            }
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                let why = self.access.why_denied(&refusal);
                refused(io::ErrorKind::PermissionDenied, format!("{said}: {why}"))
            }
            StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT => {
                passing(retry_after(headers))
            }
            status if status.is_server_error() && status != StatusCode::NOT_IMPLEMENTED => {
                passing(retry_after(headers))
            }
            _ if code == "RequestTimeout" => passing(None),
            StatusCode::METHOD_NOT_ALLOWED | StatusCode::NOT_IMPLEMENTED => {
                refused(io::ErrorKind::Unsupported, refusal.said)
            }
            _ => refused(io::ErrorKind::Other, refusal.said),
        }
    }

    /// Waits for one of the places for concurrent requests to the server.
    async fn slot(&self, deadline: Instant) -> io::Result<RequestSlot<'_>> {
        let late = |_| io::Error::from(io::ErrorKind::TimedOut);
        let slot = tokio::time::timeout_at(deadline.into(), self.slots.acquire())
            .await
            .map_err(late)?
            .map_err(io::Error::other)?;
        self.counters.now.add(1);
        Ok(RequestSlot { _permit: slot, counters: &self.counters })
    }

    /// Waits for the pause before the next try. During the pause, other requests can use the place `slot`. Returns a
    /// place for the next try.
    ///
    /// # Errors
    /// The cause in `trouble`, if no time is left for another try, or another try would fail too.
    async fn pause_before_retry<'a>(
        &'a self,
        slot: RequestSlot<'a>,
        patience: &mut Patience,
        trouble: Trouble,
    ) -> io::Result<RequestSlot<'a>> {
        drop(slot);
        patience.pause_before_retry(trouble).await?;
        self.counters.retries.add(1);
        self.slot(patience.deadline).await.map_err(|_| patience.no_place())
    }

    /// The headers of the answer to a request whose body is not needed.
    ///
    /// # Errors
    /// If the server refuses the request, or does not answer in time.
    pub(super) async fn headers(
        &self,
        wanted: &Wanted,
        deadline: Instant,
    ) -> io::Result<(StatusCode, HeaderMap)> {
        let mut slot = self.slot(deadline).await?;
        let mut patience = Patience::until(deadline, false);
        loop {
            match self.send(wanted, patience.stall_limit()).await {
                Ok(answer) => return Ok((answer.status(), answer.headers().clone())),
                Err(trouble) => {
                    slot = self.pause_before_retry(slot, &mut patience, trouble).await?;
                }
            }
        }
    }

    async fn body(
        &self,
        mut answer: Response,
        len_max: usize,
        limit: Duration,
    ) -> Result<Vec<u8>, Trouble> {
        let promised = len_of(answer.headers());
        let mut body = Vec::new();
        while let Some(frame) = self.frame(&mut answer, limit).await? {
            if body.len() + frame.len() > len_max {
                return Err(Trouble::Broken(format!("the answer has more than {len_max} bytes")));
            }
            body.extend_from_slice(&frame);
        }
        match promised {
            Some(len) if len != body.len() as u64 => Err(self.short(body.len() as u64, len)),
            _ => Ok(body),
        }
    }

    async fn frame(
        &self,
        answer: &mut Response,
        limit: Duration,
    ) -> Result<Option<bytes::Bytes>, Trouble> {
        match tokio::time::timeout(limit, answer.chunk()).await {
            Ok(frame) => {
                let frame = frame.map_err(|e| self.lost(e))?;
                self.counters.bytes.add(frame.as_ref().map_or(0, |frame| frame.len() as u64));
                Ok(frame)
            }
            Err(_) => Err(self.late(limit)),
        }
    }

    fn short(&self, found: u64, wanted: u64) -> Trouble {
        let why = format!("{} ended its answer after {found} of {wanted} bytes", self.host);
        Trouble::Passing { why, after: None }
    }

    /// Fills `parts` with the bytes at `offset` of the object at `target`, if the object still has `version`.
    /// `known` is the last known state of the object. Returns the state that the server's answer names.
    ///
    /// # Errors
    /// `StaleNetworkFileHandle` if the object was replaced. Also fails if the server refuses the request, or
    /// does not answer in time.
    pub(super) async fn read(
        &self,
        target: &str,
        version: &Version,
        known: Option<&ObjectState>,
        offset: u64,
        parts: &mut MemoryParts<'_>,
        deadline: Instant,
    ) -> io::Result<Option<ObjectState>> {
        let mut slot = self.slot(deadline).await?;
        let mut patience = Patience::until(deadline, true);
        let condition = known.and_then(ObjectState::condition);
        let (mut have, mut state) = (0, None);
        while have < parts.len() {
            let range = offset + have as u64..offset + parts.len() as u64;
            let mut wanted = Wanted::new(Method::GET, target);
            let bytes = format!("bytes={}-{}", range.start, range.end - 1);
            wanted.headers.push((header::RANGE, bytes));
            wanted.headers.extend(condition.clone());
            let before = have;
            let tried = self.fill(&wanted, version, range, parts, &mut have, &patience).await;
            // A slow answer counts as a failure, so that the next answer gets more time. Perhaps all answers of the
            // server are slow.
            if have > before && !matches!(tried, Err(Trouble::Slow(_))) {
                patience.progressed();
            }
            match tried {
                Ok(seen) => state = Some(seen),
                Err(trouble) => {
                    slot = self.pause_before_retry(slot, &mut patience, trouble).await?;
                }
            }
        }
        Ok(state)
    }

    /// Tries once to read `range` to the bytes of `parts` from `have` on. If the try fails, `have` includes the
    /// bytes that have arrived.
    async fn fill(
        &self,
        wanted: &Wanted,
        version: &Version,
        range: Range<u64>,
        parts: &mut MemoryParts<'_>,
        have: &mut usize,
        patience: &Patience,
    ) -> Result<ObjectState, Trouble> {
        let (sent, limit) = (Instant::now(), patience.stall_limit());
        let mut answer = self.send_twice_if_slow(wanted, limit).await?;
        let latency = sent.elapsed();
        let state = check_answer(answer.status(), answer.headers(), &range, version)?;
        self.counters.bandwidth.lock().answered(latency, Instant::now());
        let before = *have;
        let mut pace = Pace::new(limit, *have);
        while let Some(frame) = self.frame(&mut answer, limit).await? {
            if !parts.write(*have, &frame) {
                *have = before;
                return Err(Trouble::Broken(
                    "the server sends more bytes than it announces".to_owned(),
                ));
            }
            *have += frame.len();
            if pace.is_too_slow(*have, parts.len(), patience) {
                return Err(Trouble::Slow(format!("an answer from {} comes slowly", self.host)));
            }
        }
        self.counters.bandwidth.lock().arrived((*have - before) as u64, Instant::now());
        if *have == parts.len() {
            Ok(state)
        } else {
            Err(self.short((*have - before) as u64, range.end - range.start))
        }
    }
}

impl Requests for Endpoint {
    fn host(&self) -> &str {
        &self.host
    }

    async fn answer(
        &self,
        wanted: &Wanted,
        len_max: usize,
        deadline: Instant,
    ) -> io::Result<(HeaderMap, Vec<u8>)> {
        let mut slot = self.slot(deadline).await?;
        let mut patience = Patience::until(deadline, false);
        loop {
            let limit = patience.stall_limit();
            let trouble = match self.send(wanted, limit).await {
                Ok(answer) => {
                    let headers = answer.headers().clone();
                    match self.body(answer, len_max, limit).await {
                        Ok(body) => return Ok((headers, body)),
                        Err(trouble) => trouble,
                    }
                }
                Err(trouble) => trouble,
            };
            slot = self.pause_before_retry(slot, &mut patience, trouble).await?;
        }
    }

    async fn look(&self, target: &str, deadline: Instant) -> io::Result<ObjectState> {
        let asked = self.headers(&Wanted::new(Method::HEAD, target), deadline).await;
        let refused = match asked {
            Ok((_, headers)) => {
                if let Some(len) = len_of(&headers) {
                    return Ok(ObjectState::of_headers(&headers, len));
                }
                None
            }
            // The answer to HEAD has no body, so a refusal has no code.
            Err(e)
                if matches!(
                    e.kind(),
                    io::ErrorKind::Unsupported
                        | io::ErrorKind::PermissionDenied
                        | io::ErrorKind::Other
                ) =>
            {
                Some(e)
            }
            Err(e) => return Err(e),
        };
        // If the server refuses HEAD, or sends no length with it, the answer to a range request has the length or
        // the reason.
        let mut wanted = Wanted::new(Method::GET, target);
        wanted.headers.push((header::RANGE, "bytes=0-0".to_owned()));
        let (status, headers) = self.headers(&wanted, deadline).await?;
        let range = text_of(&headers, header::CONTENT_RANGE).and_then(content_range);
        match (status, range) {
            (StatusCode::PARTIAL_CONTENT, Some((_, Some(len)))) => {
                Ok(ObjectState::of_headers(&headers, len))
            }
            _ => {
                let why = format!("{} tells no length: it has to serve ranges", self.host);
                Err(match refused {
                    Some(e) => io::Error::new(e.kind(), format!("{e}; {why}")),
                    None => invalid_data(why),
                })
            }
        }
    }
}

/// One place for a concurrent request to the server. It is freed when this is dropped.
struct RequestSlot<'a> {
    _permit: SemaphorePermit<'a>,
    counters: &'a EndpointCounters,
}

impl Drop for RequestSlot<'_> {
    fn drop(&mut self) {
        self.counters.now.sub(1);
    }
}

/// The error code in an XML error answer. Empty if there is none.
async fn code_of(mut answer: Response) -> String {
    let mut text = Vec::new();
    let limit = Duration::from_secs(2);
    while let Ok(Ok(Some(frame))) = tokio::time::timeout(limit, answer.chunk()).await {
        text.extend_from_slice(&frame);
        if text.len() > ERROR_LEN_MAX {
            break;
        }
    }
    code_in(&String::from_utf8_lossy(&text))
}

fn code_in(text: &str) -> String {
    let found = text.split_once("<Code>").and_then(|(_, rest)| rest.split_once("</Code>"));
    let code = found.map_or("", |(code, _)| code.trim());
    if is_code(code) { code.to_owned() } else { String::new() }
}

fn is_code(text: &str) -> bool {
    text.len() < 64 && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '.')
}

#[cfg(test)]
mod tests {
    use super::super::web::WebAccess;
    use super::*;
    use crate::store::remote_settings::StoreSettings;

    #[test]
    fn an_address_has_one_spelling_and_servers_of_one_host_have_different_ones() {
        let clients = RemoteProcess::get().unwrap().clients_of(&StoreSettings::default()).unwrap();
        let address = |base: &str| {
            Endpoint::new(base.to_owned(), Access::Web(WebAccess::default()), clients.clone())
                .unwrap()
                .address
        };
        assert_eq!(address("HTTP://Host:80/a/"), address("http://host/a"));
        let bases = ["http://host/a", "http://host/b", "https://host/a", "http://host:81/a"];
        let all: std::collections::BTreeSet<String> = bases.into_iter().map(address).collect();
        assert_eq!(all.len(), bases.len(), "{all:?}");
    }

    #[test]
    fn the_code_of_an_error_is_a_word() {
        assert_eq!(code_in("<Error><Code>SlowDown</Code><Message>x</Message></Error>"), "SlowDown");
        for text in ["", "<html>", "<Code>", "<Code>a b</Code>", "<Code>\u{1b}[2J</Code>"] {
            assert_eq!(code_in(text), "", "{text}");
        }
    }
}
