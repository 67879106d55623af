//! The HTTP clients.

use std::io;
use std::sync::OnceLock;
use std::time::Duration;

/// Maximum number of concurrent requests to one server by the whole process. With reads of 8 MiB, this number
/// fills 100 Gbit/s at a latency of 40 ms.
pub(super) const REQUESTS_MAX: usize = 64;

/// Time limit for opening a connection.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);

/// Maximum number of redirects of a request.
const REDIRECTS_MAX: usize = 10;

/// An HTTP client that is created at its first use, because it parses all certificates of the machine then.
#[derive(Debug)]
pub(super) struct LazyClient {
    trusted: Vec<reqwest::Certificate>,
    follows: bool,
    made: OnceLock<Result<reqwest::Client, String>>,
}

impl LazyClient {
    pub(super) fn new(trusted: Vec<reqwest::Certificate>, follows: bool) -> LazyClient {
        LazyClient { trusted, follows, made: OnceLock::new() }
    }

    /// # Errors
    /// If the client cannot be created.
    pub(super) fn get(&self) -> io::Result<&reqwest::Client> {
        let make = || {
            let redirects = || match self.follows {
                true => reqwest::redirect::Policy::custom(follow),
                false => reqwest::redirect::Policy::none(),
            };
            let trusted = || self.trusted.clone();
            builder().tls_certs_merge(trusted()).redirect(redirects()).build().or_else(|e| {
                // Plain HTTP still works on a machine without certificates.
                tracing::debug!("no certificates of the machine: {}", e.without_url());
                made(builder().tls_certs_only(trusted()))
            })
        };
        self.made.get_or_init(make).as_ref().map_err(|why| io::Error::other(why.clone()))
    }
}

/// The client for services of this machine or its host: over plain HTTP, without a proxy.
pub(super) fn client_of_host() -> Result<reqwest::Client, String> {
    made(builder().tls_certs_only([]).no_proxy())
}

fn builder() -> reqwest::ClientBuilder {
    reqwest::Client::builder()
        .user_agent(concat!("tensorfs/", env!("CARGO_PKG_VERSION")))
        .connect_timeout(CONNECT_LIMIT)
        .pool_max_idle_per_host(REQUESTS_MAX)
        .retry(reqwest::retry::never())
        .redirect(reqwest::redirect::Policy::none())
        .referer(false)
}

fn made(builder: reqwest::ClientBuilder) -> Result<reqwest::Client, String> {
    builder.build().map_err(|e| format!("cannot make an HTTP client: {}", e.without_url()))
}

/// Follows redirects, except from a secure connection to an insecure one.
fn follow(attempt: reqwest::redirect::Attempt<'_>) -> reqwest::redirect::Action {
    let was_secure = attempt.previous().last().is_some_and(|url| url.scheme() == "https");
    if attempt.previous().len() > REDIRECTS_MAX {
        attempt.error("too many redirects")
    } else if was_secure && attempt.url().scheme() != "https" {
        attempt.stop()
    } else {
        attempt.follow()
    }
}
