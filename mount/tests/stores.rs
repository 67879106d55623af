//! The programs on stores that are not the local file system, from a listing to a mount: one in memory,
//! and a bucket of S3.
//!
//! The test program is both the tests and, in processes of its own, the `tensorfs` command with a
//! store in memory. No shipped program has that store. The bucket is read by the shipped program.

#![allow(clippy::unwrap_used, reason = "a test that panics has failed, as it should")]

#[path = "../../tests/common/memory_store.rs"]
#[allow(dead_code, reason = "other tests use the rest")]
mod memory_store;

#[path = "../../tests/common/object_server.rs"]
#[allow(dead_code, reason = "other tests use the rest")]
mod object_server;

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Output};
use std::sync::Arc;
use std::time::{Duration, Instant};

use memory_store::MemoryStore;
use nix::sys::stat::Mode;
use object_server::ObjectServer;
use tempfile::TempDir;

/// Names the folder whose files the store of a process begins with.
const FOLDER: &str = "TENSORFS_TEST_FOLDER";

/// Names a FIFO with commands for the store, a line each.
const COMMANDS: &str = "TENSORFS_TEST_COMMANDS";

/// Commands for the store before anything else.
const FIRST: &str = "TENSORFS_TEST_FIRST";

/// The first store of a process.
const ROOT: &str = "/in-memory:1";

/// Longest wait for anything.
const PATIENCE: Duration = Duration::from_secs(60);

type Test = (&'static str, fn());

const TESTS: [Test; 7] = [
    ("commands_say_and_write_the_same", commands_say_and_write_the_same),
    ("files_that_are_short_or_gone_fail", files_that_are_short_or_gone_fail),
    ("a_mount_shows_the_bytes_and_follows_changes", a_mount_shows_the_bytes_and_follows_changes),
    ("reads_of_a_store_that_stalls_fail", reads_of_a_store_that_stalls_fail),
    ("commands_on_a_bucket", || say_and_write_the_same(Place::of_bucket())),
    ("a_mount_of_a_bucket", || show_the_bytes_and_follow_changes(Place::of_bucket())),
    ("reads_of_a_bucket_that_stalls_fail", || stall(Place::of_bucket())),
];

fn main() -> ExitCode {
    if std::env::var_os(FOLDER).is_some() {
        return act_as_tensorfs();
    }
    let filters: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let mut status = ExitCode::SUCCESS;
    for (name, test) in TESTS {
        if filters.is_empty() || filters.iter().any(|filter| name.contains(filter)) {
            let is_ok = std::panic::catch_unwind(test).is_ok();
            println!("test {name} ... {}", if is_ok { "ok" } else { "FAILED" });
            status = if is_ok { status } else { ExitCode::FAILURE };
        }
    }
    status
}

/// The command, with a store in memory.
fn act_as_tensorfs() -> ExitCode {
    let store = MemoryStore::add();
    store.put_folder("", Path::new(&std::env::var_os(FOLDER).unwrap()));
    std::env::var(FIRST).iter().flat_map(|lines| lines.lines()).for_each(|line| obey(&store, line));
    let is_probe = std::env::args().nth(1).is_some_and(|word| word == "internal");
    if let Some(fifo) = std::env::var_os(COMMANDS).filter(|_| !is_probe) {
        std::thread::spawn(move || {
            // It stays open for writing too, so that it does not end with the first writer.
            let lines = OpenOptions::new().read(true).write(true).open(&fifo).unwrap();
            let done = Path::new(&fifo).with_extension("done");
            for line in BufReader::new(lines).lines().map(Result::unwrap) {
                obey(&store, &line);
                fs::write(&done, line).unwrap();
            }
        });
    }
    tensorfs_mount::main()
}

fn obey(store: &Arc<MemoryStore>, line: &str) {
    let words: Vec<&str> = line.split(' ').collect();
    match words.as_slice() {
        ["put", name, file] => store.put(name, &fs::read(file).unwrap()),
        ["remove", name] => store.remove(name),
        ["cut", name, len] => store.cut(name, len.parse().unwrap()),
        ["late", name] => store.set_late(name, true),
        ["listed", name] => store.set_late(name, false),
        ["slow", milliseconds] => {
            store.set_slow(Duration::from_millis(milliseconds.parse().unwrap()));
        }
        ["stall"] => store.set_stalled(true),
        ["answer"] => store.set_stalled(false),
        _ => panic!("{line}"),
    }
}

/// Does to a bucket what `obey` does to a store in memory.
fn obey_remotely(server: &ObjectServer, line: &str) {
    let words: Vec<&str> = line.split(' ').collect();
    match words.as_slice() {
        ["put", name, file] => server.put(&format!("bucket/{name}"), &fs::read(file).unwrap()),
        ["remove", name] => server.remove(&format!("bucket/{name}")),
        ["slow", milliseconds] => {
            let seconds = milliseconds.parse::<f64>().unwrap() / 1000.0;
            server.order("delay", &seconds.to_string());
        }
        ["stall"] => server.order("delay", "-1"),
        ["answer"] => server.order("delay", "0"),
        _ => panic!("{line}"),
    }
}

/// A model in a folder, of which a store in memory or a bucket has a copy.
struct Place {
    folder: TempDir,
    server: Option<ObjectServer>,
}

impl Place {
    fn new() -> Place {
        let place = Place { folder: tempfile::tempdir().unwrap(), server: None };
        let from = Path::new("../tests/fixtures/hf/gpt2_tiny");
        fs::create_dir_all(place.path("store/model")).unwrap();
        for file in fs::read_dir(from).unwrap().map(Result::unwrap) {
            fs::copy(file.path(), place.path("store/model").join(file.file_name())).unwrap();
        }
        place
    }

    fn of_bucket() -> Place {
        let (place, server) = (Place::new(), ObjectServer::start());
        server.put_folder("bucket/model", &place.path("store/model"));
        Place { server: Some(server), ..place }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The copy of the model.
    fn source(&self) -> String {
        let root = if self.server.is_some() { "s3://bucket" } else { ROOT };
        format!("{root}/model")
    }

    /// The command with these words.
    fn command(&self, words: &[&str]) -> Command {
        let mut command = match &self.server {
            None => Command::new(std::env::current_exe().unwrap()),
            Some(_) => Command::new(env!("CARGO_BIN_EXE_tensorfs")),
        };
        match &self.server {
            None => command.env(FOLDER, self.path("store")),
            Some(server) => command.envs(server.environment()),
        };
        command.args(words).env("TENSORFS_INDEX_DIR", "none").env("TENSORFS_CACHE_DIR", "none");
        command
    }

    fn run(&self, words: &[&str]) -> Output {
        self.command(words).output().unwrap()
    }

    /// Runs the command, which succeeds, on the copy in memory and on the folder. `SOURCE` stands for
    /// the source, `OUT` for a file or folder that is written; returns the two.
    fn run_both(&self, words: &[&str]) -> [PathBuf; 2] {
        let on = |source: &str, out: &str| {
            let out = self.path(out);
            let _ = fs::remove_file(&out);
            let words: Vec<String> = words
                .iter()
                .map(|word| word.replace("SOURCE", source).replace("OUT", out.to_str().unwrap()))
                .collect();
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            let done = self.run(&words);
            let text = String::from_utf8_lossy(&done.stdout).replace(source, "SOURCE");
            let errors = String::from_utf8_lossy(&done.stderr).into_owned();
            assert!(done.status.success(), "{words:?}: {text}{errors}");
            (out, text)
        };
        let folder = self.path("store/model").canonicalize().unwrap();
        let (copy, said) = on(&self.source(), "of-copy.safetensors");
        let (local, said_of_local) = on(folder.to_str().unwrap(), "of-folder.safetensors");
        if !["load", "verify", "consolidate"].contains(&words[0]) {
            assert_eq!(said, said_of_local, "{words:?}");
        }
        [copy, local]
    }
}

fn commands_say_and_write_the_same() {
    say_and_write_the_same(Place::new());
}

fn say_and_write_the_same(place: Place) {
    place.run_both(&["ls", "SOURCE"]);
    place.run_both(&["ls", "--json", "SOURCE"]);
    place.run_both(&["inspect", "SOURCE"]);
    place.run_both(&["verify", "SOURCE"]);
    place.run_both(&["load", "SOURCE"]);
    for view in ["prefer=shards", "dtype=f32", "exclude=*bias*"] {
        let [copy, local] = place.run_both(&["consolidate", "-o", view, "SOURCE", "OUT"]);
        let bytes = fs::read(copy).unwrap();
        assert!(bytes == fs::read(local).unwrap() && bytes.len() > 1000, "{view}");
    }
    let indexed = place.path("index");
    let index = indexed.to_str().unwrap();
    for _ in 0..2 {
        place.run_both(&["ls", "--index-dir", index, "SOURCE"]);
    }
    assert!(fs::read_dir(indexed).unwrap().count() > 0);
}

fn files_that_are_short_or_gone_fail() {
    let place = Place::new();
    let name = fs::read_dir(place.path("store/model"))
        .unwrap()
        .map(|file| file.unwrap().file_name().into_string().unwrap())
        .find(|name| name.contains("-00002-of-"))
        .unwrap();
    let source = place.source();
    let fails = |first: String, words: &[&str], why: &str| {
        let done = place.command(words).env(FIRST, &first).output().unwrap();
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        assert!(!done.status.success() && said.contains(why), "{first}: {said}");
    };
    let len = fs::metadata(place.path("store/model").join(&name)).unwrap().len();
    let short = format!("cut model/{name} {}", len - 1);
    fails(short.clone(), &["verify", &source], "ends before byte");
    fails(short, &["load", &source], "ends before byte");
    fails(format!("remove model/{name}"), &["verify", &source], "which is not there");
    fails(format!("late model/{name}"), &["verify", &source], "is not a regular file");
    let stalled = "stall".to_owned();
    fails(stalled, &["ls", "-o", "io-timeout=1", &source], "no answer within 1 seconds");
}

/// A mount of the store of its process, or of a bucket.
struct Mount<'a> {
    place: &'a Place,
    process: Child,
    target: PathBuf,
    commands: File,
    /// Has the last command that the store has obeyed.
    done: PathBuf,
}

impl Mount<'_> {
    /// Mounts `model` of the store, `None` where there is no FUSE.
    fn new<'a>(place: &'a Place, options: &str) -> Option<Mount<'a>> {
        if !Path::new("/dev/fuse").exists() {
            eprintln!("skipped: no /dev/fuse");
            return None;
        }
        let (target, fifo) = (place.path("target"), place.path("commands"));
        fs::create_dir(&target).unwrap();
        nix::unistd::mkfifo(&fifo, Mode::S_IRWXU).unwrap();
        let commands = OpenOptions::new().read(true).write(true).open(&fifo).unwrap();
        let words = ["mount", "-f", "-o", options, &place.source()];
        let process = place.command(&words).arg(&target).env(COMMANDS, &fifo).spawn().unwrap();
        let done = fifo.with_extension("done");
        let mount = Mount { place, process, target, commands, done };
        mount.wait_for("the mount", || mount.target.join("model.safetensors").exists());
        Some(mount)
    }

    fn wait_for(&self, what: &str, is_there: impl Fn() -> bool) {
        let started = Instant::now();
        while !is_there() {
            assert!(started.elapsed() < PATIENCE, "{what} does not come");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn order(&mut self, line: &str) {
        if let Some(server) = &self.place.server {
            return obey_remotely(server, line);
        }
        let _ = fs::remove_file(&self.done);
        self.commands.write_all(format!("{line}\n").as_bytes()).unwrap();
        self.wait_for(line, || fs::read(&self.done).is_ok_and(|done| done == line.as_bytes()));
    }
}

impl Drop for Mount<'_> {
    fn drop(&mut self) {
        match &self.place.server {
            None => drop(self.commands.write_all(b"answer\nslow 0\n")),
            Some(server) => server.order("delay", "0"),
        }
        let _ = nix::mount::umount2(&self.target, nix::mount::MntFlags::MNT_DETACH);
        let _ = Command::new("fusermount3").args(["-u", "-z"]).arg(&self.target).output();
        let _ = self.process.wait();
    }
}

fn a_mount_shows_the_bytes_and_follows_changes() {
    show_the_bytes_and_follow_changes(Place::new());
}

fn show_the_bytes_and_follow_changes(place: Place) {
    let [_, local] = place.run_both(&["consolidate", "SOURCE", "OUT"]);
    let expected = fs::read(local).unwrap();
    let options = "watch=poll,watch-interval=1,watch-grace=1";
    let Some(mut mount) = Mount::new(&place, options) else { return };
    let model = mount.target.join("model.safetensors");
    assert!(fs::read(&model).unwrap() == expected);
    mount.order("slow 30");
    let config = mount.target.join("config.json");
    let original = fs::read(place.path("store/model/config.json")).unwrap();
    assert_eq!(fs::read(&config).unwrap(), original);
    // A plain file changes, comes and goes.
    let text = place.path("text");
    fs::write(&text, "{\"other\": 1}").unwrap();
    mount.order(&format!("put model/config.json {}", text.to_str().unwrap()));
    mount.wait_for("the new config", || fs::read(&config).is_ok_and(|now| now != original));
    mount.order("remove model/config.json");
    mount.wait_for("its end", || !config.exists());
    mount.order("slow 0");
    // A whole checkpoint beside the first one.
    mount.order(&format!("put model/other.safetensors {}", model_file(&place).to_str().unwrap()));
    let other = mount.target.join("other.safetensors");
    mount.wait_for("another model", || {
        fs::read(&other).is_ok_and(|now| now == fs::read(model_file(&place)).unwrap())
    });
    // A shard that is replaced while it is open gives no byte of the new version.
    let held = File::open(&model).unwrap();
    let shard = fs::read_dir(place.path("store/model"))
        .unwrap()
        .map(|file| file.unwrap().path())
        .find(|path| path.to_str().unwrap().contains("-00001-of-"))
        .unwrap();
    let mut bytes = fs::read(&shard).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&text, &bytes).unwrap();
    let name = shard.file_name().unwrap().to_str().unwrap();
    mount.order(&format!("put model/{name} {}", text.to_str().unwrap()));
    mount.wait_for("the new bytes", || {
        fs::read(&model).is_ok_and(|now| now.len() == expected.len() && now != expected)
    });
    drop(held);
}

/// A whole model, as one file.
fn model_file(place: &Place) -> PathBuf {
    place.path("of-folder.safetensors")
}

fn reads_of_a_store_that_stalls_fail() {
    stall(Place::new());
}

fn stall(place: Place) {
    let Some(mut mount) = Mount::new(&place, "watch=off,io-timeout=1") else { return };
    let model = mount.target.join("model.safetensors");
    mount.order("stall");
    let begun = Instant::now();
    fs::read(&model).unwrap_err();
    assert!(begun.elapsed() < PATIENCE / 2, "a read hangs");
    mount.order("answer");
    mount.wait_for("the bytes", || fs::read(&model).is_ok_and(|bytes| bytes.len() > 1000));
}
