//! What belongs to one process: a child made by fork(2) begins anew.
//!
//! A child has none of its parent's threads, and locks that those held stay locked in it for
//! ever. So what threads share is kept by process, and the child never looks at its parent's.

use std::sync::OnceLock;

/// A value that each process makes for itself when it needs it first.
#[derive(Debug)]
pub struct PerProcess<T> {
    /// Of the process that came first.
    own: OnceLock<(u32, T)>,
    /// Of its descendants.
    next: OnceLock<Box<PerProcess<T>>>,
}

impl<T> PerProcess<T> {
    /// Nothing yet.
    pub const fn new() -> PerProcess<T> {
        PerProcess { own: OnceLock::new(), next: OnceLock::new() }
    }

    /// The value of this process, which `make` makes if there is none. Of threads that make it at
    /// once one is the first; what the others made is dropped.
    pub fn get_or_init(&self, make: impl FnOnce() -> T) -> &T {
        let process = std::process::id();
        let (mut held, mut make) = (self, Some(make));
        loop {
            match held.own.get() {
                Some((owner, value)) if *owner == process => return value,
                Some(_) => held = held.next.get_or_init(|| Box::new(PerProcess::new())),
                None => {
                    // Made before the cell is taken, which a child of a fork in between would
                    // find taken for ever.
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
        // As a child finds it: made by somebody else.
        value.own.set((0, 1)).unwrap();
        assert_eq!(*value.get_or_init(|| 2), 2);
        assert_eq!(*value.get_or_init(|| 3), 2);
    }
}
