//! State that all remote stores of a process share: the threads that drive connections, the HTTP
//! clients, the credentials, and how many requests each server gets at a time.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};
use tokio::sync::Semaphore;

use super::credentials::{CredentialChain, aws, azure, context_of, google};
use crate::process::PerProcess;
use crate::store::remote_settings::StoreSettings;
use crate::sync::Mutex;

/// Threads that drive connections. The bytes are copied by the threads that wait for them.
const THREADS: usize = 2;

/// Maximum number of requests to one server at a time, by all engines of the process. With reads of
/// 8 MiB these fill 100 Gbit/s over a distance of 40 ms.
pub(super) const REQUESTS_MAX: usize = 64;

/// Time limit of a connection.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);

/// Maximum number of redirects of a request.
const REDIRECTS_MAX: usize = 10;

/// A file of certificates that are trusted besides those of the machine, as AWS names it.
const CA_BUNDLE: &str = "AWS_CA_BUNDLE";

/// A child of a fork has none of the threads, and makes its own.
static OF_PROCESS: PerProcess<Result<RemoteProcess, String>> = PerProcess::new();

/// State that the stores of this process share.
pub(super) struct RemoteProcess {
    pub(super) runtime: Runtime,
    slots: Mutex<HashMap<String, Arc<Semaphore>>>,
    clients: Mutex<HashMap<StoreSettings, Arc<RemoteClients>>>,
}

/// State that the stores of this process with the same settings share.
pub(super) struct RemoteClients {
    pub(super) settings: StoreSettings,
    /// Follows redirects.
    pub(super) following: reqwest::Client,
    /// Returns redirects as they are: a signature is for one server.
    pub(super) direct: reqwest::Client,
    pub(super) aws: CredentialChain<reqsign_aws_core::Credential>,
    pub(super) azure: CredentialChain<reqsign_azure_storage::Credential>,
    pub(super) google: CredentialChain<reqsign_google::Credential>,
}

impl RemoteProcess {
    /// The state of this process, made at the first use.
    ///
    /// # Errors
    /// If threads or clients cannot be made.
    pub(super) fn get() -> io::Result<&'static RemoteProcess> {
        let own = OF_PROCESS.get_or_init(RemoteProcess::new);
        own.as_ref().map_err(|why| io::Error::other(why.clone()))
    }

    fn new() -> Result<RemoteProcess, String> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(THREADS)
            .thread_name("tensorfs-remote")
            .enable_io()
            .enable_time()
            .build()
            .map_err(|e| format!("cannot start threads for remote sources: {e}"))?;
        // Another part of the process may have chosen a provider before.
        let _ = rustls::crypto::ring::default_provider().install_default();
        Ok(RemoteProcess { runtime, slots: Mutex::default(), clients: Mutex::default() })
    }

    /// The clients of the stores with these settings, made at the first use.
    ///
    /// # Errors
    /// If clients cannot be made.
    pub(super) fn clients_of(&self, settings: &StoreSettings) -> io::Result<Arc<RemoteClients>> {
        let mut all = self.clients.lock();
        if let Some(clients) = all.get(settings) {
            return Ok(clients.clone());
        }
        let made = Arc::new(RemoteClients::new(settings.clone()).map_err(io::Error::other)?);
        all.insert(settings.clone(), made.clone());
        Ok(made)
    }

    /// The requests that the server `host` may get at a time.
    pub(super) fn slots_of(&self, host: &str) -> Arc<Semaphore> {
        let mut slots = self.slots.lock();
        let new = || Arc::new(Semaphore::new(REQUESTS_MAX));
        slots.entry(host.to_owned()).or_insert_with(new).clone()
    }
}

impl RemoteClients {
    fn new(settings: StoreSettings) -> Result<RemoteClients, String> {
        let client = |redirects, by_proxy| client(&settings, redirects, by_proxy);
        let following = client(reqwest::redirect::Policy::custom(follow), true)?;
        let direct = client(reqwest::redirect::Policy::none(), true)?;
        let of_host = client(reqwest::redirect::Policy::none(), false)?;
        let context = context_of(settings.clone(), following.clone(), of_host);
        let aws = CredentialChain::new(aws::providers(&settings), &settings, context.clone());
        let azure = CredentialChain::new(azure::providers(&settings), &settings, context.clone());
        let google = CredentialChain::new(google::providers(&settings), &settings, context);
        Ok(RemoteClients { settings, following, direct, aws, azure, google })
    }
}

/// Follows redirects, but not from a secure connection to one that is not.
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

fn client(
    settings: &StoreSettings,
    redirects: reqwest::redirect::Policy,
    by_proxy: bool,
) -> Result<reqwest::Client, String> {
    let failed = |e: reqwest::Error| format!("cannot make an HTTP client: {}", e.without_url());
    let builder = || {
        let builder = reqwest::Client::builder()
            .user_agent(concat!("tensorfs/", env!("CARGO_PKG_VERSION")))
            .connect_timeout(CONNECT_LIMIT)
            .pool_max_idle_per_host(REQUESTS_MAX)
            .retry(reqwest::retry::never())
            .referer(false);
        if by_proxy { builder } else { builder.no_proxy() }
    };
    let trusted = match settings.variable(CA_BUNDLE).filter(|file| !file.is_empty()) {
        None => Vec::new(),
        Some(file) => {
            let pem = std::fs::read(file).map_err(|e| format!("{CA_BUNDLE}: {e}"))?;
            reqwest::Certificate::from_pem_bundle(&pem).map_err(failed)?
        }
    };
    let with_roots = builder().tls_certs_merge(trusted.clone()).redirect(redirects).build();
    with_roots.or_else(|e| {
        // A machine without certificates can still use plain HTTP.
        tracing::debug!("no certificates of the machine: {}", e.without_url());
        let none = reqwest::redirect::Policy::none();
        builder().tls_certs_only(trusted).redirect(none).build().map_err(failed)
    })
}
