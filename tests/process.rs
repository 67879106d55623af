//! Forks of a process whose threads are at work.

#![allow(clippy::unwrap_used, reason = "a test that panics has failed, as it should")]

use std::sync::mpsc::channel;

use nix::libc;
use tensorfs::process::PerProcess;

#[test]
fn a_child_does_not_wait_for_a_value_that_a_thread_of_its_parent_makes() {
    let value = PerProcess::new();
    let (begins, begun) = channel();
    let (ends, ended) = channel::<()>();
    std::thread::scope(|scope| {
        let value = &value;
        scope.spawn(move || {
            let made = value.get_or_init(|| {
                begins.send(()).unwrap();
                ended.recv().unwrap();
                1
            });
            assert_eq!(*made, 1);
        });
        begun.recv().unwrap();
        // SAFETY: the child does nothing but ask for its value, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: no memory is passed. A child that waits for ever is ended, which fails.
            unsafe {
                libc::alarm(10);
                libc::_exit(if *value.get_or_init(|| 2) == 2 { 0 } else { 1 });
            }
        }
        let mut status = 0;
        // SAFETY: the status is written to.
        let waited = unsafe { libc::waitpid(child, &mut status, 0) };
        ends.send(()).unwrap();
        assert_eq!((waited, status), (child, 0));
    });
}
