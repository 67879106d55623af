//! Credentials for object stores. A chain of providers is tried when credentials are first needed, and again
//! before they expire. The providers of each kind of server are in its file.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::request::Parts;
use reqsign_core::time::Timestamp;
use reqsign_core::{
    CommandExecute, CommandOutput, Context, Env, Error, FileRead, HttpSend, OsEnv,
    ProvideCredentialDyn, Result, SignRequest, SigningCredential,
};

use super::client::LazyClient;
use super::patience::{Trouble, unusable};
use super::request::Refusal;
use super::url::is_confidential;
use crate::store::remote_settings::StoreSettings;

/// Time limit for the whole chain.
const CHAIN_LIMIT: Duration = Duration::from_secs(20);

/// Timeout of a plain HTTP request to a credential service of this machine or its host. Such a service often
/// does not exist.
const HTTP_TIMEOUT: Duration = Duration::from_secs(1);

/// Timeout of an HTTPS request to a credential service.
const HTTPS_TIMEOUT: Duration = Duration::from_secs(10);

/// Time for which the result "no credentials" is cached.
const NONE_FOR: Duration = Duration::from_secs(60);

/// Time limit and shortest interval of attempts to renew credentials that are about to expire.
const RENEWAL_LIMIT: Duration = Duration::from_secs(2);
const RENEWAL_INTERVAL: Duration = Duration::from_secs(10);

/// Credentials that expire within this time sign no requests. The time is longer than the limit of the signers.
const USABLE_MIN: Duration = Duration::from_secs(12);

/// Shortest interval of attempts to renew credentials that have expired.
const EXPIRED_INTERVAL: Duration = Duration::from_secs(1);

/// The variable with the URL of a service for temporary credentials (STS) that replaces the service of AWS.
const STS: &str = "AWS_ENDPOINT_URL_STS";

/// The name of the provider that reads a profile of AWS. Messages show the name of the profile as well.
pub(super) const PROFILE: &str = "a profile";

/// Returns the value of an environment variable, or of the setting that replaces the variable.
pub(super) type Variable<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Whether a request was signed. An error if the credentials cannot sign it.
pub(super) type Signed = std::result::Result<bool, Trouble>;

/// Providers of credentials, each with its name in messages.
pub(super) type Providers<C> = Vec<(&'static str, Box<dyn ProvideCredentialDyn<Credential = C>>)>;

/// Credentials with the name of their provider.
type Found<C> = Option<(C, &'static str)>;

/// The last result of the providers.
struct Held<C> {
    found: Found<C>,
    /// The provider of earlier credentials. It may fail for a while to provide new credentials.
    earlier: Option<&'static str>,
    /// The time at which the providers were last tried. `None` if the next request tries them at once.
    asked: Option<Instant>,
}

/// The credentials of this process for one kind of server.
pub(super) struct CredentialChain<C> {
    providers: Providers<C>,
    settings: StoreSettings,
    context: Context,
    /// Never printed.
    held: tokio::sync::Mutex<Held<C>>,
}

/// Access of providers to this machine: variables, files, programs and services. Requests over HTTPS use
/// `client`, requests over plain HTTP use `of_host`, which goes through no proxy.
pub(super) fn context_of(
    settings: StoreSettings,
    client: Arc<LazyClient>,
    of_host: reqwest::Client,
) -> Context {
    let sts = settings.variable(STS).filter(|url| !url.is_empty());
    Context::new()
        .with_env(Variables(settings))
        .with_file_read(LocalFiles)
        .with_command_execute(LocalCommands)
        .with_http_send(Services { client, of_host, sts })
}

impl<C: SigningCredential> CredentialChain<C> {
    /// The chain of the providers `providers`, which follow from `settings`.
    pub(super) fn new(
        providers: Providers<C>,
        settings: &StoreSettings,
        context: &Context,
    ) -> CredentialChain<C> {
        let (settings, context) = (settings.clone(), context.clone());
        let held = tokio::sync::Mutex::new(Held { found: None, earlier: None, asked: None });
        CredentialChain { providers, settings, context, held }
    }

    /// The credentials. `None` if no provider has any; then requests are not signed. Credentials that are about
    /// to expire are used until `USABLE_MIN` before, if no provider gives new ones in time.
    ///
    /// # Errors
    /// `Trouble::Passing` if there were credentials, but they have expired and no provider gives new ones.
    pub(super) async fn get(&self) -> std::result::Result<Option<C>, Trouble> {
        let mut held = self.held.lock().await;
        let asked_within = |time| held.asked.is_some_and(|asked| asked.elapsed() < time);
        let until = Timestamp::now() + USABLE_MIN;
        let usable = held.found.as_ref().filter(|(found, _)| found.is_valid_at(until));
        match (usable, held.earlier) {
            (Some((found, _)), _) if found.is_valid() || asked_within(RENEWAL_INTERVAL) => {
                return Ok(Some(found.clone()));
            }
            (None, None) if asked_within(NONE_FOR) => return Ok(None),
            (None, Some(earlier)) if asked_within(EXPIRED_INTERVAL) => {
                return Err(expired(earlier));
            }
            _ => {}
        }
        let limit = if usable.is_some() { RENEWAL_LIMIT } else { CHAIN_LIMIT };
        let kept = usable.cloned();
        let found = tokio::time::timeout(limit, self.ask()).await.unwrap_or_default().or(kept);
        let earlier = found.as_ref().map(|(_, way)| *way).or(held.earlier);
        let credential = found.as_ref().map(|(found, _)| found.clone());
        *held = Held { found, earlier, asked: Some(Instant::now()) };
        match (credential, earlier) {
            (None, Some(earlier)) => Err(expired(earlier)),
            (credential, _) => Ok(credential),
        }
    }

    /// The name of the provider of the credentials. `None` if there are no credentials.
    pub(super) async fn way(&self) -> Option<&'static str> {
        self.get().await.ok()??;
        let held = self.held.lock().await;
        held.found.as_ref().map(|(_, way)| *way)
    }

    /// The source of the credentials, in words. `advice` says how a user without credentials names them.
    pub(super) async fn origin(&self, advice: &str) -> String {
        self.way().await.map_or_else(|| no_credentials(advice), |way| format!("from {way}"))
    }

    /// The credentials of the first provider that has valid ones. The message of a failed provider may contain
    /// secrets, so it is not logged.
    async fn ask(&self) -> Found<C> {
        for (name, provider) in &self.providers {
            match provider.provide_credential_dyn(&self.context).await {
                Ok(Some(found)) if found.is_valid_at(Timestamp::now() + USABLE_MIN) => {
                    tracing::debug!("credentials come from {name}");
                    return Some((found, name));
                }
                Ok(_) => {}
                Err(e) => tracing::debug!("no credentials from {name}: {:?}", e.kind()),
            }
        }
        // If an option names a file or a profile, the profile is the first provider.
        let is_aws = self.providers.first().is_some_and(|(name, _)| *name == PROFILE);
        if self.settings.names_credentials_file() || is_aws && self.settings.names_profile() {
            tracing::warn!(
                "the file or profile of credentials that the options name has none for this source; \
                 requests are not signed"
            );
        }
        None
    }

    /// Drops the cached credentials if a refusal means that they `have_expired`. The next request obtains new ones.
    pub(super) async fn drop_if(&self, have_expired: bool, refusal: &Refusal) -> Option<Trouble> {
        if !have_expired {
            return None;
        }
        let mut held = self.held.lock().await;
        (held.found, held.asked) = (None, None);
        Some(Trouble::Broken(format!("{}: the credentials have expired", refusal.said)))
    }
}

/// The error if the credentials of `earlier` have expired.
fn expired(earlier: &str) -> Trouble {
    let why = format!("the credentials have expired, and {earlier} has no new ones yet");
    Trouble::Passing { why, after: None }
}

/// The text that requests are not signed because no credentials were found.
pub(super) fn no_credentials(advice: &str) -> String {
    format!("none were found, so that requests are not signed: {advice}")
}

/// Whether the variable `name` is set to a word for "yes".
pub(super) fn is_on(variable: Variable<'_>, name: &str) -> bool {
    let word = variable(name).unwrap_or_default().to_lowercase();
    ["1", "true", "yes", "on"].contains(&word.as_str())
}

/// Signs the request `parts` with `signer`.
pub(super) async fn sign_with<S: SignRequest>(
    signer: S,
    credential: &S::Credential,
    parts: &mut Parts,
) -> Signed {
    let nothing = Context::new();
    let signed = signer.sign_request(&nothing, parts, Some(credential), None).await;
    // The details of the error may contain secrets.
    signed.map(|()| true).map_err(|_| cannot_sign())
}

/// The error if credentials cannot sign a request.
pub(super) fn cannot_sign() -> Trouble {
    unusable("the credentials cannot sign a request")
}

/// The environment variables as the settings of a source change them. An empty variable counts as unset.
#[derive(Debug)]
struct Variables(StoreSettings);

impl Env for Variables {
    fn var(&self, name: &str) -> Option<String> {
        self.0.variable(name).filter(|value| !value.is_empty())
    }

    fn vars(&self) -> HashMap<String, String> {
        let known = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
        let names = known.chain(["AWS_REGION".to_owned()]);
        let set = |name: String| self.var(&name).map(|value| (name, value));
        names.filter_map(set).collect()
    }

    fn home_dir(&self) -> Option<PathBuf> {
        OsEnv.home_dir()
    }
}

/// Files of the user, for example `~/.aws/config`.
#[derive(Debug)]
struct LocalFiles;

impl FileRead for LocalFiles {
    async fn file_read(&self, path: &str) -> Result<Vec<u8>> {
        std::fs::read(path).map_err(|e| Error::config_invalid(format!("cannot be read: {e}")))
    }
}

/// Programs that a profile names with `credential_process`.
#[derive(Debug)]
struct LocalCommands;

impl CommandExecute for LocalCommands {
    async fn command_execute<'a>(
        &'a self,
        program: &'a str,
        args: &'a [&'a str],
    ) -> Result<CommandOutput> {
        let mut command = std::process::Command::new(program);
        command.args(args).stdin(std::process::Stdio::null());
        let run = tokio::task::spawn_blocking(move || command.output()).await;
        let failed = |e: String| Error::config_invalid(format!("credential_process: {e}"));
        let output = run.map_err(|e| failed(e.to_string()))?.map_err(|e| failed(e.to_string()))?;
        let status = output.status.code().unwrap_or(-1);
        Ok(CommandOutput { status, stdout: output.stdout, stderr: output.stderr })
    }
}

/// HTTP requests to services that issue credentials. Services of this machine or its host are reached over
/// plain HTTP and without a proxy.
#[derive(Debug)]
struct Services {
    client: Arc<LazyClient>,
    of_host: reqwest::Client,
    /// The value of the variable `STS`.
    sts: Option<String>,
}

impl Services {
    /// `request`, sent to the user's STS if it was meant for the STS of AWS.
    fn redirected(&self, mut request: http::Request<Bytes>) -> Result<http::Request<Bytes>> {
        let is_aws = |host: &str| host.starts_with("sts.") && host.contains(".amazonaws.");
        if let Some(own) = self.sts.as_ref().filter(|_| request.uri().host().is_some_and(is_aws)) {
            let url = Some(own).filter(|own| is_confidential(own)).and_then(|own| own.parse().ok());
            let why =
                || Error::config_invalid(format!("{STS} is no URL of HTTPS or of this machine"));
            *request.uri_mut() = url.ok_or_else(why)?;
        }
        Ok(request)
    }
}

impl HttpSend for Services {
    async fn http_send(&self, wanted: http::Request<Bytes>) -> Result<http::Response<Bytes>> {
        let request = self.redirected(wanted)?;
        let is_host = request.uri().scheme_str() == Some("http");
        let (client, limit) = if is_host {
            (&self.of_host, HTTP_TIMEOUT)
        } else {
            let unusable = |e: std::io::Error| Error::unexpected(e.to_string());
            (self.client.get().map_err(unusable)?, HTTPS_TIMEOUT)
        };
        let failed = |e: reqwest::Error| Error::unexpected(e.without_url().to_string());
        let answered = async {
            let request = reqwest::Request::try_from(request).map_err(failed)?;
            let answer = client.execute(request).await.map_err(failed)?;
            let (status, headers) = (answer.status(), answer.headers().clone());
            let mut whole = http::Response::new(answer.bytes().await.map_err(failed)?);
            *whole.status_mut() = status;
            *whole.headers_mut() = headers;
            Ok(whole)
        };
        let late = |_| Error::unexpected("no answer in time");
        tokio::time::timeout(limit, answered).await.map_err(late)?
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_for_the_sts_of_aws_goes_to_that_of_the_user() {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = Arc::new(LazyClient::new(Vec::new(), false));
        let to = |own: &str, url: &str| {
            let sts = Some(own.to_owned());
            let services =
                Services { client: client.clone(), of_host: reqwest::Client::new(), sts };
            let request = http::Request::post(url).body(Bytes::new()).unwrap();
            services.redirected(request).map(|request| request.uri().to_string())
        };
        let own = "https://sts.example.com/";
        assert_eq!(to(own, "https://sts.amazonaws.com/").unwrap(), own);
        assert_eq!(to(own, "https://sts.cn-north-1.amazonaws.com.cn/").unwrap(), own);
        for other in ["https://sts.googleapis.com/v1/token", "https://portal.sso.amazonaws.com/"] {
            assert_eq!(to(own, other).unwrap(), other);
        }
        assert_eq!(
            to("http://127.0.0.1:7/", "https://sts.amazonaws.com/").unwrap(),
            "http://127.0.0.1:7/"
        );
        to("http://sts.example.com", "https://sts.amazonaws.com/").unwrap_err();
    }
}
