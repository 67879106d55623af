//! Text files that users name in options.

use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crate::error::shown_path;

/// Longest text that is read, in bytes.
const LEN_MAX: u64 = 256 << 20;

/// The absolute path of the regular file at `path`, and its bytes.
///
/// # Errors
/// One line with the path.
pub fn read_text(path: &Path) -> Result<(PathBuf, Vec<u8>), String> {
    let fail = |why: String| format!("{}: {why}", shown_path(path));
    let system = |e: std::io::Error| fail(e.to_string());
    // A FIFO of this name must not block.
    let nonblock = nix::libc::O_NONBLOCK;
    let file = std::fs::OpenOptions::new().read(true).custom_flags(nonblock).open(path);
    let file = file.map_err(system)?;
    let meta = file.metadata().map_err(system)?;
    if !meta.is_file() {
        return Err(fail("is not a regular file".to_owned()));
    }
    let mut text = Vec::new();
    file.take(LEN_MAX + 1).read_to_end(&mut text).map_err(system)?;
    if text.len() as u64 > LEN_MAX {
        return Err(fail(format!("has {} bytes, at most {LEN_MAX} are read", meta.len())));
    }
    Ok((std::path::absolute(path).map_err(system)?, text))
}
