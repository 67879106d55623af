//! An object server in a process of its own: `tests/python/object_server.py`, or one of `tests/python/cloud_server.py`,
//! `tests/python/web_server.py` and `tests/python/hub_server.py`.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// The server. If this value has started its process, the drop of the value ends the process.
pub(crate) struct ObjectServer {
    child: Option<Child>,
    port: u16,
}

impl ObjectServer {
    /// Starts a server without objects.
    pub(crate) fn start() -> ObjectServer {
        ObjectServer::start_script("object_server.py", &[])
    }

    /// Starts the server of a script without objects.
    pub(crate) fn start_script(name: &str, args: &[&str]) -> ObjectServer {
        let python = std::env::var_os("TENSORFS_PYTHON").unwrap_or_else(|| "python3".into());
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
        let script = script
            .map(|folder| folder.join("tests/python").join(name))
            .find(|script| script.exists())
            .unwrap();
        let mut child = Command::new(python)
            .arg(script)
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        ObjectServer { child: Some(child), port: line.trim().parse().unwrap() }
    }

    /// A server that another process has started.
    pub(crate) fn of_port(port: u16) -> ObjectServer {
        ObjectServer { child: None, port }
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// The environment variables with which a program reads from this server.
    pub(crate) fn environment(&self) -> Vec<(&'static str, String)> {
        let fixed = [
            ("AWS_ACCESS_KEY_ID", "AKIDTESTACCESSKEY"),
            ("AWS_SECRET_ACCESS_KEY", "a-secret-key-of-the-tests/that+nobody=shows"),
            ("AWS_EC2_METADATA_DISABLED", "true"),
            ("NO_PROXY", "127.0.0.1"),
            ("HF_HUB_CACHE", "/nonexistent/hub"),
            ("HF_HUB_OFFLINE", ""),
            ("HF_TOKEN_PATH", "/nonexistent/token"),
            ("HF_TOKEN", ""),
        ];
        let mut all: Vec<_> = fixed.map(|(name, value)| (name, value.to_owned())).to_vec();
        all.push(("AWS_ENDPOINT_URL", self.url()));
        all.push(("HF_ENDPOINT", self.url()));
        all.push(("STORAGE_EMULATOR_HOST", self.url()));
        all.push(("GCE_METADATA_HOST", format!("127.0.0.1:{}", self.port)));
        all.push(("AZURE_STORAGE_ENDPOINT", format!("{}/testaccount", self.url())));
        all.push(("AZURE_STORAGE_ACCOUNT", "testaccount".to_owned()));
        all.push(("AZURE_SKIP_SIGNATURE", "1".to_owned()));
        all
    }

    fn send(&self, method: &str, path: &str, body: &[u8]) {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        let len = body.len();
        let head = format!("{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len}\r\n");
        stream.write_all(format!("{head}Connection: close\r\n\r\n").as_bytes()).unwrap();
        stream.write_all(body).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 20"), "{method} {path}: {answer}");
    }

    /// Stores an object. `path` begins with the name of its bucket.
    pub(crate) fn put(&self, path: &str, bytes: &[u8]) {
        self.send("PUT", &format!("/{path}"), bytes);
    }

    pub(crate) fn remove(&self, path: &str) {
        self.send("DELETE", &format!("/{path}"), b"");
    }

    /// Sends one of the commands that the script describes.
    pub(crate) fn order(&self, what: &str, json: &str) {
        self.send("POST", &format!("/-/{what}"), json.as_bytes());
    }

    /// Stores the files of `folder` below `path`.
    pub(crate) fn put_folder(&self, path: &str, folder: &Path) {
        for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
            let name = entry.file_name().into_string().unwrap();
            self.put(&format!("{path}/{name}"), &std::fs::read(entry.path()).unwrap());
        }
    }
}

impl Drop for ObjectServer {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
