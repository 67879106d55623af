//! Limits the free memory that the C library's allocator keeps. The daemon has many threads that
//! run for a short time only.

/// Prevents the allocator from giving each thread a heap of its own, because other threads cannot
/// use the free memory of that heap. Must be called before any thread is started.
pub(crate) fn keep_small() {
    #[cfg(target_env = "gnu")]
    {
        // SAFETY: mallopt only sets a number, and no other thread runs yet.
        unsafe { nix::libc::mallopt(nix::libc::M_ARENA_MAX, 2) };
    }
}
