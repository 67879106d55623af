//! Checkpoints in Redis, in the layout of tensorizer: `redis://HOST[:PORT]/PREFIX`. A prefix of keys is shown
//! as a folder with one file.
//!
//! Redis has no versions of values. So a tensor is compared as a whole with the hashes in its header before a
//! reader gets any byte of it. That comparison also yields checksums, and later reads of the tensor are
//! compared with them. Encrypted tensors are not compared: readers check their MACs.

mod client;
mod link;
mod values;

use std::collections::HashMap;
use std::fmt;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::{invalid_input, shown_path};
use crate::hash::Digest;
use crate::process::PerProcess;
use crate::source::{ObjectRead, StoreKind, StoreListing};
use crate::sync::Mutex;
use crate::version::{QueueKey, Version};

use client::{RedisCalls, RedisClient};
use values::RedisFile;

/// The scheme of all URLs.
const SCHEME: &str = "redis://";

/// The default port of Redis.
const PORT: u16 = 6379;

/// The name of the only file in the folder of a prefix.
const FILE: &str = "model.tensors";

/// Time limit of a call for which the caller sets no deadline.
const LIMIT: Duration = Duration::from_secs(60);

/// A request ends before the deadline of its reader, by 1 / `REASON_PART` of the time, so that the reader still
/// gets the error message.
const REASON_PART: u32 = 20;

/// The stores of this process, by the roots of their URLs.
static STORES: PerProcess<Mutex<HashMap<PathBuf, Arc<RedisStore>>>> = PerProcess::new();

/// Whether `path` is a URL of Redis.
pub(super) fn is_redis(path: &Path) -> bool {
    path.as_os_str().as_encoded_bytes().starts_with(SCHEME.as_bytes())
}

/// The store of the keys at `url`. If the URL is not usable, each call to the store returns that error.
pub(super) fn store_of(url: &Path) -> Arc<dyn StoreKind> {
    let rest = url.to_str().and_then(|url| url.strip_prefix(SCHEME)).unwrap_or_default();
    let authority = rest.split('/').next().unwrap_or_default();
    let root = PathBuf::from(format!("{SCHEME}{authority}"));
    let mut stores = STORES.get_or_init(Mutex::default).lock();
    let new = || Arc::new(RedisStore::new(root.clone(), authority));
    stores.entry(root.clone()).or_insert_with(new).clone()
}

/// The host and the port in a URL.
fn parse_authority(authority: &str) -> Result<(String, u16), &'static str> {
    const EXPECTED: &str = "expected redis://HOST[:PORT]/PREFIX";
    if authority.contains('@') {
        return Err("user names and passwords do not belong into a URL, where others see them");
    }
    // An IPv6 address contains colons too.
    let (host, port) = match authority.rsplit_once(':') {
        Some((host, port)) if !port.ends_with(']') => (host, port.parse().map_err(|_| EXPECTED)?),
        _ => (authority, PORT),
    };
    let plain = host.trim_start_matches('[').trim_end_matches(']');
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-._:".contains(c);
    if plain.is_empty() || !plain.chars().all(is_plain) {
        return Err(EXPECTED);
    }
    Ok((plain.to_owned(), port))
}

/// A Redis server.
struct RedisStore {
    /// `redis://HOST[:PORT]`.
    root: PathBuf,
    client: Result<RedisClient, &'static str>,
    /// The last known state of each checkpoint, by its prefix.
    known: PerProcess<Mutex<HashMap<String, Arc<RedisFile>>>>,
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RedisStore({})", shown_path(&self.root))
    }
}

/// The meaning of a path. Each variant has the prefix of keys.
enum RedisPlace<'a> {
    Folder(&'a str),
    File(&'a str),
}

impl RedisStore {
    fn new(root: PathBuf, authority: &str) -> RedisStore {
        let client = parse_authority(authority).map(|(host, port)| RedisClient::new(host, port));
        RedisStore { root, client, known: PerProcess::new() }
    }

    fn client(&self) -> io::Result<&RedisClient> {
        self.client.as_ref().map_err(|why| invalid_input(*why))
    }

    fn place<'a>(&self, path: &'a Path) -> io::Result<RedisPlace<'a>> {
        let rest = path.strip_prefix(&self.root).ok().and_then(Path::to_str);
        let below = rest.ok_or(ErrorKind::NotFound)?.trim_matches('/');
        if below.is_empty() {
            let why = "names no prefix of keys: expected redis://HOST[:PORT]/PREFIX";
            return Err(invalid_input(why));
        }
        if below.contains('?') {
            let why = "has settings behind a `?`: expected redis://HOST[:PORT]/PREFIX";
            return Err(invalid_input(why));
        }
        Ok(match below.rsplit_once('/') {
            Some((prefix, FILE)) => RedisPlace::File(prefix),
            _ => RedisPlace::Folder(below),
        })
    }

    /// Commands for a caller that waits until `until`.
    fn calls(&self, until: Option<Instant>) -> io::Result<RedisCalls<'_>> {
        let now = Instant::now();
        let until = until.unwrap_or(now + LIMIT);
        Ok(self.client()?.until(until - until.saturating_duration_since(now) / REASON_PART))
    }

    fn queue(&self) -> QueueKey {
        QueueKey::Store(Digest::of(self.root.as_os_str().as_encoded_bytes()).number())
    }

    fn folder_version(&self, prefix: &str) -> Version {
        let number = [Digest::of(prefix.as_bytes()).number(), 0];
        Version::of_object(self.queue(), number, true, 0, None)
    }

    fn file_version(&self, prefix: &str, file: &RedisFile) -> Version {
        let path = Digest::of(format!("{prefix}/{FILE}").as_bytes()).number();
        let number = [path, file.number];
        Version::of_tagged_object(self.queue(), number, file.len, None)
    }

    /// Reads the current state of the checkpoint below `prefix`.
    fn look(&self, prefix: &str, calls: RedisCalls<'_>) -> io::Result<Arc<RedisFile>> {
        let found = Arc::new(RedisFile::load(calls, prefix)?);
        let mut known = self.known.get_or_init(Mutex::default).lock();
        match known.get(prefix) {
            // Tensors of the known state may have been checked already.
            Some(before) if before.number == found.number => Ok(before.clone()),
            _ => {
                known.insert(prefix.to_owned(), found.clone());
                Ok(found)
            }
        }
    }

    /// The checkpoint below `prefix`, if it still has `version`.
    fn in_version(
        &self,
        prefix: &str,
        version: &Version,
        calls: RedisCalls<'_>,
    ) -> io::Result<Arc<RedisFile>> {
        let is_it = |file: &Arc<RedisFile>| {
            self.file_version(prefix, file).file_words() == version.file_words()
        };
        let known = self.known.get_or_init(Mutex::default).lock().get(prefix).cloned();
        if let Some(file) = known.filter(is_it) {
            return Ok(file);
        }
        let found = self.look(prefix, calls)?;
        if is_it(&found) { Ok(found) } else { Err(ErrorKind::StaleNetworkFileHandle.into()) }
    }
}

impl StoreKind for RedisStore {
    fn may_block(&self) -> bool {
        self.client.is_ok()
    }

    fn name(&self) -> Option<String> {
        Some(format!("redis at {}", self.client().ok()?.name()))
    }

    fn version(&self, path: &Path) -> io::Result<Version> {
        let (place, calls) = (self.place(path)?, self.calls(None)?);
        match place {
            RedisPlace::Folder(prefix) => {
                self.look(prefix, calls)?;
                Ok(self.folder_version(prefix))
            }
            RedisPlace::File(prefix) => {
                let file = self.look(prefix, calls)?;
                Ok(self.file_version(prefix, &file))
            }
        }
    }

    fn list(&self, path: &Path) -> io::Result<StoreListing> {
        let RedisPlace::Folder(prefix) = self.place(path)? else {
            return Err(ErrorKind::NotADirectory.into());
        };
        let file = self.look(prefix, self.calls(None)?)?;
        let entries = vec![(FILE.into(), self.file_version(prefix, &file))];
        Ok(StoreListing { version: self.folder_version(prefix), entries, partial: false })
    }

    fn read(&self, read: &ObjectRead<'_>, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let ObjectRead { path, version, until } = *read;
        read.end_of(offset, buf.len()).ok_or(ErrorKind::UnexpectedEof)?;
        let RedisPlace::File(prefix) = self.place(path)? else {
            return Err(ErrorKind::IsADirectory.into());
        };
        let calls = self.calls(until)?;
        self.in_version(prefix, version, calls)?.read(calls, offset, buf)
    }

    fn identifies_bytes(&self, version: &Version) -> bool {
        version.file_words()[1] & 1 == 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_names_a_server_and_a_prefix_of_keys() {
        assert_eq!(parse_authority("host").unwrap(), ("host".to_owned(), PORT));
        assert_eq!(parse_authority("127.0.0.1:7").unwrap(), ("127.0.0.1".to_owned(), 7));
        assert_eq!(parse_authority("[::1]").unwrap(), ("::1".to_owned(), PORT));
        assert_eq!(parse_authority("[::1]:7").unwrap(), ("::1".to_owned(), 7));
        for bad in ["", "host:x", "user:hunter2@host", "a b", ":7"] {
            assert!(!parse_authority(bad).unwrap_err().contains("hunter2"), "{bad}");
        }
        let store = RedisStore::new("redis://host".into(), "host");
        let place = |path: &'static str| match store.place(Path::new(path)) {
            Ok(RedisPlace::Folder(prefix)) => (false, prefix),
            Ok(RedisPlace::File(prefix)) => (true, prefix),
            Err(_) => (false, ""),
        };
        assert_eq!(place("redis://host/a/b"), (false, "a/b"));
        assert_eq!(place("redis://host/a/b/model.tensors"), (true, "a/b"));
        assert_eq!(place("redis://host"), (false, ""));
        assert_eq!(place("redis://host/a?password=hunter2"), (false, ""));
    }
}
