//! A request to a server before it is signed, and its refusal.

use std::io;
use std::time::Instant;

use reqwest::header::{self, HeaderMap, HeaderName};
use reqwest::{Method, StatusCode};

use super::state::ObjectState;

/// A request.
#[derive(Clone, Debug)]
pub(super) struct Wanted {
    pub(super) method: Method,
    /// The escaped name of the object and the query.
    pub(super) target: String,
    pub(super) headers: Vec<(HeaderName, String)>,
}

impl Wanted {
    pub(super) fn new(method: Method, target: impl Into<String>) -> Wanted {
        Wanted { method, target: target.into(), headers: Vec::new() }
    }

    /// The value of the range header.
    pub(super) fn range(&self) -> Option<&str> {
        let range = self.headers.iter().find(|(name, _)| *name == header::RANGE);
        range.map(|(_, value)| value.as_str())
    }
}

/// The requests with which folders are listed. An `Endpoint` sends them.
pub(super) trait Requests: Send + Sync + 'static {
    /// The host, for messages.
    fn host(&self) -> &str;

    /// The headers and the whole body of the answer to a request. The body may have at most `len_max` bytes.
    ///
    /// # Errors
    /// If the server refuses the request, or does not answer in time.
    fn answer(
        &self,
        wanted: &Wanted,
        len_max: usize,
        deadline: Instant,
    ) -> impl Future<Output = io::Result<(HeaderMap, Vec<u8>)>> + Send;

    /// The state of the object at `target`: its length, its ETag and its time.
    ///
    /// # Errors
    /// `NotFound` if there is no such object. Also fails if the server refuses the request, or does not answer
    /// in time.
    fn look(
        &self,
        target: &str,
        deadline: Instant,
    ) -> impl Future<Output = io::Result<ObjectState>> + Send;
}

/// An answer that refuses a request.
pub(super) struct Refusal {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    /// The code of the error. Empty if there is none.
    pub(super) code: String,
    /// Whether the request was signed.
    pub(super) is_signed: bool,
    /// The server and its answer, for messages.
    pub(super) said: String,
}
