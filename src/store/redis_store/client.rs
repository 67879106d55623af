//! Commands to a Redis server. Each runs on the calling thread and is retried until its deadline.

use std::io::{self, ErrorKind};
use std::ops::Range;
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::error::invalid_data;
use crate::process::PerProcess;
use crate::store::remote_status::{EndpointCounters, counters_of};
use crate::sync::Mutex;

use super::link::{RedisAnswer, RedisLink, RedisQuestion, time_left};

/// Time limit for opening a connection.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);

/// Minimum duration of a try, if the deadline allows it.
const TRY_MIN: Duration = Duration::from_millis(200);

/// Pause before the next try.
const PAUSE: Duration = Duration::from_millis(200);

/// Maximum number of tries that get no connection.
const UNREACHABLE_MAX: u32 = 4;

/// Why a try failed.
enum RedisFailure {
    /// There was no connection.
    Unconnected(io::Error),
    /// The connection failed, or the received bytes are not the Redis protocol.
    Broken(io::Error),
    /// The server refuses the command with this code.
    Refused(String),
}

/// A Redis server.
pub(super) struct RedisClient {
    host: String,
    port: u16,
    /// Idle connections. A child made by fork(2) opens its own.
    idle: PerProcess<Mutex<Vec<RedisLink>>>,
}

impl RedisClient {
    pub(super) fn new(host: String, port: u16) -> RedisClient {
        RedisClient { host, port, idle: PerProcess::new() }
    }

    /// Host and port of the server, for messages.
    pub(super) fn name(&self) -> String {
        format!("{}:{}", self.host, self.port)
    }

    /// Commands to the server, which end at `deadline`.
    pub(super) fn until(&self, deadline: Instant) -> RedisCalls<'_> {
        RedisCalls { client: self, deadline }
    }
}

/// Commands to a server that end at a deadline.
#[derive(Clone, Copy)]
pub(super) struct RedisCalls<'a> {
    client: &'a RedisClient,
    pub(super) deadline: Instant,
}

impl RedisCalls<'_> {
    /// The bytes `range` of the value of `key`. The result is shorter if the value ends before the end of `range`, and
    /// empty if the key does not exist.
    ///
    /// # Errors
    /// If the server refuses the command, or does not answer in time.
    pub(super) fn part(&self, key: &[u8], range: &Range<u64>) -> io::Result<Vec<u8>> {
        let answer = self.all(&[part_of(key, range)])?.pop();
        answer.map_or_else(|| Ok(Vec::new()), bytes_of)
    }

    /// The first bytes of the value of each of `keys`, up to the length given with the key, and the lengths of
    /// the values of `others`. Takes one round trip. The length is 0 if there is no such value.
    ///
    /// # Errors
    /// The errors of `part`.
    pub(super) fn starts_and_lens(
        &self,
        keys: &[(Vec<u8>, u64)],
        others: &[Vec<u8>],
    ) -> io::Result<(Vec<Vec<u8>>, Vec<u64>)> {
        let starts = keys.iter().map(|(key, len)| part_of(key, &(0..*len)));
        let lens = others.iter().map(|key| RedisQuestion::new(&[b"STRLEN", key], 0));
        let questions: Vec<RedisQuestion> = starts.chain(lens).collect();
        let mut answers = self.all(&questions)?;
        let lens = answers.split_off(keys.len().min(answers.len()));
        let values = answers.into_iter().map(bytes_of).collect::<io::Result<_>>()?;
        Ok((values, lens.into_iter().map(number_of_answer).collect::<io::Result<_>>()?))
    }

    /// The answers to `questions`, in order.
    fn all(&self, questions: &[RedisQuestion]) -> io::Result<Vec<RedisAnswer>> {
        let counters = counters_of(&self.client.name());
        counters.now.add(1);
        let answers = self.try_until(questions, &counters);
        counters.now.sub(1);
        answers
    }

    fn try_until(
        &self,
        questions: &[RedisQuestion],
        counters: &Arc<EndpointCounters>,
    ) -> io::Result<Vec<RedisAnswer>> {
        let mut unreachable = 0;
        loop {
            let before = Instant::now();
            counters.requests.add(1);
            let failed = match self.try_once(questions) {
                Ok(answers) => {
                    counters.first_byte.add(before.elapsed());
                    let len = |answer: &RedisAnswer| match answer {
                        RedisAnswer::Bytes(bytes) => bytes.len() as u64,
                        _ => 0,
                    };
                    counters.bytes.add(answers.iter().map(len).sum());
                    return Ok(answers);
                }
                Err(failed) => failed,
            };
            unreachable += u32::from(matches!(failed, RedisFailure::Unconnected(_)));
            let why = self.meaning(&failed);
            let is_over = Instant::now() + PAUSE >= self.deadline;
            if !may_pass(&failed) || unreachable >= UNREACHABLE_MAX || is_over {
                return Err(why);
            }
            tracing::debug!("trying again: {why}");
            counters.retries.add(1);
            sleep(PAUSE);
        }
    }

    /// Tries once. A try may take half of the time that is left, so that another try is possible.
    fn try_once(&self, questions: &[RedisQuestion]) -> Result<Vec<RedisAnswer>, RedisFailure> {
        let RedisCalls { client, deadline } = *self;
        let left = time_left(deadline).map_err(RedisFailure::Broken)?;
        let limit = deadline.min(Instant::now() + (left / 2).max(TRY_MIN));
        let idle = client.idle.get_or_init(Mutex::default);
        let kept = idle.lock().pop();
        let mut link = match kept {
            Some(link) => link,
            None => {
                let connected = limit.min(Instant::now() + CONNECT_LIMIT);
                let link = RedisLink::open(&client.host, client.port, connected);
                link.map_err(RedisFailure::Unconnected)?
            }
        };
        let answers = link.ask(questions, limit).map_err(RedisFailure::Broken)?;
        idle.lock().push(link);
        let refusal = answers.iter().find_map(|answer| match answer {
            RedisAnswer::Refused(code) => Some(code.clone()),
            _ => None,
        });
        refusal.map_or(Ok(answers), |code| Err(RedisFailure::Refused(code)))
    }

    /// Converts a failure into the error of a read.
    fn meaning(&self, failed: &RedisFailure) -> io::Error {
        let name = self.client.name();
        let error = match failed {
            RedisFailure::Refused(code) => {
                let is_login = ["NOAUTH", "WRONGPASS", "NOPERM"].contains(&code.as_str());
                let why = "asks for a password, which tensorizer's layout has none of";
                return if is_login {
                    io::Error::new(ErrorKind::PermissionDenied, format!("{name} {why}"))
                } else {
                    io::Error::other(format!("{name} answers {code}"))
                };
            }
            RedisFailure::Unconnected(error) | RedisFailure::Broken(error) => error,
        };
        let (kind, why) = match error.kind() {
            ErrorKind::TimedOut => (ErrorKind::TimedOut, format!("no answer from {name} in time")),
            ErrorKind::InvalidData => {
                (ErrorKind::InvalidData, format!("{name} does not answer as Redis does: {error}"))
            }
            _ => (ErrorKind::NotConnected, format!("no connection to {name}: {error}")),
        };
        io::Error::new(kind, why)
    }
}

/// The command GETRANGE for the bytes `range` of `key`.
fn part_of(key: &[u8], range: &Range<u64>) -> RedisQuestion {
    let (first, last) = (range.start.to_string(), range.end.saturating_sub(1).to_string());
    let words = [b"GETRANGE", key, first.as_bytes(), last.as_bytes()];
    RedisQuestion::new(&words, range.end - range.start)
}

/// Whether another try may succeed.
fn may_pass(failed: &RedisFailure) -> bool {
    const PASSING: [&str; 5] = ["LOADING", "BUSY", "TRYAGAIN", "MASTERDOWN", "CLUSTERDOWN"];
    match failed {
        RedisFailure::Refused(code) => PASSING.contains(&code.as_str()),
        RedisFailure::Unconnected(error) | RedisFailure::Broken(error) => {
            error.kind() != ErrorKind::InvalidData
        }
    }
}

fn bytes_of(answer: RedisAnswer) -> io::Result<Vec<u8>> {
    match answer {
        RedisAnswer::Bytes(bytes) => Ok(bytes),
        _ => Err(unexpected()),
    }
}

fn number_of_answer(answer: RedisAnswer) -> io::Result<u64> {
    match answer {
        RedisAnswer::Number(number) => Ok(number),
        _ => Err(unexpected()),
    }
}

fn unexpected() -> io::Error {
    invalid_data("the server gives an answer of another type")
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::{TcpListener, TcpStream};
    use std::thread::spawn;

    use super::*;

    /// A client of a server that reads one command on each connection, and then calls `answer`.
    fn client_of(answer: impl Fn(&mut TcpStream) + Send + 'static) -> RedisClient {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        spawn(move || {
            for mut stream in listener.incoming().flatten() {
                if stream.read(&mut [0; 4096]).is_ok() {
                    answer(&mut stream);
                }
            }
        });
        RedisClient::new("127.0.0.1".to_owned(), port)
    }

    fn failure(client: &RedisClient, len: u64, limit: Duration) -> io::Error {
        client.until(Instant::now() + limit).part(b"key", &(0..len)).unwrap_err()
    }

    #[test]
    fn a_server_that_sends_byte_after_byte_holds_no_read_past_its_deadline() {
        let client = client_of(|stream| {
            let _ = stream.write_all(b"$1000000\r\n");
            while stream.write_all(b"x").is_ok() {
                sleep(Duration::from_millis(1));
            }
        });
        let before = Instant::now();
        let error = failure(&client, 1_000_000, Duration::from_millis(600));
        assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
        // Without a limit, receiving the bytes would take a quarter of an hour.
        assert!(before.elapsed() < Duration::from_secs(60));
    }

    #[test]
    fn a_server_whose_lengths_lie_is_not_one_of_redis() {
        for text in ["$999999999999\r\n", "$-7\r\n", "*999999999\r\n"] {
            let client = client_of(move |stream| stream.write_all(text.as_bytes()).unwrap());
            let error = failure(&client, 100, Duration::from_secs(60));
            assert!(error.to_string().contains("does not answer as Redis does"), "{error}");
        }
        let client = client_of(|stream| stream.write_all(b":-3\r\n").unwrap());
        let deadline = Instant::now() + Duration::from_secs(60);
        let error = client.until(deadline).starts_and_lens(&[], &[b"key".to_vec()]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidData, "{error}");
    }

    #[test]
    fn a_deadline_that_has_passed_asks_nothing() {
        let client = client_of(|stream| stream.write_all(b"$1\r\nx\r\n").unwrap());
        assert_eq!(failure(&client, 1, Duration::ZERO).kind(), ErrorKind::TimedOut);
        let deadline = Instant::now() + Duration::from_secs(60);
        assert_eq!(client.until(deadline).part(b"key", &(0..1)).unwrap(), b"x");
    }
}
