//! Locations of stores and the names of objects in them, parsed from the URLs that users write.

use std::path::{Component, Path, PathBuf};

use super::hub::HubRepository;

/// Suffixes of the host names of Azure accounts. Tokens are sent to such hosts only.
const SUFFIXES: [&str; 5] = [
    ".core.windows.net",
    ".core.chinacloudapi.cn",
    ".core.usgovcloudapi.net",
    ".core.cloudapi.de",
    ".fabric.microsoft.com",
];

/// The protocol of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Protocol {
    /// S3, with listings and signatures.
    S3,
    /// Google Cloud Storage.
    Google,
    /// Azure Blob Storage.
    Azure,
    /// Files of an HTTP server.
    Http,
    /// The Hugging Face hub.
    Hub,
}

/// A bucket, an HTTP server, or a repository of the hub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Location {
    pub(super) protocol: Protocol,
    /// The URL without the name of an object: `s3://BUCKET`, `http://HOST`, `https://HOST`, or
    /// `hf://ORG/NAME@REVISION`.
    pub(super) root: String,
    /// The bucket, the host with its port, or the repository.
    pub(super) authority: String,
}

impl Location {
    /// The location of the object or folder at `path`, which is a URL.
    ///
    /// # Errors
    /// If the URL does not have a supported form, the message says why. It shows no part of the URL that may be
    /// secret.
    pub(super) fn of(path: &Path) -> Result<Location, String> {
        let url = path.to_str().ok_or("the URL is not UTF-8")?;
        let (scheme, rest) = url.split_once("://").ok_or("is not a URL")?;
        if path.components().any(|part| part == Component::ParentDir) {
            return Err("a URL with `..` is not supported".to_owned());
        }
        if scheme == "hf" {
            let (_, authority) = HubRepository::parse(rest)?;
            let root = format!("{scheme}://{authority}");
            return Ok(Location { protocol: Protocol::Hub, root, authority });
        }
        let authority = rest.split('/').next().unwrap_or_default();
        let protocol = match scheme {
            "s3" => Protocol::S3,
            "gs" => Protocol::Google,
            "az" | "abfs" | "abfss" => Protocol::Azure,
            _ => Protocol::Http,
        };
        let root = format!("{scheme}://{authority}");
        if protocol == Protocol::Azure {
            parse_container(authority)?;
            return Ok(Location { protocol, root, authority: authority.to_owned() });
        }
        let is_bucket = protocol != Protocol::Http;
        if authority.contains('@') {
            let why = "user names and passwords do not belong into a URL, where others see them";
            return Err(why.to_owned());
        }
        if !is_bucket && rest.contains(['?', '#']) {
            let why = "URLs with `?` or `#` are not supported: name the file or folder itself";
            return Err(why.to_owned());
        }
        if authority.is_empty() {
            return Err(if is_bucket { "names no bucket" } else { "names no host" }.to_owned());
        }
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
        if is_bucket && !authority.chars().all(is_plain) {
            return Err("is no name of a bucket: expected ".to_owned()
                + scheme
                + "://BUCKET/PREFIX");
        }
        Ok(Location { protocol, root, authority: authority.to_owned() })
    }

    /// The name of the object at `path` in this location, without slashes at its start and its end.
    pub(super) fn key(&self, path: &Path) -> Option<String> {
        let rest = path.strip_prefix(&self.root).ok()?;
        let parts: Option<Vec<&str>> =
            rest.components().map(|part| part.as_os_str().to_str()).collect();
        Some(parts?.join("/"))
    }

    /// The path of the object with the name `key`.
    pub(super) fn path(&self, key: &str) -> PathBuf {
        if key.is_empty() {
            self.root.clone().into()
        } else {
            format!("{}/{key}", self.root).into()
        }
    }
}

/// The container and the host in `CONTAINER[@HOST]`, a part of a URL.
///
/// # Errors
/// If the text has another form, the message says why.
pub(super) fn parse_container(authority: &str) -> Result<(&str, Option<&str>), String> {
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

/// Whether others cannot read the traffic to `server`, which is a URL. Tokens are sent to such servers only.
pub(super) fn is_confidential(server: &str) -> bool {
    let rest = server.strip_prefix("http://").unwrap_or_default();
    let host = rest.split('/').next().unwrap_or_default();
    let is_here = |name: &str| {
        host.strip_prefix(name).is_some_and(|port| port.is_empty() || port.starts_with(':'))
    };
    server.starts_with("https://") || ["127.0.0.1", "localhost", "[::1]"].into_iter().any(is_here)
}

/// `key`, escaped for the path of a URL. Every byte is escaped except those that never need it.
pub(super) fn escaped_key(key: &str) -> String {
    escaped_with(key, "/")
}

/// `value`, escaped for the query of a URL.
pub(super) fn escaped_value(value: &str) -> String {
    escaped_with(value, "")
}

/// `name`, which may be escaped in any way, escaped in the one way that all URLs here use.
pub(super) fn normalize_escapes(name: &str) -> String {
    let mut bytes = Vec::with_capacity(name.len());
    let mut rest = name.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let digits = after.get(..2).filter(|_| *first == b'%');
        let code =
            digits.and_then(|text| u8::from_str_radix(std::str::from_utf8(text).ok()?, 16).ok());
        bytes.push(code.unwrap_or(*first));
        rest = if code.is_some() { &after[2..] } else { after };
    }
    escaped_bytes(&bytes, "")
}

fn escaped_with(text: &str, plain: &str) -> String {
    escaped_bytes(text.as_bytes(), plain)
}

fn escaped_bytes(bytes: &[u8], plain: &str) -> String {
    use std::fmt::Write as _;
    let mut escaped = String::with_capacity(bytes.len());
    for byte in bytes {
        let c = char::from(*byte);
        if c.is_ascii_alphanumeric() || "-._~".contains(c) || plain.contains(c) {
            escaped.push(c);
        } else {
            let _ = write!(escaped, "%{byte:02X}");
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_has_a_store_and_a_key() {
        for (url, root, key) in [
            ("s3://bucket", "s3://bucket", ""),
            ("s3://bucket/", "s3://bucket", ""),
            ("s3://my.bucket/a/b c/%20?#/", "s3://my.bucket", "a/b c/%20?#"),
            ("s3://bucket//a///b", "s3://bucket", "a/b"),
            ("https://host:8443/a%20b/c", "https://host:8443", "a%20b/c"),
            ("http://[::1]:80/x", "http://[::1]:80", "x"),
            ("gs://bucket/a?b", "gs://bucket", "a?b"),
            ("az://container/a", "az://container", "a"),
            ("abfss://c@a.dfs.core.windows.net/x", "abfss://c@a.dfs.core.windows.net", "x"),
            ("hf://a/b@refs/pr/1/x/y", "hf://a/b@refs/pr/1", "x/y"),
            ("hf://models//a/b/", "hf://models/a/b", ""),
        ] {
            let location = Location::of(Path::new(url)).unwrap();
            assert_eq!(location.root, root, "{url}");
            assert_eq!(location.key(Path::new(url)).unwrap(), key, "{url}");
            assert_eq!(location.key(&location.path(key)).unwrap(), key, "{url}");
        }
    }

    #[test]
    fn a_url_of_another_form_is_refused_without_its_secrets() {
        for url in [
            "s3://",
            "s3:///key",
            "s3://a b/key",
            "s3://bucket/../x",
            "hf://a/b/../x",
            "hf://user:hunter2@a/b",
            "gs://",
            "gs://a b/key",
            "az://container@hunter2/x",
            "http:///x",
            "https://user:hunter2@host/x",
            "https://host/x?signature=hunter2",
            "https://host/x#hunter2",
        ] {
            let why = Location::of(Path::new(url)).unwrap_err();
            assert!(!why.contains("hunter2"), "{url}: {why}");
        }
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

    #[test]
    fn tokens_go_to_secure_servers_and_to_this_machine() {
        for server in
            ["https://host/x", "http://127.0.0.1:80/x", "http://localhost", "http://[::1]:1"]
        {
            assert!(is_confidential(server), "{server}");
        }
        for server in ["http://host", "http://127.0.0.1.example.com", "ftp://127.0.0.1"] {
            assert!(!is_confidential(server), "{server}");
        }
    }

    #[test]
    fn keys_are_escaped_byte_by_byte() {
        assert_eq!(escaped_key("a/b c+%\u{e9}~"), "a/b%20c%2B%25%C3%A9~");
        assert_eq!(escaped_value("a/b="), "a%2Fb%3D");
        assert_eq!(normalize_escapes("a%20b c%c3%a9%zz"), "a%20b%20c%C3%A9%25zz");
    }
}
