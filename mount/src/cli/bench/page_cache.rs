//! Fills or evicts the page cache before a run, and checks the result.

use std::fs::{self, File};
use std::path::PathBuf;

use nix::unistd::{geteuid, sync};
use tensorfs::internal::io::cached_pages;
use tensorfs::internal::system_memory::of_machine;
use tensorfs::words;

use super::args::Evict;
use super::job;
use super::worker::Trouble;

/// The kernel's switch that drops all clean pages, folders and inodes.
const DROP_CACHES: &str = "/proc/sys/vm/drop_caches";

words! {
    /// How a bench empties the page cache.
    pub(super) enum Method {
        /// Everything that the machine has cached is dropped.
        DropCaches = "drop-caches",
        /// The files that are measured are evicted.
        Fadvise = "fadvise",
    }
}

impl Method {
    /// The method for `wanted`, if this process has the rights for it.
    pub(super) fn choose(wanted: Evict) -> Result<Method, Trouble> {
        let may = geteuid().is_root() && File::options().write(true).open(DROP_CACHES).is_ok();
        match wanted {
            Evict::Fadvise => Ok(Method::Fadvise),
            Evict::Auto if !may => Ok(Method::Fadvise),
            Evict::DropCaches if !may => Err(Trouble::Failed(format!(
                "{DROP_CACHES} cannot be written; be root, or give --evict=fadvise"
            ))),
            Evict::Auto | Evict::DropCaches => Ok(Method::DropCaches),
        }
    }

    /// Drops at least `files` from the page cache. Then allocates and touches memory of the size of
    /// the largest file.
    pub(super) fn evict(self, files: &[PathBuf]) -> Result<(), Trouble> {
        match self {
            Method::DropCaches => {
                sync();
                fs::write(DROP_CACHES, "3")?;
            }
            Method::Fadvise => {
                for path in files {
                    File::open(path).and_then(|file| job::evict(&file))?;
                }
            }
        }
        let lengths =
            files.iter().filter_map(|path| fs::metadata(path).ok()).map(|meta| meta.len());
        touch_memory(lengths.max().unwrap_or(0));
        Ok(())
    }
}

/// Allocates, touches and frees `len` bytes. A host takes free memory away from its virtual
/// machines. The first use of such memory is slower than a read from the disk, and it would slow
/// down the first run.
fn touch_memory(len: u64) {
    let len = len.min(of_machine("MemAvailable").unwrap_or(0) / 2);
    std::hint::black_box(vec![1_u8; len as usize]);
}

/// Fraction of `files` that is in the page cache. `None` if the kernel does not tell.
pub(super) fn cached_part(files: &[PathBuf]) -> Option<f64> {
    let (mut cached, mut all) = (0, 0);
    for path in files {
        let file = File::open(path).ok()?;
        let found = cached_pages(&file, &(0..file.metadata().ok()?.len()))?;
        (cached, all) = (cached + found.cached, all + found.all);
    }
    Some(cached as f64 / all.max(1) as f64)
}
