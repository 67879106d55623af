//! Authentication: how requests to each kind of server are signed, and the advice to the user if the server
//! refuses one.

use http::request::Parts;
use reqsign_aws_v4::RequestSigner;
use reqsign_azure_storage::{Credential as AzureCredential, RequestSigner as AzureSigner};
use reqsign_core::{Context, SignRequest};
use reqwest::StatusCode;
use reqwest::header::{self, HeaderMap, HeaderName, HeaderValue};

use super::credentials::aws::PROFILE;
use super::hub::HubAccess;
use super::patience::{Trouble, unusable};
use super::shared::RemoteClients;
use crate::sync::Mutex;

/// The SHA-256 of an empty body. All requests here have an empty body.
const NO_BYTES_SHA256: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

const CANNOT_SIGN: &str = "the credentials cannot sign a request";

/// The version of Azure's protocol that requests name.
const AZURE_VERSION: &str = "2021-12-02";

/// Two headers of Google. In an answer, the first one has the generation of the object. In a request, the
/// second one demands a certain generation.
const GENERATION: HeaderName = HeaderName::from_static("x-goog-generation");
const IF_GENERATION: HeaderName = HeaderName::from_static("x-goog-if-generation-match");

/// How requests to a server are authenticated.
pub(super) enum Access {
    /// Not at all: the server needs no credentials, or there are none.
    Open,
    /// With the user's name and password, in this `Authorization` header. Never printed.
    Login(HeaderValue),
    /// With a signature of S3.
    S3(S3Signing),
    /// With a token of Google.
    Google(GoogleAccess),
    /// With a signature or a token of Azure.
    Azure(Box<AzureAccess>),
    /// With a token for the hub, and without one for the hosts to which the hub redirects.
    Hub(Box<HubAccess>),
}

/// How requests to S3 are signed.
#[derive(Debug)]
pub(super) struct S3Signing {
    /// The region of the bucket. The server's answer may correct it.
    pub(super) region: Mutex<String>,
    /// Whether requests are signed. `AWS_SKIP_SIGNATURE` turns this off.
    pub(super) is_wanted: bool,
    /// The URL of the bucket with the placeholder `{region}`, if the host name depends on the region.
    pub(super) by_region: Option<String>,
}

/// How requests to Google Cloud Storage are authenticated.
#[derive(Debug)]
pub(super) struct GoogleAccess {
    /// Whether credentials are looked for.
    pub(super) is_wanted: bool,
}

/// How requests to Azure are authenticated.
pub(super) struct AzureAccess {
    /// The account key or the shared access signature from the environment. Never printed.
    pub(super) own: Option<AzureCredential>,
    /// Whether requests are signed. `AZURE_SKIP_SIGNATURE` turns this off.
    pub(super) is_wanted: bool,
    /// Whether a token may be obtained from a credential service. The token is sent to the server, so the
    /// connection has to be confidential.
    pub(super) may_ask: bool,
}

impl Access {
    /// The settings for signatures of S3, if the server is one of S3.
    pub(super) fn s3(&self) -> Option<&S3Signing> {
        match self {
            Access::S3(signing) => Some(signing),
            _ => None,
        }
    }

    /// Signs a request, if there are credentials. Returns whether it was signed.
    ///
    /// # Errors
    /// If the credentials cannot sign it.
    pub(super) async fn sign(
        &self,
        clients: &RemoteClients,
        parts: &mut Parts,
    ) -> Result<bool, Trouble> {
        match self {
            Access::S3(signing) if signing.is_wanted => {
                let Some(credential) = clients.aws.get().await else { return Ok(false) };
                let hash = HeaderValue::from_static(NO_BYTES_SHA256);
                parts.headers.insert("x-amz-content-sha256", hash);
                let signer = RequestSigner::new("s3", &signing.region.lock().clone());
                let nothing = Context::new();
                let signed = signer.sign_request(&nothing, parts, Some(&credential), None);
                // The details of the error may contain secrets.
                signed.await.map_err(|_| unusable(CANNOT_SIGN))?;
                Ok(true)
            }
            Access::Google(access) => {
                by_generation(&mut parts.headers);
                if !access.is_wanted {
                    return Ok(false);
                }
                let token = clients.google.get().await.and_then(|found| found.token);
                let Some(token) = token else { return Ok(false) };
                let mut header = HeaderValue::try_from(format!("Bearer {}", token.access_token))
                    .map_err(|_| unusable(CANNOT_SIGN))?;
                header.set_sensitive(true);
                parts.headers.insert(header::AUTHORIZATION, header);
                Ok(true)
            }
            Access::Azure(access) => {
                parts.headers.insert("x-ms-version", HeaderValue::from_static(AZURE_VERSION));
                let credential = match &access.own {
                    _ if !access.is_wanted => None,
                    None if access.may_ask => clients.azure.get().await,
                    own => own.clone(),
                };
                let Some(credential) = credential else { return Ok(false) };
                let signer = AzureSigner::new();
                let nothing = Context::new();
                let signed = signer.sign_request(&nothing, parts, Some(&credential), None);
                signed.await.map_err(|_| unusable(CANNOT_SIGN))?;
                Ok(true)
            }
            Access::Login(login) => {
                parts.headers.insert(header::AUTHORIZATION, login.clone());
                Ok(true)
            }
            _ => Ok(false),
        }
    }

    /// The source of the credentials that requests carry, in words. Never the credentials themselves.
    pub(super) async fn credentials(&self, clients: &RemoteClients) -> String {
        let none =
            |advice: &str| format!("none were found, so that requests are not signed: {advice}");
        let none_wanted = |variable: &str| format!("{variable} is set: requests are not signed");
        let of_chain = |way: Option<&str>, advice: &str| match way {
            Some(way) => format!("from {way}"),
            None => none(advice),
        };
        match self {
            Access::Open => "none: .netrc has no login for this host".to_owned(),
            Access::Login(_) => "the login of .netrc for this host".to_owned(),
            Access::S3(signing) if !signing.is_wanted => none_wanted("AWS_SKIP_SIGNATURE"),
            Access::S3(_) => match clients.aws.way().await {
                Some(way) if way == PROFILE => {
                    let name =
                        clients.settings.variable("AWS_PROFILE").filter(|name| !name.is_empty());
                    format!("from the profile {}", name.as_deref().unwrap_or("default"))
                }
                way => {
                    of_chain(way, "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE")
                }
            },
            Access::Google(access) if !access.is_wanted => {
                "none: STORAGE_EMULATOR_HOST is set, and no credentials are named".to_owned()
            }
            Access::Google(_) => {
                of_chain(clients.google.way().await, "set GOOGLE_APPLICATION_CREDENTIALS")
            }
            Access::Azure(access) => match &access.own {
                _ if !access.is_wanted => none_wanted("AZURE_SKIP_SIGNATURE"),
                Some(AzureCredential::SharedKey { .. }) => "the key of the environment".to_owned(),
                Some(_) => "the shared access signature of the environment".to_owned(),
                None if access.may_ask => of_chain(
                    clients.azure.way().await,
                    "set AZURE_STORAGE_KEY or AZURE_STORAGE_SAS_TOKEN",
                ),
                None => none("the server gets no token, as others could read it"),
            },
            Access::Hub(hub) => match hub.token_origin() {
                Some(origin) => format!("the token of {origin}"),
                None => "none: HF_TOKEN is not set, and there is no token file".to_owned(),
            },
        }
    }

    /// Replaces the ETag in the headers of an answer of Google by the generation of the object, because
    /// listings identify the state of an object by its generation.
    pub(super) fn name_state(&self, headers: &mut HeaderMap) {
        if let (Access::Google(_), Some(generation)) = (self, headers.get(GENERATION).cloned()) {
            headers.insert(header::ETAG, generation);
        }
    }

    /// Whether the refusal of a request means that the credentials have expired.
    pub(super) fn have_ended(&self, status: StatusCode, code: &str, is_signed: bool) -> bool {
        let is_unknown = is_signed && status == StatusCode::UNAUTHORIZED;
        match self {
            Access::S3(_) => ["ExpiredToken", "TokenRefreshRequired"].contains(&code),
            Access::Google(_) => is_unknown,
            Access::Azure(access) => is_unknown && access.own.is_none(),
            _ => false,
        }
    }

    /// Drops the cached credentials, so that the next request obtains new ones.
    pub(super) async fn forget(&self, clients: &RemoteClients) {
        match self {
            Access::S3(_) => clients.aws.forget().await,
            Access::Google(_) => clients.google.forget().await,
            Access::Azure(_) => clients.azure.forget().await,
            _ => {}
        }
    }

    /// Why the server does not allow a request, and the user's remedy.
    pub(super) fn why_denied(
        &self,
        status: StatusCode,
        code: &str,
        is_signed: bool,
    ) -> &'static str {
        match (self, code) {
            (_, "SignatureDoesNotMatch") => "the secret key is wrong",
            (_, "InvalidAccessKeyId") => "the access key is unknown there",
            (_, "RequestTimeTooSkewed") => "the clock of this machine is wrong",
            (Access::S3(_), _) if is_signed => "the credentials do not allow it",
            (Access::S3(signing), _) if signing.is_wanted => {
                "no credentials were found, and it is not public: set AWS_ACCESS_KEY_ID and \
                 AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
            }
            (Access::S3(_), _) => "AWS_SKIP_SIGNATURE is set, and it is not public",
            (Access::Azure(access), "AuthenticationFailed" | "AuthorizationFailure")
                if access.own.is_some() =>
            {
                "the key or the signature is wrong, or the clock of this machine"
            }
            (Access::Google(_) | Access::Azure(_), _) if is_signed => {
                "the credentials do not allow it"
            }
            (Access::Google(_), _) => {
                "no credentials were found, and it is not public: set GOOGLE_APPLICATION_CREDENTIALS"
            }
            (Access::Azure(access), _) if access.is_wanted => {
                "no credentials were found, and it is not public: set AZURE_STORAGE_KEY or \
                 AZURE_STORAGE_SAS_TOKEN"
            }
            (Access::Azure(_), _) => "AZURE_SKIP_SIGNATURE is set, and it is not public",
            (Access::Login(_), _) => "the login of .netrc does not allow it",
            _ if status == StatusCode::UNAUTHORIZED => {
                "it asks for a login: add its host to the file .netrc"
            }
            _ => "it is not public",
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
