//! Locations of stores and the names of objects in them, parsed from the URLs that users write.

use std::path::{Component, Path, PathBuf};

use super::access::authority_of;

/// A bucket, an HTTP server, or a repository of the hub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Location {
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
        let authority = authority_of(scheme, rest)?;
        Ok(Location { root: format!("{scheme}://{authority}"), authority })
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
}
