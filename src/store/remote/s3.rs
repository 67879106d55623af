//! S3: the URL of a bucket, the signatures of requests, and the listing of a folder. Google Cloud Storage is listed in
//! the same way.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use http::request::Parts;
use ini::Ini;
use reqsign_aws_core::{
    AssumeRoleWithWebIdentityCredentialProvider, Credential, ECSCredentialProvider,
    EnvCredentialProvider, IMDSv2CredentialProvider, ProcessCredentialProvider,
    ProfileCredentialProvider, SSOCredentialProvider,
};
use reqsign_aws_v4::RequestSigner;
use reqsign_core::time::Timestamp;
use reqwest::Method;
use reqwest::header::{HeaderName, HeaderValue};
use serde::Deserialize;

use super::credentials::{PROFILE, Providers, Signed, Variable, is_on, sign_with};
use super::listing::{StoreEntries, StoreEntry, is_entry_name, look_up_all};
use super::patience::Trouble;
use super::request::{Refusal, Requests, Wanted};
use super::shared::RemoteClients;
use super::state::{ObjectState, text_of};
use super::url::{escaped_key, escaped_value};
use crate::error::{invalid_data, invalid_input};
use crate::store::remote_settings::{StoreSettings, text_in};
use crate::sync::Mutex;

/// Maximum length in bytes of one page of a listing. A page has 1000 keys of at most 1024 bytes.
const PAGE_LEN_MAX: usize = 16 << 20;

/// Maximum number of pages of a listing. A folder with more than a million keys is not a checkpoint.
const PAGES_MAX: usize = 1000;

/// The region of a bucket if none is configured. The server's answer corrects it.
const REGION: &str = "us-east-1";

/// The SHA-256 of an empty body. All requests here have an empty body.
const NO_BYTES_SHA256: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

/// The header in which S3 names the region of a bucket.
const BUCKET_REGION: HeaderName = HeaderName::from_static("x-amz-bucket-region");

/// A bucket of S3, and how requests to it are signed.
#[derive(Debug)]
pub(super) struct S3Access {
    /// The region of the bucket. The server's answer may correct it.
    region: Mutex<String>,
    /// Whether requests are signed. `AWS_SKIP_SIGNATURE` turns this off.
    is_wanted: bool,
    /// Whether the reader pays for the requests instead of the owner of the bucket.
    pays: bool,
    /// The URL of the bucket with the placeholder `{region}`, if the host name depends on the region.
    by_region: Option<String>,
}

impl S3Access {
    pub(super) fn base(&self) -> Option<String> {
        Some(self.by_region.as_ref()?.replace("{region}", &self.region.lock()))
    }

    pub(super) async fn sign(&self, clients: &RemoteClients, parts: &mut Parts) -> Signed {
        if !self.is_wanted {
            return Ok(false);
        }
        let Some(credential) = clients.chain(providers).get().await? else { return Ok(false) };
        let hash = HeaderValue::from_static(NO_BYTES_SHA256);
        parts.headers.insert("x-amz-content-sha256", hash);
        if self.pays {
            parts.headers.insert("x-amz-request-payer", HeaderValue::from_static("requester"));
        }
        let signer = RequestSigner::new("s3", &self.region.lock().clone());
        sign_with(signer, &credential, parts).await
    }

    pub(super) async fn credentials(&self, clients: &RemoteClients) -> String {
        if !self.is_wanted {
            return "AWS_SKIP_SIGNATURE is set: requests are not signed".to_owned();
        }
        let chain = clients.chain(providers);
        if chain.way().await == Some(PROFILE) {
            let name = clients.settings.variable("AWS_PROFILE").filter(|name| !name.is_empty());
            return format!("from the profile {}", name.as_deref().unwrap_or("default"));
        }
        chain.origin("set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE").await
    }

    /// Stores the region that the server names, if it differs from the current one, and drops expired credentials.
    pub(super) async fn mend(&self, clients: &RemoteClients, refusal: &Refusal) -> Option<Trouble> {
        let code = refusal.code.as_str();
        let is_plain = |region: &&str| {
            !region.is_empty() && region.chars().all(|c| c.is_ascii_alphanumeric() || c == '-')
        };
        let region = text_of(&refusal.headers, BUCKET_REGION).filter(is_plain);
        if let Some(region) = region.filter(|region| *self.region.lock() != **region) {
            *self.region.lock() = region.to_owned();
            return Some(Trouble::Broken(format!("the bucket is in the region {region} ({code})")));
        }
        let have_expired = ["ExpiredToken", "TokenRefreshRequired"].contains(&code);
        clients.chain(providers).drop_if(have_expired, refusal).await
    }

    pub(super) fn why_denied(&self, refusal: &Refusal) -> &'static str {
        match refusal.is_signed {
            true => "the credentials do not allow it",
            false if self.is_wanted => {
                "no credentials were found, and it is not public: set AWS_ACCESS_KEY_ID and \
                 AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
            }
            false => "AWS_SKIP_SIGNATURE is set, and it is not public",
        }
    }
}

/// The providers of credentials in the order of AWS, with their names in messages. If an option names a file or
/// a profile, the profile is the only provider.
fn providers(settings: &StoreSettings) -> Providers<Credential> {
    if settings.names_credentials_file() || settings.names_profile() {
        return vec![
            (PROFILE, Box::new(ProfileCredentialProvider::default())),
            ("SSO", Box::new(SSOCredentialProvider::default())),
            ("a program of a profile", Box::new(ProcessCredentialProvider::default())),
        ];
    }
    vec![
        ("the environment", Box::new(EnvCredentialProvider::new())),
        (PROFILE, Box::new(ProfileCredentialProvider::default())),
        ("SSO", Box::new(SSOCredentialProvider::default())),
        ("a web identity", Box::new(AssumeRoleWithWebIdentityCredentialProvider::default())),
        ("a program of a profile", Box::new(ProcessCredentialProvider::default())),
        ("the container", Box::new(ECSCredentialProvider::default())),
        ("the machine", Box::new(IMDSv2CredentialProvider::default())),
    ]
}

/// The URL of a bucket and the authentication for it, from the settings that `variable` returns.
///
/// # Errors
/// If the URL of the server is not usable.
pub(super) fn access_of(bucket: &str, variable: Variable<'_>) -> io::Result<(String, S3Access)> {
    let given = |names: [&str; 2], of_profile: &str| {
        let mut found = names.into_iter().filter_map(variable);
        found.find(|value| !value.is_empty()).or_else(|| value_in_profile(of_profile, variable))
    };
    let named = given(["AWS_REGION", "AWS_DEFAULT_REGION"], "region");
    let own = given(["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"], "endpoint_url");
    let (base, by_region) = match own {
        Some(server) => {
            (own_base(&server, bucket, is_on(variable, "AWS_VIRTUAL_HOSTED_STYLE_REQUEST"))?, None)
        }
        // The certificates of AWS are not valid for host names with further dots.
        None if bucket.contains('.') => {
            let base = format!("https://s3.{{region}}.amazonaws.com/{bucket}");
            (base.clone(), Some(base))
        }
        None => {
            let base = format!("https://{bucket}.s3.{{region}}.amazonaws.com");
            (base.clone(), Some(base))
        }
    };
    let is_wanted = !is_on(variable, "AWS_SKIP_SIGNATURE");
    let pays = variable("AWS_REQUEST_PAYER").is_some_and(|who| who == "requester");
    let region = Mutex::new(named.unwrap_or_else(|| REGION.to_owned()));
    Ok((base, S3Access { region, is_wanted, pays, by_region }))
}

/// The value of `key` in the profile that `AWS_PROFILE` names, or in the default profile.
fn value_in_profile(key: &str, variable: Variable<'_>) -> Option<String> {
    let given = |name: &str| variable(name).filter(|value| !value.is_empty());
    let file = given("AWS_CONFIG_FILE").or_else(|| Some(given("HOME")? + "/.aws/config"))?;
    let text = text_in(Path::new(&file)).ok()?;
    let profiles = Ini::load_from_str_noescape(&text).ok()?;
    let found = match given("AWS_PROFILE").filter(|name| name != "default") {
        Some(name) => profiles.get_from(Some(format!("profile {name}")), key),
        None => profiles.get_from(Some("default"), key),
    };
    found.map(|value| value.trim().to_owned()).filter(|value| !value.is_empty())
}

/// The URL of a bucket on a server other than AWS.
fn own_base(server: &str, bucket: &str, in_host: bool) -> io::Result<String> {
    let unusable = |why: &str| {
        invalid_input(format!("AWS_ENDPOINT_URL {why}: expected http(s)://HOST[:PORT]"))
    };
    let server = server.trim_end_matches('/');
    let (scheme, host) = server.split_once("://").ok_or_else(|| unusable("is no URL"))?;
    if !["http", "https"].contains(&scheme) || host.is_empty() {
        return Err(unusable("is no URL"));
    }
    if host.contains(['@', '?', '#']) {
        return Err(unusable("has more than a host and a path"));
    }
    Ok(if in_host { format!("{scheme}://{bucket}.{host}") } else { format!("{server}/{bucket}") })
}

/// The entries `listed` of the folder `key`, with the missing ETags filled in. The listings of some servers have no
/// ETags, so the objects without one are looked up by name. Objects whose lookup the server refuses stay as they are
/// listed.
///
/// # Errors
/// If the server does not answer in time, or there are too many objects.
pub(super) async fn with_tags(
    requests: &Arc<impl Requests>,
    key: &str,
    mut listed: StoreEntries,
    deadline: Instant,
) -> io::Result<StoreEntries> {
    let has_no_tag =
        |entry: &StoreEntry| matches!(entry, StoreEntry::Object(o) if o.tag.is_empty());
    let slash = if key.is_empty() { "" } else { "/" };
    let target = |name: &str| format!("/{}", escaped_key(&format!("{key}{slash}{name}")));
    let without = listed.iter().filter(|(_, entry)| has_no_tag(entry));
    let targets: Vec<_> = without.map(|(name, _)| (name.clone(), target(name))).collect();
    let is_refusal = |_: &str, e: &io::Error| {
        use io::ErrorKind::{Other, PermissionDenied, Unsupported};
        matches!(e.kind(), Other | PermissionDenied | Unsupported)
    };
    listed.extend(look_up_all(requests, targets, is_refusal, deadline).await?);
    Ok(listed)
}

/// The entries of the folder `key` by name. An empty `key` is the whole bucket. If `most` is given, at most
/// this number of entries is requested: the caller then only wants to know whether there are any.
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
    let mut token: Option<String> = None;
    for _ in 0..PAGES_MAX {
        let mut target = String::from("?list-type=2&delimiter=%2F");
        if let Some(most) = most {
            target.push_str(&format!("&max-keys={most}"));
        }
        if let Some(token) = &token {
            target.push_str(&format!("&continuation-token={}", escaped_value(token)));
        }
        target.push_str(&format!("&prefix={}", escaped_value(&prefix)));
        let wanted = Wanted::new(Method::GET, format!("/{target}"));
        let (_, text) = requests.answer(&wanted, PAGE_LEN_MAX, deadline).await?;
        let page = S3Page::parse(&text)?;
        token = page.next_token();
        page.take(&prefix, &mut entries)?;
        // A page may have only names that cannot be in a folder.
        if token.is_none() || (most.is_some() && !entries.is_empty()) {
            return Ok(entries);
        }
    }
    Err(invalid_data(format!("more than {PAGES_MAX} pages of names in one folder")))
}

/// One page of a listing.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct S3Page {
    #[serde(default)]
    contents: Vec<S3Object>,
    #[serde(default)]
    common_prefixes: Vec<S3Prefix>,
    next_continuation_token: Option<String>,
    is_truncated: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct S3Object {
    key: String,
    size: u64,
    last_modified: Option<String>,
    #[serde(rename = "ETag")]
    tag: Option<String>,
    /// The generation of the object, in listings of Google.
    generation: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct S3Prefix {
    prefix: String,
}

impl S3Page {
    fn parse(text: &[u8]) -> io::Result<S3Page> {
        let bad = |why: String| invalid_data(format!("the listing is not that of S3: {why}"));
        let text = std::str::from_utf8(text).map_err(|e| bad(e.to_string()))?;
        if !text.contains("<ListBucketResult") {
            return Err(bad("no ListBucketResult".to_owned()));
        }
        quick_xml::de::from_str(text).map_err(|e| bad(e.to_string()))
    }

    /// The token that requests the next page.
    fn next_token(&self) -> Option<String> {
        let is_last = self.is_truncated.as_deref().is_some_and(|text| text.trim() == "false");
        self.next_continuation_token.clone().filter(|token| !is_last && !token.is_empty())
    }

    /// Adds the entries below `prefix`. Names that are not valid in a folder are left out.
    fn take(self, prefix: &str, entries: &mut StoreEntries) -> io::Result<()> {
        if self.is_truncated.as_deref().is_some_and(|text| text.trim() == "true")
            && self.next_token().is_none()
        {
            return Err(invalid_data("the listing is cut off, and has no token for the rest"));
        }
        for object in self.contents {
            let Some(name) = object.key.strip_prefix(prefix).filter(|name| is_entry_name(name))
            else {
                continue;
            };
            let time = object.last_modified.as_deref();
            let modified = time.and_then(|time| time.trim().parse().ok()).map(Timestamp::as_second);
            let tag = object.generation.as_deref().or(object.tag.as_deref()).unwrap_or_default();
            let state = ObjectState::new(object.size, tag, modified);
            entries.insert(name.to_owned(), StoreEntry::Object(state));
        }
        for S3Prefix { prefix: found } in self.common_prefixes {
            let name = found.strip_prefix(prefix).and_then(|name| name.strip_suffix('/'));
            if let Some(name) = name.filter(|name| is_entry_name(name)) {
                // An object and a folder may have the same name. Then the object is listed.
                entries.entry(name.to_owned()).or_insert(StoreEntry::Folder);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_objects_folders_and_a_token() {
        let text = r#"<?xml version="1.0" encoding="UTF-8"?>
            <ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>b</Name>
            <Prefix>a/</Prefix><KeyCount>3</KeyCount><IsTruncated>true</IsTruncated>
            <NextContinuationToken>t=1</NextContinuationToken>
            <Contents><Key>a/</Key><Size>0</Size><ETag>x</ETag></Contents>
            <Contents><Key>a/x &amp; y</Key><LastModified>2015-10-21T07:28:00.123Z</LastModified>
            <ETag>&quot;e-1&quot;</ETag><Size>7</Size><StorageClass>STANDARD</StorageClass></Contents>
            <CommonPrefixes><Prefix>a/sub/</Prefix></CommonPrefixes>
            <Contents><Key>a/..</Key><Size>1</Size></Contents>
            <CommonPrefixes><Prefix>a//</Prefix></CommonPrefixes></ListBucketResult>"#;
        let page = S3Page::parse(text.as_bytes()).unwrap();
        assert_eq!(page.next_token().as_deref(), Some("t=1"));
        let mut entries = StoreEntries::new();
        page.take("a/", &mut entries).unwrap();
        let state = ObjectState::new(7, "e-1", Some(1_445_412_480));
        let expected = [
            ("sub".to_owned(), StoreEntry::Folder),
            ("x & y".to_owned(), StoreEntry::Object(state)),
        ];
        assert_eq!(entries, expected.into());
    }

    #[test]
    fn a_listing_that_is_cut_off_or_none_is_refused() {
        let page = S3Page::parse(b"<ListBucketResult></ListBucketResult>").unwrap();
        assert_eq!(page.next_token(), None);
        let cut = b"<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>";
        S3Page::parse(cut).unwrap().take("", &mut StoreEntries::new()).unwrap_err();
        S3Page::parse(b"<html></html>").unwrap_err();
        S3Page::parse(b"<ListBucketResult><Contents>").unwrap_err();
    }

    #[test]
    fn the_server_of_a_bucket_is_that_of_the_environment() {
        let base = |server: &str, in_host| own_base(server, "b", in_host);
        assert_eq!(base("http://127.0.0.1:9000/", false).unwrap(), "http://127.0.0.1:9000/b");
        assert_eq!(base("https://host/s3", false).unwrap(), "https://host/s3/b");
        assert_eq!(base("https://host", true).unwrap(), "https://b.host");
        for server in ["host:9000", "ftp://host", "http://", "http://u:hunter2@host"] {
            let error = base(server, false).unwrap_err().to_string();
            assert!(!error.contains("hunter2"), "{error}");
        }
    }
}
