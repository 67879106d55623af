//! Retries of a request: their number and the growing pauses between them, up to the deadline.

use std::io;
use std::time::{Duration, Instant};

/// The first pause, before a random part is subtracted.
const PAUSE: Duration = Duration::from_millis(100);

/// The longest pause, unless the server asks for a longer one.
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// Longest wait for the next byte in the first try, and shortest wait in any try.
const STALL_FIRST: Duration = Duration::from_secs(3);
const STALL_MIN: Duration = Duration::from_millis(200);

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
    /// There is no connection to the server.
    Unreachable(String),
    /// The server sends an answer that the protocol does not allow.
    Broken(String),
    /// Every further try would fail too.
    Final(io::Error),
}

/// The error of a request that cannot be built.
pub(super) fn unusable(why: &str) -> Trouble {
    Trouble::Final(io::Error::new(io::ErrorKind::InvalidInput, why.to_owned()))
}

/// The error of a connection to `host` that was lost, or could not be made.
pub(super) fn lost_connection(host: &str, e: reqwest::Error) -> Trouble {
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
    deadline: Instant,
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
        first.saturating_mul(1 << self.failures.min(10)).max(STALL_MIN)
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
                    return Err(io::Error::new(io::ErrorKind::InvalidData, self.given_up(&why)));
                }
                (why, None)
            }
        };
        let pause = after.unwrap_or_else(|| shortened(grown(self.failures)));
        if Instant::now() + pause >= self.deadline {
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

    fn given_up(&self, why: &str) -> String {
        let (tries, seconds) = (self.tries, self.began.elapsed().as_secs_f64());
        let tries = if tries == 1 { "1 try".to_owned() } else { format!("{tries} tries") };
        format!("{why}; given up after {tries} in {seconds:.1} s")
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
    fn pauses_grow_up_to_a_limit_and_differ() {
        assert_eq!(grown(1), PAUSE);
        assert_eq!(grown(2), PAUSE * 2);
        assert_eq!(grown(100), PAUSE_MAX);
        let pauses: Vec<Duration> = (0..50).map(|_| shortened(PAUSE)).collect();
        assert!(pauses.iter().all(|pause| (PAUSE / 2..=PAUSE).contains(pause)));
        assert!(pauses.iter().any(|pause| *pause != pauses[0]));
    }
}
