//! The backend for reads past the page cache. Each queue has one thread, which executes all its reads in one io_uring.

use std::io;
use std::os::fd::AsRawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use io_uring::{IoUring, Probe, opcode, squeue, types};
use nix::libc;

use super::device_queue::{DeviceQueue, NextWork, Waker, guarded};
use super::queue::{ReadJob, SENT_MAX};
use super::transfer::{Next, Transfer};
use crate::error::Error;

/// Number of entries of the submission queue: one for each read, one for the poll, and a reserve.
const ENTRIES: u32 = 128;

/// The user data of the poll. The user data of a read is the index of its slot.
const WAKE: u64 = u64::MAX;

/// Maximum number of retries of a submission that the kernel refuses for lack of resources.
const SUBMIT_TRIES: u32 = 200;

/// Pause between two retries.
const SUBMIT_PAUSE: Duration = Duration::from_millis(10);

/// A ring, and the transfers to whose memory the kernel writes.
struct UringDriver {
    uring: IoUring,
    waker: Arc<Waker>,
    slots: Vec<Option<UringSlot>>,
    free: Vec<usize>,
    /// Number of reads in the kernel.
    sent: usize,
}

struct UringSlot {
    id: u64,
    transfer: Transfer,
    /// Whether the kernel is told to execute the read on a worker thread at once.
    on_worker: bool,
}

impl Drop for UringDriver {
    fn drop(&mut self) {
        // The kernel may still write to the memory of these reads, so it is never freed.
        self.slots.drain(..).flatten().for_each(std::mem::forget);
    }
}

impl UringDriver {
    /// Sets up a ring for the calling thread.
    ///
    /// # Errors
    /// If the kernel's io_uring is too old, or the kernel does not let this process use it.
    fn new() -> io::Result<UringDriver> {
        let uring = build()?;
        let mut probe = Probe::new();
        uring.submitter().register_probe(&mut probe)?;
        let wanted = [opcode::Read::CODE, opcode::PollAdd::CODE];
        if !uring.params().is_feature_nodrop()
            || !wanted.iter().all(|code| probe.is_supported(*code))
        {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "the kernel's is too old"));
        }
        // By default, the kernel has only a few workers per processor, and each waiting read occupies a worker. Kernels
        // before 5.15 do not know this call, and do not have this low limit.
        let _ = uring.submitter().register_iowq_max_workers(&mut [SENT_MAX as u32, 0]);
        let waker = Arc::new(Waker::new()?);
        let slots = (0..SENT_MAX).map(|_| None).collect();
        let mut ring = UringDriver { uring, waker, slots, free: (0..SENT_MAX).collect(), sent: 0 };
        ring.poll()?;
        ring.uring.submit()?;
        Ok(ring)
    }

    fn push(&mut self, entry: &squeue::Entry) -> io::Result<()> {
        // SAFETY: the memory and the descriptor of a read stay in its slot until its completion, or are leaked.
        // The poll has no memory, and its descriptor lives as long as the ring.
        unsafe { self.uring.submission().push(entry) }.map_err(io::Error::other)
    }

    /// Adds a poll for one `Waker::wake`.
    fn poll(&mut self) -> io::Result<()> {
        let fd = types::Fd(self.waker.fd());
        let entry = opcode::PollAdd::new(fd, libc::POLLIN as u32).build().user_data(WAKE);
        self.push(&entry)
    }

    /// Pushes the next read of a slot.
    fn send(&mut self, index: usize) -> io::Result<()> {
        let Some(slot) = &mut self.slots[index] else {
            return Ok(());
        };
        let on_worker = slot.on_worker;
        let Some((file, offset, target)) = slot.transfer.next() else {
            return Ok(());
        };
        let len = u32::try_from(target.len()).unwrap_or(READ_MAX).min(READ_MAX);
        let entry = opcode::Read::new(types::Fd(file.as_raw_fd()), target.as_mut_ptr(), len)
            .offset(offset)
            .build()
            .user_data(index as u64);
        let flags = if on_worker { squeue::Flags::ASYNC } else { squeue::Flags::empty() };
        self.push(&entry.flags(flags))?;
        self.sent += 1;
        Ok(())
    }

    /// Submits the pushed entries to the kernel and waits for a completion.
    fn submit_and_wait(&mut self) -> io::Result<()> {
        for _ in 0..SUBMIT_TRIES {
            let Err(e) = self.uring.submit_and_wait(1) else {
                return Ok(());
            };
            match e.raw_os_error() {
                Some(libc::EINTR) => {}
                // If there are completions, handling them frees resources. If there are none, the kernel is
                // short of memory.
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

/// Maximum number of bytes of one read. Linux does not read more at a time. It is a multiple of the alignment.
const READ_MAX: u32 = 0x7fff_f000;

/// Builds a ring with the best options that the kernel supports. Each option saves interrupts or locks.
fn build() -> io::Result<IoUring> {
    let best = IoUring::builder().setup_single_issuer().setup_defer_taskrun().build(ENTRIES);
    match best {
        // The kernel is older than Linux 6.1, which knows both options.
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {}
        other => return other,
    }
    match IoUring::builder().setup_coop_taskrun().build(ENTRIES) {
        // The kernel is older than Linux 5.19.
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => IoUring::new(ENTRIES),
        other => other,
    }
}

/// Checks whether a ring can be set up.
///
/// # Errors
/// The reason, if not.
pub(super) fn probe() -> io::Result<()> {
    UringDriver::new().map(drop)
}

/// Executes the reads of `queue` in a ring, until the queue is closed and the kernel has completed all reads.
///
/// # Errors
/// If no ring can be set up, or if the ring fails later. All reads in the ring have then been answered.
pub(super) fn drive(queue: &Arc<DeviceQueue>) -> io::Result<()> {
    let mut ring = UringDriver::new()?;
    queue.ring_begins(ring.waker.clone());
    let ended = catch_unwind(AssertUnwindSafe(|| serve(queue, &mut ring)));
    let outcome = ended.unwrap_or_else(|_| Err(io::Error::other("it panicked")));
    if outcome.is_err() {
        // The memory of these reads stays in the ring, which leaks it.
        let mut ids = Vec::new();
        for UringSlot { id, transfer, .. } in ring.slots.iter().flatten() {
            transfer.leak_buffer();
            ids.push(*id);
        }
        for id in ids {
            let error = Error::internal("reading failed by an error of io_uring: see the log");
            queue.finish(id, Err(error));
        }
    }
    queue.ring_ends();
    outcome
}

fn serve(queue: &Arc<DeviceQueue>, ring: &mut UringDriver) -> io::Result<()> {
    let mut back = Vec::with_capacity(ENTRIES as usize);
    loop {
        // At most `SENT_MAX` reads are in flight, so there is a slot for each.
        loop {
            match queue.next_for_ring(ring.sent == 0) {
                NextWork::ReadJob(job) => take(queue, ring, job)?,
                NextWork::None | NextWork::Handed(..) | NextWork::CompletedRead(_) => break,
                NextWork::End => return Ok(()),
            }
        }
        ring.submit_and_wait()?;
        queue.ring_is_awake();
        back.extend(ring.uring.completion().map(|entry| (entry.user_data(), entry.result())));
        for (mark, result) in back.drain(..) {
            if mark == WAKE {
                ring.waker.clear();
                ring.poll()?;
            } else {
                came_back(queue, ring, mark as usize, result)?;
            }
        }
    }
}

/// Begins a job and pushes its first read.
fn take(queue: &Arc<DeviceQueue>, ring: &mut UringDriver, job: ReadJob) -> io::Result<()> {
    let id = job.id;
    let index = ring.free.pop().expect("the queue gives out no more than there are slots");
    match guarded(|| Transfer::begin(job, queue.settings.direct)) {
        Ok(transfer) if transfer.is_direct() => {
            ring.slots[index] = Some(UringSlot { id, transfer, on_worker: false });
            ring.send(index)
        }
        Ok(transfer) => {
            ring.free.push(index);
            queue.hand_over(id, transfer);
            Ok(())
        }
        Err(e) => {
            ring.free.push(index);
            queue.finish(id, Err(e));
            Ok(())
        }
    }
}

/// Handles the result of a slot's read. Then pushes the next read, or answers.
fn came_back(
    queue: &Arc<DeviceQueue>,
    ring: &mut UringDriver,
    index: usize,
    result: i32,
) -> io::Result<()> {
    ring.sent -= 1;
    let Some(slot) = ring.slots.get_mut(index).and_then(Option::as_mut) else {
        return Err(io::Error::other("a completion of no read"));
    };
    let result = match usize::try_from(result) {
        Ok(n) => Ok(n),
        Err(_) => Err(io::Error::from_raw_os_error(-result)),
    };
    // Without a worker thread, the kernel cannot wait for the bytes of this read.
    slot.on_worker |= result.as_ref().is_err_and(|e| e.kind() == io::ErrorKind::WouldBlock);
    queue.count_read(&slot.transfer, &result);
    let next = slot.transfer.advance(result);
    if matches!(next, Next::Read) && slot.transfer.is_direct() {
        return ring.send(index);
    }
    if let Some(UringSlot { id, transfer, .. }) = ring.slots[index].take() {
        ring.free.push(index);
        match next {
            Next::Read | Next::ReadLater => queue.hand_over(id, transfer),
            Next::End(result) => queue.over(id, transfer, result),
        }
    }
    Ok(())
}

#[cfg(test)]
pub(super) mod tests {
    use std::fs::File;
    use std::io::Write;
    use std::os::unix::fs::MetadataExt;
    use std::path::Path;
    use std::sync::mpsc::{Receiver, channel};

    use super::*;
    use crate::counters::Counters;
    use crate::io::{
        Backend, Budget, Buffer, Deadlines, DirectIo, Effort, Engine, Fetch, Priority, Settings,
    };
    use crate::source::Source;

    /// Makes a system call fail with EPERM on this thread and on threads that it starts later.
    pub(crate) fn refuse(call: libc::c_long) {
        fail(call, libc::EPERM);
    }

    fn fail(call: libc::c_long, errno: i32) {
        let code = |code: u32, k: u32, jt, jf| libc::sock_filter { code: code as u16, jt, jf, k };
        let (load, equal) =
            (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, libc::BPF_JMP | libc::BPF_JEQ);
        let refused = libc::SECCOMP_RET_ERRNO | errno as u32;
        let mut filter = [
            code(load, 0, 0, 0),
            code(equal | libc::BPF_K, call as u32, 0, 1),
            code(libc::BPF_RET | libc::BPF_K, refused, 0, 0),
            code(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, 0, 0),
        ];
        let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
        // SAFETY: the program and its filter outlive the calls.
        unsafe {
            assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
            let mode = libc::SECCOMP_MODE_FILTER;
            assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const program), 0);
        }
    }

    fn engine() -> Engine {
        let settings = Settings { backend: Backend::Uring, ..Settings::default() };
        Engine::start(settings, Arc::default())
    }

    /// A fetch of bytes of a file in `folder`, and the receiver of its answer.
    fn fetch_in(folder: &Path) -> (Fetch, Receiver<Result<Vec<u8>, String>>) {
        let path = folder.canonicalize().unwrap().join("a");
        File::create(&path).unwrap().write_all(b"right bytes").unwrap();
        let (source, range) = (Source::open(&path).unwrap(), 6..11);
        let budget = Budget::new(1 << 20, Arc::new(Counters::default()));
        let target = budget.try_reserve(Buffer::len_for(&range)).unwrap().into();
        let (sender, receiver) = channel();
        let done = Box::new(move |result: crate::Result<crate::io::ReadBuffer>| {
            sender.send(result.map(|b| b.to_vec()).map_err(|e| e.to_string())).unwrap();
        });
        let (priority, effort) = (Priority::Demand, Effort::AsAwaited);
        let (cached, stored) = (None, false);
        (Fetch { source, range, cached, priority, effort, stored, target, done }, receiver)
    }

    /// The bytes of a file in `folder` as the engine reads them.
    fn read_in(folder: &Path, engine: &Engine) -> Result<Vec<u8>, String> {
        let (fetch, answer) = fetch_in(folder);
        engine.submit(fetch);
        answer.recv_timeout(Duration::from_secs(30)).unwrap()
    }

    /// A ring driver for a kernel that postpones the first read. It postpones pread(2) too.
    fn drive_putting_off(queue: &Arc<DeviceQueue>) -> io::Result<()> {
        fail(libc::SYS_pread64, libc::EAGAIN);
        let mut ring = UringDriver::new()?;
        queue.ring_begins(ring.waker.clone());
        let NextWork::ReadJob(job) = queue.next_for_ring(true) else {
            panic!("the first fetch is there")
        };
        take(queue, &mut ring, job)?;
        for sent in [1, 0] {
            let Some(index) = ring.slots.iter().position(Option::is_some) else { break };
            let is_back = |ring: &mut UringDriver| {
                ring.uring.completion().any(|entry| entry.user_data() == index as u64)
            };
            while !is_back(&mut ring) {
                ring.submit_and_wait()?;
            }
            came_back(queue, &mut ring, index, -libc::EAGAIN)?;
            assert_eq!(ring.sent, sent, "the ring waits for a read that is put off");
        }
        assert_eq!(ring.free.len(), SENT_MAX);
        serve(queue, &mut ring)?;
        queue.ring_ends();
        Ok(())
    }

    #[test]
    fn a_read_that_the_kernel_puts_off_leaves_the_ring_to_the_others() {
        let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let [(put_off, first), (other, second)] = folders.each_ref().map(|f| fetch_in(f.path()));
        let settings = Settings { direct: DirectIo::Always, ..Settings::default() };
        let (counters, deadlines) = (Arc::default(), Deadlines::default());
        let of_source = put_off.source.read_queue();
        let driver = drive_putting_off;
        let queue =
            Arc::new(DeviceQueue::new(of_source, None, settings, counters, deadlines, driver));
        queue.submit(put_off);
        let first = first.recv_timeout(Duration::from_secs(30)).unwrap();
        assert!(first.unwrap_err().contains("temporarily unavailable"));
        let status = queue.status();
        if status.backend != "io_uring" || status.direct_refused {
            eprintln!("skipped: no ring, or no O_DIRECT here: {status:?}");
            return;
        }
        queue.submit(other);
        let second = second.recv_timeout(Duration::from_secs(30)).unwrap();
        assert_eq!(second.as_deref(), Ok(b"bytes".as_slice()));
        queue.close();
    }

    #[test]
    fn where_io_uring_is_refused_threads_read_instead_and_the_engine_says_why() {
        let folder = tempfile::tempdir().unwrap();
        let engine = engine();
        let refused = std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                refuse(libc::SYS_io_uring_setup);
                read_in(folder.path(), &engine)
            });
            thread.join().unwrap()
        });
        assert_eq!(refused.as_deref(), Ok(b"bytes".as_slice()));
        let queue = &engine.status().device_queues[0];
        assert_eq!(queue.backend, "pread");
        assert!(queue.why.as_deref().unwrap().contains("not permitted"), "{queue:?}");
    }

    #[test]
    fn where_no_thread_can_be_started_the_fetch_fails_at_once_and_later_ones_need_not() {
        let folder = tempfile::tempdir().unwrap();
        let device = |path: &Path| std::fs::metadata(path).map(|meta| meta.dev()).ok();
        // If nothing is mounted at `/dev/shm`, it is a folder on the same disk as `folder`. The queue of this disk must
        // not be running.
        let is_other =
            device(Path::new("/dev/shm")).is_some_and(|shm| Some(shm) != device(folder.path()));
        // In the second round, the thread that watches deadlines is running already.
        for watched in [false, true] {
            let engine = engine();
            if watched && is_other {
                read_in(tempfile::tempdir_in("/dev/shm").unwrap().path(), &engine).unwrap();
            }
            let refused = std::thread::scope(|scope| {
                let thread = scope.spawn(|| {
                    refuse(libc::SYS_clone3);
                    refuse(libc::SYS_clone);
                    read_in(folder.path(), &engine)
                });
                thread.join().unwrap()
            });
            assert!(refused.unwrap_err().contains("not permitted"));
            assert_eq!(read_in(folder.path(), &engine).as_deref(), Ok(b"bytes".as_slice()));
        }
    }
}
