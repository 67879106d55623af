//! The kinds of servers: each has a file with its URLs, signatures, refusals and listings. This file chooses between
//! them.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use http::request::Parts;
use reqwest::header::HeaderMap;

use super::azure::{self, AzureAccess};
use super::credentials::Signed;
use super::google::{self, GoogleAccess};
use super::hub::{self, HubAccess, HubRepository, PinnedCommit, tree};
use super::listing::StoreEntries;
use super::patience::Trouble;
use super::request::{Refusal, Requests};
use super::s3::{self, S3Access};
use super::shared::RemoteClients;
use super::url::{bucket_of, escaped_key};
use super::web::{self, WebAccess};

/// How requests to a server are authenticated, with the other state of its kind.
pub(super) enum Access {
    S3(S3Access),
    Google(GoogleAccess),
    Azure(Box<AzureAccess>),
    Web(WebAccess),
    Hub(Box<HubAccess>),
}

/// The bucket, the host or the repository that `rest` begins with, which is a URL without its `scheme` and `://`.
///
/// # Errors
/// If the URL does not have a supported form, the message says why. It shows no part of the URL that may be secret.
pub(super) fn authority_of(scheme: &str, rest: &str) -> Result<String, String> {
    match scheme {
        "s3" | "gs" => bucket_of(scheme, rest),
        "az" | "abfs" | "abfss" => azure::container_of(rest),
        "hf" => HubRepository::parse(rest).map(|(_, authority)| authority),
        _ => web::host_of(rest),
    }
}

impl Access {
    /// The access to the bucket, host or repository `authority` of the URL `root`, and the URL of its server.
    ///
    /// # Errors
    /// If a setting of `clients` has no usable value.
    pub(super) fn of(
        root: &str,
        authority: &str,
        clients: &RemoteClients,
        pinned: &PinnedCommit,
    ) -> io::Result<(String, Access)> {
        let variable = |name: &str| clients.settings.variable(name);
        Ok(match root.split(':').next().unwrap_or_default() {
            "s3" => of_kind(s3::access_of(authority, &variable)?, Access::S3),
            "gs" => of_kind(google::access_of(authority, &variable)?, Access::Google),
            "az" | "abfs" | "abfss" => {
                of_kind(azure::access_of(authority, &variable)?, |own| Access::Azure(own.into()))
            }
            "hf" => {
                let found = hub::access_of(authority, &variable, pinned)?;
                of_kind(found, |own| Access::Hub(own.into()))
            }
            _ => of_kind(web::access_of(root, authority, clients)?, Access::Web),
        })
    }

    /// The repository of the hub, if the server is the hub.
    pub(super) fn hub(&self) -> Option<&HubAccess> {
        match self {
            Access::Hub(hub) => Some(hub),
            _ => None,
        }
    }

    /// The URL up to the name of an object, if it differs from the one that the endpoint began with.
    pub(super) fn base(&self) -> Option<String> {
        match self {
            Access::S3(s3) => s3.base(),
            _ => None,
        }
    }

    /// The path of the object `key` in a URL, escaped.
    pub(super) fn target(&self, key: &str) -> String {
        match self {
            // The keys of HTTP servers are escaped already.
            Access::Web(_) => web::target(key, ""),
            _ => format!("/{}", escaped_key(key)),
        }
    }

    /// Signs a request, if there are credentials. Returns whether it was signed.
    ///
    /// # Errors
    /// If the credentials cannot sign it.
    pub(super) async fn sign(&self, clients: &RemoteClients, parts: &mut Parts) -> Signed {
        match self {
            Access::S3(s3) => s3.sign(clients, parts).await,
            Access::Google(google) => google.sign(clients, parts).await,
            Access::Azure(azure) => azure.sign(clients, parts).await,
            Access::Web(web) => Ok(web.sign(parts)),
            Access::Hub(_) => Ok(false),
        }
    }

    /// The source of the credentials that requests carry, in words. Never the credentials themselves.
    pub(super) async fn credentials(&self, clients: &RemoteClients) -> String {
        match self {
            Access::S3(s3) => s3.credentials(clients).await,
            Access::Google(google) => google.credentials(clients).await,
            Access::Azure(azure) => azure.credentials(clients).await,
            Access::Web(web) => web.credentials(),
            Access::Hub(hub) => hub.credentials(),
        }
    }

    /// Changes the headers of an answer so that the ETag identifies the state of the object.
    pub(super) fn name_state(&self, headers: &mut HeaderMap) {
        if let Access::Google(_) = self {
            google::name_state(headers);
        }
    }

    /// Drops what a refusal shows to be outdated, for example expired credentials. Returns the reason for another
    /// try, if something was dropped.
    pub(super) async fn mend(&self, clients: &RemoteClients, refusal: &Refusal) -> Option<Trouble> {
        match self {
            Access::S3(s3) => s3.mend(clients, refusal).await,
            Access::Google(_) => google::mend(clients, refusal).await,
            Access::Azure(azure) => azure.mend(clients, refusal).await,
            Access::Web(_) | Access::Hub(_) => None,
        }
    }

    /// Why the server does not allow a request, and the user's remedy.
    pub(super) fn why_denied(&self, refusal: &Refusal) -> &'static str {
        match (self, refusal.code.as_str()) {
            (_, "SignatureDoesNotMatch") => "the secret key is wrong",
            (_, "InvalidAccessKeyId") => "the access key is unknown there",
            (_, "RequestTimeTooSkewed") => "the clock of this machine is wrong",
            (Access::S3(s3), _) => s3.why_denied(refusal),
            (Access::Google(_), _) => google::why_denied(refusal),
            (Access::Azure(azure), _) => azure.why_denied(refusal),
            (Access::Web(web), _) => web.why_denied(refusal),
            (Access::Hub(_), _) => "it is not public",
        }
    }

    /// An ETag that no object has. `None` if requests to the server have no conditions.
    pub(super) fn other_tag(&self) -> Option<&'static str> {
        match self {
            Access::Google(_) => Some(google::OTHER_GENERATION),
            Access::Hub(_) => None,
            _ => Some("\"tensorfs-doctor\""),
        }
    }

    /// The entries of the folder `key`. An empty `key` is the whole bucket. If `most` is given, at most this number
    /// of entries is requested: the caller then only wants to know whether there are any.
    ///
    /// # Errors
    /// If the server refuses a request, or does not answer in time.
    pub(super) async fn list(
        &self,
        shared: &Arc<impl Requests>,
        key: &str,
        most: Option<u32>,
        deadline: Instant,
    ) -> io::Result<StoreEntries> {
        let requests = &**shared;
        match self {
            Access::S3(_) | Access::Google(_) => {
                let listed = s3::list(requests, key, most, deadline).await?;
                match most {
                    Some(_) => Ok(listed),
                    None => s3::with_tags(shared, key, listed, deadline).await,
                }
            }
            Access::Azure(_) => azure::list(requests, key, most, deadline).await,
            Access::Web(web) => web.list(shared, key, deadline).await,
            Access::Hub(hub) => tree::list(hub, requests, key, deadline).await,
        }
    }

    /// Whether `key` is a folder.
    ///
    /// # Errors
    /// The errors of `list`.
    pub(super) async fn is_folder(
        &self,
        requests: &Arc<impl Requests>,
        key: &str,
        deadline: Instant,
    ) -> io::Result<bool> {
        match self {
            Access::Web(web) => web.is_folder(&**requests, key, deadline).await,
            _ => Ok(!self.list(requests, key, Some(2), deadline).await?.is_empty()),
        }
    }
}

fn of_kind<T>(found: (String, T), kind: fn(T) -> Access) -> (String, Access) {
    (found.0, kind(found.1))
}
