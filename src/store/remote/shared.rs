//! State that all remote stores of a process share: the threads that drive connections, the HTTP clients, the
//! credentials, and the limit of concurrent requests to each server.

use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::hash::Hash;
use std::io;
use std::path::Path;
use std::sync::Arc;

use reqsign_core::{Context, SigningCredential};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::Semaphore;

use super::client::{LazyClient, REQUESTS_MAX, client_of_host};
use super::credentials::{CredentialChain, Providers, context_of};
use crate::process::PerProcess;
use crate::store::remote_settings::{StoreSettings, bytes_in};
use crate::sync::Mutex;

/// Number of threads that drive connections. The threads that wait for the bytes copy them.
const THREADS: usize = 2;

/// The variable of AWS that names a file of certificates. They are trusted besides those of the machine.
const CA_BUNDLE: &str = "AWS_CA_BUNDLE";

/// Maximum length of the file of certificates in bytes.
const CA_BUNDLE_LEN_MAX: u64 = 16 << 20;

/// If there are this many shared values of one kind, the unused values are dropped. Their number has no other bound,
/// because callers choose the settings.
const UNUSED_MAX: usize = 64;

/// A child made by fork(2) has none of the parent's threads, so it creates its own state.
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
    /// A client that follows redirects.
    pub(super) following: LazyClient,
    /// A client that returns redirects to the caller, because a signature is valid for one server only.
    pub(super) direct: Arc<LazyClient>,
    context: Context,
    /// A `CredentialChain` for each type of credentials.
    chains: Mutex<HashMap<TypeId, Arc<dyn Any + Send + Sync>>>,
}

impl RemoteProcess {
    /// The state of this process, created at the first use.
    ///
    /// # Errors
    /// If threads or clients cannot be created.
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
        // Another part of the process may have installed a provider already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        Ok(RemoteProcess { runtime, slots: Mutex::default(), clients: Mutex::default() })
    }

    /// The clients of the stores with these settings, created at the first use.
    ///
    /// # Errors
    /// If clients cannot be created.
    pub(super) fn clients_of(&self, settings: &StoreSettings) -> io::Result<Arc<RemoteClients>> {
        let known = self.clients.lock().get(settings).cloned();
        if let Some(clients) = known {
            return Ok(clients);
        }
        // The lock is not held here, because the file of certificates may be on a disk that does not answer.
        let made = Arc::new(RemoteClients::new(settings.clone()).map_err(io::Error::other)?);
        Ok(shared_one(&mut self.clients.lock(), settings.clone(), || made))
    }

    /// The semaphore that limits the concurrent requests to the server `host`.
    pub(super) fn slots_of(&self, host: &str) -> Arc<Semaphore> {
        let new = || Arc::new(Semaphore::new(REQUESTS_MAX));
        shared_one(&mut self.slots.lock(), host.to_owned(), new)
    }
}

/// The value for `key` in `all`. If there is none, `new` creates it. Before that, unused values are dropped if
/// `all` has `UNUSED_MAX` of them.
pub(super) fn shared_one<K: Eq + Hash, V: ?Sized>(
    all: &mut HashMap<K, Arc<V>>,
    key: K,
    new: impl FnOnce() -> Arc<V>,
) -> Arc<V> {
    if all.len() >= UNUSED_MAX && !all.contains_key(&key) {
        all.retain(|_, value| Arc::strong_count(value) > 1);
    }
    all.entry(key).or_insert_with(new).clone()
}

impl RemoteClients {
    fn new(settings: StoreSettings) -> Result<RemoteClients, String> {
        let trusted = certificates(&settings)?;
        let following = LazyClient::new(trusted.clone(), true);
        let direct = Arc::new(LazyClient::new(trusted, false));
        let context = context_of(settings.clone(), direct.clone(), client_of_host()?);
        let chains = Mutex::default();
        Ok(RemoteClients { settings, following, direct, context, chains })
    }

    /// The chain for credentials of the type `C`, created at the first use from its providers.
    pub(super) fn chain<C: SigningCredential>(
        &self,
        providers: fn(&StoreSettings) -> Providers<C>,
    ) -> Arc<CredentialChain<C>> {
        let new = || CredentialChain::new(providers(&self.settings), &self.settings, &self.context);
        let chain = shared_one(&mut self.chains.lock(), TypeId::of::<C>(), || Arc::new(new()));
        chain.downcast().unwrap_or_else(|_| Arc::new(new()))
    }
}

/// The certificates that are trusted besides those of the machine.
fn certificates(settings: &StoreSettings) -> Result<Vec<reqwest::Certificate>, String> {
    let named = settings.variable(CA_BUNDLE).filter(|file| !file.is_empty());
    let Some(file) = named else { return Ok(Vec::new()) };
    let failed = |why: String| format!("{CA_BUNDLE}: {why}");
    let pem = bytes_in(Path::new(&file), CA_BUNDLE_LEN_MAX).map_err(|e| failed(e.to_string()))?;
    reqwest::Certificate::from_pem_bundle(&pem).map_err(|e| failed(e.without_url().to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::open_options::RemoteSettings;

    #[test]
    fn shared_values_that_nobody_uses_go_and_used_ones_stay() {
        let mut all = HashMap::new();
        let used: Vec<_> = (0..3).map(|key| shared_one(&mut all, key, || Arc::new(key))).collect();
        for key in 3..10 * UNUSED_MAX {
            shared_one(&mut all, key, || Arc::new(key));
            assert!(all.len() <= UNUSED_MAX);
        }
        for (key, value) in used.iter().enumerate() {
            assert!(Arc::ptr_eq(value, &shared_one(&mut all, key, || unreachable!())));
        }
    }

    #[test]
    fn a_fifo_as_file_of_certificates_is_refused_and_no_other_store_waits_for_it() {
        let folder = tempfile::tempdir().unwrap();
        let fifo = folder.path().join("fifo");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let settings = RemoteSettings { ca_file: Some(fifo), ..RemoteSettings::default() };
        let own = StoreSettings::new(Some(&Arc::new(settings)));
        let refused = RemoteProcess::get().unwrap().clients_of(&own).err().unwrap();
        assert!(refused.to_string().contains("is not a regular file"), "{refused}");
    }
}
