//! Faults: the rules that choose the affected requests, the requests that are held back, and counts of requests.

use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// The most reads of each file that are recorded.
const RANGES_MAX: usize = 4096;

/// Kinds of requests of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Request {
    Lookup,
    Getattr,
    Open,
    Read,
    Flush,
    Readdir,
    Statfs,
}

/// The fate of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// The request is answered after the command `resume`.
    Stall,
    /// The request is answered after this time.
    Delay(Duration),
    /// The request fails with EIO.
    Eio,
    /// A read gets fewer bytes than it asked for, but at least one if the file has one there.
    Short,
    /// An open with `O_DIRECT` fails with EINVAL.
    NoDirect,
}

/// The answer to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    Right,
    Short,
    Eio,
}

/// A fault for the files whose path matches.
#[derive(Debug)]
struct Rule {
    request: Request,
    glob: String,
    fault: Fault,
    /// The fault hits reads from this offset on.
    from: u64,
}

/// A function that answers one request. If it is dropped without a call, the answer is EIO.
pub(crate) type Job = Box<dyn FnOnce(Answer) + Send>;

/// A request that is held back until a time, or until the command `resume`.
struct Parked {
    path: PathBuf,
    due: Option<Instant>,
    job: Job,
}

/// Counts of requests for one file.
#[derive(Debug, Default)]
struct Counts {
    lookups: u64,
    getattrs: u64,
    opens: u64,
    direct_opens: u64,
    reads: u64,
    bytes: u64,
    failed: u64,
    ranges: VecDeque<(u64, u32)>,
}

#[derive(Default)]
struct State {
    rules: Vec<Rule>,
    parked: Vec<Parked>,
    counts: BTreeMap<PathBuf, Counts>,
    ended: bool,
}

/// The faults of one file system. A thread has to run `answer_parked`.
#[derive(Default)]
pub(crate) struct Faults {
    state: Mutex<State>,
    changed: Condvar,
}

impl Faults {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers a request at once, or holds it back. Never blocks.
    pub(crate) fn meet(&self, request: Request, path: &Path, job: Job) {
        self.meet_at(request, path, 0, job);
    }

    /// Does the same as `meet` for a read from `offset` on.
    pub(crate) fn meet_read(&self, path: &Path, offset: u64, job: Job) {
        self.meet_at(Request::Read, path, offset, job);
    }

    fn meet_at(&self, request: Request, path: &Path, offset: u64, job: Job) {
        let mut state = self.lock();
        let fault = state.fault(request, path, offset, |fault| fault != Fault::NoDirect);
        let counts = state.counts.entry(path.to_owned()).or_default();
        match request {
            Request::Lookup => counts.lookups += 1,
            Request::Getattr => counts.getattrs += 1,
            Request::Open => counts.opens += 1,
            Request::Read => counts.reads += 1,
            Request::Flush | Request::Readdir | Request::Statfs => {}
        }
        let due = match fault {
            None | Some(Fault::NoDirect) => return now(state, job, Answer::Right),
            Some(Fault::Short) => return now(state, job, Answer::Short),
            Some(Fault::Eio) => {
                counts.failed += 1;
                return now(state, job, Answer::Eio);
            }
            Some(Fault::Stall) => None,
            Some(Fault::Delay(time)) => Some(Instant::now() + time),
        };
        // After the end no thread would answer the request.
        if !state.ended {
            state.parked.push(Parked { path: path.to_owned(), due, job });
            self.changed.notify_all();
        }
    }

    /// Records the range of a read.
    pub(crate) fn note_range(&self, path: &Path, offset: u64, size: u32) {
        let mut state = self.lock();
        let counts = state.counts.entry(path.to_owned()).or_default();
        counts.bytes += u64::from(size);
        if counts.ranges.len() == RANGES_MAX {
            counts.ranges.pop_front();
        }
        counts.ranges.push_back((offset, size));
    }

    /// Whether an open with `O_DIRECT` is refused.
    pub(crate) fn refuses_direct(&self, path: &Path) -> bool {
        let mut state = self.lock();
        state.counts.entry(path.to_owned()).or_default().direct_opens += 1;
        state.fault(Request::Open, path, 0, |fault| fault == Fault::NoDirect).is_some()
    }

    /// Answers held-back requests when their time has come. Returns after `end`.
    pub(crate) fn answer_parked(&self) {
        let mut state = self.lock();
        while !state.ended {
            let now = Instant::now();
            let is_due = |parked: &mut Parked| parked.due.is_some_and(|due| due <= now);
            let due: Vec<_> = state.parked.extract_if(.., is_due).collect();
            if !due.is_empty() {
                drop(state);
                due.into_iter().for_each(|parked| (parked.job)(Answer::Right));
                state = self.lock();
                continue;
            }
            let next = state.parked.iter().filter_map(|parked| parked.due).min();
            let wait = next.map_or(Duration::from_secs(60), |due| due - now);
            let woken = self.changed.wait_timeout(state, wait);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Fails all requests that are held back. From then on no request is held back.
    pub(crate) fn end(&self) {
        let mut state = self.lock();
        state.ended = true;
        state.rules.clear();
        let parked = std::mem::take(&mut state.parked);
        drop(state);
        self.changed.notify_all();
        // A reply that is dropped without an answer is EIO.
        drop(parked);
    }

    /// Carries out one command, which is a line of text. The answer is one line too.
    pub(crate) fn command(&self, line: &str) -> Result<String, String> {
        let words: Vec<_> = line.split_whitespace().collect();
        match words.as_slice() {
            ["resume"] => self.lift(|rule| rule.fault == Fault::Stall),
            ["ok"] => self.lift(|_| true),
            ["reset"] => self.lock().counts.clear(),
            ["parked", glob] => {
                let state = self.lock();
                let found = state.parked.iter().filter(|parked| matches(glob, &parked.path));
                return Ok(found.count().to_string());
            }
            ["counts", glob] => return Ok(self.counts(glob).to_string()),
            ["ranges", glob] => return Ok(self.ranges(glob).to_string()),
            [name, glob, arguments @ ..] => {
                let (request, fault, from) = fault_named(name, arguments)?;
                // If several rules match, the last one applies.
                self.lock()
                    .rules
                    .insert(0, Rule { request, glob: (*glob).to_owned(), fault, from });
            }
            _ => return Err(format!("unknown command: {line}")),
        }
        Ok("ok".to_owned())
    }

    /// Removes rules, and answers the requests that they held back.
    fn lift(&self, lifted: impl Fn(&Rule) -> bool) {
        let mut state = self.lock();
        state.rules.retain(|rule| !lifted(rule));
        let now = Instant::now();
        for parked in &mut state.parked {
            parked.due = parked.due.or(Some(now));
        }
        self.changed.notify_all();
    }

    fn counts(&self, glob: &str) -> Value {
        let state = self.lock();
        let found = state.counts.iter().filter(|(path, _)| matches(glob, path));
        let counts = found.map(|(path, counts)| {
            let value = json!({
                "lookups": counts.lookups,
                "getattrs": counts.getattrs,
                "opens": counts.opens,
                "direct_opens": counts.direct_opens,
                "reads": counts.reads,
                "bytes": counts.bytes,
                "failed": counts.failed,
            });
            (path.to_string_lossy().into_owned(), value)
        });
        counts.collect()
    }

    fn ranges(&self, glob: &str) -> Value {
        let state = self.lock();
        let found = state.counts.iter().filter(|(path, _)| matches(glob, path));
        found.map(|(path, counts)| (path.to_string_lossy(), json!(counts.ranges))).collect()
    }
}

impl State {
    fn fault(
        &self,
        request: Request,
        path: &Path,
        offset: u64,
        of: impl Fn(Fault) -> bool,
    ) -> Option<Fault> {
        let concerns = |rule: &&Rule| {
            rule.request == request && rule.from <= offset && matches(&rule.glob, path)
        };
        self.rules.iter().filter(concerns).map(|rule| rule.fault).find(|fault| of(*fault))
    }
}

/// Answers after the lock is free, because the answer may take long.
fn now(state: MutexGuard<'_, State>, job: Job, answer: Answer) {
    drop(state);
    job(answer);
}

/// The request kind and the fault of a command like `stall`, `eio-open` or `delay-getattr GLOB 100`, and the offset
/// from which on the fault applies.
fn fault_named(name: &str, arguments: &[&str]) -> Result<(Request, Fault, u64), String> {
    let number = |text: &str| text.parse().map_err(|_| format!("not a number: {text}"));
    let (fault, request) = match name {
        "no-direct" => ("no-direct", Request::Open),
        _ => match name.split_once('-') {
            None => (name, Request::Read),
            Some((fault, "open")) => (fault, Request::Open),
            Some((fault, "getattr")) => (fault, Request::Getattr),
            Some((fault, "lookup")) => (fault, Request::Lookup),
            Some((fault, "flush")) => (fault, Request::Flush),
            Some((fault, "readdir")) => (fault, Request::Readdir),
            Some((fault, "statfs")) => (fault, Request::Statfs),
            Some(_) => return Err(format!("unknown request in {name}")),
        },
    };
    let mut from = 0;
    let fault = match (fault, arguments) {
        ("stall", []) => Fault::Stall,
        ("stall", [offset]) if request == Request::Read => {
            from = number(offset)?;
            Fault::Stall
        }
        ("eio", []) => Fault::Eio,
        ("short", []) if request == Request::Read => Fault::Short,
        ("no-direct", []) => Fault::NoDirect,
        ("delay", [millis]) => Fault::Delay(Duration::from_millis(number(millis)?)),
        _ => return Err(format!("unknown command, or wrong arguments: {name}")),
    };
    Ok((request, fault, from))
}

/// Whether `glob` matches the whole of `path`. `*` stands for any text.
fn matches(glob: &str, path: &Path) -> bool {
    let text = path.to_string_lossy();
    let mut rest: &str = &text;
    let mut parts = glob.split('*');
    let first = parts.next().unwrap_or_default();
    let Some(after) = rest.strip_prefix(first) else { return false };
    rest = after;
    let mut parts: Vec<_> = parts.collect();
    let Some(last) = parts.pop() else { return rest.is_empty() };
    for part in parts {
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    #[test]
    fn globs_match_the_whole_path() {
        for (glob, path, expected) in [
            ("a/b", "a/b", true),
            ("a/b", "a/bc", false),
            ("*", "", true),
            ("*", "a/b", true),
            ("*b", "a/b", true),
            ("a*", "b/a", false),
            ("a*a", "a", false),
            ("*-00002-of-*", "x/model-00002-of-00003.safetensors", true),
            ("*-00002-of-*", "x/model-00001-of-00003.safetensors", false),
        ] {
            assert_eq!(matches(glob, Path::new(path)), expected, "{glob} {path}");
        }
    }

    #[test]
    fn a_stalled_request_is_answered_by_resume_and_a_delayed_one_in_time() {
        let faults = Arc::new(Faults::default());
        let answered = Arc::new(AtomicU64::new(0));
        let ask = |path: &str| {
            let answered = answered.clone();
            let job = move |_| {
                answered.fetch_add(1, Ordering::SeqCst);
            };
            faults.meet(Request::Read, Path::new(path), Box::new(job));
        };
        let wait_for = |n| {
            while answered.load(Ordering::SeqCst) < n {
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        let answering = std::thread::spawn({
            let faults = faults.clone();
            move || faults.answer_parked()
        });
        faults.command("stall a*").expect("a command");
        faults.command("delay b* 20").expect("a command");
        ask("a");
        ask("b");
        ask("c");
        wait_for(2);
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(answered.load(Ordering::SeqCst), 2);
        assert_eq!(faults.command("parked *").expect("a command"), "1");
        faults.command("resume").expect("a command");
        wait_for(3);
        faults.end();
        answering.join().expect("no panic");
    }

    #[test]
    fn a_stall_from_an_offset_on_holds_back_no_read_in_front_of_it() {
        let faults = Faults::default();
        faults.command("stall a 100").expect("a command");
        faults.meet_read(Path::new("a"), 99, Box::new(|_| ()));
        assert_eq!(faults.command("parked *").expect("a command"), "0");
        faults.meet_read(Path::new("a"), 100, Box::new(|_| ()));
        assert_eq!(faults.command("parked *").expect("a command"), "1");
    }

    #[test]
    fn commands_that_mean_nothing_are_refused() {
        for line in [
            "",
            "stall",
            "stall a x",
            "stall-open a 3",
            "delay a",
            "delay a x",
            "short-open a",
            "eio-write a",
        ] {
            assert!(Faults::default().command(line).is_err(), "{line}");
        }
    }
}
