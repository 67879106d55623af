//! The order in which open files of the previous process are proved.
//!
//! A file system that stalls blocks every thread that accesses it. So only a few proofs at a time
//! access the same file systems, and threads remain for the other proofs.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use tensorfs::internal::io::PerSourceLimiter;
use tensorfs::internal::sync::Mutex;
use tensorfs::internal::version::QueueKey;

use crate::serve::blocking::guarded;

/// Maximum number of simultaneous proofs that access the same file systems. Each has a thread.
const EACH_MAX: u64 = 8;

/// The devices and stores that a proof accesses.
pub(super) type Devices = BTreeSet<QueueKey>;

/// Starts a proof without waiting. The proof lasts until its `Turn` is dropped.
type Begin = Box<dyn FnOnce(Turn) + Send>;

/// The proofs that run, and those that wait for their turn.
pub(super) struct AdoptionQueue(Mutex<State>);

struct State {
    running: PerSourceLimiter<Devices>,
    waiting: HashMap<Devices, VecDeque<Begin>>,
    /// Whether a thread is starting proofs now. That thread starts all proofs that may start.
    is_beginning: bool,
}

/// The turn of a proof that runs. Its drop starts the next proof.
pub(super) struct Turn {
    queue: Arc<AdoptionQueue>,
    devices: Devices,
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.queue.0.lock().running.give_back(&self.devices, 1);
        self.queue.advance();
    }
}

impl AdoptionQueue {
    pub(super) fn new() -> Arc<AdoptionQueue> {
        let running = PerSourceLimiter::new(EACH_MAX, u64::MAX);
        let state = State { running, waiting: HashMap::new(), is_beginning: false };
        Arc::new(AdoptionQueue(Mutex::new(state)))
    }

    /// Calls `begin` as soon as fewer than `EACH_MAX` proofs access exactly the set `devices`,
    /// which may be at once.
    pub(super) fn add(
        self: &Arc<Self>,
        devices: Devices,
        begin: impl FnOnce(Turn) + Send + 'static,
    ) {
        self.0.lock().waiting.entry(devices).or_default().push_back(Box::new(begin));
        self.advance();
    }

    /// Starts the proofs that may start. A loop does this, so that a proof that ends at once does
    /// not start the next one from its own stack frame.
    fn advance(self: &Arc<Self>) {
        loop {
            let mut state = self.0.lock();
            if state.is_beginning {
                return;
            }
            let Some((devices, begin)) = state.next() else { return };
            state.is_beginning = true;
            drop(state);
            guarded(|| begin(Turn { queue: self.clone(), devices }));
            self.0.lock().is_beginning = false;
        }
    }
}

impl State {
    fn next(&mut self) -> Option<(Devices, Begin)> {
        let State { running, waiting, .. } = self;
        let devices = waiting.keys().find(|devices| running.has_room_for(*devices))?.clone();
        let queue = waiting.get_mut(&devices)?;
        let begin = queue.pop_front();
        if queue.is_empty() {
            waiting.remove(&devices);
        }
        running.take(devices.clone(), 1);
        Some((devices, begin?))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    fn on(devices: &[u64]) -> Devices {
        devices.iter().copied().map(QueueKey::Device).collect()
    }

    /// Adds `count` proofs on `devices`. Each proof sends its turn, so it ends when the receiver
    /// drops the turn.
    fn add(queue: &Arc<AdoptionQueue>, devices: &[u64], count: u64) -> Receiver<Turn> {
        let (send, turns): (Sender<Turn>, _) = channel();
        for _ in 0..count {
            let send = send.clone();
            queue.add(on(devices), move |turn| drop(send.send(turn)));
        }
        turns
    }

    #[test]
    fn proofs_of_a_stalled_file_system_hold_up_those_of_no_other_one() {
        let queue = AdoptionQueue::new();
        let stalled = add(&queue, &[7], 200);
        let held: Vec<Turn> = stalled.try_iter().collect();
        assert_eq!(held.len() as u64, EACH_MAX);
        for devices in [&[8][..], &[7, 8], &[]] {
            let others = add(&queue, devices, 100);
            assert_eq!(others.try_iter().count(), 100, "{devices:?}");
        }
        drop(held);
        assert_eq!(stalled.try_iter().count(), 200 - EACH_MAX as usize);
        let state = queue.0.lock();
        assert!(state.waiting.is_empty() && state.running.total() == 0);
    }

    #[test]
    fn proofs_that_end_at_once_or_by_a_panic_make_room() {
        let queue = AdoptionQueue::new();
        let held: Vec<Turn> = add(&queue, &[7], EACH_MAX).try_iter().collect();
        for _ in 0..EACH_MAX + 1 {
            queue.add(on(&[7]), |_| panic!("on purpose"));
        }
        let (send, ended) = channel();
        // A stack could not hold this number of proofs if each proof started the next one.
        for _ in 0..100_000 {
            let send = send.clone();
            queue.add(on(&[7]), move |turn| drop((turn, send.send(()))));
        }
        assert_eq!(ended.try_iter().count(), 0);
        drop(held);
        assert_eq!(ended.try_iter().count(), 100_000);
    }
}
