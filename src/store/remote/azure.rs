//! Azure Blob Storage: the URL of a container, the signatures of requests, and the listing of a folder.

use std::collections::HashMap;
use std::io;
use std::time::Instant;

use http::request::Parts;
use reqsign_azure_storage::{
    AzureCliCredentialProvider, ClientCertificateCredentialProvider,
    ClientSecretCredentialProvider, Credential, ImdsCredentialProvider, RequestSigner,
    WorkloadIdentityCredentialProvider,
};
use reqsign_core::time::Timestamp;
use reqwest::header::HeaderValue;
use reqwest::{Method, StatusCode};
use serde::Deserialize;

use super::credentials::{Providers, Signed, Variable, is_on, no_credentials, sign_with};
use super::listing::{StoreEntries, StoreEntry, is_entry_name};
use super::patience::Trouble;
use super::request::{Refusal, Requests, Wanted};
use super::shared::RemoteClients;
use super::state::ObjectState;
use super::url::{escaped_value, is_confidential};
use crate::error::{invalid_data, invalid_input};
use crate::store::remote_settings::StoreSettings;

/// The version of Azure's protocol that requests name.
const VERSION: &str = "2021-12-02";

/// Suffixes of the host names of Azure accounts. Tokens are sent to such hosts only.
const SUFFIXES: [&str; 5] = [
    ".core.windows.net",
    ".core.chinacloudapi.cn",
    ".core.usgovcloudapi.net",
    ".core.cloudapi.de",
    ".fabric.microsoft.com",
];

/// Maximum length in bytes of one page of a listing. A page has at most 5000 blobs, with names of at most 1024
/// characters.
const PAGE_LEN_MAX: usize = 64 << 20;

/// Maximum number of pages of a listing.
const PAGES_MAX: usize = 1000;

/// The account and the key that every emulator has. They are public.
const EMULATOR_ACCOUNT: &str = "devstoreaccount1";
const EMULATOR_KEY: &str =
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==";

/// A container of Azure, and how requests to it are authenticated.
pub(super) struct AzureAccess {
    /// The account key or the shared access signature from the environment. Never printed.
    own: Option<Credential>,
    /// Whether requests are signed. `AZURE_SKIP_SIGNATURE` turns this off.
    is_wanted: bool,
    /// Whether a token may be obtained from a credential service. The token is sent to the server, so the
    /// connection has to be confidential.
    may_ask: bool,
}

impl AzureAccess {
    pub(super) async fn sign(&self, clients: &RemoteClients, parts: &mut Parts) -> Signed {
        parts.headers.insert("x-ms-version", HeaderValue::from_static(VERSION));
        let credential = match &self.own {
            _ if !self.is_wanted => None,
            None if self.may_ask => clients.chain(providers).get().await?,
            own => own.clone(),
        };
        let Some(credential) = credential else { return Ok(false) };
        sign_with(RequestSigner::new(), &credential, parts).await
    }

    pub(super) async fn credentials(&self, clients: &RemoteClients) -> String {
        match &self.own {
            _ if !self.is_wanted => {
                "AZURE_SKIP_SIGNATURE is set: requests are not signed".to_owned()
            }
            Some(Credential::SharedKey { .. }) => "the key of the environment".to_owned(),
            Some(_) => "the shared access signature of the environment".to_owned(),
            None if self.may_ask => {
                let advice = "set AZURE_STORAGE_KEY or AZURE_STORAGE_SAS_TOKEN";
                clients.chain(providers).origin(advice).await
            }
            None => no_credentials("the server gets no token, as others could read it"),
        }
    }

    /// Drops an expired token.
    pub(super) async fn mend(&self, clients: &RemoteClients, refusal: &Refusal) -> Option<Trouble> {
        let is_unknown = refusal.is_signed && refusal.status == StatusCode::UNAUTHORIZED;
        clients.chain(providers).drop_if(is_unknown && self.own.is_none(), refusal).await
    }

    pub(super) fn why_denied(&self, refusal: &Refusal) -> &'static str {
        match refusal.code.as_str() {
            "AuthenticationFailed" | "AuthorizationFailure" if self.own.is_some() => {
                "the key or the signature is wrong, or the clock of this machine"
            }
            _ if refusal.is_signed => "the credentials do not allow it",
            _ if self.is_wanted => {
                "no credentials were found, and it is not public: set AZURE_STORAGE_KEY or \
                 AZURE_STORAGE_SAS_TOKEN"
            }
            _ => "AZURE_SKIP_SIGNATURE is set, and it is not public",
        }
    }
}

/// The providers of credentials, with their names in messages. There are none if an option names a file, since
/// that file has a key or a signature.
fn providers(settings: &StoreSettings) -> Providers<Credential> {
    if settings.names_credentials_file() {
        return Vec::new();
    }
    vec![
        ("a client secret", Box::new(ClientSecretCredentialProvider::new())),
        ("a client certificate", Box::new(ClientCertificateCredentialProvider::new())),
        ("a workload identity", Box::new(WorkloadIdentityCredentialProvider::new())),
        ("the Azure CLI", Box::new(AzureCliCredentialProvider::new())),
        ("the machine", Box::new(ImdsCredentialProvider::new())),
    ]
}

/// The container and perhaps the host that `rest` begins with, which is a URL without its scheme and `://`.
///
/// # Errors
/// The errors of `parse_container`.
pub(super) fn container_of(rest: &str) -> Result<String, String> {
    let authority = rest.split('/').next().unwrap_or_default();
    parse_container(authority).map(|_| authority.to_owned())
}

/// The container and the host in `CONTAINER[@HOST]`, a part of a URL.
///
/// # Errors
/// If the text has another form, the message says why.
fn parse_container(authority: &str) -> Result<(&str, Option<&str>), String> {
    let expected =
        "expected az://CONTAINER/PATH, or abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PATH";
    let (container, host) = match authority.split_once('@') {
        Some((container, host)) => (container, Some(host)),
        None => (authority, None),
    };
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-$_.".contains(c);
    if container.is_empty() || !container.chars().all(is_plain) {
        return Err(format!("names no container: {expected}"));
    }
    let is_host = |host: &str| {
        SUFFIXES.iter().any(|suffix| host.ends_with(suffix))
            && host.chars().all(|c| c.is_ascii_alphanumeric() || "-.".contains(c))
    };
    if host.is_some_and(|host| !is_host(host)) {
        return Err(format!("names no account of Azure: {expected}"));
    }
    Ok((container, host))
}

/// The settings from the environment variables of Azure.
struct AzureSettings {
    account: Option<String>,
    /// The URL of the account.
    server: Option<String>,
    credential: Option<Credential>,
}

impl AzureSettings {
    fn of(variable: Variable<'_>) -> io::Result<AzureSettings> {
        let given = |names: &[&str]| {
            let mut found = names.iter().filter_map(|name| variable(name));
            found.find(|value| !value.is_empty())
        };
        let text = given(&["AZURE_STORAGE_CONNECTION_STRING"]).unwrap_or_default();
        let parts: HashMap<&str, &str> =
            text.split(';').filter_map(|part| part.trim().split_once('=')).collect();
        let part = |name: &str| parts.get(name).map(|value| (*value).to_owned());
        let is_emulated = part("UseDevelopmentStorage").is_some_and(|value| value == "true");
        let account = given(&["AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_ACCOUNT_NAME"])
            .or_else(|| part("AccountName"))
            .or_else(|| is_emulated.then(|| EMULATOR_ACCOUNT.to_owned()));
        let key = given(&["AZURE_STORAGE_KEY", "AZURE_STORAGE_ACCOUNT_KEY"])
            .or_else(|| part("AccountKey"))
            .or_else(|| is_emulated.then(|| EMULATOR_KEY.to_owned()));
        let signature =
            given(&["AZURE_STORAGE_SAS_TOKEN"]).or_else(|| part("SharedAccessSignature"));
        let of_suffix = || {
            let scheme = part("DefaultEndpointsProtocol").unwrap_or_else(|| "https".to_owned());
            Some(format!("{scheme}://{}.blob.{}", part("AccountName")?, part("EndpointSuffix")?))
        };
        let emulator = || is_emulated.then(|| format!("http://127.0.0.1:10000/{EMULATOR_ACCOUNT}"));
        let server = given(&["AZURE_STORAGE_ENDPOINT", "AZURE_STORAGE_BLOB_ENDPOINT"])
            .or_else(|| part("BlobEndpoint"))
            .or_else(of_suffix)
            .or_else(emulator)
            .map(|server| account_url(&server))
            .transpose()?;
        let credential = match (&account, key, signature) {
            (Some(account), Some(key), _) => Some(Credential::with_shared_key(account, &key)),
            (_, _, Some(signature)) => {
                Some(Credential::with_sas_token(signature.trim_start_matches('?')))
            }
            _ => None,
        };
        Ok(AzureSettings { account, server, credential })
    }
}

/// Checks the URL of an account from `AZURE_STORAGE_ENDPOINT`.
fn account_url(server: &str) -> io::Result<String> {
    let server = server.trim_end_matches('/');
    let host = server.strip_prefix("http://").or_else(|| server.strip_prefix("https://"));
    if host.is_none_or(|host| host.is_empty() || host.contains(['@', '?', '#'])) {
        let why =
            "AZURE_STORAGE_ENDPOINT is no URL of an account: expected http(s)://HOST[/ACCOUNT]";
        return Err(invalid_input(why));
    }
    Ok(server.to_owned())
}

/// The URL of a container and the authentication for it, from the settings that `variable` returns.
///
/// # Errors
/// If no account is named, or its URL is not usable.
pub(super) fn access_of(
    authority: &str,
    variable: Variable<'_>,
) -> io::Result<(String, AzureAccess)> {
    let settings = AzureSettings::of(variable)?;
    let (container, host) = parse_container(authority).map_err(invalid_input)?;
    let account = host.and_then(|host| host.split('.').next());
    let is_own = account.is_none() || account == settings.account.as_deref();
    let server = match (host, settings.server, &settings.account) {
        (_, Some(server), _) if is_own => server,
        (Some(host), ..) => format!("https://{}", host.replacen(".dfs.", ".blob.", 1)),
        (None, _, Some(account)) => format!("https://{account}.blob.core.windows.net"),
        _ => {
            return Err(invalid_input(
                "names no account: set AZURE_STORAGE_ACCOUNT or AZURE_STORAGE_CONNECTION_STRING",
            ));
        }
    };
    // A key or a signature is valid for one account only.
    let own = settings.credential.filter(|_| is_own);
    let is_wanted = !is_on(variable, "AZURE_SKIP_SIGNATURE");
    let access = AzureAccess { own, is_wanted, may_ask: is_confidential(&server) };
    Ok((format!("{server}/{container}"), access))
}

/// The entries of the folder `key` by name. If `most` is given, at most this number of entries is requested.
///
/// # Errors
/// If the server refuses the request, or does not answer in time.
pub(super) async fn list(
    requests: &impl Requests,
    key: &str,
    most: Option<u32>,
    deadline: Instant,
) -> io::Result<StoreEntries> {
    let prefix = if key.is_empty() { String::new() } else { format!("{key}/") };
    let mut entries = StoreEntries::new();
    let mut marker = String::new();
    for _ in 0..PAGES_MAX {
        let mut target = String::from("?restype=container&comp=list&delimiter=%2F");
        if let Some(most) = most {
            target.push_str(&format!("&maxresults={most}"));
        }
        if !marker.is_empty() {
            target.push_str(&format!("&marker={}", escaped_value(&marker)));
        }
        target.push_str(&format!("&prefix={}", escaped_value(&prefix)));
        let wanted = Wanted::new(Method::GET, target);
        let (_, text) = requests.answer(&wanted, PAGE_LEN_MAX, deadline).await?;
        let page = AzurePage::parse(&text)?;
        page.blobs.take(&prefix, &mut entries);
        marker = page.next_marker.unwrap_or_default();
        if marker.is_empty() || (most.is_some() && !entries.is_empty()) {
            return Ok(entries);
        }
    }
    Err(invalid_data(format!("more than {PAGES_MAX} pages of names in one folder")))
}

/// One page of a listing.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct AzurePage {
    blobs: AzureBlobs,
    next_marker: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct AzureBlobs {
    #[serde(default, rename = "Blob")]
    blobs: Vec<AzureBlob>,
    #[serde(default, rename = "BlobPrefix")]
    prefixes: Vec<AzurePrefix>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct AzureBlob {
    name: String,
    properties: AzureProperties,
}

#[derive(Debug, Deserialize)]
struct AzureProperties {
    #[serde(rename = "Last-Modified")]
    modified: Option<String>,
    #[serde(rename = "Etag")]
    tag: Option<String>,
    #[serde(rename = "Content-Length")]
    len: u64,
    /// `directory` for a folder, in accounts with hierarchical namespaces.
    #[serde(rename = "ResourceType")]
    resource: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct AzurePrefix {
    name: String,
}

impl AzurePage {
    fn parse(text: &[u8]) -> io::Result<AzurePage> {
        let bad = |why: String| invalid_data(format!("the listing is not that of Azure: {why}"));
        let text = std::str::from_utf8(text)
            .map_err(|e| bad(e.to_string()))?
            .trim_start_matches('\u{feff}');
        if !text.contains("<EnumerationResults") {
            return Err(bad("no EnumerationResults".to_owned()));
        }
        quick_xml::de::from_str(text).map_err(|e| bad(e.to_string()))
    }
}

impl AzureBlobs {
    /// Adds the entries below `prefix`. Names that are not valid in a folder are left out.
    fn take(self, prefix: &str, entries: &mut StoreEntries) {
        for blob in self.blobs {
            let name = blob.name.strip_prefix(prefix).filter(|name| is_entry_name(name));
            let (Some(name), properties) = (name, blob.properties) else { continue };
            if properties.resource.as_deref() == Some("directory") {
                entries.entry(name.to_owned()).or_insert(StoreEntry::Folder);
                continue;
            }
            let time = properties.modified.as_deref();
            let modified = time.and_then(|time| Timestamp::parse_rfc2822(time.trim()).ok());
            let tag = properties.tag.as_deref().unwrap_or_default();
            let state = ObjectState::new(properties.len, tag, modified.map(Timestamp::as_second));
            entries.insert(name.to_owned(), StoreEntry::Object(state));
        }
        for AzurePrefix { name } in self.prefixes {
            let name = name.strip_prefix(prefix).and_then(|name| name.strip_suffix('/'));
            if let Some(name) = name.filter(|name| is_entry_name(name)) {
                // An object and a folder may have the same name. Then the object is listed.
                entries.entry(name.to_owned()).or_insert(StoreEntry::Folder);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_blobs_folders_and_a_marker() {
        let text = "\u{feff}<?xml version=\"1.0\" encoding=\"utf-8\"?>
            <EnumerationResults ServiceEndpoint=\"http://h/a\" ContainerName=\"c\"><Prefix>a/</Prefix>
            <Blobs><Blob><Name>a/x &amp; y</Name><Properties>
            <Last-Modified>Wed, 21 Oct 2015 07:28:00 GMT</Last-Modified><Etag>0x8D</Etag>
            <Content-Length>7</Content-Length><BlobType>BlockBlob</BlobType></Properties></Blob>
            <BlobPrefix><Name>a/sub/</Name></BlobPrefix>
            <Blob><Name>a/dir</Name><Properties><Content-Length>0</Content-Length>
            <ResourceType>directory</ResourceType></Properties></Blob>
            <Blob><Name>a/..</Name><Properties><Content-Length>0</Content-Length></Properties></Blob>
            </Blobs><NextMarker>m=1</NextMarker></EnumerationResults>";
        let page = AzurePage::parse(text.as_bytes()).unwrap();
        assert_eq!(page.next_marker.as_deref(), Some("m=1"));
        let mut entries = StoreEntries::new();
        page.blobs.take("a/", &mut entries);
        let state = ObjectState::new(7, "0x8D", Some(1_445_412_480));
        let expected = [
            ("dir".to_owned(), StoreEntry::Folder),
            ("sub".to_owned(), StoreEntry::Folder),
            ("x & y".to_owned(), StoreEntry::Object(state)),
        ];
        assert_eq!(entries, expected.into());
        let empty = b"<EnumerationResults><Blobs /><NextMarker /></EnumerationResults>";
        assert_eq!(AzurePage::parse(empty).unwrap().next_marker.unwrap_or_default(), "");
        AzurePage::parse(b"<html></html>").unwrap_err();
    }

    #[test]
    fn the_account_is_that_of_the_url_or_of_the_environment() {
        let server = |authority: &str, variables: &[(&str, &str)]| {
            let variable = |name: &str| {
                let found = variables.iter().find(|(known, _)| *known == name);
                found.map(|(_, value)| (*value).to_owned())
            };
            access_of(authority, &variable).map(|(base, access)| {
                let host = base.split('/').nth(2).unwrap_or_default().to_owned();
                (host, access.own.is_some())
            })
        };
        let of = |host: &str, has_key| (host.to_owned(), has_key);
        let account = ("AZURE_STORAGE_ACCOUNT", "mine");
        let key = ("AZURE_STORAGE_KEY", "a2V5");
        let text = "DefaultEndpointsProtocol=https;AccountName=mine;AccountKey=a2V5;EndpointSuffix=core.windows.net";
        let string = ("AZURE_STORAGE_CONNECTION_STRING", text);
        let emulator = ("AZURE_STORAGE_CONNECTION_STRING", "UseDevelopmentStorage=true");
        let own = "mine.blob.core.windows.net";
        assert_eq!(server("c", &[account, key]).unwrap(), of(own, true));
        assert_eq!(server("c", &[string]).unwrap(), of(own, true));
        assert_eq!(server("c", &[emulator]).unwrap(), of("127.0.0.1:10000", true));
        let sas = ("AZURE_STORAGE_SAS_TOKEN", "?sv=1&sig=x");
        assert_eq!(server("c@mine.dfs.core.windows.net", &[account, sas]).unwrap(), of(own, true));
        let other = of("other.blob.core.windows.net", false);
        assert_eq!(server("c@other.dfs.core.windows.net", &[account, key]).unwrap(), other);
        assert!(server("c", &[key]).is_err());
        let bad = [account, ("AZURE_STORAGE_ENDPOINT", "http://u:hunter2@host")];
        assert!(!server("c", &bad).unwrap_err().to_string().contains("hunter2"));
    }

    #[test]
    fn a_url_names_a_container_and_perhaps_an_account_of_azure() {
        assert_eq!(parse_container("c").unwrap(), ("c", None));
        let host = "a.dfs.core.windows.net";
        assert_eq!(parse_container("c@a.dfs.core.windows.net").unwrap(), ("c", Some(host)));
        for bad in
            ["", "@a.dfs.core.windows.net", "c@evil.example.com", "c@a/core.windows.net", "c@x@y"]
        {
            parse_container(bad).unwrap_err();
        }
    }
}
