//! `tensorfs doctor URL`: reports whether a remote source can be read from here, with which
//! credentials, which guarantees its server gives, and how fast it is.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::json;
use tensorfs::internal::error::{counted, shown, shown_path};
use tensorfs::internal::size::shown_size;
use tensorfs::internal::source::{StateMark, StoreProbe};
use tensorfs::internal::store::{Store, remote_status};
use tensorfs::internal::version::Version;
use tensorfs::{Checkpoint, Error, ErrorKind};

use super::super::args::DOCTOR;
use super::super::output::{Failure, Outcome, print_bytes, print_json};
use super::{Check, in_colour, table};
use crate::options::Options;

/// Maximum depth of folders in which a file for the test is searched.
const DEPTH_MAX: usize = 4;

/// The page of the docs with remedies.
const PAGE: &str = "docs/guides/object-stores.md";

pub(super) fn run(url: &Path, options: &[String], as_json: bool) -> Outcome {
    let parsed = Options::parse(options, false).map_err(Failure::Usage)?;
    if let Some((option, _)) = Options::other_than(options, DOCTOR.uses) {
        let why = format!("option {}: doctor does not take it; leave it out", shown(&option));
        return Err(Failure::Usage(why));
    }
    parsed.remote.take_effect().map_err(Failure::Failed)?;
    let store = Store::of(url);
    let mut checks = Vec::new();
    let asked = ask(&store, url, &mut checks);
    if let Some(found) = store.credentials() {
        checks.insert(0, Check::ok("credentials", found));
    }
    if let Err(error) = &asked {
        checks.push(Check::missing("source", error.to_string(), PAGE));
    }
    let outcome = asked.map_err(Failure::Error);
    if as_json {
        let failure = outcome.as_ref().err();
        print_json(&json!({
            "source": shown_path(url),
            "ok": failure.is_none(),
            "class": failure.map(|failure| failure.kind().as_str()),
            "error": failure.map(Failure::message),
            "checks": checks,
        }))?;
    } else {
        print_bytes(table(&checks, in_colour()).as_bytes())?;
    }
    outcome
}

/// Requests the version of the source, lists it, tests one of its files, and opens the source as a
/// checkpoint.
fn ask(store: &Store, url: &Path, checks: &mut Vec<Check>) -> Result<(), Error> {
    let failed = |path: &Path, action, e| Error::io(path, action, e);
    let look = Stopwatch::start();
    let version = store.version(url).map_err(|e| failed(url, "open", e))?;
    let server = store.server().unwrap_or_default();
    checks.push(Check::ok("server", format!("{server} answers in {}", look.shown())));
    let file = if version.is_file() {
        Some((url.to_owned(), version))
    } else {
        let listing = Stopwatch::start();
        let count = store.list(url, url).map_err(|e| failed(url, "list", e))?.entries.len();
        let found = format!("{} in {}", counted(count, "name"), listing.shown());
        checks.push(Check::ok("listing", found));
        largest_file(store, url).map_err(|e| failed(url, "list", e))?
    };
    match file {
        None => checks.push(Check::unknown("file", "there is none to try")),
        Some((path, version)) => {
            let probe = match store.probe(&path, &version) {
                // This store has no ranges to test: values of Redis are compared with their hashes.
                Err(e) if e.kind() == std::io::ErrorKind::Unsupported => {
                    return checkpoint(url, checks);
                }
                probe => probe.map_err(|e| failed(&path, "read", e))?,
            };
            checks.extend(checks_of(&probe, &path));
            if probe.obeys_ranges == Some(false) {
                let why = "the server does not send a part of a file: it has to serve ranges";
                return Err(failed(&path, "read", std::io::Error::other(why)));
            }
        }
    }
    checkpoint(url, checks)
}

/// The largest file of the first folder that contains any file.
fn largest_file(store: &Store, url: &Path) -> std::io::Result<Option<(PathBuf, Version)>> {
    let mut folder = url.to_owned();
    for _ in 0..DEPTH_MAX {
        let entries = store.list(&folder, &folder)?.entries;
        let files = entries.iter().filter(|(_, version)| version.is_file());
        if let Some((name, version)) = files.max_by_key(|(_, version)| version.len) {
            return Ok(Some((folder.join(name), *version)));
        }
        match entries.first() {
            Some((name, _)) => folder.push(name),
            None => break,
        }
    }
    Ok(None)
}

/// The checks that the test of the file at `path` gives.
fn checks_of(probe: &StoreProbe, path: &Path) -> Vec<Check> {
    let name = shown_path(path.file_name().unwrap_or_default().as_ref());
    let mut checks = vec![mark(probe.mark)];
    match probe.obeys_ranges {
        None => checks.push(Check::unknown("ranges", format!("{name} is empty"))),
        Some(true) => checks.push(Check::ok("ranges", "obeyed")),
        Some(false) => checks.push(Check::missing(
            "ranges",
            "not obeyed: the whole file comes for a part of it",
            "use another server, or copy the files",
        )),
    }
    checks.push(match probe.obeys_conditions {
        Some(true) => Check::ok("conditions", "obeyed: another version of a file is refused"),
        Some(false) => Check::ok(
            "conditions",
            "ignored: each answer is compared with the version all the same",
        ),
        None => Check::ok("conditions", "not sent"),
    });
    let first_byte = Check::ok("first byte", format!("after {}", shown_time(probe.first_byte)));
    checks.push(first_byte);
    if let Some(sample) = probe.sample {
        let rate = (sample.len as f64 / sample.took.as_secs_f64().max(1e-6)) as u64;
        let (len, took) = (shown_size(sample.len), shown_time(sample.took));
        let requests = counted(sample.at_a_time, "request");
        let found =
            format!("{}/s: {len} of {name} in {took}, {requests} at a time", shown_size(rate));
        checks.push(Check::ok("speed", found));
    }
    checks
}

fn mark(mark: StateMark) -> Check {
    let advice = "nothing of it is kept in the disk cache; replace files under new names";
    match mark {
        StateMark::Strong => {
            Check::ok("versions", "told apart by their bytes: a strong ETag or number")
        }
        StateMark::LengthAndTime => Check::degraded(
            "versions",
            "told apart by an ETag of the length and the second of the last change",
            "do not replace a file by one of the same length within a second",
        ),
        StateMark::Weak => Check::degraded("versions", "told apart by weak ETags", advice),
        StateMark::Time => {
            Check::degraded("versions", "told apart by the time of the last change alone", advice)
        }
        StateMark::Length => {
            Check::degraded("versions", "told apart by their length alone", advice)
        }
    }
}

/// Opens the source as a checkpoint. A source that only has further folders may be none.
fn checkpoint(url: &Path, checks: &mut Vec<Check>) -> Result<(), Error> {
    let opening = Stopwatch::start();
    match Checkpoint::open(url) {
        Ok(checkpoint) => {
            let tensors = counted(checkpoint.catalog().tensors().count(), "tensor");
            let found = format!("{tensors}, opened in {}", opening.shown());
            checks.push(Check::ok("checkpoint", found));
        }
        Err(error) if error.kind() == ErrorKind::Io => return Err(error),
        Err(error) => checks.push(Check::unknown("checkpoint", error.to_string())),
    }
    Ok(())
}

/// Measures the time and the number of requests since its start.
struct Stopwatch {
    began: Instant,
    requests: u64,
}

impl Stopwatch {
    fn start() -> Stopwatch {
        Stopwatch { began: Instant::now(), requests: requests() }
    }

    fn shown(&self) -> String {
        let sent = (requests() - self.requests) as usize;
        format!("{}, {}", shown_time(self.began.elapsed()), counted(sent, "request"))
    }
}

/// Number of requests to all servers so far.
fn requests() -> u64 {
    let status = remote_status().unwrap_or_default();
    status.endpoints.iter().map(|endpoint| endpoint.requests).sum()
}

fn shown_time(time: Duration) -> String {
    let ms = time.as_secs_f64() * 1000.0;
    if ms < 10.0 { format!("{ms:.1} ms") } else { format!("{ms:.0} ms") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tensorfs::internal::source::StoreSample;

    #[test]
    fn each_finding_of_a_trial_is_a_line() {
        let ms = Duration::from_millis;
        let sample = StoreSample { len: 64 << 20, took: ms(500), at_a_time: 16 };
        let probe = StoreProbe {
            mark: StateMark::Weak,
            obeys_ranges: Some(true),
            obeys_conditions: Some(false),
            first_byte: ms(12),
            sample: Some(sample),
        };
        let checks = checks_of(&probe, Path::new("s3://bucket/a.safetensors"));
        let text = table(&checks, false);
        for line in [
            "degraded  versions    told apart by weak ETags",
            "ok        ranges      obeyed",
            "ok        conditions  ignored",
            "ok        first byte  after 12 ms",
            "ok        speed       128 MiB/s: 64 MiB of a.safetensors in 500 ms, 16 requests at a time",
        ] {
            assert!(text.contains(line), "{text}");
        }
        let none = StoreProbe { obeys_ranges: Some(false), sample: None, ..probe };
        assert!(table(&checks_of(&none, Path::new("x")), false).contains("missing   ranges"));
    }
}
