//! Questions to a server of Redis, each on the thread that asks, with tries again until its deadline.

use std::io::{self, ErrorKind};
use std::ops::Range;
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use redis::{Cmd, Connection, RedisError, Value};

use crate::process::PerProcess;
use crate::store::remote_status::{EndpointCounters, counters_of};
use crate::sync::Mutex;

/// Time limit of a connection.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);

/// Shortest wait for an answer.
const ANSWER_MIN: Duration = Duration::from_millis(200);

/// Pause before another try.
const PAUSE: Duration = Duration::from_millis(200);

/// Maximum number of tries without any connection.
const UNREACHABLE_MAX: u32 = 4;

/// A value, if there is one.
pub(super) type MaybeValue = Option<Vec<u8>>;

/// A server.
pub(super) struct RedisClient {
    host: String,
    port: u16,
    /// Connections that nobody uses. A child of a fork makes its own.
    idle: PerProcess<Mutex<Vec<Connection>>>,
}

impl RedisClient {
    pub(super) fn new(host: String, port: u16) -> RedisClient {
        RedisClient { host, port, idle: PerProcess::new() }
    }

    /// Its host and port, for people.
    pub(super) fn name(&self) -> String {
        format!("{}:{}", self.host, self.port)
    }

    /// The value of `key`, `None` if there is none.
    ///
    /// # Errors
    /// The refusal of the server, or no answer in time.
    pub(super) fn value(&self, key: &[u8], deadline: Instant) -> io::Result<MaybeValue> {
        let mut command = redis::cmd("GET");
        command.arg(key);
        self.one(&command, deadline)
    }

    /// The bytes `range` of `key`; fewer if it is shorter.
    ///
    /// # Errors
    /// The errors of `value`.
    pub(super) fn part(
        &self,
        key: &[u8],
        range: &Range<u64>,
        deadline: Instant,
    ) -> io::Result<Vec<u8>> {
        let mut command = redis::cmd("GETRANGE");
        command.arg(key).arg(range.start).arg(range.end - 1);
        Ok(self.one(&command, deadline)?.unwrap_or_default())
    }

    /// The values of `keys` and the lengths of the values of `others`, in one round trip. The length of
    /// a value that is not there is 0.
    ///
    /// # Errors
    /// The errors of `value`.
    pub(super) fn values_and_lens(
        &self,
        keys: &[Vec<u8>],
        others: &[Vec<u8>],
        deadline: Instant,
    ) -> io::Result<(Vec<MaybeValue>, Vec<u64>)> {
        let gets = keys.iter().map(|key| ("GET", key));
        let lens = others.iter().map(|key| ("STRLEN", key));
        let commands = gets.chain(lens).map(|(name, key)| {
            let mut command = redis::cmd(name);
            command.arg(key);
            command
        });
        let mut answers = self.all(&commands.collect::<Vec<Cmd>>(), deadline)?;
        let lens = answers.split_off(keys.len().min(answers.len()));
        let as_len = |answer| match answer {
            Value::Int(len) => Ok(len.cast_unsigned()),
            other => Err(unexpected(&other)),
        };
        let values = answers.into_iter().map(bytes_of).collect::<io::Result<_>>()?;
        Ok((values, lens.into_iter().map(as_len).collect::<io::Result<_>>()?))
    }

    fn one(&self, command: &Cmd, deadline: Instant) -> io::Result<MaybeValue> {
        let answer = self.all(std::slice::from_ref(command), deadline)?.pop();
        bytes_of(answer.unwrap_or(Value::Nil))
    }

    /// The answers to `commands`, in order.
    fn all(&self, commands: &[Cmd], deadline: Instant) -> io::Result<Vec<Value>> {
        let counters = counters_of(&self.name());
        counters.now.add(1);
        let answers = self.try_until(commands, &counters, deadline);
        counters.now.sub(1);
        answers
    }

    fn try_until(
        &self,
        commands: &[Cmd],
        counters: &Arc<EndpointCounters>,
        deadline: Instant,
    ) -> io::Result<Vec<Value>> {
        let mut unreachable = 0;
        loop {
            let before = Instant::now();
            counters.requests.add(1);
            let (is_connected, failed) = match self.try_once(commands, deadline) {
                Ok(answers) => {
                    counters.first_byte.add(before.elapsed());
                    let len = |answer: &Value| match answer {
                        Value::BulkString(bytes) => bytes.len() as u64,
                        _ => 0,
                    };
                    counters.bytes.add(answers.iter().map(len).sum());
                    return Ok(answers);
                }
                Err(failed) => failed,
            };
            unreachable += u32::from(!is_connected);
            let why = self.meaning(&failed);
            let is_over = Instant::now() + PAUSE >= deadline;
            if !may_pass(&failed) || unreachable >= UNREACHABLE_MAX || is_over {
                return Err(why);
            }
            tracing::debug!("trying again: {why}");
            counters.retries.add(1);
            sleep(PAUSE);
        }
    }

    /// One try. An error says whether there was a connection.
    fn try_once(
        &self,
        commands: &[Cmd],
        deadline: Instant,
    ) -> Result<Vec<Value>, (bool, RedisError)> {
        let left = deadline.saturating_duration_since(Instant::now());
        let idle = self.idle.get_or_init(Mutex::default);
        let kept = idle.lock().pop();
        let mut connection = match kept {
            Some(connection) => connection,
            None => {
                let client = redis::Client::open((self.host.as_str(), self.port));
                let connect = |client: redis::Client| {
                    client.get_connection_with_timeout(left.min(CONNECT_LIMIT).max(ANSWER_MIN))
                };
                client.and_then(connect).map_err(|e| (false, e))?
            }
        };
        // A part of the time, so that there is some for another try.
        let limit = Some((left / 2).max(ANSWER_MIN));
        let mut pipe = redis::pipe();
        for command in commands {
            pipe.add_command(command.clone());
        }
        let asked = connection
            .set_read_timeout(limit)
            .and_then(|()| connection.set_write_timeout(limit))
            .and_then(|()| pipe.query::<Vec<Value>>(&mut connection));
        let answers = asked.map_err(|e| (true, first_of(e)))?;
        idle.lock().push(connection);
        Ok(answers)
    }

    /// A failure as the error of a read.
    fn meaning(&self, failed: &RedisError) -> io::Error {
        let name = self.name();
        let (kind, why) = match failed.code() {
            Some("NOAUTH" | "WRONGPASS" | "NOPERM") => {
                let why = "asks for a password, which tensorizer's layout has none of";
                (ErrorKind::PermissionDenied, format!("{name} {why}"))
            }
            Some(code) => (ErrorKind::Other, format!("{name} answers {code}")),
            None if failed.is_timeout() => {
                (ErrorKind::TimedOut, format!("no answer from {name} in time"))
            }
            None if failed.is_io_error() => {
                (ErrorKind::NotConnected, format!("no connection to {name}: {failed}"))
            }
            None => (ErrorKind::InvalidData, format!("{name} does not answer as Redis does")),
        };
        io::Error::new(kind, why)
    }
}

/// The first failure of many answers.
fn first_of(failed: RedisError) -> RedisError {
    let of_answers = failed.clone().into_server_errors();
    match of_answers.and_then(|all| all.first().cloned()) {
        Some((_, first)) => first.into(),
        None => failed,
    }
}

/// Whether another try may succeed.
fn may_pass(failed: &RedisError) -> bool {
    match failed.code() {
        Some(code) => ["LOADING", "BUSY", "TRYAGAIN", "MASTERDOWN", "CLUSTERDOWN"].contains(&code),
        None => failed.is_io_error() || failed.is_timeout() || failed.is_connection_dropped(),
    }
}

fn bytes_of(answer: Value) -> io::Result<MaybeValue> {
    match answer {
        Value::Nil => Ok(None),
        Value::BulkString(bytes) => Ok(Some(bytes)),
        other => Err(unexpected(&other)),
    }
}

fn unexpected(answer: &Value) -> io::Error {
    let why = match answer {
        Value::ServerError(error) => format!("the server answers {}", error.code()),
        _ => "the server gives an answer of another type".to_owned(),
    };
    io::Error::new(ErrorKind::InvalidData, why)
}
