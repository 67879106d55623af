//! The bandwidth-delay product of a server: how many bytes have to be in flight, so that its connections never idle.

use std::time::{Duration, Instant};

/// Shortest time over which a rate is measured.
const INTERVAL_MIN: Duration = Duration::from_millis(100);

/// If no bytes have arrived for more than this number of intervals, the reader has paused, and no rate is computed.
const PAUSE_INTERVALS: u32 = 4;

/// Number of last intervals whose highest rate is used. If the reader waits for something else during an interval, the
/// rate of this interval is too low.
const INTERVALS: usize = 16;

/// Time after which the shortest latency is measured again, because the route to the server may have changed.
const LATENCY_AGE_MAX: Duration = Duration::from_secs(60);

/// Factor between the bandwidth-delay product and the bytes in flight. It lets the measured rate grow up to the rate of
/// the connection, and covers the variation of the latency.
const GAIN: f64 = 2.0;

/// Measures the rate at which a server sends, and the time that its first bytes take.
#[derive(Debug, Default)]
pub(super) struct Bandwidth {
    /// The interval that is being measured: its begin, and the bytes that have arrived since then.
    interval: Option<(Instant, u64)>,
    /// Rates of the last intervals in bytes per second.
    rates: [f64; INTERVALS],
    /// Number of intervals so far.
    measured: usize,
    /// Shortest time to a first byte: since `latency_since`, and in the period before that.
    latency: [Option<Duration>; 2],
    latency_since: Option<Instant>,
}

impl Bandwidth {
    /// Notes that the first byte of an answer took `latency`.
    pub(super) fn answered(&mut self, latency: Duration, now: Instant) {
        let since = *self.latency_since.get_or_insert(now);
        if now.saturating_duration_since(since) >= LATENCY_AGE_MAX {
            self.latency = [None, self.latency[0]];
            self.latency_since = Some(now);
        }
        let shortest = self.latency[0].map_or(latency, |before| before.min(latency));
        self.latency[0] = Some(shortest);
    }

    /// Notes that `bytes` have arrived.
    pub(super) fn arrived(&mut self, bytes: u64, now: Instant) {
        let Some((began, before)) = self.interval else {
            self.interval = Some((now, 0));
            return;
        };
        let (elapsed, bytes) = (now.saturating_duration_since(began), before + bytes);
        let interval = INTERVAL_MIN.max(self.least_latency().unwrap_or_default());
        if elapsed < interval {
            self.interval = Some((began, bytes));
            return;
        }
        self.interval = Some((now, 0));
        if elapsed > PAUSE_INTERVALS * interval {
            return;
        }
        self.rates[self.measured % INTERVALS] = bytes as f64 / elapsed.as_secs_f64();
        self.measured += 1;
    }

    fn least_latency(&self) -> Option<Duration> {
        self.latency.iter().flatten().min().copied()
    }

    /// Number of bytes to have in flight. `None` before the first interval has ended.
    pub(super) fn wanted_in_flight(&self) -> Option<u64> {
        let rate = self.rates.iter().copied().fold(0.0, f64::max);
        let latency = self.least_latency().filter(|_| self.measured > 0)?;
        Some((GAIN * rate * latency.as_secs_f64()) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Answers of 1 MiB arrive for `secs` seconds at `rate` bytes per second. Returns the time at the end.
    fn run(
        bandwidth: &mut Bandwidth,
        from: Instant,
        secs: f64,
        rate: f64,
        latency_ms: u64,
    ) -> Instant {
        let mut now = from;
        let step = Duration::from_secs_f64(MIB as f64 / rate);
        while now < from + Duration::from_secs_f64(secs) {
            now += step;
            bandwidth.answered(Duration::from_millis(latency_ms), now);
            bandwidth.arrived(MIB, now);
        }
        now
    }

    #[test]
    fn twice_the_rate_times_the_least_latency_is_in_flight() {
        let mut bandwidth = Bandwidth::default();
        assert_eq!(bandwidth.wanted_in_flight(), None);
        let now = run(&mut bandwidth, Instant::now(), 1.0, 500e6, 100);
        let wanted = bandwidth.wanted_in_flight().unwrap() as f64;
        assert!((wanted - 100e6).abs() < 3e6, "{wanted}");
        // Too many bytes in flight wait for each other, which raises the latency. A higher latency must not cause more
        // bytes in flight.
        run(&mut bandwidth, now, 1.0, 500e6, 300);
        let wanted = bandwidth.wanted_in_flight().unwrap() as f64;
        assert!((wanted - 100e6).abs() < 3e6, "{wanted}");
    }

    #[test]
    fn a_reader_that_pauses_does_not_lower_it_and_a_slower_server_does() {
        let mut bandwidth = Bandwidth::default();
        let pause = run(&mut bandwidth, Instant::now(), 1.0, 400e6, 20);
        let slower = run(&mut bandwidth, pause + Duration::from_secs(30), 0.3, 400e6, 20);
        assert!(bandwidth.wanted_in_flight().unwrap() > 15_000_000);
        run(&mut bandwidth, slower, 3.0, 40e6, 20);
        assert!(bandwidth.wanted_in_flight().unwrap() < 2_000_000);
    }

    #[test]
    fn a_latency_that_has_grown_for_good_counts_after_two_minutes() {
        let mut bandwidth = Bandwidth::default();
        let now = run(&mut bandwidth, Instant::now(), 1.0, 100e6, 20);
        run(&mut bandwidth, now, 125.0, 100e6, 80);
        let wanted = bandwidth.wanted_in_flight().unwrap();
        assert!((15_000_000..17_000_000).contains(&wanted), "{wanted}");
    }
}
