//! The promises of every kind of store and source, as one function that runs on each kind.

#![allow(clippy::unwrap_used, reason = "a test that panics has failed, as it should")]

#[path = "common/memory_store.rs"]
#[allow(dead_code, reason = "other tests use the rest")]
mod memory_store;

#[path = "common/object_server.rs"]
#[allow(dead_code, reason = "other tests use the rest")]
mod object_server;

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::channel;

use memory_store::MemoryStore;
use object_server::ObjectServer;
use tempfile::TempDir;
use tensorfs::Error;
use tensorfs::internal::io::{
    Budget, Buffer, Effort, Engine, Fetch, Priority, Read, Settings, read_all,
};
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
    /// Whether it lists whatever lies in a folder.
    fn lists_all(&self) -> bool {
        true
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

/// A server of objects, by S3 or as a plain HTTP server.
struct RemoteKind {
    server: Arc<ObjectServer>,
    bucket: String,
    /// The URL of its buckets.
    root: String,
    lists_all: bool,
}

impl RemoteKind {
    /// A new bucket.
    fn new(server: &Arc<ObjectServer>, root: &str) -> RemoteKind {
        static LAST: AtomicU32 = AtomicU32::new(0);
        let bucket = format!("bucket-{}", LAST.fetch_add(1, Ordering::Relaxed));
        server.put(&format!("{bucket}/beside"), b"");
        server.order("public", &format!("[{bucket:?}]"));
        let (server, root) = (server.clone(), root.to_owned());
        RemoteKind { server, bucket, lists_all: !root.starts_with("http"), root }
    }

    fn path(&self, name: &str) -> String {
        format!("{}/folder/{name}", self.bucket)
    }
}

impl StoreKind for RemoteKind {
    fn store(&self) -> Store {
        Store::of(&self.folder())
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

    fn lists_all(&self) -> bool {
        self.lists_all
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
fn a_server_of_webdav_conforms() {
    let server = Arc::new(ObjectServer::start_script("web_server.py", &[]));
    let root = format!("{}/", server.url());
    conforms(&|| RemoteKind { lists_all: true, ..RemoteKind::new(&server, &root) });
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

/// A source named `a` with these bytes.
fn open(kind: &impl StoreKind, bytes: &[u8]) -> Arc<Source> {
    kind.replace("a", bytes);
    kind.store().open(&kind.folder().join("a")).unwrap()
}

fn names_are_listed_sorted(kind: &impl StoreKind) {
    if !kind.lists_all() {
        return;
    }
    for name in ["b", "a", "c"] {
        kind.replace(name, b"x");
    }
    assert_eq!(kind.store().names(&kind.folder()).unwrap(), ["a", "b", "c"]);
    let absent = kind.store().names(&kind.folder().join("absent")).unwrap_err();
    assert_eq!(absent.kind(), ErrorKind::NotFound);
}

fn a_version_is_equal_only_to_itself(kind: &impl StoreKind) {
    let (store, path) = (kind.store(), kind.folder().join("a"));
    assert_eq!(store.version(&path).unwrap_err().kind(), ErrorKind::NotFound);
    let source = open(kind, b"one");
    let first = store.version(&path).unwrap();
    assert_eq!((source.version(), store.version_behind_links(&path).unwrap()), (first, first));
    assert!(source.is_current());
    kind.replace("a", b"two");
    assert_ne!(store.version(&path).unwrap(), first);
    assert!(!source.is_current());
}

fn ranges_are_read_exactly(kind: &impl StoreKind) {
    let all = bytes(20_000);
    let source = open(kind, &all);
    assert_eq!((source.len(), source.is_empty()), (20_000, false));
    for range in [0..1, 0..20_000, 4095..4097, 19_999..20_000, 5000..5000] {
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
    let all = bytes(300_000);
    let source = open(kind, &all);
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
    let error = source.read_exact_at(&mut [0; 10], 95).unwrap_err();
    assert!(matches!(error, Error::Changed { .. }), "{error}");
    assert!(source.is_changed() && source.check().is_err());
}

fn a_change_is_final(kind: &impl StoreKind) {
    let source = open(kind, b"before");
    source.check().unwrap();
    kind.overwrite("a", b"after!");
    let changed = |outcome: tensorfs::Result<()>| matches!(outcome, Err(Error::Changed { .. }));
    assert!(changed(source.check()));
    kind.overwrite("a", b"before");
    assert!(changed(source.check()) && changed(source.check_known()));
    assert!(changed(source.read_exact_at(&mut [0; 6], 0)));
    // Its new state is a source of its own.
    source.as_it_is_now().unwrap().check().unwrap();
}

fn a_removed_source_keeps_its_bytes_while_it_is_pinned_or_fails(kind: &impl StoreKind) {
    let source = open(kind, b"before");
    let pin = source.pin().unwrap();
    kind.remove("a");
    source.release();
    let mut buf = [0; 6];
    let read = source.read_exact_at(&mut buf, 0);
    assert_eq!(read.is_ok() && &buf == b"before", kind.pins_keep_bytes());
    drop(pin);
    assert!(source.read_exact_at(&mut buf, 0).is_err());
}

fn a_closed_source_is_opened_again_only_as_the_same_version(kind: &impl StoreKind) {
    let source = open(kind, b"before");
    source.release();
    source.check().unwrap();
    source.release();
    kind.replace("a", b"after!");
    let error = source.check().unwrap_err();
    assert!(matches!(error, Error::Changed { .. }), "{error}");
}

fn only_sources_are_opened(kind: &impl StoreKind) {
    assert!(kind.store().open(&kind.folder()).is_err());
    let absent = kind.store().open(&kind.folder().join("absent")).unwrap_err();
    assert!(matches!(absent, Error::Io { ref source, .. } if source.kind() == ErrorKind::NotFound));
}
