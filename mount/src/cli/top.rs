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
use tensorfs::internal::error::{shown, shown_path};
use tensorfs::internal::mountinfo;
use tensorfs::internal::size::short_size;
use tensorfs::internal::store::disk_cache::DiskCacheStatus;
use tensorfs::internal::store::{EndpointStatus, RemoteStatus};

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

/// The columns of servers and of disk caches after the name, in the form of `COLUMNS`. The last
/// column names the mount.
const SERVER_COLUMNS: [(&str, usize, u8); 7] = [
    ("REQ/s", 6, 3),
    ("MB/s", 7, 1),
    ("FLIGHT", 3, 2),
    ("RETRIES", 3, 4),
    ("HEDGES", 3, 7),
    ("P50", 7, 6),
    ("P99", 7, 5),
];
const DISK_COLUMNS: [(&str, usize, u8); 4] =
    [("MB/s", 7, 1), ("HIT", 4, 2), ("STORED MB/s", 7, 3), ("DAMAGED", 3, 4)];

/// Minimum number of lines for servers and disk caches: an empty line, the titles, and one of them.
const REMOTE_MIN: usize = 3;

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
/// then the servers and disk caches of remote sources, then the busiest files. The page has at most
/// `width` columns and `height` lines. It says how many lines are missing.
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
    let rows = mounts.iter().map(|(old, seen, _)| row(*old, seen)).collect();
    let table = TextTable { columns: columns("MOUNT", &COLUMNS), rows };
    let mut lines = table.lines(width);
    let pairs: Vec<TwoLooks> =
        mounts.iter().map(|(old, new, _)| TwoLooks { old: *old, new }).collect();
    let mut of_remote = remote_lines(&pairs, width);
    // Servers and disk caches get at most a third of all lines, or none if that is too little.
    match height.map_or(usize::MAX, |height| height / 3) {
        0..REMOTE_MIN => of_remote.clear(),
        most => fit(&mut of_remote, Some(most)),
    }
    let room = height.map(|height| height - of_remote.len());
    // The files get the lines that the mounts do not need. They get at least a third of the lines
    // that both share, if a third is enough to show one file.
    let most = of_files.len().min(FILES_MAX + 2);
    let least = most.min(room.map_or(most, |room| room / 3));
    if least >= most.min(FILES_MIN) {
        fit(&mut lines, room.map(|room| room - least));
        let rest = room.map_or(usize::MAX, |room| room - lines.len());
        fit(&mut of_files, Some(rest.min(FILES_MAX + 2)));
    } else {
        fit(&mut lines, room);
        of_files.clear();
    }
    [lines, of_remote, of_files].concat()
}

/// The columns of a table: the name, and numbers by title, minimum width and rank.
fn columns(name: &'static str, numbers: &[(&'static str, usize, u8)]) -> Vec<Column> {
    let name = Column { title: name, min: 0, rank: 0, kind: ColumnKind::Name };
    let number = |&(title, min, rank)| Column { title, min, rank, kind: ColumnKind::Number };
    std::iter::once(name).chain(numbers.iter().map(number)).collect()
}

/// Two looks at a mount. `old` is `None` if the first look did not see the same daemon.
#[derive(Clone, Copy)]
struct TwoLooks<'a> {
    old: Option<&'a Seen>,
    new: &'a Seen,
}

/// The servers and the disk caches that the mounts read from: a table of each, below an empty line. Each process
/// counts for itself, so there is a row for each mount.
fn remote_lines(pairs: &[TwoLooks], width: Option<usize>) -> Vec<String> {
    let table = |name, numbers, rows: Vec<TableRow>| {
        let mount = Column { title: "MOUNT", min: 0, rank: 8, kind: ColumnKind::Name };
        let columns = [columns(name, numbers), vec![mount]].concat();
        let is_empty = rows.is_empty();
        let lines = TextTable { columns, rows }.lines(width);
        if is_empty { Vec::new() } else { [vec![String::new()], lines].concat() }
    };
    [
        table("SERVER", &SERVER_COLUMNS[..], pairs.iter().flat_map(server_rows).collect()),
        table("DISK CACHE", &DISK_COLUMNS[..], pairs.iter().flat_map(disk_rows).collect()),
    ]
    .concat()
}

fn remote(seen: &Seen) -> Option<&RemoteStatus> {
    seen.status.as_ref()?.service.remote.as_ref()
}

fn server_rows(pair: &TwoLooks) -> Vec<TableRow> {
    let row = |now: &EndpointStatus| {
        let before = pair.old.and_then(remote).map_or(&[][..], |remote| &remote.endpoints);
        let old = before.iter().find(|old| old.host == now.host).cloned().unwrap_or_default();
        TableRow::Cells(vec![
            shown(&now.host),
            tenths(pair.rate(old.requests, now.requests)),
            tenths(pair.rate(old.bytes, now.bytes).map(|rate| rate / 1e6)),
            now.requests_now.to_string(),
            now.retries.to_string(),
            now.hedges.to_string(),
            known_time(now.first_byte_us.p50),
            known_time(now.first_byte_us.p99),
            shown_path(&pair.new.target),
        ])
    };
    remote(pair.new).iter().flat_map(|remote| remote.endpoints.iter().map(row)).collect()
}

fn disk_rows(pair: &TwoLooks) -> Vec<TableRow> {
    let row = |now: &DiskCacheStatus| {
        let before = pair.old.and_then(remote).map_or(&[][..], |remote| &remote.disk_caches);
        let old = before.iter().find(|old| old.folder == now.folder).cloned().unwrap_or_default();
        let megabytes = |old, now| tenths(pair.rate(old, now).map(|rate| rate / 1e6));
        let grown = |old, now: u64| pair.old.map(|_| now.saturating_sub(old));
        TableRow::Cells(vec![
            shown(&now.folder),
            megabytes(old.found_bytes, now.found_bytes),
            percent(
                grown(old.found_bytes, now.found_bytes),
                grown(old.missed_bytes, now.missed_bytes),
            ),
            megabytes(old.stored_bytes, now.stored_bytes),
            now.damaged_blocks.to_string(),
            shown_path(&pair.new.target),
        ])
    };
    remote(pair.new).iter().flat_map(|remote| remote.disk_caches.iter().map(row)).collect()
}

impl TwoLooks<'_> {
    /// The growth of a number from `before` to `now`, per second between both looks.
    fn rate(&self, before: u64, now: u64) -> Option<f64> {
        let seconds = self.new.asked.saturating_duration_since(self.old?.asked).as_secs_f64();
        Some(now.saturating_sub(before) as f64 / seconds.max(0.001))
    }
}

/// A number of microseconds as text. The text for 0 is `-`, because 0 means that no time is known.
fn known_time(us: u64) -> String {
    if us > 0 { duration(us) } else { "-".to_owned() }
}

fn tenths(rate: Option<f64>) -> String {
    rate.map_or_else(|| "-".to_owned(), |rate| format!("{rate:.1}"))
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
    let time = |count: CounterOf| known_time(counters.map_or(0, count));
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
    TwoLooks { old, new }.rate(0, grown(old, new, count)?)
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
    let (earlier, pair) = (files(old), TwoLooks { old: Some(old), new });
    let busy = files(new).into_iter().filter_map(|file| {
        let before = earlier.iter().find(|old| old.path == file.path);
        let served_before = before.map_or(0, |old| old.bytes_served);
        let rate = pair.rate(served_before, file.bytes_served)?;
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
    use tensorfs::internal::counters::{CounterValues, Waits};
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

    /// A look at a mount that reads from a server with a disk cache, `served` bytes so far.
    fn remote_seen(asked: Instant, served: u64) -> Seen {
        let mut seen = seen(asked, served, 0, &[]);
        let endpoint = EndpointStatus {
            host: "bucket.example:443".to_owned(),
            requests: served / 1_000_000,
            bytes: served,
            requests_now: 3,
            retries: 2,
            hedges: 1,
            first_byte_us: Waits { p50: 512, p99: 8192, ..Waits::default() },
        };
        let disk = DiskCacheStatus {
            folder: "/cache".to_owned(),
            found_bytes: served * 3,
            missed_bytes: served,
            ..DiskCacheStatus::default()
        };
        let remote = RemoteStatus { endpoints: vec![endpoint], disk_caches: vec![disk] };
        seen.status.as_mut().unwrap().service.remote = Some(remote);
        seen
    }

    #[test]
    fn servers_and_disk_caches_of_remote_sources_have_a_table_each() {
        let start = Instant::now();
        let old = remote_seen(start, 1_000_000);
        let new = remote_seen(start + Duration::from_secs(2), 5_000_000);
        let lines = page(std::slice::from_ref(&old), std::slice::from_ref(&new), None, None);
        let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        let shown: Vec<String> = lines[2..].iter().map(|line| words(line)).collect();
        assert_eq!(
            shown,
            [
                "",
                "SERVER REQ/s MB/s FLIGHT RETRIES HEDGES P50 P99 MOUNT",
                "bucket.example:443 2.0 2.0 3 2 1 512 us 8.2 ms /mnt/a",
                "",
                "DISK CACHE MB/s HIT STORED MB/s DAMAGED MOUNT",
                "/cache 6.0 75% 0.0 0 /mnt/a",
            ]
        );
        let first = page(&[], std::slice::from_ref(&new), None, None);
        assert_eq!(words(&first[4]), "bucket.example:443 - - 3 2 1 512 us 8.2 ms /mnt/a");
        assert_eq!(words(&first[7]), "/cache - - - 0 /mnt/a");
        for height in 1..20 {
            let lines = page(&[], std::slice::from_ref(&new), Some(40), Some(height));
            assert!(lines.len() <= height, "{lines:#?}");
            assert_eq!(lines.iter().any(|line| line.starts_with("SERVER")), height >= 9);
        }
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
