//! Where log lines go: standard error while somebody watches, then the system log or a file,
//! never nowhere.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use tracing::{Level, Metadata};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};

/// Environment variable with tracing directives.
const FILTER: &str = "TENSORFS_LOG";

/// The socket of the system log; journald listens there too.
const SYSLOG: &str = "/dev/log";

/// Facility of our lines in the system log: daemon.
const FACILITY: u32 = 3 << 3;

enum Target {
    Stderr,
    Syslog(UnixDatagram),
    File(File),
}

static TARGET: Mutex<Target> = Mutex::new(Target::Stderr);

/// Starts logging to standard error: warnings, more with each `verbose`, or what
/// `TENSORFS_LOG` says.
pub(crate) fn start(verbose: u8) {
    let default = match verbose {
        // Requests that only other file systems answer are no reason to warn.
        0 => "warn,fuser=error",
        1 => "info,fuser=warn",
        2 => "debug",
        _ => "trace",
    };
    let filter = EnvFilter::try_from_env(FILTER).unwrap_or_else(|_| EnvFilter::new(default));
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_target(false)
        .with_ansi(false)
        .without_time()
        .with_writer(Lines);
    // A second call, as tests make, changes nothing.
    let _ = subscriber.try_init();
}

/// Sends all further lines to `file`.
pub(crate) fn to_file(file: &Path) -> io::Result<()> {
    let file = File::options().append(true).create(true).open(file)?;
    *TARGET.lock().unwrap_or_else(PoisonError::into_inner) = Target::File(file);
    Ok(())
}

/// Sends all further lines to the system log or, where there is none, to a file of ours; that
/// file's path is returned.
pub(crate) fn to_system_log() -> io::Result<Option<PathBuf>> {
    if let Ok(socket) = connect() {
        *TARGET.lock().unwrap_or_else(PoisonError::into_inner) = Target::Syslog(socket);
        return Ok(None);
    }
    let path = fallback_file();
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    to_file(&path)?;
    Ok(Some(path))
}

/// A connection to the system log that never waits: a log that is stuck must not stop reads.
fn connect() -> io::Result<UnixDatagram> {
    let socket = UnixDatagram::unbound()?;
    socket.connect(SYSLOG)?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

fn fallback_file() -> PathBuf {
    if nix::unistd::geteuid().is_root() {
        return "/var/log/tensorfs.log".into();
    }
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".local/state"));
    let state = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from).or_else(home);
    state.unwrap_or_else(std::env::temp_dir).join("tensorfs").join("tensorfs.log")
}

/// Makes writers that hand over one line each.
struct Lines;

impl<'a> MakeWriter<'a> for Lines {
    type Writer = Line;

    fn make_writer(&'a self) -> Line {
        Line { text: Vec::new(), severity: severity(Level::INFO) }
    }

    fn make_writer_for(&'a self, meta: &Metadata<'_>) -> Line {
        Line { text: Vec::new(), severity: severity(*meta.level()) }
    }
}

/// The severity of a level, as syslog and the journal count.
fn severity(level: Level) -> u32 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        _ => 7,
    }
}

/// One line, sent when it is dropped.
struct Line {
    text: Vec<u8>,
    severity: u32,
}

impl Write for Line {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.text.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        let text = String::from_utf8_lossy(&self.text);
        let text = text.trim();
        // Nothing can be done about a log that takes no lines.
        let _ = match &mut *TARGET.lock().unwrap_or_else(PoisonError::into_inner) {
            // The journal reads the severity off the line.
            Target::Stderr if std::env::var_os("JOURNAL_STREAM").is_some() => {
                writeln!(io::stderr(), "<{}>{text}", self.severity)
            }
            Target::Stderr => writeln!(io::stderr(), "tensorfs: {text}"),
            Target::File(file) => {
                let pid = std::process::id();
                let line = format!("{} tensorfs[{pid}]: {text}\n", now());
                file.write_all(line.as_bytes())
            }
            Target::Syslog(socket) => {
                let pid = std::process::id();
                let line = format!("<{}>tensorfs[{pid}]: {text}", FACILITY | self.severity);
                // A system log that was started anew listens on a new socket.
                socket.send(line.as_bytes()).map(|_| ()).or_else(|_| {
                    *socket = connect()?;
                    socket.send(line.as_bytes()).map(|_| ())
                })
            }
        };
    }
}

fn now() -> String {
    let mut text = String::new();
    let _ = SystemTime.format_time(&mut Writer::new(&mut text));
    text
}
