//! Streams. Each stream has a thread and a queue. The thread does the work in order and with delays.

use std::collections::VecDeque;
use std::thread::JoinHandle;
use std::time::Duration;

use crate::kernels::Kernel;
use crate::state::{CHANGED, State, lock};

/// A copy of rows of bytes. The addresses are without tag.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows {
    pub(crate) from: u64,
    pub(crate) from_pitch: u64,
    pub(crate) to: u64,
    pub(crate) to_pitch: u64,
    pub(crate) width: u64,
    pub(crate) height: u64,
}

impl Rows {
    /// Number of bytes from the start of the first row to the end of the last row, in the source and in the target.
    pub(crate) fn spans(&self) -> (u64, u64) {
        let steps = self.height.saturating_sub(1);
        (steps * self.from_pitch + self.width, steps * self.to_pitch + self.width)
    }

    /// Copies the rows.
    pub(crate) fn copy(&self) {
        for row in 0..self.height {
            let from = (self.from + row * self.from_pitch) as *const u8;
            let to = (self.to + row * self.to_pitch) as *mut u8;
            // SAFETY: the call checked that source and target lie in live memory. If a program frees it before the
            // copy, that is reported as a violation.
            unsafe { std::ptr::copy(from, to, self.width as usize) };
        }
    }
}

/// A piece of work.
#[derive(Clone, Debug)]
pub(crate) enum Work {
    Copy(Rows),
    Launch { kernel: Kernel, from: u64, to: u64, elements: u64 },
    Record { event: u64 },
    Wait { event: u64, until: u64 },
}

/// A stream.
pub(crate) struct Stream {
    pub(crate) ordinal: i32,
    queue: VecDeque<Work>,
    closing: bool,
    thread: Option<JoinHandle<()>>,
}

impl Stream {
    /// Starts a stream, and returns its handle.
    pub(crate) fn start(state: &mut State, ordinal: i32) -> u64 {
        let handle = state.handle();
        let thread = std::thread::spawn(move || work(handle));
        let stream =
            Stream { ordinal, queue: VecDeque::new(), closing: false, thread: Some(thread) };
        state.streams.insert(handle, stream);
        handle
    }

    pub(crate) fn push(&mut self, work: Work) {
        self.queue.push_back(work);
        CHANGED.notify_all();
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.queue.is_empty()
    }

    /// Makes the thread of the stream end once all its work is done.
    pub(crate) fn close(&mut self) -> Option<JoinHandle<()>> {
        self.closing = true;
        CHANGED.notify_all();
        self.thread.take()
    }

    /// Whether work that is not done uses any of `len` bytes at `address`.
    pub(crate) fn uses(&self, address: u64, len: u64) -> bool {
        let meets = |start: u64, span: u64| start < address + len && address < start + span;
        self.queue.iter().any(|work| match work {
            Work::Copy(rows) => {
                let (from, to) = rows.spans();
                meets(rows.from, from) || meets(rows.to, to)
            }
            Work::Launch { kernel, from, to, elements } => {
                let (source, target) = kernel.lens(*elements);
                meets(*from, source) || meets(*to, target)
            }
            Work::Record { .. } | Work::Wait { .. } => false,
        })
    }
}

/// Does the work of stream `handle` until it is closed. Work in progress stays in the queue, so
/// that it counts as not done.
fn work(handle: u64) {
    let mut state = lock();
    loop {
        let Some(stream) = state.streams.get(&handle) else { return };
        let Some(next) = stream.queue.front().cloned() else {
            if stream.closing {
                return;
            }
            state = CHANGED.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner());
            continue;
        };
        if let Work::Wait { event, until } = next {
            if state.events.get(&event).is_some_and(|event| event.reached < until) {
                state = CHANGED.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner());
                continue;
            }
        } else {
            let delay = state.delay();
            if delay > 0 {
                drop(state);
                std::thread::sleep(Duration::from_micros(delay));
                state = lock();
            }
        }
        match next {
            Work::Copy(rows) => rows.copy(),
            Work::Launch { kernel, from, to, elements } => kernel.run(from, to, elements),
            Work::Record { event } => state.reach(event),
            Work::Wait { .. } => {}
        }
        if let Some(stream) = state.streams.get_mut(&handle) {
            stream.queue.pop_front();
        }
        CHANGED.notify_all();
    }
}
