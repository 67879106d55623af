//! Google Cloud Storage: the URL of a bucket, and the tokens in requests.
//!
//! Requests use its XML API, which lists objects in the same way as S3. The version of an object is its
//! generation, a number that changes whenever the object is replaced.

use std::io;

use http::request::Parts;
use reqsign_core::{Context, ProvideCredential};
use reqsign_google::{
    Credential, EnvCredentialProvider, ServiceAccountTokenCredentialProvider,
    VmMetadataCredentialProvider, WellKnownCredentialProvider,
};
use reqwest::StatusCode;
use reqwest::header::{self, HeaderMap, HeaderName, HeaderValue};

use super::credentials::{Providers, Signed, Variable, cannot_sign};
use super::patience::Trouble;
use super::request::Refusal;
use super::shared::RemoteClients;
use super::url::is_confidential;
use crate::error::invalid_input;
use crate::store::remote_settings::StoreSettings;

/// The server of all buckets.
const SERVER: &str = "https://storage.googleapis.com";

/// Variables that name credentials. If the user names another server than Google's, credentials are used only if one of
/// these variables is set.
const NAMED: [&str; 2] = ["GOOGLE_APPLICATION_CREDENTIALS", "GCE_METADATA_HOST"];

/// Two headers of Google. In an answer, the first one has the generation of the object. In a request, the
/// second one demands a certain generation.
const GENERATION: HeaderName = HeaderName::from_static("x-goog-generation");
const IF_GENERATION: HeaderName = HeaderName::from_static("x-goog-if-generation-match");

/// A generation that no object has, as an ETag.
pub(super) const OTHER_GENERATION: &str = "\"1\"";

/// A bucket of Google Cloud Storage, and how requests to it are authenticated.
#[derive(Debug)]
pub(super) struct GoogleAccess {
    /// Whether the providers of credentials are tried.
    is_wanted: bool,
}

impl GoogleAccess {
    pub(super) async fn sign(&self, clients: &RemoteClients, parts: &mut Parts) -> Signed {
        by_generation(&mut parts.headers);
        if !self.is_wanted {
            return Ok(false);
        }
        let token = clients.chain(providers).get().await?.and_then(|found| found.token);
        let Some(token) = token else { return Ok(false) };
        let mut header = HeaderValue::try_from(format!("Bearer {}", token.access_token))
            .map_err(|_| cannot_sign())?;
        header.set_sensitive(true);
        parts.headers.insert(header::AUTHORIZATION, header);
        Ok(true)
    }

    pub(super) async fn credentials(&self, clients: &RemoteClients) -> String {
        if !self.is_wanted {
            let why = "none: to the server of STORAGE_EMULATOR_HOST, only named credentials are sent, and only \
                       over https or to this machine";
            return why.to_owned();
        }
        clients.chain(providers).origin("set GOOGLE_APPLICATION_CREDENTIALS").await
    }
}

/// Replaces the ETag by the generation, because listings identify the state of an object by its generation.
pub(super) fn name_state(headers: &mut HeaderMap) {
    if let Some(generation) = headers.get(GENERATION).cloned() {
        headers.insert(header::ETAG, generation);
    }
}

/// Drops expired credentials.
pub(super) async fn mend(clients: &RemoteClients, refusal: &Refusal) -> Option<Trouble> {
    let have_expired = refusal.is_signed && refusal.status == StatusCode::UNAUTHORIZED;
    clients.chain(providers).drop_if(have_expired, refusal).await
}

/// Why the server does not allow a request.
pub(super) fn why_denied(refusal: &Refusal) -> &'static str {
    match refusal.is_signed {
        true => "the credentials do not allow it",
        false => {
            "no credentials were found, and it is not public: set GOOGLE_APPLICATION_CREDENTIALS"
        }
    }
}

/// Turns an `If-Match` header whose value is a generation into the header for generations.
fn by_generation(headers: &mut HeaderMap) {
    let condition = headers.get(header::IF_MATCH).and_then(|value| value.to_str().ok());
    let is_number = |text: &&str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let generation = condition
        .map(|condition| condition.trim_matches('"'))
        .filter(is_number)
        .and_then(|text| HeaderValue::from_str(text).ok());
    if let Some(generation) = generation {
        headers.remove(header::IF_MATCH);
        headers.insert(IF_GENERATION, generation);
    }
}

/// The URL of a bucket and the authentication for it, from the settings that `variable` returns.
///
/// # Errors
/// If the URL of the server is not usable.
pub(super) fn access_of(
    bucket: &str,
    variable: Variable<'_>,
) -> io::Result<(String, GoogleAccess)> {
    let given = |name: &str| variable(name).filter(|value| !value.is_empty());
    let own = given("STORAGE_EMULATOR_HOST");
    let is_named = own.is_none() || NAMED.into_iter().any(|name| given(name).is_some());
    let server = match own {
        Some(server) => emulator_url(&server)?,
        None => SERVER.to_owned(),
    };
    let is_wanted = is_named && is_confidential(&server);
    Ok((format!("{server}/{bucket}"), GoogleAccess { is_wanted }))
}

/// The URL in `STORAGE_EMULATOR_HOST`. `server` may be a host without a scheme.
fn emulator_url(server: &str) -> io::Result<String> {
    let named = server.trim_end_matches('/');
    let url = if named.contains("://") { named.to_owned() } else { format!("http://{named}") };
    let host = url.strip_prefix("http://").or_else(|| url.strip_prefix("https://"));
    if host.is_none_or(|host| host.is_empty() || host.contains(['@', '?', '#'])) {
        let why = "STORAGE_EMULATOR_HOST is no server: expected [http(s)://]HOST[:PORT]";
        return Err(invalid_input(why));
    }
    Ok(url)
}

/// The scope that a token is requested for.
const SCOPE: &str = "https://www.googleapis.com/auth/devstorage.read_only";

/// The providers of credentials in the order of Google's programs, with their names in messages. If an option
/// names a file, that file is the only provider.
fn providers(settings: &StoreSettings) -> Providers<Credential> {
    let file = EnvCredentialProvider::new().with_scope(SCOPE);
    let own = WellKnownCredentialProvider::new().with_scope(SCOPE);
    let machine = VmMetadataCredentialProvider::new().with_scope(SCOPE);
    if settings.names_credentials_file() {
        return vec![("GOOGLE_APPLICATION_CREDENTIALS", Box::new(GoogleToken(file)))];
    }
    vec![
        ("GOOGLE_APPLICATION_CREDENTIALS", Box::new(GoogleToken(file))),
        ("the file of gcloud", Box::new(GoogleToken(own))),
        ("the machine", Box::new(UnlessForbidden(machine))),
    ]
}

/// A provider whose key is exchanged for a token. Many requests can use the same token.
#[derive(Debug)]
struct GoogleToken<P>(P);

impl<P: ProvideCredential<Credential = Credential>> ProvideCredential for GoogleToken<P> {
    type Credential = Credential;

    async fn provide_credential(
        &self,
        context: &Context,
    ) -> reqsign_core::Result<Option<Credential>> {
        let found = self.0.provide_credential(context).await?;
        match found.as_ref().and_then(|found| found.service_account.clone()) {
            Some(account) => {
                let token = ServiceAccountTokenCredentialProvider::new(account).with_scope(SCOPE);
                token.provide_credential(context).await
            }
            None => Ok(found),
        }
    }
}

/// The metadata service of the virtual machine, unless the user has said that there is none.
#[derive(Debug)]
struct UnlessForbidden(VmMetadataCredentialProvider);

impl ProvideCredential for UnlessForbidden {
    type Credential = Credential;

    async fn provide_credential(
        &self,
        context: &Context,
    ) -> reqsign_core::Result<Option<Credential>> {
        let is_forbidden = context.env_var("NO_GCE_CHECK").is_some_and(|value| value == "true");
        if is_forbidden { Ok(None) } else { self.0.provide_credential(context).await }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;
    use std::sync::Arc;

    use bytes::Bytes;
    use reqsign_core::{FileRead, HttpSend, StaticEnv};

    use crate::sync::Mutex;

    /// A key of nobody, made for this test.
    const KEY: &str = "\
        -----BEGIN PRIVATE KEY-----\n\
        MIICdQIBADANBgkqhkiG9w0BAQEFAASCAl8wggJbAgEAAoGBAKdo2uEJOnnbIcid\n\
        NY5m3wEZJ4q/NHuQJ419TbBu7psS+soNv4NV3u3o4Hn0rvnXonWcTrBnyT9P8luJ\n\
        Nk7txbKKeLNbRzI7S1vrmUa771LBVkc5bieWQlFP1RfeiVhBSEOHyjpCPb0V/OS2\n\
        /p+tv35JBHW+x+miMyK/mfsB3uf5AgMBAAECgYAwU8Wz5v0ZhlfXWQLH7Ax+fat7\n\
        kzzsWq4AW2bdAvkgjTcWsydRG63yUiLTMf59I3HDr+7LX/qpq0OUhyTFXkCOlYGr\n\
        GLRaO2YeJsODKVrUwX1LQ5z+geRMaDdwOickCectgShrFCLfj3xFPnm23UwHc84V\n\
        p0P57N5jb7HA93J38QJBANB22ZEk2ixd6AGlnl6w+IwrFrm9N871ROCnUgEWx7Kw\n\
        sr20ZYgB3ReoMwArYTGeYsnfUvN1ztMa2Hx4bAqnGNUCQQDNlW3iqROiL0n7VKNV\n\
        FZE8RaIRn51mrROgQlkecn6SvkX4S8OI/m7hQRPOdwzdfS2hhWDbnhSubQhuVYzy\n\
        YaSVAkAWOLUUfcMr+46hrk/ldCPqfSVdA0iRrR98exmIuC7tY1yKUFKKXvh8bxeQ\n\
        qw8fROzu6/lhrmsvoar2CbgqoolJAkBo9gXoV1KC14n6G7hYVG6WSyb3wHpoVa1T\n\
        gQxnEyW0XhjzMBtg8iZCMyudmgKjgqmtcZ+GASul8lz/mAYiKeARAkBEzpL97Czy\n\
        pieDuEBilaaJc1GFfRXiwUPB5vMsVLpjdqDrU4386viIj9NAjg2BD+R4FX0WMprB\n\
        0JgrjG8TMcru\n\
        -----END PRIVATE KEY-----\n";

    /// A server that answers every request with a token, and records the requests.
    #[derive(Clone, Debug, Default)]
    struct Exchange(Arc<Mutex<Vec<(String, String)>>>);

    impl HttpSend for Exchange {
        async fn http_send(
            &self,
            request: http::Request<Bytes>,
        ) -> reqsign_core::Result<http::Response<Bytes>> {
            let body = String::from_utf8_lossy(request.body()).into_owned();
            self.0.lock().push((request.uri().to_string(), body));
            let answer = r#"{"access_token": "of-the-account", "expires_in": 3600}"#;
            Ok(http::Response::new(Bytes::from_static(answer.as_bytes())))
        }
    }

    #[derive(Debug)]
    struct OneFile(String);

    impl FileRead for OneFile {
        async fn file_read(&self, _: &str) -> reqsign_core::Result<Vec<u8>> {
            Ok(self.0.clone().into_bytes())
        }
    }

    fn found(file: &str) -> (Option<Credential>, Vec<(String, String)>) {
        let exchange = Exchange::default();
        let path = ("GOOGLE_APPLICATION_CREDENTIALS".to_owned(), "/x".to_owned());
        let envs = HashMap::from([path]);
        let context = Context::new()
            .with_env(StaticEnv { home_dir: None, envs })
            .with_file_read(OneFile(file.to_owned()))
            .with_http_send(exchange.clone());
        let file = GoogleToken(EnvCredentialProvider::new().with_scope(SCOPE));
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let found = runtime.block_on(file.provide_credential(&context)).unwrap();
        let asked = exchange.0.lock().clone();
        (found, asked)
    }

    fn token(found: Option<Credential>) -> String {
        found.unwrap().token.unwrap().access_token
    }

    #[test]
    fn the_server_is_googles_or_that_of_the_user() {
        assert_eq!(emulator_url("127.0.0.1:4443/").unwrap(), "http://127.0.0.1:4443");
        assert_eq!(emulator_url("https://host/gcs").unwrap(), "https://host/gcs");
        for bad in ["", "ftp://host", "http://u:hunter2@host", "host?x"] {
            let error = emulator_url(bad).unwrap_err().to_string();
            assert!(error.contains("STORAGE_EMULATOR_HOST") && !error.contains("hunter2"));
        }
    }

    #[test]
    fn the_key_of_a_service_account_is_exchanged_for_a_token() {
        let account = serde_json::json!({
            "type": "service_account", "client_email": "a@b.iam.gserviceaccount.com", "private_key": KEY,
        });
        let (found, asked) = found(&account.to_string());
        assert_eq!(token(found), "of-the-account");
        let [(url, body)] = asked.as_slice() else { panic!("{asked:?}") };
        assert_eq!(url, "https://oauth2.googleapis.com/token");
        // The body has a signed token of three parts, and no part of the private key.
        assert!(body.contains("jwt-bearer") && body.matches('.').count() == 2, "{body}");
        assert!(!body.contains("PRIVATE"));
    }

    #[test]
    fn the_login_of_a_user_is_exchanged_for_a_token() {
        let user = serde_json::json!({
            "type": "authorized_user", "client_id": "id", "client_secret": "s",
            "refresh_token": "a-refresh-token",
        });
        let (found, asked) = found(&user.to_string());
        assert_eq!(token(found), "of-the-account");
        assert!(asked[0].1.contains("a-refresh-token"));
    }
}
