//! Claims on blocks of a cached object, so that several threads, processes and containers fetch each block only
//! once. A claim is a lock on a byte range of the block map. The kernel releases the lock when the process of
//! its holder ends.
//!
//! Claims only save requests. They are not needed for correct bytes, because two holders of the same block would write
//! the same bytes.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;

/// The result of an attempt to claim blocks.
pub(super) enum Claim {
    /// The blocks are claimed until the `HeldClaim` is dropped. `None` if the file system does not support
    /// these locks.
    Mine(#[allow(dead_code, reason = "its end is the end of the claim")] Option<HeldClaim>),
    /// Another reader has a claim on this range, which overlaps the wanted one.
    Busy(Range<u64>),
}

/// A claim, which ends when it is dropped.
#[derive(Debug)]
pub(super) struct HeldClaim {
    file: File,
    range: Range<u64>,
}

impl Drop for HeldClaim {
    fn drop(&mut self) {
        // The lock belongs to the open file description. A child made by fork(2) shares that description, so
        // without an explicit unlock the lock would last until the child ends.
        let unlocked = lock_of(&self.range, libc::F_UNLCK);
        let _ = fcntl(&self.file, FcntlArg::F_OFD_SETLK(&unlocked));
    }
}

/// Tries to claim the byte range `range` of the map at `path`. Every claim on the same blocks uses the same byte range.
/// Never waits.
pub(super) fn claim(path: &Path, range: &Range<u64>) -> Claim {
    match try_claim(path, range) {
        Ok(claim) => claim,
        // Without locks, two readers may fetch the same block.
        Err(_) => Claim::Mine(None),
    }
}

fn try_claim(path: &Path, range: &Range<u64>) -> io::Result<Claim> {
    // A lock belongs to an open file description, so each claim opens the file anew.
    let mut options = std::fs::OpenOptions::new();
    options.read(true).write(true).custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC);
    let file = options.open(path)?;
    let mut lock = lock_of(range, libc::F_WRLCK);
    match fcntl(&file, FcntlArg::F_OFD_SETLK(&lock)) {
        Ok(_) => return Ok(Claim::Mine(Some(HeldClaim { file, range: range.clone() }))),
        Err(Errno::EAGAIN | Errno::EACCES) => {}
        Err(e) => return Err(e.into()),
    }
    fcntl(&file, FcntlArg::F_OFD_GETLK(&mut lock))?;
    if i32::from(lock.l_type) == libc::F_UNLCK {
        // The other claim has ended meanwhile. The caller's next attempt can succeed.
        return Ok(Claim::Busy(range.clone()));
    }
    let start = u64::try_from(lock.l_start).unwrap_or(0);
    let len = u64::try_from(lock.l_len).unwrap_or(0);
    let end = if len == 0 { u64::MAX } else { start.saturating_add(len) };
    Ok(Claim::Busy(start.max(range.start)..end.min(range.end)))
}

#[allow(clippy::cast_possible_truncation, reason = "the constants are small")]
fn lock_of(range: &Range<u64>, kind: libc::c_int) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: range.start as libc::off_t,
        l_len: (range.end - range.start) as libc::off_t,
        l_pid: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_has_one_claim_at_a_time_and_others_learn_which_part_is_taken() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("map");
        std::fs::write(&path, [0; 64]).unwrap();
        let first = claim(&path, &(16..32));
        assert!(matches!(first, Claim::Mine(Some(_))));
        assert!(matches!(claim(&path, &(0..48)), Claim::Busy(busy) if busy == (16..32)));
        assert!(matches!(claim(&path, &(24..48)), Claim::Busy(busy) if busy == (24..32)));
        assert!(matches!(claim(&path, &(32..48)), Claim::Mine(Some(_))));
        drop(first);
        assert!(matches!(claim(&path, &(16..32)), Claim::Mine(Some(_))));
        assert!(matches!(claim(&folder.path().join("none"), &(0..1)), Claim::Mine(None)));
    }

    #[test]
    fn a_claim_ends_with_its_holder_while_a_child_has_the_same_open_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("map");
        std::fs::write(&path, [0; 64]).unwrap();
        let Claim::Mine(Some(held)) = claim(&path, &(16..32)) else { panic!("nobody has a claim") };
        // A child made by fork(2) has a duplicate descriptor like this one.
        let of_child = held.file.try_clone().unwrap();
        drop(held);
        assert!(matches!(claim(&path, &(16..32)), Claim::Mine(Some(_))));
        drop(of_child);
    }
}
