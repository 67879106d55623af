//! Limits the memory for headers. A header takes several times its length in memory. Without a
//! limit, a user who may add files to a source could use up the memory of the process that serves
//! it.

use std::io;
use std::path::Path;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::error::{Error, ErrorKind, Fault, Result};
use crate::sync::{Condvar, Mutex};
use crate::system_memory;

/// Lower bound of the limit for the headers of one folder, in bytes. It applies on every machine.
const FOLDER_MIN: u64 = 512 << 20;

/// The headers of one folder may have 1 / `FOLDER_SHARE` of the machine's memory in bytes. The
/// limit grows with the memory, because machines that serve the largest checkpoints also need to
/// read larger headers.
const FOLDER_SHARE: u64 = 64;

/// One description of a whole checkpoint may take 1 / `DESCRIPTION_SHARE` of the memory.
const DESCRIPTION_SHARE: u64 = 8;

/// Headers of a folder up to this number of bytes need no reservation, so that an ordinary
/// checkpoint is not refused because of other folders.
const SMALL_MAX: u64 = 1 << 20;

/// Maximum time for which a folder waits until the headers of other folders are freed.
const WAIT_MAX: Duration = Duration::from_secs(60);

/// Number of bytes of headers that are reserved by all folders that are being proved.
static IN_USE: Mutex<u64> = Mutex::new(0);
static FREED: Condvar = Condvar::new();

/// The reservation for the headers of a folder while they are in memory.
#[derive(Debug, Default)]
pub(super) struct Reserved(u64);

impl Reserved {
    /// Reserves `len` bytes for the headers of `folder`. Waits while the headers of other folders
    /// use up the limit.
    ///
    /// # Errors
    /// `Error::Io` if the wait takes too long. The error does not mean that the folder itself is
    /// faulty.
    pub(super) fn wait(folder: &Path, len: u64) -> Result<Reserved> {
        Reserved::wait_for(folder, len, WAIT_MAX)
    }

    fn wait_for(folder: &Path, len: u64, limit: Duration) -> Result<Reserved> {
        if len <= SMALL_MAX {
            return Ok(Reserved(0));
        }
        let deadline = Instant::now() + limit;
        let mut in_use = IN_USE.lock();
        // The limit is twice the maximum of one folder. If nothing is reserved, any folder is
        // admitted.
        while *in_use > 0 && *in_use + len > 2 * folder_max() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let message = format!(
                    "headers of {} bytes are being read in other folders; look again later",
                    *in_use
                );
                let busy = io::Error::new(io::ErrorKind::ResourceBusy, message);
                return Err(Error::io(folder, "read headers", busy));
            }
            in_use = FREED.wait_timeout(in_use, left);
        }
        *in_use += len;
        Ok(Reserved(len))
    }

    /// Adds another reservation to this one.
    pub(super) fn add(&mut self, mut other: Reserved) {
        self.0 += std::mem::take(&mut other.0);
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        *IN_USE.lock() -= self.0;
        FREED.notify_all();
    }
}

/// Maximum number of bytes of headers of one folder.
pub(super) fn folder_max() -> u64 {
    static MAX: OnceLock<u64> = OnceLock::new();
    *MAX.get_or_init(|| {
        let total = system_memory::of_machine("MemTotal").unwrap_or(0);
        (total / FOLDER_SHARE).max(FOLDER_MIN)
    })
}

/// Maximum length in bytes of a description that needs `memory_of_byte` bytes of memory per byte. Its memory may be 1
/// / `DESCRIPTION_SHARE` of the memory of the machine, or of the control group of this process, and at least
/// `FOLDER_MIN`.
pub(super) fn description_max(memory_of_byte: u64) -> u64 {
    let total = system_memory::of_machine("MemTotal").unwrap_or(0);
    let usable = system_memory::limit().map_or(total, |limit| limit.min(total));
    (usable / DESCRIPTION_SHARE).max(FOLDER_MIN) / memory_of_byte
}

/// The memory in bytes that a machine needs, so that one description may take `len` bytes.
pub(super) fn description_memory(len: u64) -> u64 {
    len.saturating_mul(DESCRIPTION_SHARE)
}

/// The number of headers that fit into `max` bytes, and the sum of their lengths. `lens` are the
/// lengths of the headers in order. Counting stops at the first header that does not fit.
pub(super) fn admitted(lens: &[u64], max: u64) -> (usize, u64) {
    let mut sum = 0_u64;
    for (count, &len) in lens.iter().enumerate() {
        match sum.checked_add(len).filter(|&sum| sum <= max) {
            Some(more) => sum = more,
            None => return (count, sum),
        }
    }
    (lens.len(), sum)
}

/// The fault of a weight file whose header exceeds the limit of its folder.
pub(super) fn too_many(total: u64, max: u64) -> Fault {
    ErrorKind::HeaderTooLarge.fault(format!(
        "the headers of the weight files in this folder have {total} bytes, {max} are read of one \
         folder; move checkpoints to folders of their own"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_admitted_in_order_until_one_does_not_fit() {
        assert_eq!(admitted(&[], 10), (0, 0));
        assert_eq!(admitted(&[4, 6], 10), (2, 10));
        assert_eq!(admitted(&[4, 7, 1], 10), (1, 4));
        assert_eq!(admitted(&[11], 10), (0, 0));
        assert_eq!(admitted(&[1, u64::MAX], u64::MAX), (1, 1));
    }

    #[test]
    fn a_description_may_take_an_eighth_of_the_memory_and_512_mib_on_every_machine() {
        assert!(description_max(1) >= FOLDER_MIN);
        assert_eq!(description_max(8), description_max(1) / 8);
        assert_eq!((description_memory(2), description_memory(u64::MAX)), (16, u64::MAX));
    }

    #[test]
    fn a_folder_waits_for_the_headers_of_others_and_one_alone_always_goes_on() {
        let (folder, large) = (Path::new("/a"), SMALL_MAX + 1);
        let first = Reserved::wait(folder, 2 * folder_max() + 1).unwrap();
        let soon = Duration::from_millis(10);
        let busy = Reserved::wait_for(folder, large, soon).map(|_| ()).unwrap_err();
        assert_eq!(busy.kind(), ErrorKind::Io);
        assert!(busy.to_string().contains("look again later"), "{busy}");
        // Ordinary checkpoints do not wait at all.
        Reserved::wait_for(folder, SMALL_MAX, Duration::ZERO).unwrap();
        let (send, receive) = std::sync::mpsc::channel();
        let second = std::thread::spawn(move || {
            let reserved = Reserved::wait(Path::new("/a"), large);
            send.send(reserved.map(|_| ())).unwrap();
        });
        assert!(receive.recv_timeout(soon).is_err());
        drop(first);
        receive.recv().unwrap().unwrap();
        second.join().unwrap();
    }
}
