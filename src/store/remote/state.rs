//! The state of an object in headers and listings, and the check of an answer against it.

use std::io;
use std::ops::Range;
use std::time::Duration;

use reqsign_core::time::Timestamp;
use reqwest::StatusCode;
use reqwest::header::{self, HeaderMap, HeaderName};

use super::patience::Trouble;
use crate::hash::Digest;
use crate::version::{QueueKey, Version};

/// Identifies the bytes of an object, as well as the server's answers allow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ObjectState {
    pub(super) len: u64,
    /// The ETag without quotes. Empty if there is none.
    pub(super) tag: String,
    /// Whether the ETag is weak, which means that the bytes may change while it stays the same.
    pub(super) is_weak: bool,
    /// Time of the last change, in seconds since 1970.
    pub(super) modified: Option<i64>,
}

impl ObjectState {
    /// The state of an object of `len` bytes from the headers of an answer.
    pub(super) fn of_headers(headers: &HeaderMap, len: u64) -> ObjectState {
        let modified = text_of(headers, header::LAST_MODIFIED).and_then(seconds_of_http_date);
        let tag = text_of(headers, header::ETAG).unwrap_or_default();
        ObjectState::new(len, tag, modified)
    }

    /// The state with the ETag `tag`, which may be in quotes.
    pub(super) fn new(len: u64, tag: &str, modified: Option<i64>) -> ObjectState {
        let trimmed = tag.trim();
        let (is_weak, quoted) = match trimmed.strip_prefix("W/") {
            Some(strong) => (true, strong),
            None => (false, trimmed),
        };
        let tag = quoted.trim_matches('"').to_owned();
        ObjectState { len, tag, is_weak, modified }
    }

    /// Whether anything but the length identifies the bytes.
    pub(super) fn has_mark(&self) -> bool {
        self.number() != 0
    }

    /// A number that identifies the bytes, except for their length. It is a hash of the ETag, or else of the
    /// time. It is odd only for a strong ETag, because a weak ETag or a time may stay when the bytes change.
    fn number(&self) -> u64 {
        let number = |text: String| Digest::of(text.as_bytes()).number();
        match (self.tag.as_str(), self.modified) {
            ("", None) => 0,
            ("", Some(modified)) => number(format!("modified {modified}")) & !1,
            (tag, _) if self.is_weak => number(format!("tag {tag}")) & !1,
            (tag, _) => number(format!("tag {tag}")) | 1,
        }
    }

    /// The version of the object with the number `object`.
    pub(super) fn version(&self, queue: QueueKey, object: u64) -> Version {
        let changed = self.modified.map(|seconds| (seconds, 0));
        Version::of_tagged_object(queue, [object, self.number()], self.len, changed)
    }

    /// Whether `version` identifies these bytes.
    pub(super) fn is_of(&self, version: &Version) -> bool {
        version.file_words()[1] == self.number() && version.len == self.len
    }

    /// The header that makes the server answer for this state only. `None` if the state has neither a strong
    /// ETag nor a time.
    pub(super) fn condition(&self) -> Option<(HeaderName, String)> {
        if !self.tag.is_empty() && !self.is_weak {
            return Some((header::IF_MATCH, format!("\"{}\"", self.tag)));
        }
        let date = Timestamp::from_second(self.modified?).ok()?.format_http_date();
        Some((header::IF_UNMODIFIED_SINCE, date))
    }
}

/// The error if an object was replaced.
pub(super) fn replaced() -> Trouble {
    Trouble::Final(io::ErrorKind::StaleNetworkFileHandle.into())
}

/// Checks that an answer has the bytes of `range` of the object in `version`. A server may ignore the condition
/// of the request. Returns the state that the answer names.
///
/// # Errors
/// `replaced` if the object does not have this version any more. `Trouble::Broken` if the answer has other
/// bytes than `range`.
pub(super) fn check_answer(
    status: StatusCode,
    headers: &HeaderMap,
    range: &Range<u64>,
    version: &Version,
) -> Result<ObjectState, Trouble> {
    let broken = |why: String| Err(Trouble::Broken(why));
    if let Some(encoding) = text_of(headers, header::CONTENT_ENCODING)
        && !encoding.eq_ignore_ascii_case("identity")
    {
        return broken(format!("the server sends the bytes as {encoding:?}, not as they are"));
    }
    let content_len = len_of(headers);
    let total = match status {
        StatusCode::PARTIAL_CONTENT => {
            let text = text_of(headers, header::CONTENT_RANGE).unwrap_or_default();
            let Some((found, total)) = content_range(text) else {
                return broken(format!("the server names no bytes of its answer: {text:?}"));
            };
            if found != *range {
                let (start, last) = (range.start, range.end - 1);
                return broken(format!("the server answers {text:?} to bytes {start}-{last}"));
            }
            total
        }
        // If the range is the whole object, the server may answer with status 200.
        StatusCode::OK if *range == (0..version.len) => content_len,
        _ => {
            return broken(format!(
                "the server answers {} to a range: it has to serve ranges",
                status.as_u16()
            ));
        }
    };
    if content_len.is_some_and(|len| len != range.end - range.start) {
        let (found, wanted) = (content_len.unwrap_or_default(), range.end - range.start);
        return broken(format!("the server announces {found} bytes of {wanted}"));
    }
    let state = ObjectState::of_headers(headers, total.unwrap_or(version.len));
    if state.is_of(version) { Ok(state) } else { Err(replaced()) }
}

/// The range, and the length of the whole object, in a `Content-Range` header.
pub(super) fn content_range(text: &str) -> Option<(Range<u64>, Option<u64>)> {
    let (range, total) = text.trim().strip_prefix("bytes ")?.split_once('/')?;
    let (start, last) = range.split_once('-')?;
    let (start, last): (u64, u64) = (start.parse().ok()?, last.parse().ok()?);
    let total = if total == "*" { None } else { Some(total.parse().ok()?) };
    (start <= last).then_some((start..last.checked_add(1)?, total))
}

/// The length in the header `Content-Length`.
pub(super) fn len_of(headers: &HeaderMap) -> Option<u64> {
    text_of(headers, header::CONTENT_LENGTH)?.parse().ok()
}

/// The pause that the server asks for.
pub(super) fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = text_of(headers, header::RETRY_AFTER)?.trim();
    if let Ok(seconds) = text.parse() {
        return Some(Duration::from_secs(seconds));
    }
    let seconds = seconds_of_http_date(text)? - Timestamp::now().as_second();
    Some(Duration::from_secs(seconds.max(0) as u64))
}

pub(super) fn text_of(headers: &HeaderMap, name: HeaderName) -> Option<&str> {
    headers.get(name)?.to_str().ok()
}

fn seconds_of_http_date(text: &str) -> Option<i64> {
    Timestamp::parse_rfc2822(text).ok().map(Timestamp::as_second)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        pairs
            .iter()
            .map(|(name, value)| (HeaderName::from_static(name), value.parse().unwrap()))
            .collect()
    }

    const DATE: &str = "Wed, 21 Oct 2015 07:28:00 GMT";

    fn check(status: u16, pairs: &[(&'static str, &str)]) -> Result<ObjectState, Trouble> {
        let version = ObjectState::new(100, "\"a\"", None).version(QueueKey::Store(1), 2);
        let status = StatusCode::from_u16(status).unwrap();
        check_answer(status, &headers(pairs), &(10..20), &version)
    }

    #[test]
    fn an_answer_counts_only_for_the_range_and_the_version() {
        let good =
            [("content-range", "bytes 10-19/100"), ("etag", "\"a\""), ("content-length", "10")];
        assert!(check(206, &good).is_ok());
        assert!(check(206, &[("content-range", "bytes 10-19/*"), ("etag", "a")]).is_ok());
        let broken = |status, pairs: &[(&'static str, &str)]| {
            assert!(matches!(check(status, pairs), Err(Trouble::Broken(_))), "{pairs:?}");
        };
        broken(200, &good);
        broken(206, &[("etag", "\"a\"")]);
        broken(206, &[("content-range", "bytes 10-18/100"), ("etag", "\"a\"")]);
        broken(206, &[("content-range", "bytes 0-9/100"), ("etag", "\"a\"")]);
        broken(206, &[good[0], good[1], ("content-length", "9")]);
        broken(206, &[good[0], good[1], ("content-encoding", "gzip")]);
        let gone = |pairs: &[(&'static str, &str)]| {
            assert!(matches!(check(206, pairs), Err(Trouble::Final(_))), "{pairs:?}");
        };
        gone(&[good[0], ("etag", "\"b\"")]);
        gone(&[good[0]]);
        gone(&[("content-range", "bytes 10-19/101"), good[1]]);
    }

    #[test]
    fn without_an_etag_the_time_tells_versions_apart() {
        let state = ObjectState::of_headers(&headers(&[("last-modified", DATE)]), 5);
        assert_eq!(state.modified, Some(1_445_412_480));
        let condition = state.condition().unwrap();
        assert_eq!(condition, (header::IF_UNMODIFIED_SINCE, DATE.to_owned()));
        let version = state.version(QueueKey::Store(1), 2);
        assert!(state.is_of(&version));
        assert!(!ObjectState { modified: Some(1), ..state }.is_of(&version));
    }

    #[test]
    fn an_etag_is_the_same_with_quotes_and_without_and_tells_more_than_the_time() {
        let quoted = ObjectState::new(5, "\"a-1\"", Some(1));
        let version = ObjectState::new(5, "a-1", Some(2)).version(QueueKey::Store(1), 2);
        assert!(quoted.is_of(&version));
        assert_eq!(quoted.condition().unwrap(), (header::IF_MATCH, "\"a-1\"".to_owned()));
        let weak = ObjectState::new(5, "W/\"a-1\"", Some(1));
        assert_eq!(weak.condition().unwrap().0, header::IF_UNMODIFIED_SINCE);
    }

    #[test]
    fn a_server_asks_to_wait_by_seconds_or_by_a_date() {
        let after = |text| retry_after(&headers(&[("retry-after", text)]));
        assert_eq!(after("7"), Some(Duration::from_secs(7)));
        assert_eq!(after(DATE), Some(Duration::ZERO));
        assert_eq!(after("soon"), None);
    }
}
