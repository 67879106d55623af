//! Messages from the supervisor to the service manager, by sd_notify(3).

use std::sync::mpsc::{Receiver, SyncSender, channel, sync_channel};
use std::time::Duration;

use sd_notify::NotifyState;

use crate::log;

/// Maximum number of messages that wait for a service manager that reads none.
const WAITING_MAX: usize = 64;

/// Maximum size of a status text, in bytes.
const STATUS_MAX: usize = 2000;

/// Maximum time for which the end of the process waits until the last messages are sent.
const LAST_TIMEOUT: Duration = Duration::from_secs(1);

/// Variables of the service manager that only the supervisor may use.
pub(super) const VARIABLES: [&str; 6] = [
    "NOTIFY_SOCKET",
    "WATCHDOG_USEC",
    "WATCHDOG_PID",
    "LISTEN_FDS",
    "LISTEN_FDNAMES",
    "LISTEN_PID",
];

/// A message.
enum Note {
    Ready,
    Reloading,
    Stopping,
    Watchdog,
    Status(String),
}

/// Sends messages from a thread of its own, so that a service manager that hangs does not stop the
/// supervisor. Without a service manager, it does nothing.
pub(super) struct Notifier {
    /// The queue, and a channel that closes when the thread ends.
    thread: Option<(SyncSender<Note>, Receiver<()>)>,
    status: String,
    /// The interval of the service manager's watchdog.
    pub watchdog: Option<Duration>,
}

impl Notifier {
    pub(super) fn start() -> Notifier {
        let watchdog = sd_notify::watchdog_enabled();
        let thread = std::env::var_os("NOTIFY_SOCKET").and_then(|_| start_notifier().ok());
        Notifier { thread, status: String::new(), watchdog }
    }

    pub(super) fn ready(&self) {
        self.send(Note::Ready);
    }

    pub(super) fn reloading(&self) {
        self.send(Note::Reloading);
    }

    pub(super) fn stopping(&self) {
        self.send(Note::Stopping);
    }

    /// Tells the service manager that the supervisor works. Must be called after each round of the
    /// supervisor's loop.
    pub(super) fn alive(&self) {
        if self.watchdog.is_some() {
            self.send(Note::Watchdog);
        }
    }

    /// Sets the line that `systemctl status` shows. Returns whether the line has changed.
    pub(super) fn status(&mut self, mut status: String) -> bool {
        if status.len() > STATUS_MAX {
            let end = (0..=STATUS_MAX).rev().find(|&end| status.is_char_boundary(end));
            status.truncate(end.unwrap_or_default());
            status.push_str(" ...");
        }
        let is_new = status != self.status;
        if is_new {
            self.send(Note::Status(status.clone()));
            self.status = status;
        }
        is_new
    }

    fn send(&self, note: Note) {
        if let Some((queue, _)) = &self.thread {
            // If the queue is full, the service manager hangs, and the message is dropped.
            let _ = queue.try_send(note);
        }
    }
}

impl Drop for Notifier {
    fn drop(&mut self) {
        if let Some((queue, ended)) = self.thread.take() {
            drop(queue);
            let _ = ended.recv_timeout(LAST_TIMEOUT);
        }
    }
}

fn start_notifier() -> std::io::Result<(SyncSender<Note>, Receiver<()>)> {
    let (end, ended) = channel();
    let (send, receive) = sync_channel::<Note>(WAITING_MAX);
    log::start_thread("notify", move || {
        for note in receive {
            let _ = match &note {
                Note::Ready => sd_notify::notify(&[NotifyState::Ready]),
                Note::Stopping => sd_notify::notify(&[NotifyState::Stopping]),
                Note::Watchdog => sd_notify::notify(&[NotifyState::Watchdog]),
                Note::Status(status) => sd_notify::notify(&[NotifyState::Status(status)]),
                Note::Reloading => NotifyState::monotonic_usec_now()
                    .and_then(|now| sd_notify::notify(&[NotifyState::Reloading, now])),
            };
        }
        drop(end);
    })?;
    Ok((send, ended))
}
