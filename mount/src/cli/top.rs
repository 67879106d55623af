//! `tensorfs top`: the running mounts, in a table that is updated.

use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write as _};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use console::{Term, truncate_str};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::termios::{LocalFlags, SetArg, Termios, tcgetattr, tcsetattr};
use serde_json::Value;
use tensorfs::internal::error::shown_path;
use tensorfs::internal::mountinfo;

use super::args;
use super::output::{Failure, Outcome, print_text};
use super::status::{self, LIMIT, MountState, Seen};

/// Most files that are listed.
const FILES_MAX: usize = 10;

const TITLE: &str = "    GB/s SRC GB/s   HIT  WASTE FLIGHT QUEUED STUCK ERRORS      P50      P99         \
                     CACHE    RSS  MOUNT";

/// Keys that end it: q, Ctrl-C and Ctrl-D.
const ENDING_KEYS: [u8; 4] = [b'q', b'Q', 3, 4];

pub(super) fn run(args: &args::TopArgs) -> Outcome {
    let failed = |e: io::Error| Failure::Failed(e.to_string());
    let dumb = std::env::var_os("TERM").is_none_or(|term| term.is_empty() || term == "dumb");
    if !args.once && !dumb && io::stdout().is_terminal() && io::stdin().is_terminal() {
        return live(args.interval).map_err(failed);
    }
    let start = Instant::now();
    let before = look(short_limit(args.interval)).map_err(failed)?;
    std::thread::sleep(args.interval.saturating_sub(start.elapsed()));
    let now = look(LIMIT).map_err(failed)?;
    let mut text = table(&before, &now).join("\n");
    text.push('\n');
    print_text(&text)
}

/// Time limit for an answer in the live table: a daemon that does not answer must delay neither the
/// keys nor the other mounts.
fn short_limit(interval: Duration) -> Duration {
    interval.clamp(Duration::from_millis(250), Duration::from_secs(1))
}

/// All mounts, each once even if it is mounted in several places.
fn look(limit: Duration) -> io::Result<Vec<Seen>> {
    let mut mounts = mountinfo::ours()?;
    mounts.sort_by_key(|mount| mount.minor);
    mounts.dedup_by_key(|mount| mount.minor);
    let mut seen = status::look(mounts, limit, false);
    seen.sort_by(|a, b| a.target.cmp(&b.target));
    Ok(seen)
}

/// Shows tables until a key or a signal ends it.
fn live(interval: Duration) -> io::Result<()> {
    let ending = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGQUIT];
    let mut signals = SigSet::from_iter(ending);
    // The terminal has another size: the last table is drawn again.
    signals.add(Signal::SIGWINCH);
    signals.thread_block()?;
    let signals = SignalFd::with_flags(&signals, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?;
    let screen = Screen::open()?;
    let limit = short_limit(interval);
    let mut before = look(limit)?;
    screen.draw(&table(&[], &before))?;
    let mut now = Vec::new();
    loop {
        let next = Instant::now() + interval;
        while Instant::now() < next {
            if !wait(&signals, next)? {
                return Ok(());
            }
            let shown = if now.is_empty() { &before } else { &now };
            if let Ok(Some(signal)) = signals.read_signal() {
                if signal.ssi_signo != Signal::SIGWINCH as u32 {
                    return Ok(());
                }
                screen.draw(&table(&before, shown))?;
            }
        }
        if !now.is_empty() {
            before = now;
        }
        now = look(limit)?;
        screen.draw(&table(&before, &now))?;
    }
}

/// Waits for a key or a signal until `end`. Returns false if a key, or the end of the terminal,
/// ends the program.
fn wait(signals: &SignalFd, end: Instant) -> io::Result<bool> {
    let stdin = io::stdin();
    let fds = [stdin.as_fd(), signals.as_fd()];
    let mut fds = fds.map(|fd| PollFd::new(fd, PollFlags::POLLIN));
    let rest = end.saturating_duration_since(Instant::now()).as_millis() + 1;
    poll(&mut fds, PollTimeout::try_from(rest).unwrap_or(PollTimeout::MAX))?;
    if !fds[0].any().unwrap_or(true) {
        return Ok(true);
    }
    let mut keys = [0; 64];
    let len = nix::unistd::read(&stdin, &mut keys)?;
    Ok(len > 0 && !keys[..len].iter().any(|key| ENDING_KEYS.contains(key)))
}

/// The terminal in its live mode: alternate screen, no cursor, unbuffered keys. The drop restores
/// it.
struct Screen {
    before: Termios,
}

impl Screen {
    fn open() -> io::Result<Screen> {
        let before = tcgetattr(io::stdin())?;
        let mut keys = before.clone();
        keys.local_flags -= LocalFlags::ICANON | LocalFlags::ECHO | LocalFlags::ISIG;
        tcsetattr(io::stdin(), SetArg::TCSANOW, &keys)?;
        let screen = Screen { before };
        write_all("\x1b[?1049h\x1b[?25l\x1b[2J")?;
        Ok(screen)
    }

    fn draw(&self, lines: &[String]) -> io::Result<()> {
        let (rows, columns) = Term::stdout().size();
        let mut frame = String::from("\x1b[H");
        for (row, line) in lines.iter().take(rows.into()).enumerate() {
            let start = if row == 0 { "" } else { "\r\n" };
            let _ = write!(frame, "{start}{}\x1b[K", truncate_str(line, columns.into(), ""));
        }
        frame.push_str("\x1b[J");
        write_all(&frame)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let _ = write_all("\x1b[?25h\x1b[?1049l");
        let _ = tcsetattr(io::stdin(), SetArg::TCSANOW, &self.before);
    }
}

fn write_all(text: &str) -> io::Result<()> {
    let mut output = io::stdout().lock();
    output.write_all(text.as_bytes())?;
    output.flush()
}

/// The table of the activity between two readings: one line for each mount of the second, then the
/// busiest files.
fn table(before: &[Seen], now: &[Seen]) -> Vec<String> {
    if now.is_empty() {
        return vec!["no tensorfs mounts".to_owned()];
    }
    let mut lines = vec![TITLE.to_owned()];
    let mut files = Vec::new();
    for seen in now {
        let old = before.iter().find(|old| is_same(old, seen));
        lines.push(line(old, seen));
        files.extend(busy_files(old, seen));
    }
    files.sort_by(|a, b| b.rate.total_cmp(&a.rate).then_with(|| a.path.cmp(&b.path)));
    files.truncate(FILES_MAX);
    if !files.is_empty() {
        lines.push(String::new());
        lines.push("    GB/s   OPEN  FILE".to_owned());
    }
    for File { rate, open, path } in files {
        lines.push(format!("{:>8} {open:>6}  {path}", gigabytes(Some(rate))));
    }
    lines
}

/// Whether two looks saw the same daemon.
fn is_same(old: &Seen, new: &Seen) -> bool {
    old.minor == new.minor && old.facts.get("pid") == new.facts.get("pid")
}

fn line(old: Option<&Seen>, new: &Seen) -> String {
    let target = shown_path(&new.target);
    if !matches!(new.state, MountState::Running | MountState::Detached) {
        return format!("{target}: {}", new.state.text());
    }
    let count = |key: &str| new.number(&format!("/counters/{key}"));
    let number = |key: &str| count(key).map_or_else(|| "-".to_owned(), |n| n.to_string());
    let time = |key: &str| count(key).filter(|us| *us > 0).map_or("-".to_owned(), status::duration);
    let size = |pointer: &str| new.number(pointer).map(short);
    let grown = |key: &str| grown(old, new, &format!("/counters/{key}"));
    let rate = |key: &str| gigabytes(per_second(old, new, &format!("/counters/{key}")));
    let cache = match (size("/cache/used"), size("/cache/budget")) {
        (Some(used), Some(budget)) => format!("{used}/{budget}"),
        _ => "-".to_owned(),
    };
    let mark = if new.state == MountState::Detached { " (detached)" } else { "" };
    format!(
        "{:>8} {:>8} {:>5} {:>6} {:>6} {:>6} {:>5} {:>6} {:>8} {:>8} {cache:>13} {:>6}  {target}{mark}",
        rate("bytes_served"),
        rate("source_bytes"),
        percent(grown("hits"), grown("misses")),
        percent(grown("prefetch_wasted_bytes"), grown("prefetch_used_bytes")),
        number("source_reads_now"),
        number("reads_queued_now"),
        number("source_stuck_now"),
        number("read_errors"),
        time("wait_us/p50"),
        time("wait_us/p99"),
        size("/memory/rss").unwrap_or_else(|| "-".to_owned()),
    )
}

/// By how much the number at `pointer` has grown.
fn grown(old: Option<&Seen>, new: &Seen, pointer: &str) -> Option<u64> {
    Some(new.number(pointer)?.saturating_sub(old?.number(pointer)?))
}

fn per_second(old: Option<&Seen>, new: &Seen, pointer: &str) -> Option<f64> {
    let seconds = new.asked.saturating_duration_since(old?.asked).as_secs_f64();
    Some(grown(old, new, pointer)? as f64 / seconds.max(0.001))
}

/// A file that was read.
struct File {
    /// Bytes per second.
    rate: f64,
    open: u64,
    path: String,
}

/// The files of a mount that were read between two looks.
fn busy_files(old: Option<&Seen>, new: &Seen) -> Vec<File> {
    let list = |seen: &'_ Seen| seen.facts.get("files").and_then(Value::as_array).cloned();
    let number = |file: &Value, key: &str| file.get(key).and_then(Value::as_u64).unwrap_or(0);
    let Some(old) = old else { return Vec::new() };
    let earlier = list(old).unwrap_or_default();
    let seconds = new.asked.saturating_duration_since(old.asked).as_secs_f64().max(0.001);
    let files = list(new).unwrap_or_default();
    let busy = files.iter().filter_map(|file| {
        let path = file.get("path").and_then(Value::as_str)?;
        let before =
            earlier.iter().find(|old| old.get("path").and_then(Value::as_str) == Some(path));
        let before = before.map_or(0, |old| number(old, "bytes_served"));
        let rate = number(file, "bytes_served").saturating_sub(before) as f64 / seconds;
        let path = shown_path(&new.target.join(path.trim_start_matches('/')));
        (rate > 0.0).then(|| File { rate, open: number(file, "open"), path })
    });
    busy.collect()
}

fn gigabytes(rate: Option<f64>) -> String {
    rate.map_or_else(|| "-".to_owned(), |rate| format!("{:.3}", rate / 1e9))
}

/// The share of `part` in the sum of both.
fn percent(part: Option<u64>, other: Option<u64>) -> String {
    match (part, other) {
        (Some(part), Some(other)) if part + other > 0 => {
            format!("{:.0}%", 100.0 * part as f64 / (part + other) as f64)
        }
        _ => "-".to_owned(),
    }
}

/// Bytes in few columns: `64.0M`.
fn short(bytes: u64) -> String {
    let mut value = bytes as f64;
    for unit in ["", "k", "M", "G"] {
        if value < 1000.0 {
            return if unit.is_empty() { format!("{value}") } else { format!("{value:.1}{unit}") };
        }
        value /= 1000.0;
    }
    format!("{value:.1}T")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn seen(asked: Instant, served: u64, hits: u64, facts: Value) -> Seen {
        let mut facts = facts;
        facts["counters"] = json!({ "bytes_served": served, "hits": hits, "misses": 1 });
        Seen { minor: 51, target: "/mnt/a".into(), state: MountState::Running, facts, asked }
    }

    #[test]
    fn the_table_shows_what_happened_between_two_looks() {
        let start = Instant::now();
        let files = |served: u64| json!([{ "path": "/m", "open": 3, "bytes_served": served }]);
        let old = seen(start, 1_000_000_000, 5, json!({ "files": files(0) }));
        let facts = json!({ "files": files(1_000_000_000), "memory": { "rss": 64_000_000 } });
        let new = seen(start + Duration::from_secs(2), 3_000_000_000, 9, facts);
        let lines = table(&[old], &[new]);
        let words: Vec<_> = lines[1].split_whitespace().collect();
        assert_eq!(
            words,
            ["1.000", "-", "100%", "-", "-", "-", "-", "-", "-", "-", "-", "64.0M", "/mnt/a"]
        );
        assert_eq!(lines[3..], ["    GB/s   OPEN  FILE", "   0.500      3  /mnt/a/m"]);
        assert_eq!(lines[0].split("  MOUNT").next().map(str::len), lines[1].find("  /mnt"));
    }

    #[test]
    fn a_first_look_and_another_daemon_have_no_rates() {
        let now = Instant::now();
        let old = seen(now, 9, 9, json!({ "pid": 1 }));
        let new = || seen(now, 5, 5, json!({ "pid": 2 }));
        assert!(table(&[], &[new()])[1].trim_start().starts_with("- "));
        assert!(table(&[old], &[new()])[1].trim_start().starts_with("- "));
    }
}
