//! The queue of log lines, and the thread that writes them.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::sys::signal::{SigSet, SigmaskHow};

use tensorfs::internal::error::shown_path;
use tensorfs::internal::sync::{Condvar, Mutex};

use super::line::Line;
use super::output::{Destination, Output};

/// Maximum number of queued lines.
const LINES_MAX: usize = 1024;

/// Maximum size of all queued lines, in bytes.
const BYTES_MAX: usize = 1 << 20;

/// Maximum number of lines about requests in `LIMIT_TIME`. This limit is needed because a program
/// may repeat a failing read without end.
const REQUESTS_MAX: u32 = 20;

/// The interval to which `REQUESTS_MAX` applies. After the interval, one line says how many lines
/// about requests were left out, and further lines are written.
const LIMIT_TIME: Duration = Duration::from_secs(5);

/// The queue between the threads that log and the thread that writes.
#[derive(Default)]
pub(super) struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    lines: VecDeque<Line>,
    bytes: usize,
    /// Number of dropped lines, and how many of them the log has reported.
    dropped: u64,
    told: u64,
    /// Number of queued lines that come before the first dropped line.
    before_loss: usize,
    /// Start time of the current limit interval, and number of lines about requests in it.
    requests: (Option<Instant>, u32),
    /// Number of lines about requests that were left out, in total and in the current limit
    /// interval.
    limited: u64,
    limited_now: u64,
    /// Number of the thread that writes. A thread with a lower number ends once its current write
    /// returns.
    writer: u64,
    /// Whether the thread with the number `writer` is writing a line.
    writing: bool,
    /// Whether the last line could not be written.
    failing: bool,
    destination: Destination,
    /// Device and inode number of the log file.
    file: Option<(u64, u64)>,
    /// Whether a thread is reopening the log file.
    reopening: bool,
}

impl Queue {
    /// Queues a line. The line is dropped if the queue is full, and left out if there are too many
    /// lines about requests. Never waits for the log.
    pub(super) fn push(&self, line: Line, is_request: bool) {
        let mut state = self.state.lock();
        if is_request && !state.may_log_request(Instant::now()) {
            // The thread that writes will report the number of lines later.
            if state.limited_now == 1 {
                drop(state);
                self.changed.notify_all();
            }
            return;
        }
        let len = line.len();
        if state.lines.len() >= LINES_MAX || state.bytes + len > BYTES_MAX {
            return state.lose();
        }
        state.bytes += len;
        state.lines.push_back(line);
        drop(state);
        self.changed.notify_all();
    }

    /// Number of lines about requests that were left out.
    pub(super) fn limited(&self) -> u64 {
        self.state.lock().limited
    }

    /// Number of lines that were dropped.
    pub(super) fn dropped(&self) -> u64 {
        self.state.lock().dropped
    }

    /// Waits until all lines are written, at most for `limit`.
    pub(super) fn flush(&self, limit: Duration) {
        let deadline = Instant::now() + limit;
        let mut state = self.state.lock();
        state.note_limited();
        self.changed.notify_all();
        while state.has_work() || state.writing {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            state = self.changed.wait_timeout(state, left);
        }
    }

    /// Writes all further lines to `output`, which is the opened `destination`. The thread that
    /// writes to the old output is not stopped, because it may hang in a write.
    ///
    /// # Errors
    /// If no thread can be started.
    pub(super) fn write_to(
        self: &Arc<Self>,
        destination: Destination,
        output: Output,
    ) -> io::Result<()> {
        let queue = self.clone();
        let file = output.identity();
        let mut state = self.state.lock();
        let number = state.writer + 1;
        start_thread("log", move || queue.write(number, output))?;
        state.adopt(number);
        state.destination = destination;
        state.file = file;
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    /// Reopens the log file on a new thread. That thread logs the reopening and becomes the writer.
    /// If the path still leads to the same file, the old thread stays the writer, even if it hangs
    /// in a write.
    pub(super) fn reopen(self: &Arc<Self>) {
        let mut state = self.state.lock();
        let destination = state.destination.clone();
        let Some(path) = destination.path() else { return };
        if state.reopening {
            return;
        }
        state.reopening = true;
        drop(state);
        let queue = self.clone();
        let reopen = move || {
            let opened = destination.open().map(|output| (output.identity(), output));
            let shown = shown_path(&path);
            let mut state = queue.state.lock();
            state.reopening = false;
            let taken_over = match opened {
                Ok((file, output)) if file.is_none() || file != state.file => {
                    state.file = file;
                    Some((state.take_over(), output))
                }
                Ok(_) => None,
                Err(e) => {
                    drop(state);
                    tracing::error!("log={shown}: cannot be opened anew: {e}");
                    return;
                }
            };
            drop(state);
            tracing::info!("SIGHUP: {shown} is opened anew");
            if let Some((number, output)) = taken_over {
                queue.changed.notify_all();
                queue.write(number, output);
            }
        };
        if let Err(e) = start_thread("log", reopen) {
            self.state.lock().reopening = false;
            tracing::error!("the log cannot be opened anew: {e}");
        }
    }

    /// The body of a writer thread: writes lines until another thread is the writer.
    fn write(&self, number: u64, mut output: Output) {
        let mut state = self.state.lock();
        while state.writer == number {
            if state.limit_ends().is_some_and(|end| end <= Instant::now()) {
                state.note_limited();
            }
            let Some((line, lost)) = state.next() else {
                state = match state.limit_ends() {
                    Some(end) => {
                        let left = end.saturating_duration_since(Instant::now());
                        self.changed.wait_timeout(state, left)
                    }
                    None => self.changed.wait(state),
                };
                continue;
            };
            state.writing = true;
            drop(state);
            let written = output.write(&line);
            state = self.state.lock();
            if state.writer == number {
                state.writing = false;
                state.failing = written.is_err();
            }
            match (&written, lost) {
                (Ok(()), Some(lost)) => state.told = state.told.max(lost),
                (Err(_), None) => state.lose(),
                _ => {}
            }
            self.changed.notify_all();
        }
    }
}

impl State {
    /// Makes thread `number` the writer.
    fn adopt(&mut self, number: u64) {
        self.writer = number;
        self.writing = false;
        self.failing = false;
    }

    /// Makes a new thread the writer. Returns its number.
    fn take_over(&mut self) -> u64 {
        let number = self.writer + 1;
        self.adopt(number);
        number
    }

    /// Whether a line about a request may be written now. Counts the line.
    fn may_log_request(&mut self, now: Instant) -> bool {
        let (since, count) = &mut self.requests;
        if since.is_none_or(|since| now.duration_since(since) >= LIMIT_TIME) {
            (*since, *count) = (Some(now), 0);
        }
        *count += 1;
        let is_allowed = *count <= REQUESTS_MAX;
        if !is_allowed {
            self.limited += 1;
            self.limited_now += 1;
        }
        is_allowed
    }

    /// The time at which the number of lines that were left out must be reported. `None` if there
    /// are none.
    fn limit_ends(&self) -> Option<Instant> {
        self.requests.0.filter(|_| self.limited_now > 0).map(|since| since + LIMIT_TIME)
    }

    /// Queues the report about lines that were left out, if there are any.
    fn note_limited(&mut self) {
        let count = std::mem::take(&mut self.limited_now);
        if count > 0 {
            let line =
                Line::new(&format!(" WARN {count} more errors of requests were not logged"), 4);
            self.bytes += line.len();
            self.lines.push_back(line);
        }
    }

    /// Counts a line that was dropped.
    fn lose(&mut self) {
        if self.dropped == self.told {
            self.before_loss = self.lines.len();
        }
        self.dropped += 1;
    }

    fn has_work(&self) -> bool {
        !self.lines.is_empty() || self.has_losses()
    }

    /// Whether there are dropped lines to report and the log works again.
    fn has_losses(&self) -> bool {
        !self.failing && self.dropped > self.told
    }

    /// The next line to write. At the position of dropped lines, it is a report of their number. A
    /// report is returned with the number of all lines dropped so far. `told` is set to this number
    /// once the report is written.
    fn next(&mut self) -> Option<(Line, Option<u64>)> {
        if self.has_losses() && self.before_loss == 0 {
            let lost = self.dropped - self.told;
            let text = format!("{lost} lines of the log were dropped: it was blocked or full");
            return Some((Line::new(&text, 4), Some(self.dropped)));
        }
        let line = self.lines.pop_front()?;
        self.bytes -= line.len();
        self.before_loss = self.before_loss.saturating_sub(1);
        Some((line, None))
    }
}

/// Starts a thread that blocks all signals. Signals that end the process then reach the thread that
/// waits for them.
pub(crate) fn start_thread(
    name: &str,
    work: impl FnOnce() + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    let before = SigSet::all().thread_swap_mask(SigmaskHow::SIG_SETMASK)?;
    let started = std::thread::Builder::new().name(name.to_owned()).spawn(work);
    let _ = before.thread_set_mask();
    started
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use nix::fcntl::{FcntlArg, OFlag, fcntl};
    use nix::unistd::pipe;
    use std::path::PathBuf;

    use super::super::line::LINE_MAX;
    use super::*;

    /// The timeout is long enough that a busy machine is not mistaken for a hanging log.
    const LONG: Duration = Duration::from_secs(30);

    /// A queue whose output is a full pipe that is not read.
    fn blocked() -> (Arc<Queue>, OwnedFd) {
        let (reader, writer) = pipe().unwrap();
        fcntl(&writer, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).unwrap();
        while nix::unistd::write(&writer, b"full\n").is_ok() {}
        fcntl(&writer, FcntlArg::F_SETFL(OFlag::empty())).unwrap();
        let queue = Arc::new(Queue::default());
        queue.write_to(Destination::Nowhere, Output::File(writer.into())).unwrap();
        // The writer takes the first line and waits while it writes. From then on, it takes no
        // further line.
        queue.push(Line::new("first", 4), false);
        while !queue.state.lock().writing {
            std::thread::yield_now();
        }
        (queue, reader)
    }

    fn file(folder: &tempfile::TempDir) -> (Destination, PathBuf) {
        let path = folder.path().join("log");
        (Destination::File(path.clone()), path)
    }

    #[test]
    fn a_stream_that_takes_nothing_holds_up_nobody_and_lines_are_dropped_and_counted() {
        let (queue, _reader) = blocked();
        for number in 0..LINES_MAX + 500 {
            queue.push(Line::new(&format!("line {number}"), 4), false);
        }
        assert_eq!(queue.dropped(), 500);
        queue.flush(Duration::from_millis(10));
    }

    #[test]
    fn bytes_that_wait_are_bounded_and_so_is_a_line() {
        let (queue, _reader) = blocked();
        for _ in 0..BYTES_MAX / LINE_MAX + 10 {
            queue.push(Line::new(&"\u{e9}".repeat(LINE_MAX), 4), false);
        }
        let state = queue.state.lock();
        assert!(state.bytes <= BYTES_MAX && state.dropped > 0);
        assert!(state.lines.iter().all(|line| line.text.len() <= LINE_MAX + " ...".len()));
    }

    #[test]
    fn another_stream_takes_what_the_blocked_one_did_not_and_says_how_much_was_lost() {
        let folder = tempfile::tempdir().unwrap();
        let (queue, _reader) = blocked();
        (0..LINES_MAX + 100).for_each(|n| queue.push(Line::new(&format!("line {n}"), 4), false));
        let (destination, path) = file(&folder);
        let output = destination.open().unwrap();
        queue.write_to(destination, output).unwrap();
        queue.flush(LONG);
        queue.push(Line::new("after it", 4), false);
        queue.flush(LONG);
        let text = std::fs::read_to_string(path).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        let is_note = |line: &&str| line.contains("lines of the log were dropped");
        let note = lines.iter().position(is_note).unwrap();
        assert!(lines[note].contains(": 100 lines"), "{}", lines[note]);
        assert!(lines[note - 1].ends_with("line 1023"), "{}", lines[note - 1]);
        assert!(lines[note + 1].ends_with("after it"), "{}", lines[note + 1]);
    }

    #[test]
    fn a_file_that_was_moved_away_is_opened_anew() {
        let folder = tempfile::tempdir().unwrap();
        let (destination, path) = file(&folder);
        let queue = Arc::new(Queue::default());
        let output = destination.open().unwrap();
        queue.write_to(destination, output).unwrap();
        queue.push(Line::new("before", 4), false);
        queue.flush(LONG);
        let old = folder.path().join("log.1");
        std::fs::rename(&path, &old).unwrap();
        queue.reopen();
        let started = Instant::now();
        while queue.state.lock().writer < 2 {
            assert!(started.elapsed() < LONG);
            std::thread::yield_now();
        }
        queue.push(Line::new("after", 4), false);
        queue.flush(LONG);
        assert!(std::fs::read_to_string(old).unwrap().ends_with("before\n"));
        assert!(std::fs::read_to_string(path).unwrap().ends_with("after\n"));
    }
    #[test]
    fn a_file_that_is_still_there_keeps_the_thread_that_hangs_on_it_and_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let mut reader = std::fs::File::options();
        let _reader = reader.read(true).write(true).open(&path).unwrap();
        let destination = Destination::File(path);
        let output = destination.open().unwrap();
        let queue = Arc::new(Queue::default());
        queue.write_to(destination, output).unwrap();
        for _ in 0..3 {
            queue.push(Line::new(&"x".repeat(LINE_MAX), 4), false);
            queue.reopen();
            let started = Instant::now();
            while queue.state.lock().reopening {
                assert!(started.elapsed() < LONG);
                std::thread::yield_now();
            }
            assert_eq!(queue.state.lock().writer, 1);
        }
    }

    #[test]
    fn lines_that_were_lost_are_told_of_again_where_the_note_could_not_be_written() {
        let mut state = State::default();
        state.lose();
        let (note, lost) = state.next().unwrap();
        assert!(note.text.starts_with("1 lines"));
        assert_eq!(lost, Some(1));
        // Writing the report fails, and another line is dropped.
        state.failing = true;
        state.lose();
        assert!(state.next().is_none());
        state.failing = false;
        let (note, lost) = state.next().unwrap();
        assert!(note.text.starts_with("2 lines"), "{}", note.text);
        state.told = lost.unwrap();
        assert!(state.next().is_none());
    }

    #[test]
    fn of_many_errors_of_requests_some_are_written_and_the_others_are_counted() {
        let folder = tempfile::tempdir().unwrap();
        let (destination, path) = file(&folder);
        let queue = Arc::new(Queue::default());
        let output = destination.open().unwrap();
        queue.write_to(destination, output).unwrap();
        (0..100).for_each(|n| queue.push(Line::new(&format!("request {n}"), 3), true));
        queue.push(Line::new("another line", 4), false);
        queue.flush(LONG);
        let text = std::fs::read_to_string(path).unwrap();
        assert_eq!(text.matches("request ").count(), REQUESTS_MAX as usize, "{text}");
        assert!(text.contains("another line") && text.contains("80 more errors"), "{text}");
        assert_eq!(queue.limited(), 80);
    }

    #[test]
    fn errors_of_requests_are_written_again_after_a_while() {
        let mut state = State::default();
        let now = Instant::now();
        let allowed = (0..100).filter(|_| state.may_log_request(now)).count();
        assert_eq!(allowed, REQUESTS_MAX as usize);
        assert_eq!(state.limit_ends(), Some(now + LIMIT_TIME));
        assert!(state.may_log_request(now + LIMIT_TIME));
        state.note_limited();
        assert!(state.limit_ends().is_none());
    }
}
