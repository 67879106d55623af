//! How requests to a server are signed, by the kind of the server, and what to do where it refuses.

use http::request::Parts;
use reqsign_aws_v4::RequestSigner;
use reqsign_core::{Context, SignRequest};
use reqwest::StatusCode;
use reqwest::header::HeaderValue;

use super::hub::HubAccess;
use super::patience::{Trouble, unusable};
use super::shared::RemoteProcess;
use crate::sync::Mutex;

/// The hash of no bytes, which is what all requests here send.
const NO_BYTES_SHA256: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

/// How a server lets requests in.
pub(super) enum Access {
    /// Everybody is let in.
    Open,
    /// With a signature of S3.
    S3(S3Signing),
    /// With a token, and by links to other hosts.
    Hub(Box<HubAccess>),
}

/// How requests to S3 are signed.
#[derive(Debug)]
pub(super) struct S3Signing {
    /// The region, which the server may correct.
    pub(super) region: Mutex<String>,
    /// Whether requests are signed at all.
    pub(super) is_wanted: bool,
    /// The URL of the bucket with `{region}` in it, if the server depends on the region.
    pub(super) by_region: Option<String>,
}

impl Access {
    /// How requests to S3 are signed, if it is S3.
    pub(super) fn s3(&self) -> Option<&S3Signing> {
        match self {
            Access::S3(signing) => Some(signing),
            _ => None,
        }
    }

    /// Signs a request. Returns whether there are credentials for that.
    ///
    /// # Errors
    /// If the credentials cannot sign it.
    pub(super) async fn sign(
        &self,
        process: &RemoteProcess,
        parts: &mut Parts,
    ) -> Result<bool, Trouble> {
        match self {
            Access::S3(signing) if signing.is_wanted => {
                let Some(credential) = process.credentials.get().await else { return Ok(false) };
                let hash = HeaderValue::from_static(NO_BYTES_SHA256);
                parts.headers.insert("x-amz-content-sha256", hash);
                let signer = RequestSigner::new("s3", &signing.region.lock().clone());
                let nothing = Context::new();
                let signed = signer.sign_request(&nothing, parts, Some(&credential), None);
                // The details may have secrets.
                signed.await.map_err(|_| unusable("the credentials cannot sign a request"))?;
                Ok(true)
            }
            _ => Ok(false),
        }
    }

    /// Why the server does not allow a request, and what to do.
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
            _ if status == StatusCode::UNAUTHORIZED => {
                "it asks for a login, which is not supported"
            }
            _ => "it is not public",
        }
    }
}
