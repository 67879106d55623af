//! Tests of the thread that watches deadlines. `tests/lost_wakeups.rs` has a model of it.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use crate::io::{Deadlines, NextLook};

#[test]
fn the_thread_looks_at_due_times_and_when_it_is_called_until_its_owner_is_gone() {
    let (deadlines, owner) = (Deadlines::default(), Arc::new(()));
    let (weak, mut looks) = (Arc::downgrade(&owner), 0);
    let (send, receive) = channel();
    let expire = move || {
        looks += 1;
        let is_gone = weak.upgrade().is_none();
        send.send(looks).unwrap();
        match looks {
            _ if is_gone => NextLook::Never,
            1 | 2 => NextLook::At(Instant::now() + Duration::from_millis(1)),
            _ => NextLook::WhenCalled,
        }
    };
    deadlines.start("deadlines", expire).unwrap();
    deadlines.start("deadlines", || unreachable!("it runs already")).unwrap();
    assert_eq!(receive.iter().take(3).collect::<Vec<_>>(), [1, 2, 3]);
    deadlines.wake();
    assert_eq!(receive.recv(), Ok(4));
    drop(owner);
    deadlines.wake();
    // When the thread ends, it drops the sender.
    assert_eq!(receive.iter().collect::<Vec<_>>(), [5]);
}
