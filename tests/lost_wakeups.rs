//! Models of structures in which a lost wakeup would hang a read. loom runs the threads of each model in
//! every order, and fails if all of them wait.

#![allow(clippy::unwrap_used, reason = "a test that panics has failed, as it should")]

#[allow(dead_code, unreachable_pub, reason = "the model calls some of it only")]
#[path = "../src/io/deadlines.rs"]
mod deadlines;

/// The names of `src/sync.rs`, as loom has them. Nothing wakes up without a call, and no time passes.
mod sync {
    use std::time::Duration;

    pub(crate) use loom::sync::MutexGuard;
    pub(crate) use loom::sync::atomic::{AtomicBool, Ordering};
    pub(crate) use loom::thread;

    #[derive(Debug, Default)]
    pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().unwrap()
        }
    }

    #[derive(Debug, Default)]
    pub(crate) struct Condvar(loom::sync::Condvar);

    impl Condvar {
        pub(crate) fn notify_one(&self) {
            self.0.notify_one();
        }

        pub(crate) fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
            self.0.wait(guard).unwrap()
        }

        pub(crate) fn wait_timeout<'a, T>(
            &self,
            guard: MutexGuard<'a, T>,
            _: Duration,
        ) -> MutexGuard<'a, T> {
            self.wait(guard)
        }
    }
}

use std::sync::Arc;

use deadlines::{Deadlines, NextLook};
use sync::{Condvar, Mutex, thread};

/// Deadlines that have begun and not ended, and whether the owner is gone.
#[derive(Default)]
struct Owner {
    state: Mutex<(u32, bool)>,
    ended: Condvar,
}

#[test]
fn a_deadline_that_begins_at_any_moment_is_seen_and_the_thread_ends_with_its_owner() {
    let mut model = loom::model::Builder::new();
    // More switches between the threads take minutes.
    model.preemption_bound = Some(2);
    model.check(|| {
        let (owner, deadlines) = (Arc::new(Owner::default()), Deadlines::default());
        let seen = owner.clone();
        let expire = move || {
            let mut state = seen.state.lock();
            state.0 = 0;
            seen.ended.notify_one();
            if state.1 { NextLook::Never } else { NextLook::WhenCalled }
        };
        deadlines.start("deadlines", expire).unwrap();
        let begin = |owner: &Owner, deadlines: &Deadlines| {
            owner.state.lock().0 += 1;
            deadlines.added();
        };
        let (other, handle) = (owner.clone(), deadlines.clone());
        let thread = thread::spawn(move || begin(&other, &handle));
        begin(&owner, &deadlines);
        thread.join().unwrap();
        let mut state = owner.state.lock();
        while state.0 > 0 {
            state = owner.ended.wait(state);
        }
        state.1 = true;
        drop(state);
        deadlines.wake();
    });
}
