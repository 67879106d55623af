//! How the C library's allocator keeps memory: a daemon with many short-lived threads must stay
//! small.

/// Keeps the allocator from giving each thread a heap of its own, of which none gives memory
/// back that another could use. To be called before threads are started.
pub(crate) fn keep_small() {
    #[cfg(target_env = "gnu")]
    {
        // SAFETY: mallopt only sets a number, and no other thread runs yet.
        unsafe { nix::libc::mallopt(nix::libc::M_ARENA_MAX, 2) };
    }
}
