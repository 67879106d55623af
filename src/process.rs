//! State of one process: a child made by fork(2) begins anew.
//!
//! A child has none of its parent's threads, and locks that those held stay locked in it for
//! ever. So each process keeps the state that its threads share, and a child never looks at its
//! parent's.
//!
//! A process number does not identify a process: in a PID namespace of its own a child may have the
//! number that its parent has outside. `token` identifies it.

use std::num::NonZeroUsize;
use std::ptr::{self, NonNull};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

use nix::libc;
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap_anonymous, munmap};

/// A number that no ancestor of this process by fork has. It stays the same while the process
/// lives.
pub fn token() -> u64 {
    static OF_PROCESS: Token = Token::new();
    OF_PROCESS.get(wiped_page)
}

/// Memory that the kernel fills with zeros in a child (`MADV_WIPEONFORK`), or `NO_PAGE`.
struct Token(AtomicPtr<AtomicU64>);

/// Stands for memory that the kernel did not provide.
static NO_PAGE: AtomicU64 = AtomicU64::new(0);

/// The next token. A child continues from its parent's value.
static NEXT: AtomicU64 = AtomicU64::new(1);

/// Number of forks from the first process to this one, counted if there is no such memory.
static FORKS: AtomicU32 = AtomicU32::new(0);

extern "C" fn count_fork() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

impl Token {
    const fn new() -> Token {
        Token(AtomicPtr::new(ptr::null_mut()))
    }

    /// The token of this process. `make` provides the memory. No lock is taken, since a thread of
    /// the parent may hold it during a fork.
    fn get(&self, make: fn() -> Option<NonNull<AtomicU64>>) -> u64 {
        let mut page = self.0.load(Ordering::Acquire);
        if page.is_null() {
            let made = make().map_or_else(without_page, NonNull::as_ptr);
            let before = self.0.compare_exchange(page, made, Ordering::AcqRel, Ordering::Acquire);
            // If several threads come here at once, all but one leave a page unused.
            page = before.map_or_else(|first| first, |_| made);
        }
        if ptr::eq(page, &NO_PAGE) {
            let forks = u64::from(FORKS.load(Ordering::Relaxed));
            return forks << 32 | u64::from(std::process::id());
        }
        // SAFETY: the page is never unmapped, and begins with zeros or a token.
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

/// A page of zeros, which a child finds full of zeros again. `None` if the kernel has no such
/// memory: some sandboxes emulate a kernel without it.
fn wiped_page() -> Option<NonNull<AtomicU64>> {
    const LEN: NonZeroUsize = NonZeroUsize::new(4096).unwrap();
    let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    // SAFETY: the mapping is new, and no other code refers to it. It stays, or is unmapped at once.
    unsafe {
        let page = mmap_anonymous(None, LEN, protection, MapFlags::MAP_PRIVATE).ok()?;
        if madvise(page, LEN.get(), MmapAdvise::MADV_WIPEONFORK).is_err() {
            let _ = munmap(page, LEN.get());
            return None;
        }
        Some(page.cast())
    }
}

/// Counts forks from now on: those by fork(3), which all libraries use.
fn without_page() -> *mut AtomicU64 {
    // SAFETY: the function only adds to a counter. If it is registered twice, it adds two.
    unsafe { libc::pthread_atfork(None, None, Some(count_fork)) };
    (&raw const NO_PAGE).cast_mut()
}
/// A value that each process makes for itself at the first use.
#[derive(Debug)]
pub struct PerProcess<T> {
    /// The value of the process that came first, with its token.
    own: OnceLock<(u64, T)>,
    /// The values of its descendants.
    next: OnceLock<Box<PerProcess<T>>>,
}

impl<T> PerProcess<T> {
    /// Creates a holder without a value.
    pub const fn new() -> PerProcess<T> {
        PerProcess { own: OnceLock::new(), next: OnceLock::new() }
    }

    /// The value of this process, which `make` makes if there is none. If
    /// several threads make it at once, the first value stays and the others are dropped.
    pub fn get_or_init(&self, make: impl FnOnce() -> T) -> &T {
        let process = token();
        let (mut held, mut make) = (self, Some(make));
        loop {
            match held.own.get() {
                Some((owner, value)) if *owner == process => return value,
                Some(_) => held = held.next.get_or_init(|| Box::new(PerProcess::new())),
                None => {
                    // The value is made before the cell is taken: a child of a fork in between
                    // would find the cell taken for ever.
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
        // The value is as a child finds it: another process has made it.
        value.own.set((0, 1)).unwrap();
        assert_eq!(*value.get_or_init(|| 2), 2);
        assert_eq!(*value.get_or_init(|| 3), 2);
    }

    /// Whether a child finds another token than its parent has.
    fn differs_in_a_child(token: &Token, make: fn() -> Option<NonNull<AtomicU64>>) -> bool {
        let own = token.get(make);
        // SAFETY: the child only reads its token, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let same = token.get(make) == own;
            // SAFETY: no memory is passed.
            unsafe { libc::_exit(i32::from(same)) };
        }
        let mut status = 0;
        // SAFETY: the status is written to.
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
