//! The choice between huge and small pages by their cost. On most machines huge pages are several times cheaper than
//! small pages. In a virtual machine small pages can be cheaper: a host that takes back free memory takes whole huge
//! pages, and leaves single small pages. Memory that the host has to provide again is the most expensive. So both sizes
//! are tried, and the cheaper one is used. It may become more expensive later, because the supply of either size can
//! run out, and then the other size is used.

use std::time::{Duration, Instant};

use super::PageSize;

/// Number of bytes of one measurement. A measurement must cost less than it saves.
const STRETCH: u64 = 4 << 20;

/// Number of bytes until the other size is tried again: initial value and maximum.
const WAIT_MIN: u64 = 16 << 20;
const WAIT_MAX: u64 = 1 << 30;

/// Maximum time between two loads for which memory counts as unchanged.
const SOON: Duration = Duration::from_millis(500);

/// The other page size.
fn other(pages: PageSize) -> PageSize {
    match pages {
        PageSize::Huge => PageSize::Small,
        PageSize::Small => PageSize::Huge,
    }
}

/// Chooses the next page size by the measured cost of both sizes.
#[derive(Clone, Debug)]
pub(super) struct Choice {
    now: PageSize,
    /// Whether `now` is used only for a trial.
    trial: bool,
    /// Cost of huge pages and of small pages at the last measurement, in nanoseconds per byte.
    cost: [Option<f64>; 2],
    /// Number of bytes since the last measurement, and the time that they took.
    bytes: u64,
    time: Duration,
    /// Number of bytes between two trials. `left` is the number of bytes that remain until the next trial.
    wait: u64,
    left: u64,
}

/// The choice at the end of the last load.
#[derive(Clone, Debug, Default)]
pub(super) struct LastChoice {
    pub(super) choice: Choice,
    /// Time at which that load ended. `None` if there was none.
    pub(super) made_at: Option<Instant>,
}

impl LastChoice {
    /// The first choice of the next load. A load that begins soon after the last load continues with the choice at the
    /// end of the last load.
    pub(super) fn first_of_next_load(&self) -> Choice {
        let is_soon = self.made_at.is_some_and(|made_at| made_at.elapsed() < SOON);
        if is_soon { self.choice.clone() } else { self.choice.clone().next() }
    }
}

impl Default for Choice {
    fn default() -> Choice {
        Choice {
            now: PageSize::Huge,
            trial: false,
            cost: [None; 2],
            bytes: 0,
            time: Duration::ZERO,
            wait: WAIT_MIN,
            left: 0,
        }
    }
}

impl Choice {
    /// The page size to use next.
    pub(super) fn now(&self) -> PageSize {
        self.now
    }

    /// Notes that a thread needed the time `time` for `bytes` in pages of `size`.
    pub(super) fn took(&mut self, size: PageSize, bytes: u64, time: Duration) {
        // The choice may have changed while this thread was populating.
        if size != self.now {
            return;
        }
        self.bytes += bytes;
        self.time += time;
        if self.bytes < STRETCH {
            return;
        }
        let cost = self.time.as_nanos() as f64 / self.bytes as f64;
        let before = self.cost[size as usize].replace(cost);
        let others = self.cost[other(size) as usize];
        self.left = self.left.saturating_sub(self.bytes);
        (self.bytes, self.time) = (0, Duration::ZERO);
        if self.trial {
            self.trial = false;
            if others.is_some_and(|others| others <= cost) {
                self.now = other(size);
                self.wait = (2 * self.wait).min(WAIT_MAX);
            } else {
                self.wait = WAIT_MIN;
            }
            self.left = self.wait;
        } else if self.left == 0 || before.is_some_and(|before| cost > 2.0 * before) {
            // The next trial is due, or the current page size has become more expensive.
            self.now = other(size);
            self.trial = true;
        }
    }

    /// The choice for a load after a pause, in which much may have changed. If small pages were in use, huge
    /// pages are tried at once.
    pub(super) fn next(self) -> Choice {
        let now = if self.trial { other(self.now) } else { self.now };
        let left = if now == PageSize::Small { 0 } else { self.left };
        Choice { now, trial: false, bytes: 0, time: Duration::ZERO, left, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PART: u64 = 2 << 20;

    /// Simulates the population of `bytes`. `cost` returns the cost of a page size in nanoseconds per KiB.
    /// Returns the number of bytes in huge pages.
    fn take(choice: &mut Choice, bytes: u64, cost: &mut dyn FnMut(PageSize) -> u64) -> u64 {
        let mut huge = 0;
        for _ in 0..bytes / PART {
            let pages = choice.now();
            huge += if pages == PageSize::Huge { PART } else { 0 };
            choice.took(pages, PART, Duration::from_nanos(cost(pages) * (PART >> 10)));
        }
        huge
    }

    fn costs(huge: u64, small: u64) -> impl FnMut(PageSize) -> u64 {
        move |pages| if pages == PageSize::Huge { huge } else { small }
    }

    #[test]
    fn huge_pages_that_cost_less_are_kept_with_few_trials_of_small_ones() {
        let mut choice = Choice::default();
        let huge = take(&mut choice, 4 << 30, &mut costs(45, 320));
        assert!((4 << 30) - huge <= 48 << 20, "{huge}");
        assert_eq!(choice.now(), PageSize::Huge);
    }

    #[test]
    fn small_pages_that_cost_less_are_taken_from_the_first_megabytes_on() {
        let mut choice = Choice::default();
        let huge = take(&mut choice, 4 << 30, &mut costs(2500, 320));
        assert!(huge <= 48 << 20, "{huge}");
        assert_eq!(choice.now(), PageSize::Small);
    }

    #[test]
    fn the_choice_changes_within_few_megabytes_when_the_cheaper_pages_are_used_up() {
        let mut choice = Choice::default();
        // 1 GiB of huge pages and 2 GiB of small pages are cheap. All further pages are expensive.
        let mut left = [1 << 30, 2 << 30];
        let mut cost = |pages| {
            let here: &mut u64 = &mut left[pages as usize];
            let there = *here > 0;
            *here = here.saturating_sub(PART);
            match pages {
                _ if !there => 2500,
                PageSize::Huge => 45,
                PageSize::Small => 320,
            }
        };
        take(&mut choice, (3 << 30) + (128 << 20), &mut cost);
        // All cheap pages were used.
        assert_eq!(left, [0, 0]);
    }

    #[test]
    fn equal_costs_leave_huge_pages() {
        let mut choice = Choice::default();
        let huge = take(&mut choice, 1 << 30, &mut costs(2500, 2500));
        assert!((1 << 30) - huge <= 48 << 20, "{huge}");
    }

    #[test]
    fn one_dear_part_costs_no_more_than_a_short_stay_with_the_other_pages() {
        let mut choice = Choice::default();
        take(&mut choice, 1 << 30, &mut costs(45, 320));
        let mut parts = 0;
        let mut cost = |pages| {
            parts += 1;
            if parts == 1 { 2500 } else { costs(45, 320)(pages) }
        };
        let huge = take(&mut choice, 1 << 30, &mut cost);
        assert!((1 << 30) - huge <= 64 << 20, "{huge}");
    }

    #[test]
    fn the_next_load_begins_with_the_choice_and_tries_huge_pages_again_at_once() {
        let mut first = Choice::default();
        take(&mut first, 1 << 30, &mut costs(2500, 320));
        let mut choice = first.next();
        assert_eq!(choice.now(), PageSize::Small);
        let huge = take(&mut choice, 256 << 20, &mut costs(45, 320));
        assert!((256 << 20) - huge <= 24 << 20, "{huge}");
        assert_eq!(choice.next().now(), PageSize::Huge);
    }

    #[test]
    fn short_loads_in_a_row_find_out_together_what_a_long_one_does() {
        let mut last = LastChoice::default();
        let mut huge = 0;
        for _ in 0..64 {
            let mut choice = last.first_of_next_load();
            // Each of seven threads takes one part before the first part is populated.
            let sizes = [choice.now(); 7];
            for size in sizes {
                huge += u64::from(size == PageSize::Huge);
                let time = Duration::from_micros(if size == PageSize::Huge { 5000 } else { 640 });
                choice.took(size, PART, time);
            }
            last = LastChoice { choice, made_at: Some(Instant::now()) };
        }
        assert!(huge <= 64 * 7 / 8, "{huge}");
    }

    #[test]
    fn a_load_that_begins_long_after_another_tries_huge_pages_again() {
        let mut choice = Choice::default();
        take(&mut choice, 1 << 30, &mut costs(2500, 320));
        let last = LastChoice { choice, made_at: Instant::now().checked_sub(2 * SOON) };
        let mut choice = last.first_of_next_load();
        let huge = take(&mut choice, 256 << 20, &mut costs(45, 320));
        assert!((256 << 20) - huge <= 24 << 20, "{huge}");
    }

    #[test]
    fn a_load_that_ends_within_a_trial_leaves_no_trial_to_the_next() {
        let mut choice = Choice::default();
        take(&mut choice, STRETCH, &mut costs(45, 320));
        assert_eq!((choice.now(), choice.trial), (PageSize::Small, true));
        assert_eq!(choice.next().now(), PageSize::Huge);
    }

    #[test]
    fn times_of_the_other_pages_count_for_nothing() {
        let mut choice = Choice::default();
        choice.took(PageSize::Small, 1 << 30, Duration::ZERO);
        assert_eq!((choice.now(), choice.bytes), (PageSize::Huge, 0));
    }
}
