//! Sources of the key or the passphrase of encrypted files: a file or a command.
//!
//! The secret is read at each start, and also when a new process takes over a mount. So it never has to be stored.

use std::ffi::OsString;
use std::io::{ErrorKind, Read};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::libc;
use nix::poll::{PollFd, PollFlags, poll};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use zeroize::Zeroizing;

use crate::error::{expect_local_path, shown_path};
use crate::format::tensorizer::keys::Secret;

/// Maximum length in bytes of a key file, of a passphrase file and of the output of a command.
const LEN_MAX: usize = 64 << 10;

/// Time after which a running command is killed, and a read of a pipe fails.
const LIMIT: Duration = Duration::from_secs(60);

/// Interval of polls of a command or a pipe. The second constant has the same value in milliseconds.
const STEP: Duration = Duration::from_millis(5);
const STEP_MS: u8 = 5;

/// The source of a secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SecretOrigin {
    /// A file with a key.
    KeyFile(PathBuf),
    /// A file with a passphrase. A line break at its end is not part of the passphrase.
    PassphraseFile(PathBuf),
    /// A command for `sh` that writes a key to its standard output.
    KeyCommand(OsString),
}

impl SecretOrigin {
    /// Reads the secret.
    ///
    /// # Errors
    /// A message of one line with the file or the command.
    pub fn read(&self) -> Result<Secret, String> {
        match self {
            SecretOrigin::KeyFile(path) => {
                Secret::parse_key(&read_file(path, LIMIT)?).map_err(|why| in_file(path, &why))
            }
            SecretOrigin::PassphraseFile(path) => {
                let mut text = read_file(path, LIMIT)?;
                if text.ends_with(b"\n") {
                    text.pop();
                    if text.ends_with(b"\r") {
                        text.pop();
                    }
                }
                Secret::passphrase(text).map_err(|why| in_file(path, &why))
            }
            SecretOrigin::KeyCommand(command) => {
                let output = run(command, LIMIT).map_err(|why| format!("key-command: {why}"))?;
                Secret::parse_key(&output).map_err(|why| format!("key-command: {why}"))
            }
        }
    }

    /// The secret that an environment variable names, for all files that need one. The variables are
    /// `TENSORFS_KEY_FILE`, `TENSORFS_PASSPHRASE_FILE` and `TENSORFS_KEY_COMMAND`. An empty variable counts as unset.
    ///
    /// # Errors
    /// A message of one line, if two of the variables are set or `read` fails.
    pub fn of_environment() -> Result<Option<Secret>, String> {
        let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
        let mut named = [
            set("TENSORFS_KEY_FILE").map(|path| SecretOrigin::KeyFile(path.into())),
            set("TENSORFS_PASSPHRASE_FILE").map(|path| SecretOrigin::PassphraseFile(path.into())),
            set("TENSORFS_KEY_COMMAND").map(SecretOrigin::KeyCommand),
        ]
        .into_iter()
        .flatten();
        match (named.next(), named.next()) {
            (None, _) => Ok(None),
            (Some(origin), None) => origin.read().map(|secret| Some(secret.optional())),
            (Some(_), Some(_)) => {
                let why = "TENSORFS_KEY_FILE, TENSORFS_PASSPHRASE_FILE and TENSORFS_KEY_COMMAND \
                           exclude each other: set one";
                Err(why.to_owned())
            }
        }
    }
}

fn in_file(path: &Path, why: &str) -> String {
    format!("{}: {why}", shown_path(path))
}

/// All bytes of a file, which may be a pipe. Waits up to `limit` for the writer of a FIFO.
fn read_file(path: &Path, limit: Duration) -> Result<Zeroizing<Vec<u8>>, String> {
    expect_local_path(path)?;
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
    let mut file = std::fs::OpenOptions::new()
        .read(true)
        .custom_flags(flags)
        .open(path)
        .map_err(|e| in_file(path, &e.to_string()))?;
    let mut output = Output::new();
    let since = Instant::now();
    loop {
        // Before the first writer has opened the FIFO, a read would report the end of the file. So poll(2) is called
        // first, which reports nothing until then.
        let waited = poll(&mut [PollFd::new(file.as_fd(), PollFlags::POLLIN)], STEP_MS);
        let read = match waited {
            Ok(0) | Err(Errno::EINTR) => Ok(Arrived::Nothing),
            Ok(_) => output.read(&mut file),
            Err(e) => Err(e.desc().to_owned()),
        };
        match read.map_err(|why| in_file(path, &why))? {
            Arrived::End => return Ok(output.into_bytes()),
            Arrived::Bytes => {}
            Arrived::Nothing if since.elapsed() < limit => {}
            Arrived::Nothing => {
                let why = format!("its writer did not come, or did not end, within {limit:?}");
                return Err(in_file(path, &why));
            }
        }
    }
}

/// The bytes that one call of `Output::read` received.
enum Arrived {
    Bytes,
    /// No bytes have arrived yet.
    Nothing,
    End,
}

/// Received bytes. The memory is allocated once, so no copy of the bytes is left behind by a reallocation.
struct Output {
    bytes: Zeroizing<Vec<u8>>,
    len: usize,
}

impl Output {
    fn new() -> Output {
        Output { bytes: Zeroizing::new(vec![0; LEN_MAX + 1]), len: 0 }
    }

    /// Reads once.
    ///
    /// # Errors
    /// The second part of a message, after the name of the file or the command: the read failed, or there are too many
    /// bytes.
    fn read(&mut self, from: &mut impl Read) -> Result<Arrived, String> {
        match from.read(&mut self.bytes[self.len..]) {
            Ok(0) => return Ok(Arrived::End),
            Ok(read) => self.len += read,
            Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(Arrived::Nothing),
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e.to_string()),
        }
        match self.len > LEN_MAX {
            true => Err(format!("has more than {LEN_MAX} bytes, a key or a passphrase has fewer")),
            false => Ok(Arrived::Bytes),
        }
    }

    fn into_bytes(mut self) -> Zeroizing<Vec<u8>> {
        self.bytes.truncate(self.len);
        self.bytes
    }
}

/// A shell in a process group of its own. If it is dropped while the shell runs, the group is killed.
struct Shell {
    child: Child,
    ended: bool,
}

impl Drop for Shell {
    fn drop(&mut self) {
        if !self.ended {
            // The exit status of the shell was not read yet, so no other process group can have its number.
            let _ = killpg(Pid::from_raw(self.child.id().cast_signed()), Signal::SIGKILL);
            let _ = self.child.wait();
        }
    }
}

/// The output of a command up to the exit of its shell. Processes that the shell leaves behind may keep the pipe open.
fn run(command: &OsString, limit: Duration) -> Result<Zeroizing<Vec<u8>>, String> {
    let mut shell = Command::new("/bin/sh");
    shell.arg("-c").arg(command).stdin(Stdio::null()).stdout(Stdio::piped()).process_group(0);
    let child = shell.spawn().map_err(|e| format!("cannot start /bin/sh: {e}"))?;
    let mut shell = Shell { child, ended: false };
    let mut pipe = shell.child.stdout.take().ok_or("the command has no output")?;
    fcntl(&pipe, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).map_err(|e| e.desc().to_owned())?;
    let mut output = Output::new();
    let since = Instant::now();
    loop {
        let status =
            shell.child.try_wait().map_err(|e| format!("the command cannot be waited for: {e}"))?;
        shell.ended = status.is_some();
        if let Some(status) = status.filter(|status| !status.success()) {
            return Err(format!("the command failed: {status}"));
        }
        // This loop ends, because `read` fails once there are more than `LEN_MAX` bytes.
        while let Arrived::Bytes = output.read(&mut pipe)? {}
        if shell.ended {
            return Ok(output.into_bytes());
        }
        if since.elapsed() > limit {
            return Err(format!(
                "the command took more than {limit:?}; it has no terminal to ask at"
            ));
        }
        sleep(STEP);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use nix::sys::stat::Mode;
    use nix::unistd::mkfifo;

    use super::*;

    const HEX: &str = "59ba374069e46091b7e3e84e249dbc904961ff18d6d6c385240b84d2a2966de2";

    fn key() -> Secret {
        Secret::parse_key(HEX.as_bytes()).expect("64 digits are a key")
    }

    #[test]
    fn a_key_file_has_bytes_or_digits_and_a_passphrase_file_a_line() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("secret");
        let read = |bytes: &[u8], origin: fn(PathBuf) -> SecretOrigin| {
            std::fs::write(&path, bytes).expect("it is written");
            origin(path.clone()).read()
        };
        let raw: Vec<u8> = (0..32).collect();
        assert!(read(&raw, SecretOrigin::KeyFile).is_ok());
        assert_eq!(read(HEX.as_bytes(), SecretOrigin::KeyFile), Ok(key()));
        assert_eq!(read(format!("{HEX}\n").as_bytes(), SecretOrigin::KeyFile), Ok(key()));
        for wrong in [&b""[..], &raw[1..], &HEX.as_bytes()[1..], &[b'x'; 64]] {
            let error = read(wrong, SecretOrigin::KeyFile).expect_err("it is no key");
            assert!(error.contains("a key has 32 bytes"), "{error}");
            assert!(error.contains("secret: "), "{error}");
        }
        let line = |bytes: &[u8]| read(bytes, SecretOrigin::PassphraseFile);
        assert_eq!(line(b"a b"), Secret::passphrase(b"a b".to_vec().into()));
        assert_eq!(line(b"a b\n"), line(b"a b"));
        assert_eq!(line(b"a b\r\n"), line(b"a b"));
        assert_ne!(line(b"a b\n\n"), line(b"a b"));
        assert!(line(b"\n").is_err());
        assert!(line(&vec![b'a'; LEN_MAX + 1]).is_err());
        assert!(SecretOrigin::KeyFile(folder.path().join("none")).read().is_err());
    }

    #[test]
    fn a_command_writes_a_key_or_fails() {
        let run = |command: &str| SecretOrigin::KeyCommand(command.into()).read();
        assert_eq!(run(&format!("echo {HEX}")), Ok(key()));
        for (command, why) in
            [("exit 3", "exit status: 3"), ("true", "0 bytes were found"), ("echo x", "2 bytes")]
        {
            let error = run(command).expect_err("there is no key");
            assert!(error.starts_with("key-command: ") && error.contains(why), "{error}");
        }
        let error = run("head -c 1000000 /dev/zero").expect_err("it is too long");
        assert!(error.contains("more than 65536 bytes"), "{error}");
    }

    /// A folder with a FIFO.
    fn fifo() -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("fifo");
        mkfifo(&path, Mode::S_IRWXU).expect("it is made");
        (folder, path)
    }

    #[test]
    fn a_process_that_the_command_leaves_behind_is_not_waited_for() {
        let (_folder, fifo) = fifo();
        let command = format!("cat '{}' & echo {HEX}", fifo.display());
        assert_eq!(SecretOrigin::KeyCommand(command.into()).read(), Ok(key()));
        // The process that was left behind ends when this writer has opened and closed the FIFO.
        drop(std::fs::OpenOptions::new().write(true).open(fifo).expect("it still reads"));
    }

    #[test]
    fn a_command_past_its_limit_is_killed_with_its_processes() {
        let (_folder, fifo) = fifo();
        let mut opening = std::fs::OpenOptions::new();
        let opened = opening.read(true).custom_flags(libc::O_NONBLOCK).open(&fifo);
        let command = format!("exec 3>'{}'; (sleep 20; echo late >&3) & wait", fifo.display());
        let error = run(&command.into(), Duration::from_millis(500)).expect_err("it takes longer");
        assert!(error.contains("took more than 500ms"), "{error}");
        let mut reader = opened.expect("it is opened");
        fcntl(&reader, FcntlArg::F_SETFL(OFlag::empty())).expect("reads wait");
        let mut written = String::new();
        reader.read_to_string(&mut written).expect("its writers have ended");
        assert_eq!(written, "", "no process of the command is left");
    }

    #[test]
    fn a_fifo_is_read_to_the_end_of_its_writer_and_given_up_without_one() {
        let (_folder, fifo) = fifo();
        let error = read_file(&fifo, Duration::from_millis(100)).expect_err("nobody writes");
        assert!(error.contains("fifo: its writer did not come"), "{error}");
        let path = fifo.clone();
        let writer = std::thread::spawn(move || {
            let mut file = std::fs::OpenOptions::new().write(true).open(path).expect("it is read");
            for half in [&HEX[..20], &HEX[20..]] {
                file.write_all(half.as_bytes()).expect("it is written");
                sleep(STEP * 4);
            }
        });
        assert_eq!(SecretOrigin::KeyFile(fifo).read(), Ok(key()));
        writer.join().expect("it has written all");
    }
}
