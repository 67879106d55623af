//! A worker: the process that serves one mount for the supervisor. It takes orders on its standard
//! input, and unmounts and ends when the supervisor ends.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use nix::sys::signal::{SigSet, SigmaskHow, Signal, kill};
use nix::unistd::{Pid, setsid};

use super::channel::{Channel, Order, Report};
use crate::daemon::{background, inherited};
use crate::log;
use crate::options::Options;

/// Serves the mount of the first order until the supervisor stops it or somebody unmounts it.
///
/// # Errors
/// The reason why it ended. The supervisor has it too.
pub(crate) fn run() -> Result<(), String> {
    let failed = |e: io::Error| format!("no channel to a supervisor: {e}");
    let channel = Arc::new(Channel::from_stdin().map_err(failed)?);
    inherited::note_descriptors();
    inherited::restore_ignored();
    // Signals of the supervisor's terminal are for the supervisor.
    let _ = setsid();
    let _ = std::env::set_current_dir("/");
    match channel.receive(true).map_err(failed)? {
        Some((Order::Start { source, target, options }, _)) => {
            listen(channel.clone()).map_err(|e| format!("cannot start a thread: {e}"))?;
            let ended = serve(&channel, source, target, &options);
            if let Err(message) = &ended {
                let _ = channel.send(&Report::Failed { message: message.clone() }, &[]);
            }
            ended
        }
        Some((order, _)) => Err(format!("expected an order to start, found {order:?}")),
        None => Ok(()),
    }
}

fn serve(channel: &Channel, source: PathBuf, target: PathBuf, options: &str) -> Result<(), String> {
    let options = Options::parse(&[options], false)?;
    background::serve(&source, &target, options, |mounted| {
        log::flush();
        let ready = Report::Ready { target: mounted.target.clone() };
        channel.send(&ready, &[]).map_err(|e| format!("the supervisor is gone: {e}"))
    })
}

/// Starts the thread that takes orders.
fn listen(channel: Arc<Channel>) -> io::Result<()> {
    // A signal to end must not reach this thread: before the mount is there it ends the process, and
    // then another thread waits for it.
    let before = SigSet::all().thread_swap_mask(SigmaskHow::SIG_SETMASK)?;
    let started = std::thread::Builder::new().name("orders".to_owned()).spawn(move || {
        while let Ok(Some((order, _))) = channel.receive(true) {
            match order {
                Order::Ping => drop(channel.send(&Report::Pong, &[])),
                Order::ReopenLog => log::reopen(),
                Order::Stop => end(),
                Order::Start { .. } => tracing::error!("a second order to start; not obeyed"),
            }
        }
        // A worker without a supervisor would serve a mount that nobody can reload or stop.
        tracing::debug!("the supervisor is gone");
        end();
    });
    let _ = before.thread_set_mask();
    started.map(|_| ())
}

/// Ends this process as SIGTERM does: by unmounting, if it has mounted.
fn end() {
    let _ = kill(Pid::this(), Signal::SIGTERM);
}
