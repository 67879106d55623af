//! Puts tensors into the kernel's page cache before a program reads them. A program that maps a
//! file and touches it page by page would otherwise wait for each page.
//!
//! One thread does this work. This thread may wait for pages that pending reads have locked, so
//! threads that answer reads must not wait for it.

use std::ops::Range;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Weak};

use tensorfs::internal::cache::verify_on_read::ChecksumGate;
use tensorfs::internal::cache::{Cache, CachedFile, OnStorm};
use tensorfs::internal::counters::Counters;

use super::change_watcher::{Forget, Watcher};

/// Puts bytes into the kernel's page cache. The arguments are the inode number, the offset and the
/// bytes.
pub(crate) type StoreBytes = Box<dyn Fn(u64, u64, &[u8]) -> std::io::Result<()> + Send>;

/// Number of bytes that are put into the page cache at a time.
const STEP: u64 = 1 << 20;

/// Size of a page of the page cache.
const PAGE: u64 = 4096;

/// Maximum number of queued tensors. Further tensors are read by page faults.
const QUEUE_MAX: usize = 16;

/// The reader number that these reads use. No open handle has this number.
const STORE_READER: u64 = u64::MAX;

struct StoreTask {
    file: Weak<CachedFile>,
    ino: u64,
    range: Range<u64>,
    gate: Option<Arc<ChecksumGate>>,
}

/// Queues tensors for the page cache.
#[derive(Clone)]
pub(crate) struct StoreQueue(SyncSender<StoreTask>);

/// The receiving end of the queue, until the thread is started.
pub(crate) struct StoreWorker(Receiver<StoreTask>);

/// A queue, and its worker.
pub(crate) fn store_queue() -> (StoreQueue, StoreWorker) {
    let (send, receive) = sync_channel(QUEUE_MAX);
    (StoreQueue(send), StoreWorker(receive))
}

impl StoreQueue {
    /// The callback for page-by-page reads of inode `ino`. The bytes have to pass `gate`.
    pub(crate) fn on_fault_storm(&self, ino: u64, gate: Option<Arc<ChecksumGate>>) -> OnStorm {
        let send = self.0.clone();
        Box::new(move |file, range| {
            let (file, gate) = (Arc::downgrade(file), gate.clone());
            // If the queue is full, the tensor is read by page faults.
            let _ = send.try_send(StoreTask { file, ino, range, gate });
        })
    }
}

impl StoreWorker {
    /// Starts the thread that puts queued tensors into the page cache with `store`.
    pub(crate) fn start(
        self,
        cache: Cache,
        counters: Arc<Counters>,
        store: StoreBytes,
        forget: Forget,
        watcher: Arc<Watcher>,
    ) -> std::io::Result<()> {
        let run = move || {
            while let Ok(task) = self.0.recv() {
                push(&cache, &counters, &task, &store);
                let Some(file) = task.file.upgrade() else { continue };
                // Pages must not stay in the page cache if a source has changed since they were
                // read. `check_known` finds changes that are known already. The search for other
                // changes may take long, so the watcher makes it, and then drops the pages of
                // changed sources.
                if file.reader().sources().iter().any(|source| source.check_known().is_err()) {
                    forget(task.ino);
                } else {
                    watcher.look_at(task.ino);
                }
            }
        };
        std::thread::Builder::new().name("store".to_owned()).spawn(run)?;
        Ok(())
    }
}

/// Puts the whole pages of a tensor into the page cache. Zeros that no shard contains are left out,
/// because a tensor of zeros may have any length. Stops if a page cannot be read or stored, or if
/// the file is closed.
fn push(cache: &Cache, counters: &Counters, task: &StoreTask, store: &StoreBytes) {
    let end = task.range.end / PAGE * PAGE;
    let mut offset = task.range.start.next_multiple_of(PAGE);
    while offset < end {
        let step = offset..(offset + STEP).min(end);
        let Some(file) = task.file.upgrade() else { return };
        if file.reader().is_unstored(step.clone()) {
            offset = step.end;
            continue;
        }
        if task.gate.as_ref().is_some_and(|gate| !gate.is_good(step.clone())) {
            return;
        }
        let (send, receive) = sync_channel(1);
        let answer = move |outcome: Result<&[u8], &tensorfs::Error>| {
            let _ = send.send(outcome.ok().map(<[u8]>::to_vec));
        };
        cache.read(&file, STORE_READER, step.clone(), Box::new(answer));
        drop(file);
        let Ok(Some(bytes)) = receive.recv() else { return };
        if let Err(e) = store(task.ino, offset, &bytes) {
            tracing::debug!("a tensor is not put into the page cache: {e}");
            return;
        }
        counters.stored_bytes.add(bytes.len() as u64);
        offset = step.end;
    }
}
