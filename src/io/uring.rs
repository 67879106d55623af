//! The backend for local file systems: one thread per lane, all its reads in one io_uring.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, FromRawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use io_uring::{IoUring, Probe, opcode, squeue, types};
use nix::libc;

use super::lane::{Job, Lane, Work};
use super::queue::SENT_MAX;
use super::transfer::{Next, Transfer};
use crate::error::Error;

/// Entries of the submission queue: every read, the poll, and room.
const ENTRIES: u32 = 64;

/// What marks the completion of the poll; others are slots.
const WAKE: u64 = u64::MAX;

/// A submission that the kernel refuses for want of memory is tried again so often.
const SUBMIT_TRIES: u32 = 200;

/// How long to wait in between.
const SUBMIT_PAUSE: Duration = Duration::from_millis(10);

/// Wakes the thread that waits in a ring.
#[derive(Debug)]
pub(super) struct Waker(File);

impl Waker {
    fn new() -> io::Result<Waker> {
        // SAFETY: no memory is passed.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a new descriptor that nothing else owns.
        Ok(Waker(unsafe { File::from_raw_fd(fd) }))
    }

    pub(super) fn wake(&self) {
        // It fails only where 2^64 - 2 calls wait: then it is awake anyway.
        let _ = (&self.0).write(&1_u64.to_ne_bytes());
    }

    fn clear(&self) {
        let mut count = [0; 8];
        let _ = io::Read::read(&mut &self.0, &mut count);
    }
}

/// A ring, and what the kernel holds memory of.
pub(super) struct Ring {
    uring: IoUring,
    waker: Arc<Waker>,
    slots: Vec<Option<Slot>>,
    free: Vec<usize>,
    /// Reads that the kernel has.
    sent: usize,
}

struct Slot {
    id: u64,
    transfer: Transfer,
    /// Whether the kernel is to read it on a thread of its own at once.
    on_worker: bool,
}

impl Drop for Ring {
    fn drop(&mut self) {
        // The kernel may still write there: such memory is never freed.
        self.slots.drain(..).flatten().for_each(std::mem::forget);
    }
}

impl Ring {
    /// Sets up a ring for the calling thread.
    ///
    /// # Errors
    /// Where the kernel has no io_uring that is good enough, or does not let this process use it.
    pub(super) fn new() -> io::Result<Ring> {
        let uring = build()?;
        let mut probe = Probe::new();
        uring.submitter().register_probe(&mut probe)?;
        let wanted = [opcode::Read::CODE, opcode::PollAdd::CODE];
        if !uring.params().is_feature_nodrop()
            || !wanted.iter().all(|code| probe.is_supported(*code))
        {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "the kernel's is too old"));
        }
        // By default a few per processor, and a read that has to wait occupies one. Kernels
        // before 5.15 do not know it, and have no such low bound.
        let _ = uring.submitter().register_iowq_max_workers(&mut [SENT_MAX as u32, 0]);
        let waker = Arc::new(Waker::new()?);
        let slots = (0..SENT_MAX).map(|_| None).collect();
        let mut ring = Ring { uring, waker, slots, free: (0..SENT_MAX).collect(), sent: 0 };
        ring.poll()?;
        ring.uring.submit()?;
        Ok(ring)
    }

    pub(super) fn waker(&self) -> Arc<Waker> {
        self.waker.clone()
    }

    fn push(&mut self, entry: &squeue::Entry) -> io::Result<()> {
        // SAFETY: a read's memory lies in its slot until its completion, or is leaked; its
        // descriptor too. The poll has no memory, and its descriptor lives as long as the ring.
        unsafe { self.uring.submission().push(entry) }.map_err(io::Error::other)
    }

    /// Watches for `Waker::wake`, once.
    fn poll(&mut self) -> io::Result<()> {
        let fd = types::Fd(self.waker.0.as_raw_fd());
        let entry = opcode::PollAdd::new(fd, libc::POLLIN as u32).build().user_data(WAKE);
        self.push(&entry)
    }

    /// Sends the next read of a slot.
    fn send(&mut self, at: usize) -> io::Result<()> {
        let Some(slot) = &mut self.slots[at] else {
            return Ok(());
        };
        let on_worker = slot.on_worker;
        let (file, offset, target) = slot.transfer.next();
        let len = u32::try_from(target.len()).unwrap_or(READ_MAX).min(READ_MAX);
        let entry = opcode::Read::new(types::Fd(file.as_raw_fd()), target.as_mut_ptr(), len)
            .offset(offset)
            .build()
            .user_data(at as u64);
        let flags = if on_worker { squeue::Flags::ASYNC } else { squeue::Flags::empty() };
        self.push(&entry.flags(flags))?;
        self.sent += 1;
        Ok(())
    }

    /// Hands what was pushed to the kernel and waits for a completion.
    fn submit_and_wait(&mut self) -> io::Result<()> {
        for _ in 0..SUBMIT_TRIES {
            let Err(e) = self.uring.submit_and_wait(1) else {
                return Ok(());
            };
            match e.raw_os_error() {
                Some(libc::EINTR) => {}
                // Completions make room; without any, the kernel is short of memory.
                Some(libc::EAGAIN | libc::EBUSY | libc::ENOMEM) => {
                    if !self.uring.completion().is_empty() {
                        return Ok(());
                    }
                    std::thread::sleep(SUBMIT_PAUSE);
                }
                _ => return Err(e),
            }
        }
        Err(io::Error::from_raw_os_error(libc::EAGAIN))
    }
}

/// Most bytes of one read, a multiple of the alignment: Linux reads no more at a time.
const READ_MAX: u32 = 0x7fff_f000;

/// The best ring that the kernel makes: each of these spares interrupts and locks.
fn build() -> io::Result<IoUring> {
    let best = IoUring::builder().setup_single_issuer().setup_defer_taskrun().build(ENTRIES);
    match best {
        // Linux 6.1 knows both.
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {}
        other => return other,
    }
    match IoUring::builder().setup_coop_taskrun().build(ENTRIES) {
        // Linux 5.19.
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => IoUring::new(ENTRIES),
        other => other,
    }
}

/// Carries out the reads of `lane` until it is closed and the kernel has given everything back.
///
/// # Errors
/// Where the ring is of no use any more. All its reads were then answered.
pub(super) fn run(lane: &Arc<Lane>, mut ring: Ring) -> io::Result<()> {
    let ended = catch_unwind(AssertUnwindSafe(|| serve(lane, &mut ring)));
    let error = match ended {
        Ok(Ok(())) => return Ok(()),
        Ok(Err(e)) => e,
        Err(_) => io::Error::other("it panicked"),
    };
    // Their memory stays with the ring, which leaks it.
    let mut ids = Vec::new();
    for Slot { id, transfer, .. } in ring.slots.iter().flatten() {
        transfer.write_off();
        ids.push(*id);
    }
    for id in ids {
        let message = "reading failed by an error of io_uring: see the log".to_owned();
        lane.finish(id, Err(Error::Usage { message }));
    }
    Err(error)
}

fn serve(lane: &Arc<Lane>, ring: &mut Ring) -> io::Result<()> {
    let mut back = Vec::with_capacity(ENTRIES as usize);
    loop {
        // Never more than SENT_MAX at a time, so there is a slot for each.
        loop {
            match lane.next_for_ring(ring.sent == 0) {
                Work::Job(job) => take(lane, ring, job)?,
                Work::None => break,
                Work::End => return Ok(()),
            }
        }
        ring.submit_and_wait()?;
        back.extend(ring.uring.completion().map(|entry| (entry.user_data(), entry.result())));
        for (at, result) in back.drain(..) {
            if at == WAKE {
                ring.waker.clear();
                ring.poll()?;
            } else {
                came_back(lane, ring, at as usize, result)?;
            }
        }
    }
}

/// Begins a job and sends its first read.
fn take(lane: &Arc<Lane>, ring: &mut Ring, job: Job) -> io::Result<()> {
    let id = job.id;
    let Some(at) = ring.free.pop() else {
        return Err(io::Error::other("more reads than slots"));
    };
    match Transfer::begin(job, lane.settings.direct) {
        Ok(transfer) => {
            ring.slots[at] = Some(Slot { id, transfer, on_worker: false });
            ring.send(at)
        }
        Err(e) => {
            ring.free.push(at);
            lane.finish(id, Err(e));
            Ok(())
        }
    }
}

/// Takes the result of a slot's read, and sends the next or answers.
fn came_back(lane: &Arc<Lane>, ring: &mut Ring, at: usize, result: i32) -> io::Result<()> {
    ring.sent -= 1;
    let Some(slot) = ring.slots.get_mut(at).and_then(Option::as_mut) else {
        return Err(io::Error::other("a completion of no read"));
    };
    let result = match usize::try_from(result) {
        Ok(n) => Ok(n),
        Err(_) => Err(io::Error::from_raw_os_error(-result)),
    };
    // The kernel would have had to wait, and this ring cannot: a thread of the kernel can.
    slot.on_worker |= result.as_ref().is_err_and(|e| e.kind() == io::ErrorKind::WouldBlock);
    lane.count_read(slot.transfer.is_direct(), &result);
    match slot.transfer.advance(result) {
        Next::Read => ring.send(at),
        Next::End(result) => {
            if let Some(Slot { id, transfer, .. }) = ring.slots[at].take() {
                ring.free.push(at);
                lane.finish(id, result.and_then(|()| transfer.finish()));
            }
            Ok(())
        }
    }
}
