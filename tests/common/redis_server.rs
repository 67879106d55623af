//! A Redis server in a process of its own, with checkpoints in the layout of tensorizer.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use sha2::{Digest, Sha256};

use crate::written::{StoredTensor, TensorizerFile};

/// The server. The drop of this value ends its process.
pub(crate) struct RedisServer {
    child: Child,
    pub(crate) port: u16,
}

impl RedisServer {
    /// Starts a server without keys. `None` if its program is not installed.
    pub(crate) fn start() -> Option<RedisServer> {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        // The package redis-tools contains the server too, under the name of a tool.
        let child = ["redis-server", "redis-check-rdb"].into_iter().find_map(|program| {
            let mut words = Command::new(program);
            words.arg0("redis-server").args(["--bind", "127.0.0.1", "--save", "", "--dir", "/"]);
            words.args(["--port", &port.to_string()]).stdout(Stdio::piped()).spawn().ok()
        })?;
        let mut server = RedisServer { child, port };
        let lines = BufReader::new(server.child.stdout.take().unwrap()).lines();
        let mut lines = lines.map(Result::unwrap);
        assert!(lines.any(|line| line.contains("Ready to accept connections")));
        Some(server)
    }

    /// Stores a file of one tensor with these bytes below `prefix`.
    pub(crate) fn put(&self, prefix: &str, data: &[u8]) {
        let (tensor, file) = file_of(data);
        let end = file.len() - 8;
        let start = end - data.len();
        let header = start - tensor.header_bytes().len();
        self.send(&[b"SET", format!("{prefix}:t:{header}").as_bytes(), &file[header..start]]);
        self.send(&[b"SET", format!("{prefix}:t:{start}").as_bytes(), &file[start..end]]);
        self.send(&[b"SET", format!("{prefix}:header:0").as_bytes(), &file[..header]]);
    }

    /// Removes all keys.
    pub(crate) fn remove_all(&self) {
        self.send(&[b"FLUSHALL"]);
    }

    fn send(&self, words: &[&[u8]]) {
        let mut text = format!("*{}\r\n", words.len()).into_bytes();
        for word in words {
            text.extend(format!("${}\r\n", word.len()).as_bytes());
            text.extend_from_slice(word);
            text.extend(b"\r\n");
        }
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.write_all(&text).unwrap();
        let mut answer = [0; 5];
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"+OK\r\n");
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A file of one tensor with these bytes and its hashes.
pub(crate) fn file_of(data: &[u8]) -> (StoredTensor, Vec<u8>) {
    let mut tensor = StoredTensor::new("t", "|u1", &[data.len() as u64], data);
    // The hashes are computed with zeros in place of the hash values.
    tensor.hashes = vec![(0, vec![0; 4]), (1, vec![0; 32])];
    let hashed = [&tensor.header_bytes(), data].concat();
    let crc32 = crc32fast::hash(&hashed).to_le_bytes().to_vec();
    tensor.hashes = vec![(0, crc32), (1, Sha256::digest(&hashed).to_vec())];
    let file = TensorizerFile::new(2, vec![tensor.clone()]).bytes();
    (tensor, file)
}
