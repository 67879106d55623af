//! A request to a server before it is signed.

use reqwest::Method;
use reqwest::header::{self, HeaderName};

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
