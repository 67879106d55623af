//! `tensorfs top`: shows the running mounts in a table that is updated.

use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write as _};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use console::Term;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::termios::{LocalFlags, SetArg, Termios, tcgetattr, tcsetattr};
use tensorfs::internal::error::shown_path;
use tensorfs::internal::mountinfo;
use tensorfs::internal::size::short_size;

use super::args;
use super::columns::{Column, ColumnKind, TableRow, TextTable, end_of, percent};
use super::output::{Failure, Outcome, print_text, terminal_width};
use super::seen::{self, LIMIT, MountState, Seen};
use super::status::duration;
use crate::daemon::status::CounterOf;
use crate::serve::service::CacheStatus;

/// Maximum number of files in the list.
const FILES_MAX: usize = 10;

/// Minimum number of lines for the list of files: an empty line, the title, one file, and the
/// number of the other files.
const FILES_MIN: usize = 4;

/// The columns after the mount: title, minimum width and rank. If not all columns fit, the column
/// with the largest rank is left out first.
const COLUMNS: [(&str, usize, u8); 12] = [
    ("GB/s", 6, 1),
    ("SRC GB/s", 6, 5),
    ("HIT", 4, 6),
    ("WASTE", 4, 12),
    ("FLIGHT", 3, 4),
    ("QUEUED", 3, 9),
    ("STUCK", 3, 3),
    ("ERRORS", 3, 2),
    ("P50", 7, 10),
    ("P99", 7, 8),
    ("CACHE", 13, 11),
    ("RSS", 6, 7),
];

/// Keys that end the program: q, Ctrl-C and Ctrl-D.
const ENDING_KEYS: [u8; 4] = [b'q', b'Q', 3, 4];

pub(super) fn run(args: &args::TopArgs) -> Outcome {
    let failed = |e: io::Error| Failure::Failed(e.to_string());
    let dumb = std::env::var_os("TERM").is_none_or(|term| term.is_empty() || term == "dumb");
    if !args.once && !dumb && io::stdout().is_terminal() && io::stdin().is_terminal() {
        return live(args).map_err(failed);
    }
    let start = Instant::now();
    let before = look(args, short_limit(args.interval)).map_err(failed)?;
    std::thread::sleep(args.interval.saturating_sub(start.elapsed()));
    let now = look(args, LIMIT).map_err(failed)?;
    let mut text = page(&before, &now, terminal_width(), None).join("\n");
    text.push('\n');
    print_text(&text)
}

/// Time limit for the answer of a daemon in the live table. A daemon that does not answer must
/// delay neither the keys nor the other mounts.
fn short_limit(interval: Duration) -> Duration {
    interval.clamp(Duration::from_millis(250), Duration::from_secs(1))
}

/// The mounts. A mount that is in several places is listed only once.
fn look(args: &args::TopArgs, limit: Duration) -> io::Result<Vec<Seen>> {
    let mut mounts = mountinfo::ours()?;
    if !args.targets.is_empty() {
        let chosen = args.targets.iter().filter_map(|path| seen::find(&mounts, path)).collect();
        return Ok(seen::ask(chosen, limit, false));
    }
    mounts.sort_by_key(|mount| mount.minor);
    mounts.dedup_by_key(|mount| mount.minor);
    let mut seen = seen::look(mounts, limit, false);
    seen.sort_by(|a, b| a.target.cmp(&b.target));
    Ok(seen)
}

/// Shows tables until a key or a signal ends the program.
fn live(args: &args::TopArgs) -> io::Result<()> {
    let interval = args.interval;
    let ending = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGQUIT];
    let mut awaited = SigSet::from_iter(ending);
    // When the terminal changes its size, the last table is drawn again.
    awaited.add(Signal::SIGWINCH);
    awaited.thread_block()?;
    let signals = SignalFd::with_flags(&awaited, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?;
    let screen = Screen::open()?;
    let limit = short_limit(interval);
    let mut before = look(args, limit)?;
    screen.draw(&[], &before)?;
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
                screen.draw(&before, shown)?;
            }
        }
        if !now.is_empty() {
            before = now;
        }
        now = look(args, limit)?;
        screen.draw(&before, &now)?;
    }
}

/// Waits for a key or a signal until `end`. Returns false if a key or the end of the terminal ends
/// the program.
fn wait(signals: &SignalFd, end: Instant) -> io::Result<bool> {
    let stdin = io::stdin();
    let mut fds = [stdin.as_fd(), signals.as_fd()].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
    let rest = end.saturating_duration_since(Instant::now()).as_millis() + 1;
    poll(&mut fds, PollTimeout::try_from(rest).unwrap_or(PollTimeout::MAX))?;
    if !fds[0].any().unwrap_or(true) {
        return Ok(true);
    }
    let mut keys = [0; 64];
    let len = nix::unistd::read(&stdin, &mut keys)?;
    Ok(len > 0 && !keys[..len].iter().any(|key| ENDING_KEYS.contains(key)))
}

/// The terminal in live mode: alternate screen, no cursor, unbuffered keys. The drop restores it.
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

    fn draw(&self, before: &[Seen], now: &[Seen]) -> io::Result<()> {
        let (rows, columns) = Term::stdout().size();
        let lines = page(before, now, Some(columns.into()), Some(rows.into()));
        let mut frame = String::from("\x1b[H");
        for (row, line) in lines.iter().take(rows.into()).enumerate() {
            let start = if row == 0 { "" } else { "\r\n" };
            let _ = write!(frame, "{start}{line}\x1b[K");
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

/// The activity between two looks: one line for each mount of the second look, the busiest first,
/// then the busiest files. The page has at most `width` columns and `height` lines. It says how many
/// lines are missing.
fn page(before: &[Seen], now: &[Seen], width: Option<usize>, height: Option<usize>) -> Vec<String> {
    if now.is_empty() {
        return vec!["no tensorfs mounts".to_owned()];
    }
    let mut mounts: Vec<_> = now
        .iter()
        .map(|seen| (before.iter().find(|old| is_same(old, seen)), seen))
        .map(|(old, seen)| (old, seen, per_second(old, seen, |c| c.bytes_served)))
        .collect();
    // Mounts with trouble come first. The other mounts are sorted by speed, as in top(1).
    let is_fine = |seen: &Seen| !matches!(seen.state, MountState::Dead | MountState::NoAnswer);
    mounts.sort_by(|(_, a, a_rate), (_, b, b_rate)| {
        let rate = |rate: &Option<f64>| rate.unwrap_or(-1.0);
        let order = is_fine(a).cmp(&is_fine(b)).then(rate(b_rate).total_cmp(&rate(a_rate)));
        order.then_with(|| a.target.cmp(&b.target))
    });
    let mut files: Vec<File> =
        mounts.iter().flat_map(|(old, seen, _)| busy_files(*old, seen)).collect();
    files.sort_by(|a, b| b.rate.total_cmp(&a.rate).then_with(|| a.path.cmp(&b.path)));
    let mut of_files = Vec::new();
    if !files.is_empty() {
        of_files = vec![String::new(), "    GB/s   OPEN  FILE".to_owned()];
        for File { rate, open, path } in &files {
            let start = format!("{:>8} {open:>6}  ", gigabytes(Some(*rate)));
            let room = width.map_or(usize::MAX, |width| width.saturating_sub(start.len()));
            of_files.push(format!("{start}{}", end_of(path, room)));
        }
    }
    let name = Column { title: "MOUNT", min: 0, rank: 0, kind: ColumnKind::Name };
    let others =
        COLUMNS.map(|(title, min, rank)| Column { title, min, rank, kind: ColumnKind::Number });
    let rows = mounts.iter().map(|(old, seen, _)| row(*old, seen)).collect();
    let table = TextTable { columns: [vec![name], others.to_vec()].concat(), rows };
    let mut lines = table.lines(width);
    // The files get the lines that the mounts do not need, but at least a third of all lines if
    // that is enough for one file.
    let most = of_files.len().min(FILES_MAX + 2);
    let least = most.min(height.map_or(most, |height| height / 3));
    if least >= most.min(FILES_MIN) {
        fit(&mut lines, height.map(|height| height - least));
        let rest = height.map_or(usize::MAX, |height| height - lines.len());
        fit(&mut of_files, Some(rest.min(FILES_MAX + 2)));
        lines.extend(of_files);
    } else {
        fit(&mut lines, height);
    }
    lines
}

/// Cuts `lines` to `height`. If this leaves out lines, the last line gives the number of the lines
/// that were left out.
fn fit(lines: &mut Vec<String>, height: Option<usize>) {
    let Some(height) = height.filter(|height| lines.len() > *height) else { return };
    let shown = height.saturating_sub(1);
    let more = lines.len() - shown;
    lines.truncate(shown);
    lines.push(format!("{more} more"));
}

/// Whether both looks saw the same daemon.
fn is_same(old: &Seen, new: &Seen) -> bool {
    old.minor == new.minor && old.pid == new.pid
}

fn row(old: Option<&Seen>, new: &Seen) -> TableRow {
    let target = shown_path(&new.target);
    if !matches!(new.state, MountState::Running | MountState::Detached) {
        return TableRow::Remark(target, new.state.text().to_owned());
    }
    let counters = new.counters();
    let number =
        |count: CounterOf| counters.map_or_else(|| "-".to_owned(), |c| count(c).to_string());
    let time = |count: CounterOf| {
        counters.map(count).filter(|us| *us > 0).map_or_else(|| "-".to_owned(), duration)
    };
    let grown = |count| grown(old, new, count);
    let rate = |count| gigabytes(per_second(old, new, count));
    let cache = new.status.as_ref().map(|status| {
        let CacheStatus { used, budget } = status.service.cache;
        format!("{}/{}", short_size(used), short_size(budget))
    });
    let resident = new.memory.and_then(|memory| memory.rss).map(short_size);
    let mark = if new.state == MountState::Detached { " (detached)" } else { "" };
    TableRow::Cells(vec![
        format!("{target}{mark}"),
        rate(|c| c.bytes_served),
        rate(|c| c.source_bytes),
        percent(grown(|c| c.hits), grown(|c| c.misses)),
        percent(grown(|c| c.prefetch_wasted_bytes), grown(|c| c.prefetch_used_bytes)),
        number(|c| c.source_reads_now),
        number(|c| c.reads_queued_now),
        number(|c| c.source_stuck_now),
        number(|c| c.read_errors),
        time(|c| c.wait_us.p50),
        time(|c| c.wait_us.p99),
        cache.unwrap_or_else(|| "-".to_owned()),
        resident.unwrap_or_else(|| "-".to_owned()),
    ])
}

/// The growth of a counter.
fn grown(old: Option<&Seen>, new: &Seen, count: CounterOf) -> Option<u64> {
    Some(count(new.counters()?).saturating_sub(count(old?.counters()?)))
}

fn per_second(old: Option<&Seen>, new: &Seen, count: CounterOf) -> Option<f64> {
    let seconds = new.asked.saturating_duration_since(old?.asked).as_secs_f64();
    Some(grown(old, new, count)? as f64 / seconds.max(0.001))
}

/// A file that was read between two looks.
struct File {
    /// Bytes per second.
    rate: f64,
    open: usize,
    path: String,
}

/// The files of a mount that were read between two looks.
fn busy_files(old: Option<&Seen>, new: &Seen) -> Vec<File> {
    let files = |seen: &'_ Seen| seen.status.clone().unwrap_or_default().service.files;
    let Some(old) = old else { return Vec::new() };
    let earlier = files(old);
    let seconds = new.asked.saturating_duration_since(old.asked).as_secs_f64().max(0.001);
    let busy = files(new).into_iter().filter_map(|file| {
        let before = earlier.iter().find(|old| old.path == file.path);
        let served_before = before.map_or(0, |old| old.bytes_served);
        let rate = file.bytes_served.saturating_sub(served_before) as f64 / seconds;
        let path = shown_path(&new.target.join(file.path.trim_start_matches('/')));
        (rate > 0.0).then_some(File { rate, open: file.open, path })
    });
    busy.collect()
}

fn gigabytes(rate: Option<f64>) -> String {
    rate.map_or_else(|| "-".to_owned(), |rate| format!("{:.3}", rate / 1e9))
}

#[cfg(test)]
mod tests {
    use tensorfs::internal::counters::CounterValues;
    use tensorfs::internal::mountinfo::Mount;

    use super::*;
    use crate::cli::seen::Memory;
    use crate::daemon::status::{Status, Told};
    use crate::serve::service::{FileStatus, ServiceStatus};

    fn seen(asked: Instant, served: u64, hits: u64, files: &[&str]) -> Seen {
        let counters =
            CounterValues { bytes_served: served, hits, misses: 1, ..CounterValues::default() };
        let file = |path: &&str| FileStatus {
            path: (*path).to_owned(),
            open: 3,
            bytes_served: served / 2,
        };
        let files = files.iter().map(file).collect();
        let service = ServiceStatus { counters, files, ..ServiceStatus::default() };
        let told = Told { facts: Status { service, ..Status::default() }, ..Told::default() };
        let mount = Mount { minor: 51, target: "/mnt/a".into(), ..Mount::default() };
        Seen { asked, ..Seen::told(mount, MountState::Running, 0, told) }
    }

    #[test]
    fn the_table_shows_what_happened_between_two_looks() {
        let start = Instant::now();
        let old = seen(start, 1_000_000_000, 5, &["/m"]);
        let mut new = seen(start + Duration::from_secs(2), 3_000_000_000, 9, &["/m"]);
        new.memory = Some(Memory { rss: Some(64 << 20), peak: None });
        let lines = page(&[old], &[new], None, None);
        let words: Vec<_> = lines[1].split_whitespace().collect();
        assert_eq!(
            words,
            ["/mnt/a", "1.000", "0.000", "100%", "-", "0", "0", "0", "0", "-", "-", "0/0", "64M"]
        );
        assert_eq!(lines[3..], ["    GB/s   OPEN  FILE", "   0.500      3  /mnt/a/m"]);
    }

    #[test]
    fn a_first_look_and_another_daemon_have_no_rates() {
        let now = Instant::now();
        let old = Seen { pid: Some(1), ..seen(now, 9, 9, &[]) };
        let new = || Seen { pid: Some(2), ..seen(now, 5, 5, &[]) };
        let rate = |before: &[Seen]| {
            let lines = page(before, &[new()], None, None);
            lines[1].split_whitespace().nth(1).map(str::to_owned)
        };
        assert_eq!(rate(&[]).as_deref(), Some("-"));
        assert_eq!(rate(&[old]).as_deref(), Some("-"));
    }

    #[test]
    fn a_page_fits_the_terminal_names_mounts_and_counts_what_is_left_out() {
        let start = Instant::now();
        let mounts = |served: fn(u32) -> u64, at: Instant| -> Vec<Seen> {
            let mount = |number: u32| {
                let mut seen = seen(at, served(number), 0, &["f0", "f1", "f2"]);
                seen.minor = number;
                seen.target = format!("/srv/mounts/of/the/node/{number}").into();
                seen
            };
            (0..30).map(mount).collect()
        };
        let old = mounts(|_| 0, start);
        let mut new =
            mounts(|number| u64::from(number) * 1_000_000_000, start + Duration::from_secs(1));
        new[7].state = MountState::Dead;
        for (width, height) in [(80, 24), (40, 10), (200, 50), (20, 4), (1, 1)] {
            let lines = page(&old, &new, Some(width), Some(height));
            assert!(lines.len() <= height, "{lines:#?}");
            assert!(lines.iter().all(|line| line.chars().count() <= width.max(8)), "{lines:#?}");
            if height < 10 {
                continue;
            }
            assert!(lines[0].starts_with("MOUNT ") && lines[0].contains("GB/s"), "{lines:#?}");
            assert!(lines[1].contains("/7 ") && lines[1].contains("dead: its"), "{lines:#?}");
            // The busiest mount comes first.
            assert!(lines[2].contains("/29 ") && lines[2].contains("29.000"), "{lines:#?}");
            assert!(lines[3].contains("/28 "), "{lines:#?}");
            let mounts = lines.iter().position(String::is_empty).unwrap_or(lines.len());
            let more = lines[mounts - 1].strip_suffix(" more").and_then(|more| more.parse().ok());
            let shown = mounts - 1 - usize::from(more.is_some());
            assert_eq!(shown + more.unwrap_or(0), 30, "{lines:#?}");
            let has_files = lines.iter().any(|line| line.ends_with("/29/f0"));
            assert_eq!(has_files, height > 10, "{lines:#?}");
        }
    }
}
