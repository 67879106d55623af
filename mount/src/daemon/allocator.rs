//! Limits the memory that the C library's allocator keeps, for a daemon with many short-lived
//! threads.

/// Keeps the allocator from giving each thread its own heap, whose free memory other threads cannot
/// use. Call it before any thread is started.
pub(crate) fn keep_small() {
    #[cfg(target_env = "gnu")]
    {
        // SAFETY: mallopt only sets a number, and no other thread runs yet.
        unsafe { nix::libc::mallopt(nix::libc::M_ARENA_MAX, 2) };
    }
}
