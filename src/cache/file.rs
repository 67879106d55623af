//! A file whose reads go through a cache.

use std::ops::Range;
use std::sync::{Arc, Weak};

use super::CacheInner;
use crate::counters::Counter;
use crate::prefetch::Planner;
use crate::reader::Reader;
use crate::source::release_unpinned;
use crate::sync::Mutex;

/// An open file whose reads go through a cache. When it is dropped, its blocks are dropped.
pub struct CachedFile {
    pub(super) id: u64,
    pub(super) reader: Reader,
    pub(super) planner: Arc<Mutex<Planner>>,
    pub(super) cache: Weak<CacheInner>,
    /// Bytes that were served in answers.
    pub bytes_served: Counter,
    pub(super) on_storm: Option<OnStorm>,
}

/// Called with a file and the range of a tensor that is requested page by page. Must not wait.
pub type OnStorm = Box<dyn Fn(&Arc<CachedFile>, Range<u64>) + Send + Sync>;

impl CachedFile {
    /// The reader of the file.
    pub fn reader(&self) -> &Reader {
        &self.reader
    }
}

impl Drop for CachedFile {
    fn drop(&mut self) {
        if let Some(cache) = self.cache.upgrade() {
            let mut state = cache.state.lock();
            if let Some(file) = state.files.remove(&self.id) {
                for (start, block) in file.blocks {
                    state.idle.pop(&(self.id, start));
                    cache.waste(&file.planner, start, &block);
                }
            }
        }
        // Readahead may have opened the sources again after their last pin was removed.
        release_unpinned(self.reader.sources());
    }
}
