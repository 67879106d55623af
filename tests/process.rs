//! Forks of a process whose threads are at work.

#![allow(clippy::unwrap_used, reason = "a test that panics has failed, as it should")]

use std::sync::mpsc::channel;

use nix::libc;
use tensorfs::internal::process::PerProcess;

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

/// Runs `work` in a child; returns its exit status, or None where it was ended by a signal.
fn in_child(work: impl FnOnce() -> i32) -> Option<i32> {
    // SAFETY: the child does nothing but `work`, and ends. One that waits for ever is ended.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: no memory is passed.
        unsafe {
            libc::alarm(10);
            libc::_exit(work());
        }
    }
    let mut status = 0;
    // SAFETY: the status is written to.
    let waited = unsafe { libc::waitpid(child, &mut status, 0) };
    (waited == child && libc::WIFEXITED(status)).then(|| libc::WEXITSTATUS(status))
}

#[test]
fn a_child_with_the_process_number_of_its_parent_begins_anew() {
    const NOT_ALLOWED: i32 = 77;
    let value = PerProcess::new();
    // Namespaces are for processes with one thread, which a test is not.
    let outcome = in_child(|| {
        // SAFETY: no memory is passed.
        let user = if unsafe { libc::geteuid() } == 0 { 0 } else { libc::CLONE_NEWUSER };
        // SAFETY: no memory is passed.
        if unsafe { libc::unshare(user | libc::CLONE_NEWPID) } != 0 {
            return NOT_ALLOWED;
        }
        let first = in_child(|| {
            let number = std::process::id();
            if *value.get_or_init(|| 1) != 1 {
                return 1;
            }
            // SAFETY: no memory is passed.
            if unsafe { libc::unshare(libc::CLONE_NEWPID) } != 0 {
                return NOT_ALLOWED;
            }
            let second = in_child(|| {
                let same_number = std::process::id() == number;
                i32::from(!same_number || *value.get_or_init(|| 2) != 2)
            });
            second.unwrap_or(2)
        });
        first.unwrap_or(3)
    });
    if outcome == Some(NOT_ALLOWED) {
        eprintln!("not tested: no PID namespaces here");
        return;
    }
    assert_eq!(outcome, Some(0));
}
