//! Retries of a request: their number and the growing pauses between them, up to the deadline.

use std::io;
use std::time::{Duration, Instant};

use crate::error::{invalid_data, invalid_input};

/// The first pause, before a random part is subtracted.
const PAUSE: Duration = Duration::from_millis(100);

/// The longest pause, unless the server asks for a longer one.
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// Upper bound of `Patience::stall_limit` in the first try, and its lower bound in any try.
const STALL_FIRST: Duration = Duration::from_secs(3);
const STALL_MIN: Duration = Duration::from_millis(200);

/// Upper bound of `Patience::stall_limit` in any try. Without this bound, a reader without a deadline could wait for a
/// dead connection for an hour.
const STALL_MAX: Duration = Duration::from_secs(5 * 60);

/// Maximum number of consecutive tries without any connection, for a request that no read of a user waits for.
const UNREACHABLE_MAX: u32 = 4;

/// Maximum number of consecutive answers that break the protocol. Further tries would not help.
const BROKEN_MAX: u32 = 4;

/// Why a try failed.
#[derive(Debug)]
pub(super) enum Trouble {
    /// The server is busy, or the connection was lost. The next try may succeed.
    Passing {
        /// The reason, for messages.
        why: String,
        /// The pause that the server asks for.
        after: Option<Duration>,
    },
    /// The bytes of an answer come so slowly that another request is likely faster.
    Slow(String),
    /// There is no connection to the server.
    Unreachable(String),
    /// The server sends an answer that the protocol does not allow.
    Broken(String),
    /// Every further try would fail too.
    Final(io::Error),
}

/// The error of a request that cannot be built.
pub(super) fn unusable(why: &str) -> Trouble {
    Trouble::Final(invalid_input(why))
}

/// The error of a connection to `host` that was lost, or could not be made.
pub(super) fn lost_connection(host: &str, e: reqwest::Error) -> Trouble {
    if e.is_redirect() {
        return Trouble::Broken(format!("{host} redirects without end"));
    }
    let is_connect = e.is_connect();
    let why = root_cause(&e.without_url());
    if is_connect {
        Trouble::Unreachable(format!("no connection to {host}: {why}"))
    } else {
        Trouble::Passing { why: format!("the connection to {host} was lost: {why}"), after: None }
    }
}

/// The error of a server that sends nothing for the time `limit`.
pub(super) fn no_answer(host: &str, limit: Duration) -> Trouble {
    let why = format!("no answer from {host} within {:.1} s", limit.as_secs_f64());
    Trouble::Passing { why, after: None }
}

/// The innermost cause of an error, which is the most specific one.
fn root_cause(error: &dyn std::error::Error) -> String {
    let mut inner = error;
    while let Some(next) = inner.source() {
        inner = next;
    }
    inner.to_string()
}

/// The tries of one request.
pub(super) struct Patience {
    began: Instant,
    pub(super) deadline: Instant,
    /// Whether tries go on up to the deadline even if there is no connection to the server.
    waits_for_server: bool,
    tries: u32,
    /// Number of failures since the last byte arrived.
    failures: u32,
    unreachable: u32,
    broken: u32,
}

impl Patience {
    pub(super) fn until(deadline: Instant, waits_for_server: bool) -> Patience {
        let (tries, failures, unreachable, broken) = (0, 0, 0, 0);
        let began = Instant::now();
        Patience { began, deadline, waits_for_server, tries, failures, unreachable, broken }
    }

    /// The longest wait for the next byte in one try. It is a part of the time up to the deadline, so that time
    /// is left for another try. It grows with each failure, because the server may just be slow.
    pub(super) fn stall_limit(&self) -> Duration {
        let first = STALL_FIRST.min(self.deadline.saturating_duration_since(self.began) / 4);
        let left = self.deadline.saturating_duration_since(Instant::now());
        first.saturating_mul(1 << self.failures.min(10)).min(STALL_MAX).min(left).max(STALL_MIN)
    }

    /// Resets the counts of failures, because bytes have arrived.
    pub(super) fn progressed(&mut self) {
        (self.failures, self.unreachable, self.broken) = (0, 0, 0);
    }

    /// Waits for the pause before the next try.
    ///
    /// # Errors
    /// The cause in `trouble`, if no time is left for another try, or another try would fail too.
    pub(super) async fn pause_before_retry(&mut self, trouble: Trouble) -> io::Result<()> {
        self.tries += 1;
        self.failures += 1;
        let (why, after) = match trouble {
            Trouble::Final(e) => return Err(e),
            Trouble::Passing { why, after } => (why, after),
            Trouble::Slow(why) => (why, None),
            Trouble::Unreachable(why) => {
                self.unreachable += 1;
                if !self.waits_for_server && self.unreachable >= UNREACHABLE_MAX {
                    return Err(io::Error::new(io::ErrorKind::NotConnected, self.given_up(&why)));
                }
                (why, None)
            }
            Trouble::Broken(why) => {
                self.broken += 1;
                if self.broken >= BROKEN_MAX {
                    return Err(invalid_data(self.given_up(&why)));
                }
                (why, None)
            }
        };
        // The server may ask for no pause at all, or for the same pause from many readers.
        let own = shortened(grown(self.failures));
        let pause = after.map_or(own, |after| after.saturating_add(own));
        let left = self.deadline.saturating_duration_since(Instant::now());
        if pause >= left.saturating_sub(STALL_MIN) {
            let why = match after {
                Some(after) => format!("{why}, and asks to wait {} s", after.as_secs()),
                None => why,
            };
            return Err(io::Error::new(io::ErrorKind::TimedOut, self.given_up(&why)));
        }
        tracing::debug!(?pause, tries = self.tries, "trying again: {why}");
        tokio::time::sleep(pause).await;
        Ok(())
    }

    /// The error if other requests take all places for requests to the server up to the deadline.
    pub(super) fn no_place(&self) -> io::Error {
        let why = "the limit of concurrent requests to the server was reached";
        io::Error::new(io::ErrorKind::TimedOut, self.given_up(why))
    }

    fn given_up(&self, why: &str) -> String {
        let (tries, seconds) = (self.tries, self.began.elapsed().as_secs_f64());
        let tries = if tries == 1 { "1 try".to_owned() } else { format!("{tries} tries") };
        format!("{why}; given up after {tries} in {seconds:.1} s")
    }
}

/// The speed at which the bytes of an answer come.
pub(super) struct Pace {
    /// The time over which the speed is measured.
    window: Duration,
    since: Instant,
    have: usize,
}

impl Pace {
    /// The pace of an answer that begins now, after `have` bytes of the read.
    pub(super) fn new(window: Duration, have: usize) -> Pace {
        Pace { window, since: Instant::now(), have }
    }

    /// Whether `have` of `wanted` bytes came so slowly that another request is likely faster. In the first try, this is
    /// so if the rest would take more than half of the time up to the deadline. In later tries, it is so if the rest
    /// would arrive after the deadline.
    pub(super) fn is_too_slow(&mut self, have: usize, wanted: usize, patience: &Patience) -> bool {
        let (now, elapsed) = (Instant::now(), self.since.elapsed());
        if elapsed < self.window {
            return false;
        }
        let rest = elapsed.mul_f64((wanted - have) as f64 / (have - self.have).max(1) as f64);
        (self.since, self.have) = (now, have);
        let left = patience.deadline.saturating_duration_since(now);
        let rest_max = if patience.failures == 0 { left / 2 } else { left };
        // Near the deadline, no time is left for another request.
        rest > rest_max && left > STALL_MIN * 4
    }
}

/// The pause after this many failures.
fn grown(failures: u32) -> Duration {
    PAUSE.saturating_mul(1 << failures.saturating_sub(1).min(10)).min(PAUSE_MAX)
}

/// `pause`, shortened by a random part of at most half of it, so that many readers do not retry at the same time.
fn shortened(pause: Duration) -> Duration {
    let chance = getrandom::u32().unwrap_or_default();
    pause.mul_f64(0.5 + f64::from(chance) / f64::from(u32::MAX) / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_try_waits_longer_than_the_one_before_and_leaves_time_for_another() {
        let mut patience = Patience::until(Instant::now() + Duration::from_secs(60), true);
        assert_eq!(patience.stall_limit(), STALL_FIRST);
        patience.failures = 2;
        assert_eq!(patience.stall_limit(), STALL_FIRST * 4);
        let short = Patience::until(Instant::now() + Duration::from_secs(4), true);
        assert!(short.stall_limit() <= Duration::from_secs(1));
        let over = Patience::until(Instant::now(), true);
        assert_eq!(over.stall_limit(), STALL_MIN);
    }

    #[test]
    fn an_answer_is_too_slow_if_its_rest_takes_half_of_the_time_that_is_left() {
        let mut patience = Patience::until(Instant::now() + Duration::from_secs(120), true);
        let mut pace = Pace::new(Duration::from_secs(3), 0);
        assert!(!pace.is_too_slow(1, 1 << 20, &patience));
        let after_three_seconds = |patience: &Patience, have: usize| {
            let since = Instant::now().checked_sub(Duration::from_secs(3))?;
            let mut pace = Pace { since, ..Pace::new(Duration::from_secs(3), 0) };
            Some(pace.is_too_slow(have, 1000, patience))
        };
        // At 30 bytes in 3 s, the rest takes 97 s, and at 90 bytes, it takes 30 s.
        assert_ne!(after_three_seconds(&patience, 30), Some(false));
        assert_ne!(after_three_seconds(&patience, 90), Some(true));
        patience.failures = 1;
        assert_ne!(after_three_seconds(&patience, 30), Some(true));
        assert_ne!(after_three_seconds(&patience, 10), Some(false));
    }

    fn pauses_of(limit: Duration, after: Option<Duration>) -> (u32, io::Error) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let mut patience = Patience::until(Instant::now() + limit, true);
        runtime.block_on(async {
            loop {
                let trouble = Trouble::Passing { why: "busy".to_owned(), after };
                if let Err(e) = patience.pause_before_retry(trouble).await {
                    return (patience.tries, e);
                }
            }
        })
    }

    // A regression: with `Retry-After: 0`, 300 requests a second were sent until the deadline.
    #[test]
    fn a_server_that_asks_for_no_pause_gets_no_storm_of_requests() {
        let (tries, e) = pauses_of(Duration::from_secs(1), Some(Duration::ZERO));
        assert!((3..=6).contains(&tries), "{tries}");
        assert_eq!(e.kind(), io::ErrorKind::TimedOut);
    }

    // A regression: the sum of this pause and the time was a panic.
    #[test]
    fn a_pause_that_never_ends_is_an_error_at_once() {
        let (tries, e) = pauses_of(Duration::from_secs(9), Some(Duration::from_secs(u64::MAX)));
        assert_eq!(tries, 1);
        assert!(e.to_string().contains("asks to wait 18446744073709551615 s"), "{e}");
    }

    #[test]
    fn pauses_grow_up_to_a_limit_and_differ() {
        assert_eq!(grown(1), PAUSE);
        assert_eq!(grown(2), PAUSE * 2);
        assert_eq!(grown(100), PAUSE_MAX);
        let pauses: Vec<Duration> = (0..50).map(|_| shortened(PAUSE)).collect();
        assert!(pauses.iter().all(|pause| (PAUSE / 2..=PAUSE).contains(pause)));
        assert!(pauses.iter().any(|pause| *pause != pauses[0]));
    }
}
