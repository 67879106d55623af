//! Where the key or the passphrase of encrypted files comes from: a file, or a command.
//!
//! It is read at each start, also when one process takes a mount over from another, so that nothing
//! writes it down.

use std::ffi::OsString;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use zeroize::Zeroizing;

use crate::error::shown_path;
use crate::format::tensorizer::keys::Secret;

/// Longest key file, passphrase file or output of a command, in bytes.
const LEN_MAX: usize = 64 << 10;

/// Time after which a command that has not ended is killed.
const COMMAND_TIME: Duration = Duration::from_secs(60);

/// Time between two looks at a command that runs.
const COMMAND_STEP: Duration = Duration::from_millis(5);

/// Where a secret comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SecretOrigin {
    /// A file with a key.
    KeyFile(PathBuf),
    /// A file with a passphrase. A line end after it does not belong to it.
    PassphraseFile(PathBuf),
    /// A command for `sh`, which writes a key to its standard output.
    KeyCommand(OsString),
}

impl SecretOrigin {
    /// Reads the secret.
    ///
    /// # Errors
    /// One line with the file or the command.
    pub fn read(&self) -> Result<Secret, String> {
        match self {
            SecretOrigin::KeyFile(path) => {
                Secret::key(&read_file(path)?).map_err(|why| in_file(path, &why))
            }
            SecretOrigin::PassphraseFile(path) => {
                let mut text = read_file(path)?;
                if text.ends_with(b"\n") {
                    text.pop();
                    if text.ends_with(b"\r") {
                        text.pop();
                    }
                }
                Secret::passphrase(text).map_err(|why| in_file(path, &why))
            }
            SecretOrigin::KeyCommand(command) => {
                let output = run(command).map_err(|why| format!("key-command: {why}"))?;
                Secret::key(&output).map_err(|why| format!("key-command: {why}"))
            }
        }
    }

    /// The secret that the environment names, for all files that need one: by `TENSORFS_KEY_FILE`,
    /// `TENSORFS_PASSPHRASE_FILE` or `TENSORFS_KEY_COMMAND`. An empty variable counts as unset.
    ///
    /// # Errors
    /// Two of them are set, or the error of `read`, in one line.
    pub fn of_environment() -> Result<Option<Secret>, String> {
        let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
        let named = [
            set("TENSORFS_KEY_FILE").map(|path| SecretOrigin::KeyFile(path.into())),
            set("TENSORFS_PASSPHRASE_FILE").map(|path| SecretOrigin::PassphraseFile(path.into())),
            set("TENSORFS_KEY_COMMAND").map(SecretOrigin::KeyCommand),
        ];
        let mut named = named.into_iter().flatten();
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

/// All bytes of a file, which may be a pipe.
fn read_file(path: &Path) -> Result<Zeroizing<Vec<u8>>, String> {
    let file = std::fs::File::open(path).map_err(|e| in_file(path, &e.to_string()))?;
    read_all(file).map_err(|why| in_file(path, &why))
}

/// All bytes of `from`, in memory that is allocated once, so that no copy of them is left behind.
fn read_all(from: impl Read) -> Result<Zeroizing<Vec<u8>>, String> {
    let mut bytes = Zeroizing::new(Vec::with_capacity(LEN_MAX + 1));
    from.take(LEN_MAX as u64 + 1).read_to_end(&mut bytes).map_err(|e| e.to_string())?;
    if bytes.len() > LEN_MAX {
        return Err(format!("has more than {LEN_MAX} bytes, a key or a passphrase has fewer"));
    }
    Ok(bytes)
}

/// The output of a command.
fn run(command: &OsString) -> Result<Zeroizing<Vec<u8>>, String> {
    let mut shell = Command::new("/bin/sh");
    shell.arg("-c").arg(command).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = shell.spawn().map_err(|e| format!("cannot start /bin/sh: {e}"))?;
    let output = child.stdout.take();
    // The pipe takes more than the longest output, but for one that is refused.
    let reader = std::thread::Builder::new()
        .name("tensorfs-key".to_owned())
        .spawn(move || output.map_or_else(|| Ok(Zeroizing::default()), read_all));
    let reader = match reader {
        Ok(reader) => reader,
        Err(e) => {
            let _ = child.kill();
            let _ = child.wait();
            return Err(format!("cannot start a thread: {e}"));
        }
    };
    ended(&mut child)?;
    // A process that the command left behind may hold the pipe.
    let since = Instant::now();
    while !reader.is_finished() {
        if since.elapsed() > COMMAND_TIME {
            return Err("another process holds its output".to_owned());
        }
        sleep(COMMAND_STEP);
    }
    reader.join().unwrap_or_else(|_| Err("its output cannot be read".to_owned()))
}

/// Waits for the end of a command, which must succeed.
fn ended(child: &mut Child) -> Result<(), String> {
    let since = Instant::now();
    loop {
        match child.try_wait() {
            Ok(Some(status)) if status.success() => return Ok(()),
            Ok(Some(status)) => return Err(format!("the command failed: {status}")),
            Ok(None) if since.elapsed() < COMMAND_TIME => sleep(COMMAND_STEP),
            Ok(None) => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(format!("the command took more than {} s", COMMAND_TIME.as_secs()));
            }
            Err(e) => return Err(format!("the command cannot be waited for: {e}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEX: &str = "59ba374069e46091b7e3e84e249dbc904961ff18d6d6c385240b84d2a2966de2";

    fn key() -> Secret {
        Secret::key(HEX.as_bytes()).expect("64 digits are a key")
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
        assert!(!error.is_empty());
    }
}
