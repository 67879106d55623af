//! Measurements of a server with one file, for the command `doctor`.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use reqwest::header::{self, HeaderName};
use reqwest::{Method, StatusCode};
use tokio::task::JoinSet;

use super::endpoint::Endpoint;
use super::request::{Requests, Wanted};
use super::state::{ObjectState, content_range, text_of};
use crate::source::{MemoryParts, StateMark, StoreProbe, StoreSample};
use crate::version::Version;

/// Number of requests for one byte. The median of their times is reported.
const FIRST_BYTES: usize = 3;

/// Maximum number of bytes that the sample reads, and number of bytes of one request.
const SAMPLE_LEN_MAX: u64 = 64 << 20;
const PART_LEN: u64 = 1 << 20;

/// Number of range requests that are in flight at a time.
const AT_A_TIME: usize = 16;

/// Time after which no further request is sent.
const SAMPLE_LIMIT: Duration = Duration::from_secs(3);

/// A time that no object has.
const OTHER_TIME: &str = "Thu, 01 Jan 1970 00:00:00 GMT";

/// Measures how the server of `endpoint` serves the object at `target`, which has `version`.
///
/// # Errors
/// If the server refuses a request, or does not answer in time.
pub(super) async fn probe(
    endpoint: &Arc<Endpoint>,
    target: &str,
    version: &Version,
    state: &ObjectState,
    deadline: Instant,
) -> io::Result<StoreProbe> {
    let mark = mark_of(state);
    if version.len == 0 {
        let (obeys_ranges, obeys_conditions) = (None, None);
        let began = Instant::now();
        endpoint.look(target, deadline).await?;
        let first_byte = began.elapsed();
        return Ok(StoreProbe { mark, obeys_ranges, obeys_conditions, first_byte, sample: None });
    }
    let (has_ranges, first_byte) = first_bytes(endpoint, target, version.len, deadline).await?;
    let obeys_conditions = try_condition(endpoint, target, state, deadline).await?;
    let sample = match has_ranges {
        true => Some(take_sample(endpoint, target, version, state, deadline).await?),
        false => None,
    };
    let obeys_ranges = Some(has_ranges);
    Ok(StoreProbe { mark, obeys_ranges, obeys_conditions, first_byte, sample })
}

fn mark_of(state: &ObjectState) -> StateMark {
    match (state.tag.as_str(), state.modified) {
        ("", Some(_)) => StateMark::Time,
        ("", None) => StateMark::Length,
        _ if state.is_weak => StateMark::Weak,
        (tag, Some(modified)) if is_of_time(tag, state.len, modified) => StateMark::LengthAndTime,
        _ => StateMark::Strong,
    }
}

/// Whether an ETag consists of the time of the last change and the length, as nginx creates ETags.
fn is_of_time(tag: &str, len: u64, modified: i64) -> bool {
    tag.eq_ignore_ascii_case(&format!("{modified:x}-{len:x}"))
}

/// A request for the first byte, with an optional condition.
fn first_byte_wanted(target: &str, condition: Option<(HeaderName, String)>) -> Wanted {
    let mut wanted = Wanted::new(Method::GET, target);
    wanted.headers.push((header::RANGE, "bytes=0-0".to_owned()));
    wanted.headers.extend(condition);
    wanted
}

/// Whether a request for one byte gets exactly that byte, and the median time to the answer.
async fn first_bytes(
    endpoint: &Endpoint,
    target: &str,
    len: u64,
    deadline: Instant,
) -> io::Result<(bool, Duration)> {
    let mut times = Vec::new();
    let mut obeys_ranges = true;
    for _ in 0..FIRST_BYTES {
        let began = Instant::now();
        let wanted = first_byte_wanted(target, None);
        let (status, headers) = endpoint.headers(&wanted, deadline).await?;
        times.push(began.elapsed());
        let range = text_of(&headers, header::CONTENT_RANGE).and_then(content_range);
        let is_part = status == StatusCode::PARTIAL_CONTENT
            && range
                .is_some_and(|(range, total)| range == (0..1) && total.is_none_or(|t| t == len));
        obeys_ranges &= is_part || len == 1;
    }
    times.sort_unstable();
    Ok((obeys_ranges, times[FIRST_BYTES / 2]))
}

/// Whether the server refuses a request whose condition the object does not meet. `None` if requests to the
/// server have no conditions.
async fn try_condition(
    endpoint: &Endpoint,
    target: &str,
    state: &ObjectState,
    deadline: Instant,
) -> io::Result<Option<bool>> {
    let (Some(tag), Some((name, _))) = (endpoint.access.other_tag(), state.condition()) else {
        return Ok(None);
    };
    let value = if name == header::IF_MATCH { tag } else { OTHER_TIME };
    let wanted = first_byte_wanted(target, Some((name, value.to_owned())));
    match endpoint.headers(&wanted, deadline).await {
        Ok(_) => Ok(Some(false)),
        Err(e) if e.kind() == io::ErrorKind::StaleNetworkFileHandle => Ok(Some(true)),
        Err(e) => Err(e),
    }
}

/// Reads from the start of the object with many concurrent requests.
async fn take_sample(
    endpoint: &Arc<Endpoint>,
    target: &str,
    version: &Version,
    state: &ObjectState,
    deadline: Instant,
) -> io::Result<StoreSample> {
    let began = Instant::now();
    let end = version.len.min(SAMPLE_LEN_MAX);
    let (mut asked, mut len, mut reads) = (0, 0, JoinSet::new());
    let mut at_a_time = 0;
    loop {
        while reads.len() < AT_A_TIME && asked < end && began.elapsed() < SAMPLE_LIMIT {
            let (endpoint, target) = (endpoint.clone(), target.to_owned());
            let (version, state, offset) = (*version, state.clone(), asked);
            let part_len = PART_LEN.min(end - offset);
            asked += part_len;
            reads.spawn(async move {
                let mut bytes = vec![0; part_len as usize];
                let mut parts = MemoryParts::one(&mut bytes);
                let known = Some(&state);
                let read = endpoint.read(&target, &version, known, offset, &mut parts, deadline);
                read.await.map(|_| part_len)
            });
        }
        at_a_time = at_a_time.max(reads.len());
        match reads.join_next().await {
            None => break,
            Some(read) => len += read.map_err(io::Error::other)??,
        }
    }
    Ok(StoreSample { len, took: began.elapsed(), at_a_time })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_etag_of_nginx_is_made_of_the_time_and_the_length() {
        assert!(is_of_time("5627f6a0-400", 0x400, 0x5627_f6a0));
        for tag in
            ["5627f6a0-401", "5627f6a1-400", "5627f6a0400", "d41d8cd98f00b204e9800998ecf8427e"]
        {
            assert!(!is_of_time(tag, 0x400, 0x5627_f6a0), "{tag}");
        }
    }
}
