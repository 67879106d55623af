//! Hedged requests: a second copy of a request, sent if the first one is not answered in the usual time.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use super::patience::Trouble;
use crate::store::remote_status::EndpointCounters;

/// Minimum number of answers from which the usual time is computed.
const SAMPLES_MIN: u64 = 32;

/// Factor between the time in which 95 % of the answers came and the wait for the first answer.
const USUAL_TIMES: u32 = 2;

/// Shortest and longest wait before the second copy is sent.
const DELAYS: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(2));

/// Minimum number of requests for each second copy. This bounds the extra work of a slow server.
const REQUESTS_PER_HEDGE: u64 = 20;

/// Time to wait for the first answer before a second copy is sent. `None` if no second copy may be sent.
pub(super) fn delay(counters: &EndpointCounters) -> Option<Duration> {
    let answers: u64 = counters.first_byte.histogram().below_us.iter().map(|(_, n)| n).sum();
    let allowed = counters.requests.get() / REQUESTS_PER_HEDGE;
    if answers < SAMPLES_MIN || counters.hedges.get() >= allowed {
        return None;
    }
    let usual = Duration::from_micros(counters.first_byte.percentile_us(95));
    Some((usual * USUAL_TIMES).clamp(DELAYS.0, DELAYS.1))
}

/// The first answer that is a success or a final failure, which no other try would change. If both requests fail and
/// another try could succeed, the later failure.
pub(super) async fn first_success<T>(
    first: impl Future<Output = Result<T, Trouble>>,
    second: impl Future<Output = Result<T, Trouble>>,
) -> Result<T, Trouble> {
    let (mut first, mut second) = (pin!(first), pin!(second));
    let (mut first_over, mut second_over) = (false, false);
    poll_fn(move |context| {
        let mut failed = None;
        if !first_over && let Poll::Ready(answer) = first.as_mut().poll(context) {
            match answer {
                Err(trouble) if !matches!(trouble, Trouble::Final(_)) => failed = Some(trouble),
                answer => return Poll::Ready(answer),
            }
            first_over = true;
        }
        if !second_over && let Poll::Ready(answer) = second.as_mut().poll(context) {
            match answer {
                Err(trouble) if !matches!(trouble, Trouble::Final(_)) => failed = Some(trouble),
                answer => return Poll::Ready(answer),
            }
            second_over = true;
        }
        match failed {
            Some(trouble) if first_over && second_over => Poll::Ready(Err(trouble)),
            _ => Poll::Pending,
        }
    })
    .await
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use super::*;

    fn trouble(why: &str) -> Trouble {
        Trouble::Passing { why: why.to_owned(), after: None }
    }

    fn run<T>(work: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(work)
    }

    #[test]
    fn the_first_success_counts_and_two_failures_are_one() {
        assert_eq!(run(first_success(pending(), ready(Ok(2)))).unwrap(), 2);
        assert_eq!(run(first_success(ready(Ok(1)), pending())).unwrap(), 1);
        assert_eq!(run(first_success(ready(Err(trouble("a"))), ready(Ok(2)))).unwrap(), 2);
        let both: Result<u8, _> =
            run(first_success(ready(Err(trouble("a"))), ready(Err(trouble("b")))));
        assert!(matches!(both, Err(Trouble::Passing { why, .. }) if why == "b"));
        let last: Result<u8, _> = run(first_success(
            pending(),
            ready(Err(Trouble::Final(std::io::ErrorKind::NotFound.into()))),
        ));
        assert!(matches!(last, Err(Trouble::Final(_))));
    }

    #[test]
    fn second_requests_are_few_and_come_after_the_usual_time() {
        let counters = EndpointCounters::default();
        for _ in 0..SAMPLES_MIN {
            assert_eq!(delay(&counters), None);
            counters.requests.add(1);
            counters.first_byte.add(Duration::from_millis(60));
        }
        let usual = delay(&counters).unwrap();
        assert!(usual >= Duration::from_millis(120) && usual < Duration::from_millis(300));
        counters.hedges.add(1);
        assert_eq!(delay(&counters), None);
        counters.requests.add(20);
        assert!(delay(&counters).is_some());
    }
}
