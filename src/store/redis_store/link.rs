//! A connection to a Redis server. No call lasts longer than its deadline, and no reply takes more memory than
//! its command allows, whatever the server sends. Client libraries do not guarantee this, so this module uses none.

use std::io::{self, BufRead as _, BufReader, ErrorKind, Read, Write as _};
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs as _};
use std::time::{Duration, Instant};

use crate::asked::Asked;
use crate::error::invalid_data;

/// Maximum length of a line of a reply in bytes.
const LINE_MAX: u64 = 4096;

/// Maximum number of characters of an error code that are shown.
const CODE_MAX: usize = 32;

/// Maximum number of bytes that are allocated for a value before any of it was received.
const FIRST_ROOM: u64 = 1 << 20;

/// An encoded command, and the maximum length of the value in its reply in bytes.
pub(super) struct RedisQuestion {
    packed: Vec<u8>,
    most: u64,
}

impl RedisQuestion {
    /// The command that consists of `words`.
    pub(super) fn new(words: &[&[u8]], most: u64) -> RedisQuestion {
        let mut packed = format!("*{}\r\n", words.len()).into_bytes();
        for word in words {
            packed.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
            packed.extend_from_slice(word);
            packed.extend_from_slice(b"\r\n");
        }
        RedisQuestion { packed, most }
    }
}

/// The answer to a command.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum RedisAnswer {
    Bytes(Vec<u8>),
    Number(u64),
    /// An error reply, with its code.
    Refused(String),
}

/// A connection.
pub(super) struct RedisLink {
    reader: BufReader<TimedStream>,
}

/// A connection with the deadline of the current call.
struct TimedStream {
    stream: TcpStream,
    deadline: Instant,
}

fn too_late() -> io::Error {
    ErrorKind::TimedOut.into()
}

/// The time until `deadline`.
///
/// # Errors
/// `TimedOut` if the deadline has passed.
pub(super) fn time_left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(too_late()) } else { Ok(left) }
}

/// Turns the error of a call that ran out of time into `TimedOut`.
fn as_timeout(error: io::Error) -> io::Error {
    if error.kind() == ErrorKind::WouldBlock { too_late() } else { error }
}

impl Read for TimedStream {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(Some(time_left(self.deadline)?))?;
        self.stream.read(buf).map_err(as_timeout)
    }
}

impl RedisLink {
    /// Connects to the first address of `host` that accepts. The time is divided among the addresses.
    ///
    /// # Errors
    /// The failure of the last address, or of the name resolution.
    pub(super) fn open(host: &str, port: u16, deadline: Instant) -> io::Result<RedisLink> {
        let addresses = addresses_of(host, port, deadline)?;
        let mut failed = io::Error::new(ErrorKind::NotFound, "the host has no address");
        for (at, address) in addresses.iter().enumerate() {
            let part = time_left(deadline)? / (addresses.len() - at) as u32;
            match TcpStream::connect_timeout(address, part.max(Duration::from_millis(1))) {
                Ok(stream) => {
                    stream.set_nodelay(true)?;
                    let reader = BufReader::new(TimedStream { stream, deadline });
                    return Ok(RedisLink { reader });
                }
                Err(e) => failed = e,
            }
        }
        Err(failed)
    }

    /// Sends `questions` and returns the replies in order. After an error the connection cannot be used any more.
    ///
    /// # Errors
    /// `TimedOut` at `deadline`. `InvalidData` if a reply is not valid or is longer than its question allows.
    /// Also the errors of the connection.
    pub(super) fn ask(
        &mut self,
        questions: &[RedisQuestion],
        deadline: Instant,
    ) -> io::Result<Vec<RedisAnswer>> {
        self.reader.get_mut().deadline = deadline;
        let packed: Vec<u8> = questions.iter().flat_map(|one| one.packed.iter().copied()).collect();
        self.send(&packed)?;
        let mut answers = Vec::with_capacity(questions.len());
        for question in questions {
            answers.push(read_answer(&mut self.reader, question.most)?);
        }
        match self.reader.buffer() {
            [] => Ok(answers),
            _ => Err(invalid_data("there are bytes behind the last answer")),
        }
    }

    fn send(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        let TimedStream { stream, deadline } = self.reader.get_mut();
        while !bytes.is_empty() {
            stream.set_write_timeout(Some(time_left(*deadline)?))?;
            match stream.write(bytes) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(len) => bytes = &bytes[len..],
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(as_timeout(e)),
            }
        }
        Ok(())
    }
}

/// Resolves `host`. If the resolver does not answer by `deadline`, its thread is abandoned.
fn addresses_of(host: &str, port: u16, deadline: Instant) -> io::Result<Vec<SocketAddr>> {
    if let Ok(address) = host.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(address, port)]);
    }
    let name = host.to_owned();
    let look = move || Ok((name.as_str(), port).to_socket_addrs()?.collect());
    let mut asked = Asked::on_thread("resolve", look)?;
    asked.within(time_left(deadline)?).unwrap_or_else(|_| Err(too_late()))
}

/// Reads one reply with a value of at most `most` bytes. None of the commands used here gets a reply with
/// several values.
fn read_answer(reader: &mut impl io::BufRead, most: u64) -> io::Result<RedisAnswer> {
    let mut line = Vec::new();
    reader.by_ref().take(LINE_MAX).read_until(b'\n', &mut line)?;
    let Some(line) = line.strip_suffix(b"\r\n") else {
        let is_cut = (line.len() as u64) < LINE_MAX && !line.ends_with(b"\n");
        return Err(if is_cut { ErrorKind::UnexpectedEof.into() } else { invalid_data("no line") });
    };
    let text = std::str::from_utf8(line).map_err(|_| invalid_data("a line is not text"))?;
    let number = |digits: &str| digits.parse().map_err(|_| invalid_data("a number is none"));
    if let Some(refusal) = text.strip_prefix('-') {
        let code = refusal.split(' ').next().unwrap_or_default();
        return Ok(RedisAnswer::Refused(code.chars().take(CODE_MAX).collect()));
    }
    if let Some(digits) = text.strip_prefix(':') {
        return Ok(RedisAnswer::Number(number(digits)?));
    }
    let digits = text.strip_prefix('$').ok_or_else(|| invalid_data("an answer of another type"))?;
    let len: u64 = number(digits)?;
    if len > most {
        return Err(invalid_data("a value is longer than what was asked for"));
    }
    let mut value = Vec::with_capacity(len.min(FIRST_ROOM) as usize);
    reader.by_ref().take(len).read_to_end(&mut value)?;
    let mut end = [0; 2];
    reader.read_exact(&mut end)?;
    if value.len() as u64 == len && end == *b"\r\n" {
        Ok(RedisAnswer::Bytes(value))
    } else {
        Err(invalid_data("a value has another length than it says"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind_of(text: &[u8]) -> ErrorKind {
        read_answer(&mut &*text, 10).unwrap_err().kind()
    }

    #[test]
    fn a_command_is_an_array_of_words_with_their_lengths() {
        let packed = RedisQuestion::new(&[b"STRLEN", b"a\r\nb"], 0).packed;
        assert_eq!(packed, b"*2\r\n$6\r\nSTRLEN\r\n$4\r\na\r\nb\r\n");
    }

    #[test]
    fn answers_are_values_numbers_and_refusals() {
        let read = |text: &'static [u8]| read_answer(&mut &*text, 10).unwrap();
        assert_eq!(read(b"$3\r\na\r\n\r\n"), RedisAnswer::Bytes(b"a\r\n".to_vec()));
        assert_eq!(read(b"$0\r\n\r\n"), RedisAnswer::Bytes(Vec::new()));
        assert_eq!(read(b":7\r\n"), RedisAnswer::Number(7));
        assert_eq!(read(b"-NOAUTH x y\r\n"), RedisAnswer::Refused("NOAUTH".to_owned()));
    }

    #[test]
    fn lengths_that_lie_are_refused_before_they_take_memory() {
        for bad in [
            "$11\r\n",
            "$99999999999999999\r\n",
            "$99999999999999999999999\r\n",
            "$-5\r\n",
            ":-5\r\n",
            "*1000000000\r\n",
            "+OK\r\n",
            "$1\r\nabc\r\n",
            "HTTP/1.1 200 OK\r\n",
            "a\n",
        ] {
            assert_eq!(kind_of(bad.as_bytes()), ErrorKind::InvalidData, "{bad:?}");
        }
        assert_eq!(kind_of(&[b'-'; 1 << 20]), ErrorKind::InvalidData);
        for cut in ["", "$1", "$3\r\na"] {
            assert_eq!(kind_of(cut.as_bytes()), ErrorKind::UnexpectedEof, "{cut:?}");
        }
    }
}
