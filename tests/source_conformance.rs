//! Tests of the guarantees that every kind of store and source must give. One function runs the tests on each
//! kind.

#![allow(clippy::unwrap_used, reason = "a test that panics has failed, as it should")]

#[path = "common/memory_store.rs"]
#[allow(dead_code, reason = "other tests use the rest")]
mod memory_store;

#[path = "common/object_server.rs"]
#[allow(dead_code, reason = "other tests use the rest")]
mod object_server;

#[path = "common/redis_server.rs"]
mod redis_server;

#[path = "common/tensorizer.rs"]
#[allow(dead_code, reason = "the test of tensorizer files uses all")]
mod written;

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::channel;

use memory_store::MemoryStore;
use object_server::ObjectServer;
use redis_server::RedisServer;
use tempfile::TempDir;
use tensorfs::Error;
use tensorfs::internal::io::{
    Budget, Buffer, Effort, Engine, Fetch, Priority, Read, Settings, read_all,
};
use tensorfs::internal::open_options::DiskCachePlace;
use tensorfs::internal::source::Source;
use tensorfs::internal::store::Store;

/// A kind of store, with the changes that others make to it.
trait StoreKind {
    /// The store.
    fn store(&self) -> Store;
    /// The folder that the tests use, without links on its way.
    fn folder(&self) -> PathBuf;
    /// Puts new bytes at `name`, as a version of their own.
    fn replace(&self, name: &str, bytes: &[u8]);
    /// Writes to the bytes at `name` in place, where the kind allows it.
    fn overwrite(&self, name: &str, bytes: &[u8]);
    /// Removes `name`.
    fn remove(&self, name: &str);
    /// Whether a pin keeps the bytes of what is removed.
    fn pins_keep_bytes(&self) -> bool;
    /// Whether what was seen first stays, whatever others change.
    fn is_pinned(&self) -> bool {
        false
    }
    /// Names of files that it lists in a folder, in any order; the tests use the first. Empty if it lists
    /// none.
    fn names(&self) -> &'static [&'static str] {
        &["b", "a", "c"]
    }
    /// The bytes of a file that `replace` makes of `bytes`.
    fn stored(&self, bytes: &[u8]) -> Vec<u8> {
        bytes.to_vec()
    }
}

/// The local file system.
struct LocalKind(TempDir);

impl StoreKind for LocalKind {
    fn store(&self) -> Store {
        Store::LOCAL
    }

    fn folder(&self) -> PathBuf {
        self.0.path().canonicalize().unwrap()
    }

    fn replace(&self, name: &str, bytes: &[u8]) {
        let temporary = self.0.path().join(".new");
        File::create(&temporary).unwrap().write_all(bytes).unwrap();
        fs::rename(temporary, self.0.path().join(name)).unwrap();
    }

    fn overwrite(&self, name: &str, bytes: &[u8]) {
        let path = self.0.path().join(name);
        let before = fs::metadata(&path).unwrap().modified().unwrap();
        // Clocks of file systems tick in milliseconds.
        while fs::metadata(&path).unwrap().modified().unwrap() == before {
            File::create(&path).unwrap().write_all(bytes).unwrap();
        }
    }

    fn remove(&self, name: &str) {
        fs::remove_file(self.0.path().join(name)).unwrap();
    }

    fn pins_keep_bytes(&self) -> bool {
        true
    }
}

/// A store in memory, which replaces what it has and never writes in place.
struct MemoryKind(Arc<MemoryStore>);

impl StoreKind for MemoryKind {
    fn store(&self) -> Store {
        Store::of(&self.folder())
    }

    fn folder(&self) -> PathBuf {
        self.0.path("folder")
    }

    fn replace(&self, name: &str, bytes: &[u8]) {
        self.0.put(&format!("folder/{name}"), bytes);
    }

    fn overwrite(&self, name: &str, bytes: &[u8]) {
        self.replace(name, bytes);
    }

    fn remove(&self, name: &str) {
        self.0.remove(&format!("folder/{name}"));
    }

    fn pins_keep_bytes(&self) -> bool {
        false
    }
}

/// The URL of the repositories of the stand-in of the hub.
const HUB: &str = "hf://tests/";

/// A server of objects, by S3 or the like, as a plain HTTP server, or as a hub.
struct RemoteKind {
    server: Arc<ObjectServer>,
    bucket: String,
    /// The URL of its buckets.
    root: String,
    lists: bool,
    /// The folder of its disk cache, if it has one.
    cache: Option<TempDir>,
}

impl RemoteKind {
    /// A new bucket.
    fn new(server: &Arc<ObjectServer>, root: &str) -> RemoteKind {
        static LAST: AtomicU32 = AtomicU32::new(0);
        let bucket = format!("bucket-{}", LAST.fetch_add(1, Ordering::Relaxed));
        // A repository begins with its first file.
        if root != HUB {
            server.put(&format!("{bucket}/beside"), b"");
        }
        server.order("public", &format!("[{bucket:?}]"));
        let (server, root) = (server.clone(), root.to_owned());
        RemoteKind { server, bucket, lists: !root.starts_with("http"), root, cache: None }
    }

    fn path(&self, name: &str) -> String {
        format!("{}/folder/{name}", self.bucket)
    }
}

impl StoreKind for RemoteKind {
    fn store(&self) -> Store {
        let place = self.cache.as_ref().map(|folder| folder.path().to_owned());
        let place = place.map(|folder| DiskCachePlace::new(folder, Some(64 << 20)));
        Store::of(&self.folder()).cached(place.as_ref())
    }

    fn folder(&self) -> PathBuf {
        format!("{}{}/folder", self.root, self.bucket).into()
    }

    fn replace(&self, name: &str, bytes: &[u8]) {
        self.server.put(&self.path(name), bytes);
    }

    fn overwrite(&self, name: &str, bytes: &[u8]) {
        self.replace(name, bytes);
    }

    fn remove(&self, name: &str) {
        self.server.remove(&self.path(name));
    }

    fn pins_keep_bytes(&self) -> bool {
        false
    }

    fn is_pinned(&self) -> bool {
        self.root == HUB
    }

    fn names(&self) -> &'static [&'static str] {
        if self.lists { &["b", "a", "c"] } else { &[] }
    }
}

/// A prefix of keys in Redis, with a file of one tensor.
struct RedisKind(Arc<RedisServer>);

impl StoreKind for RedisKind {
    fn store(&self) -> Store {
        Store::of(&self.folder())
    }

    fn folder(&self) -> PathBuf {
        format!("redis://127.0.0.1:{}/folder", self.0.port).into()
    }

    fn replace(&self, _: &str, bytes: &[u8]) {
        self.0.put("folder", bytes);
    }

    fn overwrite(&self, name: &str, bytes: &[u8]) {
        self.replace(name, bytes);
    }

    fn remove(&self, _: &str) {
        self.0.remove_all();
    }

    fn pins_keep_bytes(&self) -> bool {
        false
    }

    fn names(&self) -> &'static [&'static str] {
        &["model.tensors"]
    }

    fn stored(&self, bytes: &[u8]) -> Vec<u8> {
        redis_server::file_of(bytes).1
    }
}

#[test]
fn an_s3_store_conforms() {
    conforms_by_environment("an_s3_store_conforms", "s3://", "object_server.py", &[]);
}

#[test]
fn a_store_of_google_conforms() {
    conforms_by_environment("a_store_of_google_conforms", "gs://", "cloud_server.py", &["google"]);
}

#[test]
fn a_store_of_azure_conforms() {
    conforms_by_environment("a_store_of_azure_conforms", "az://", "cloud_server.py", &["azure"]);
}

#[test]
fn a_hub_conforms() {
    conforms_by_environment("a_hub_conforms", HUB, "hub_server.py", &[]);
}

#[test]
fn a_store_in_redis_conforms() {
    let Some(server) = RedisServer::start().map(Arc::new) else {
        return println!("skipped: needs redis-server or redis-tools");
    };
    conforms(&|| {
        server.remove_all();
        RedisKind(server.clone())
    });
}

/// Checks a kind whose server is named by the environment, in a process of its own: the test `name`
/// there.
fn conforms_by_environment(name: &str, root: &str, script: &str, args: &[&str]) {
    const SERVED: &str = "TENSORFS_TEST_PORT";
    let Ok(port) = std::env::var(SERVED) else {
        let server = ObjectServer::start_script(script, args);
        let mut own = Command::new(std::env::current_exe().unwrap());
        own.args(["--exact", name]).envs(server.environment());
        let done = own.env(SERVED, server.port().to_string()).output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stdout));
        return;
    };
    let server = Arc::new(ObjectServer::of_port(port.parse().unwrap()));
    conforms(&|| RemoteKind::new(&server, root));
}

#[test]
fn an_http_server_conforms() {
    let server = Arc::new(ObjectServer::start());
    let root = format!("{}/", server.url());
    conforms(&|| RemoteKind::new(&server, &root));
}

#[test]
fn an_http_server_with_a_disk_cache_conforms() {
    let server = Arc::new(ObjectServer::start());
    let root = format!("{}/", server.url());
    let cache = || Some(tempfile::tempdir().unwrap());
    conforms(&|| RemoteKind { cache: cache(), ..RemoteKind::new(&server, &root) });
}

#[test]
fn a_server_of_webdav_conforms() {
    let server = Arc::new(ObjectServer::start_script("web_server.py", &[]));
    let root = format!("{}/", server.url());
    conforms(&|| RemoteKind { lists: true, ..RemoteKind::new(&server, &root) });
}

#[test]
fn a_store_in_memory_conforms() {
    conforms(&|| MemoryKind(MemoryStore::add()));
}

#[test]
fn the_local_store_conforms() {
    conforms(&|| LocalKind(tempfile::tempdir().unwrap()));
}

/// Checks all promises on a kind; each begins with an empty folder.
fn conforms<K: StoreKind>(new: &dyn Fn() -> K) {
    names_are_listed_sorted(&new());
    a_version_is_equal_only_to_itself(&new());
    ranges_are_read_exactly(&new());
    the_engine_reads_the_same_bytes(&new());
    a_read_past_the_end_is_a_change(&new());
    a_change_is_final(&new());
    a_removed_source_keeps_its_bytes_while_it_is_pinned_or_fails(&new());
    a_closed_source_is_opened_again_only_as_the_same_version(&new());
    only_sources_are_opened(&new());
}

fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|index| (index * 31 % 251) as u8).collect()
}

/// The path of the file that the tests use.
fn path(kind: &impl StoreKind) -> PathBuf {
    kind.folder().join(kind.names().first().unwrap_or(&"a"))
}

/// A source at that path with these bytes.
fn open(kind: &impl StoreKind, bytes: &[u8]) -> Arc<Source> {
    replace(kind, bytes);
    kind.store().open(&path(kind)).unwrap()
}

fn replace(kind: &impl StoreKind, bytes: &[u8]) {
    kind.replace(path(kind).file_name().unwrap().to_str().unwrap(), bytes);
}

fn overwrite(kind: &impl StoreKind, bytes: &[u8]) {
    kind.overwrite(path(kind).file_name().unwrap().to_str().unwrap(), bytes);
}

/// Whether all bytes of `source` can be read, and are those that `kind` stores of `bytes`.
fn has(source: &Source, kind: &impl StoreKind, bytes: &[u8]) -> bool {
    let mut buf = vec![0; source.len() as usize];
    source.read_exact_at(&mut buf, 0).is_ok() && buf == kind.stored(bytes)
}

fn names_are_listed_sorted(kind: &impl StoreKind) {
    let mut names = kind.names().to_vec();
    if names.is_empty() {
        return;
    }
    names.iter().for_each(|name| kind.replace(name, b"x"));
    names.sort_unstable();
    assert_eq!(kind.store().names(&kind.folder()).unwrap(), names);
    let absent = kind.store().names(&kind.folder().join("absent")).unwrap_err();
    assert_eq!(absent.kind(), ErrorKind::NotFound);
}

fn a_version_is_equal_only_to_itself(kind: &impl StoreKind) {
    let (store, path) = (kind.store(), path(kind));
    assert_eq!(store.version(&path).unwrap_err().kind(), ErrorKind::NotFound);
    let source = open(kind, b"one");
    let first = store.version(&path).unwrap();
    assert_eq!((source.version(), store.version_behind_links(&path).unwrap()), (first, first));
    assert!(source.is_current());
    replace(kind, b"two");
    assert_eq!(store.version(&path).unwrap() == first, kind.is_pinned());
    assert_eq!(source.is_current(), kind.is_pinned());
}

fn ranges_are_read_exactly(kind: &impl StoreKind) {
    let source = open(kind, &bytes(20_000));
    let all = kind.stored(&bytes(20_000));
    let len = all.len();
    assert_eq!((source.len(), source.is_empty()), (len as u64, false));
    for range in [0..1, 0..len, 4095..4097, len - 1..len, 5000..5000] {
        let mut buf = vec![0; range.len()];
        source.read_exact_at(&mut buf, range.start as u64).unwrap();
        assert_eq!(buf, all[range]);
    }
    let (mut first, mut second) = ([0; 10], [0; 10]);
    let mut reads = [
        Read { source: &source, offset: 100, target: &mut first },
        Read { source: &source, offset: 9000, target: &mut second },
    ];
    read_all(&mut reads).unwrap();
    assert_eq!(
        (&first, &second),
        (&all[100..110].try_into().unwrap(), &all[9000..9010].try_into().unwrap())
    );
}

fn the_engine_reads_the_same_bytes(kind: &impl StoreKind) {
    let source = open(kind, &bytes(300_000));
    let all = kind.stored(&bytes(300_000));
    let engine = Engine::start(Settings::default(), Arc::default());
    let budget = Budget::new(1 << 20, Arc::default());
    let (range, (sender, receiver)) = (1000..299_000, channel());
    let target = budget.try_reserve(Buffer::len_for(&range)).unwrap().into();
    let done = Box::new(move |result| drop(sender.send(result)));
    let (priority, effort) = (Priority::Demand, Effort::Short);
    engine.submit(Fetch {
        source,
        range: range.clone(),
        cached: None,
        priority,
        effort,
        stored: false,
        target,
        done,
    });
    let read = receiver.recv().unwrap().unwrap();
    assert!(*read == all[1000..299_000]);
}

fn a_read_past_the_end_is_a_change(kind: &impl StoreKind) {
    let source = open(kind, &bytes(100));
    let error = source.read_exact_at(&mut [0; 10], source.len() - 5).unwrap_err();
    assert!(matches!(error, Error::Changed { .. }), "{error}");
    assert!(source.is_changed() && source.check().is_err());
}

fn a_change_is_final(kind: &impl StoreKind) {
    let source = open(kind, b"before");
    source.check().unwrap();
    overwrite(kind, b"after!");
    if kind.is_pinned() {
        source.check().unwrap();
        return assert!(has(&source, kind, b"before"));
    }
    let changed = |outcome: tensorfs::Result<()>| matches!(outcome, Err(Error::Changed { .. }));
    assert!(changed(source.check()));
    overwrite(kind, b"before");
    assert!(changed(source.check()) && changed(source.check_known()));
    assert!(changed(source.read_exact_at(&mut [0; 6], 0)));
    // Its new state is a source of its own.
    source.as_it_is_now().unwrap().check().unwrap();
}

fn a_removed_source_keeps_its_bytes_while_it_is_pinned_or_fails(kind: &impl StoreKind) {
    let source = open(kind, b"before");
    let pin = source.pin().unwrap();
    kind.remove(path(kind).file_name().unwrap().to_str().unwrap());
    source.release();
    assert_eq!(has(&source, kind, b"before"), kind.pins_keep_bytes());
    drop(pin);
    assert!(!has(&source, kind, b"before"));
}

fn a_closed_source_is_opened_again_only_as_the_same_version(kind: &impl StoreKind) {
    let source = open(kind, b"before");
    source.release();
    source.check().unwrap();
    source.release();
    replace(kind, b"after!");
    if kind.is_pinned() {
        source.check().unwrap();
        return assert!(has(&source, kind, b"before"));
    }
    let error = source.check().unwrap_err();
    assert!(matches!(error, Error::Changed { .. }), "{error}");
}

fn only_sources_are_opened(kind: &impl StoreKind) {
    replace(kind, b"x");
    assert!(kind.store().open(&kind.folder()).is_err());
    let absent = kind.folder().join("absent").join(path(kind).file_name().unwrap());
    let absent = kind.store().open(&absent).unwrap_err();
    assert!(matches!(absent, Error::Io { ref source, .. } if source.kind() == ErrorKind::NotFound));
}
