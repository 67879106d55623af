//! The threads that answer the kernel, and how they are stopped for a takeover by another process.

use std::io;
use std::os::fd::{OwnedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tensorfs::internal::sync::{Condvar, Mutex};

use super::connection::{self, FuseInit, OpenSession, StoppedReads, allow_wake_up, open_session};
use crate::fs::adapter::TensorFs;
use crate::serve::in_flight::InFlight;

/// Maximum time for which a stop waits for answers. Requests that are unanswered by then go to the
/// process that takes over, or are answered late.
const DRAIN_TIMEOUT: Duration = Duration::from_millis(100);

/// The threads that serve one mount. All clones refer to the same threads.
#[derive(Clone)]
pub(crate) struct KernelServer(Arc<KernelServerShared>);

struct KernelServerShared {
    fs: TensorFs,
    connection: Arc<OwnedFd>,
    handshake: FuseInit,
    threads: usize,
    in_flight: InFlight,
    state: Mutex<KernelServerState>,
    changed: Condvar,
}

struct KernelServerState {
    /// Number of the session's descriptor.
    number: RawFd,
    /// The result of the session, set once all threads have ended.
    ended: Option<io::Result<()>>,
    phase: ServerPhase,
}

enum ServerPhase {
    Serving,
    /// No requests are read, but late replies are still sent.
    Stopped(Option<StoppedReads>),
    /// Another process serves the mount.
    Given,
}

impl KernelServer {
    /// Starts to serve with `threads` threads.
    ///
    /// # Errors
    /// The system may refuse a thread.
    pub(crate) fn start(
        fs: TensorFs,
        connection: Arc<OwnedFd>,
        threads: usize,
        in_flight: InFlight,
        opened: OpenSession,
    ) -> io::Result<KernelServer> {
        let handshake = opened.handshake.clone();
        let (number, phase) = (opened.number(), ServerPhase::Serving);
        let state = Mutex::new(KernelServerState { number, ended: None, phase });
        let changed = Condvar::new();
        let shared =
            KernelServerShared { fs, connection, handshake, threads, in_flight, state, changed };
        let server = KernelServer(Arc::new(shared));
        server.run(opened)?;
        Ok(server)
    }

    fn run(&self, opened: OpenSession) -> io::Result<()> {
        let shared = self.0.clone();
        let run = move || {
            allow_wake_up();
            let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| opened.run()));
            let bug = |_| Err(io::Error::other("the server failed by a bug"));
            shared.state.lock().ended = Some(ended.unwrap_or_else(bug));
            shared.changed.notify_all();
        };
        std::thread::Builder::new().name("serve".to_owned()).spawn(run).map(drop)
    }

    /// The handshake of the connection.
    pub(crate) fn handshake(&self) -> &FuseInit {
        &self.0.handshake
    }

    /// The connection.
    pub(crate) fn connection(&self) -> &Arc<OwnedFd> {
        &self.0.connection
    }

    /// The file system that the threads serve.
    pub(crate) fn fs(&self) -> &TensorFs {
        &self.0.fs
    }

    /// Waits until the connection ends, and returns the result of the session. `None` once another
    /// process serves the mount.
    pub(crate) fn wait(&self) -> Option<io::Result<()>> {
        let mut state = self.0.state.lock();
        loop {
            match state.phase {
                ServerPhase::Given => return None,
                ServerPhase::Serving if state.ended.is_some() => return state.ended.take(),
                _ => state = self.0.changed.wait(state),
            }
        }
    }

    /// Waits until `stop` and `give` can run without waiting for the source, at most for `limit`.
    /// Requests are served in the meantime. Returns whether both can run now.
    pub(crate) fn prepare_to_stop(&self, limit: Duration) -> bool {
        let (shared, started) = (&*self.0, Instant::now());
        shared.fs.wait_for_adoptions(limit)
            && (shared.handshake.can_resend()
                || shared.in_flight.wait_for_earlier(limit.saturating_sub(started.elapsed())))
    }

    /// Stops reading requests, and waits a short time for the answers to the requests that were
    /// read. From then on, nothing changes in the state that another process needs.
    ///
    /// # Errors
    /// If this process does not serve the mount now, or cannot stop now. Nothing changes then.
    pub(crate) fn stop(&self) -> io::Result<()> {
        let shared = &*self.0;
        if !shared.fs.wait_for_adoptions(Duration::ZERO) {
            return Err(io::Error::other("open files that it has taken over are not proved yet"));
        }
        let number = {
            let state = shared.state.lock();
            if !matches!(state.phase, ServerPhase::Serving) || state.ended.is_some() {
                return Err(io::Error::other("the mount is not served by this process now"));
            }
            state.number
        };
        // `wait` must not mistake the end of the threads for the end of the connection.
        let ended = || shared.state.lock().ended.is_some();
        shared.state.lock().phase = ServerPhase::Stopped(None);
        let stopped = match StoppedReads::begin(&shared.connection, number, ended) {
            Ok(stopped) => stopped,
            Err(e) => {
                shared.state.lock().phase = ServerPhase::Serving;
                shared.changed.notify_all();
                return Err(e);
            }
        };
        shared.in_flight.wait_for_all(DRAIN_TIMEOUT);
        shared.fs.set_frozen(true);
        shared.state.lock().phase = ServerPhase::Stopped(Some(stopped));
        Ok(())
    }

    /// Continues to serve after `stop`, because no other process has taken over.
    ///
    /// # Errors
    /// If the connection has ended.
    pub(crate) fn resume(&self) -> io::Result<()> {
        let shared = &*self.0;
        if !matches!(shared.state.lock().phase, ServerPhase::Stopped(_)) {
            return Ok(());
        }
        let (fs, done) = (shared.fs.clone(), Some(&shared.handshake));
        let opened = open_session(fs, &shared.connection, shared.threads, done)?;
        shared.fs.set_frozen(false);
        let mut state = shared.state.lock();
        state.number = opened.number();
        state.ended = None;
        // Late replies of the first session are sent to the kernel until this process ends.
        state.phase = ServerPhase::Serving;
        drop(state);
        self.run(opened)
    }

    /// Leaves the connection to another process. If the kernel cannot send unanswered requests to
    /// that process, this first waits until all of them are answered. Then it calls `tell`, and this
    /// process may end at any time.
    pub(crate) fn give(&self, tell: impl FnOnce()) {
        let shared = &*self.0;
        let stopped = match &mut shared.state.lock().phase {
            ServerPhase::Stopped(stopped) => stopped.take(),
            ServerPhase::Serving | ServerPhase::Given => None,
        };
        if let Some(stopped) = stopped {
            if !shared.handshake.can_resend() {
                shared.in_flight.wait_for_all(Duration::MAX);
            }
            // Replies that exist already are sent now, because the other process would otherwise
            // have to answer the same requests again.
            stopped.end();
        }
        // The other process continues to use the registrations for passthrough. A drop would close
        // them.
        std::mem::forget(shared.fs.clone());
        connection::let_go();
        tell();
        shared.state.lock().phase = ServerPhase::Given;
        shared.changed.notify_all();
    }
}
