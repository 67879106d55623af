//! State of one process. A child process that was created by fork(2) gets new state.
//!
//! A child has none of the threads of its parent. A lock that such a thread held stays locked forever in the child. So
//! each process has its own state, which its threads share, and a child never accesses the state of its parent.
//!
//! A process number does not identify a process: in its own PID namespace, a child may have the same number
//! that its parent has outside. `token` identifies a process.

use std::num::NonZeroUsize;
use std::ptr::{self, NonNull};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

use nix::libc;
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap_anonymous, munmap};

/// A number that differs from the numbers of all processes from which this process descends by fork. It does not change
/// while the process lives.
pub fn token() -> u64 {
    static OF_PROCESS: Token = Token::new();
    OF_PROCESS.get(wiped_page)
}

/// Memory that the kernel fills with zeros in a child (`MADV_WIPEONFORK`), or `NO_PAGE`.
struct Token(AtomicPtr<AtomicU64>);

/// This address means that the kernel did not provide memory.
static NO_PAGE: AtomicU64 = AtomicU64::new(0);

/// The next token. A child continues from the value of its parent.
static NEXT: AtomicU64 = AtomicU64::new(1);

/// Number of forks from the first process to this process. It is counted only if the kernel did not provide memory.
static FORKS: AtomicU32 = AtomicU32::new(0);

extern "C" fn count_fork() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

impl Token {
    const fn new() -> Token {
        Token(AtomicPtr::new(ptr::null_mut()))
    }

    /// The token of this process. `make` allocates the memory. The function uses no lock, because a thread of
    /// the parent might hold it during a fork.
    fn get(&self, make: fn() -> Option<NonNull<AtomicU64>>) -> u64 {
        let mut page = self.0.load(Ordering::Acquire);
        if page.is_null() {
            let made = make().map_or_else(without_page, NonNull::as_ptr);
            let before = self.0.compare_exchange(page, made, Ordering::AcqRel, Ordering::Acquire);
            // If several threads allocate a page at the same time, only the page of one thread is used, and the other
            // pages stay unused.
            page = before.map_or_else(|first| first, |_| made);
        }
        if ptr::eq(page, &NO_PAGE) {
            let forks = u64::from(FORKS.load(Ordering::Relaxed));
            return forks << 32 | u64::from(std::process::id());
        }
        // SAFETY: the page is never unmapped, and it begins with zeros or with a token.
        let own = unsafe { &*page };
        match own.load(Ordering::Relaxed) {
            0 => {
                let next = NEXT.fetch_add(1, Ordering::Relaxed);
                let before = own.compare_exchange(0, next, Ordering::Relaxed, Ordering::Relaxed);
                before.map_or_else(|first| first, |_| next)
            }
            token => token,
        }
    }
}

/// Allocates a page of zeros, which the kernel fills with zeros again in a child. `None` if the kernel does not support
/// this, as in some sandboxes that emulate a kernel.
fn wiped_page() -> Option<NonNull<AtomicU64>> {
    const LEN: NonZeroUsize = NonZeroUsize::new(4096).unwrap();
    let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    // SAFETY: the mapping is new, and no other code refers to it. It is either never unmapped or unmapped at once.
    unsafe {
        let page = mmap_anonymous(None, LEN, protection, MapFlags::MAP_PRIVATE).ok()?;
        if madvise(page, LEN.get(), MmapAdvise::MADV_WIPEONFORK).is_err() {
            let _ = munmap(page, LEN.get());
            return None;
        }
        Some(page.cast())
    }
}

/// Begins to count forks. All libraries use fork(3), which is counted.
fn without_page() -> *mut AtomicU64 {
    // SAFETY: the function only increases a counter. If it is registered twice, a fork adds two, which does no harm.
    unsafe { libc::pthread_atfork(None, None, Some(count_fork)) };
    (&raw const NO_PAGE).cast_mut()
}
/// A value that each process creates for itself at the first use.
#[derive(Debug)]
pub struct PerProcess<T> {
    /// The value of the first process that used it, with the token of this process.
    own: OnceLock<(u64, T)>,
    /// The values of the processes that descend from the first process.
    next: OnceLock<Box<PerProcess<T>>>,
}

impl<T> PerProcess<T> {
    /// Creates a holder without a value.
    pub const fn new() -> PerProcess<T> {
        PerProcess { own: OnceLock::new(), next: OnceLock::new() }
    }

    /// The value of this process. If it does not exist, `make` creates it. If several threads create it at the
    /// same time, the first value is used and the others are dropped.
    pub fn get_or_init(&self, make: impl FnOnce() -> T) -> &T {
        let process = token();
        let (mut held, mut make) = (self, Some(make));
        loop {
            match held.own.get() {
                Some((owner, value)) if *owner == process => return value,
                Some(_) => held = held.next.get_or_init(|| Box::new(PerProcess::new())),
                None => {
                    // The value is created before the cell is set. Otherwise a child of a fork in between would
                    // find the cell locked forever.
                    if let Some(make) = make.take() {
                        let _ = held.own.set((process, make()));
                    }
                }
            }
        }
    }
}

impl<T> Default for PerProcess<T> {
    fn default() -> PerProcess<T> {
        PerProcess::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_process_makes_one_value() {
        let value = PerProcess::new();
        assert_eq!(*value.get_or_init(|| 1), 1);
        assert_eq!(*value.get_or_init(|| 2), 1);
    }

    #[test]
    fn the_value_of_another_process_is_never_looked_at() {
        let value = PerProcess::new();
        // The value now looks as in a child: its token is that of another process.
        value.own.set((0, 1)).unwrap();
        assert_eq!(*value.get_or_init(|| 2), 2);
        assert_eq!(*value.get_or_init(|| 3), 2);
    }

    /// Whether a child gets another token than its parent.
    fn differs_in_a_child(token: &Token, make: fn() -> Option<NonNull<AtomicU64>>) -> bool {
        let own = token.get(make);
        // SAFETY: the child only reads its token and then ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let same = token.get(make) == own;
            // SAFETY: no memory is passed.
            unsafe { libc::_exit(i32::from(same)) };
        }
        let mut status = 0;
        // SAFETY: the call writes only to the status.
        let waited = unsafe { libc::waitpid(child, &mut status, 0) };
        assert_eq!(token.get(make), own, "it stays the same in the parent");
        waited == child && status == 0
    }

    #[test]
    fn a_child_has_another_token_also_where_the_kernel_cannot_wipe_memory() {
        assert!(differs_in_a_child(&Token::new(), wiped_page));
        assert!(differs_in_a_child(&Token::new(), || None));
    }
}
