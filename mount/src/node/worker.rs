//! A worker: the process that serves one mount for the supervisor. It gets orders through its
//! standard input. When the supervisor ends, the worker unmounts and ends too.

use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, setsid};

use super::channel::{Channel, Order, Report};
use crate::daemon::handover::{Giver, Handed};
use crate::daemon::{background, connection, ending, inherited};
use crate::log;
use crate::options::{Options, Watch};

/// Maximum time to wait for the source before a handover. It is longer than the time for which the
/// supervisor waits.
const PREPARE_TIMEOUT: Duration = Duration::from_secs(10);

/// Serves the mount of the first order until the supervisor stops it or another process unmounts
/// the mount.
///
/// # Errors
/// The reason why the worker ended. The supervisor gets it too.
pub(crate) fn run() -> Result<(), String> {
    let failed = |e: io::Error| format!("no channel to a supervisor: {e}");
    let channel = Arc::new(Channel::from_stdin().map_err(failed)?);
    inherited::note_descriptors();
    inherited::restore_ignored();
    // The worker leaves the supervisor's session, so that signals of the terminal reach only the
    // supervisor.
    let _ = setsid();
    let _ = std::env::set_current_dir("/");
    match channel.receive(true).map_err(failed)? {
        Some((Order::Start { source, target, options }, fds)) => {
            let giver = Arc::new(OnceLock::new());
            let listening = listen(channel.clone(), giver.clone());
            listening.map_err(|e| format!("cannot start a thread: {e}"))?;
            let handed = Handed::from_descriptors(fds);
            let ended = serve(&channel, &source, &target, &options, handed, &giver);
            connection::let_go();
            let report = match &ended {
                Err(message) => Some(Report::Failed { message: message.clone() }),
                Ok(()) => (!ending::was_signalled()).then_some(Report::Unmounted),
            };
            if let Some(report) = report {
                let _ = channel.send(&report, &[]);
            }
            ended
        }
        Some((order, _)) => Err(format!("expected an order to start, found {order:?}")),
        None => Ok(()),
    }
}

fn serve(
    channel: &Channel,
    source: &Path,
    target: &Path,
    options: &str,
    handed: Option<Handed>,
    giver: &OnceLock<Giver>,
) -> Result<(), String> {
    let mut options = Options::parse(&[options], false)?;
    // A node service runs for a long time, and its sources change.
    options.watch_default = Watch::Auto;
    background::serve(source, target, options, handed, |mounted| {
        log::flush();
        let _ = giver.set(mounted.giver.clone());
        let ready = Report::Ready { target: mounted.target.clone(), minor: mounted.minor };
        channel.send(&ready, &[]).map_err(|e| format!("the supervisor is gone: {e}"))
    })
}

/// Starts the thread that handles orders.
fn listen(channel: Arc<Channel>, giver: Arc<OnceLock<Giver>>) -> io::Result<()> {
    // This thread blocks all signals. Before the mount exists, a signal ends the process. After
    // that, another thread waits for signals.
    let orders = log::start_thread("orders", move || {
        while let Ok(Some((order, _))) = channel.receive(true) {
            match order {
                Order::Ping => drop(channel.send(&Report::Pong, &[])),
                Order::ReopenLog => log::reopen(),
                Order::Stop => end(giver.get()),
                Order::Prepare => prepare(&channel, giver.get()),
                Order::HandOver => hand_over(&channel, giver.get()),
                Order::Give => {
                    // A thread that waits for its source may prevent the end of this process. So
                    // the supervisor waits for this message and not for the end of the process.
                    let tell = || drop(channel.send(&Report::Given, &[]));
                    match giver.get() {
                        Some(giver) => giver.give(tell),
                        None => tell(),
                    }
                    // The mount belongs to another process now, so this worker ignores the end of
                    // the supervisor.
                    return;
                }
                Order::Start { .. } => tracing::error!("a second order to start; not obeyed"),
            }
        }
        // A worker without a supervisor would serve a mount that no one could reload or stop.
        tracing::debug!("the supervisor is gone");
        end(giver.get());
    });
    orders.map(drop)
}

/// Waits until a handover can run without waiting for the source, and reports that. If it takes too
/// long, the supervisor kills this process.
fn prepare(channel: &Channel, giver: Option<&Giver>) {
    if giver.is_none_or(|giver| giver.prepare(PREPARE_TIMEOUT)) {
        let _ = channel.send(&Report::Prepared, &[]);
    }
}

/// Stops serving, and sends the descriptors that another worker needs.
fn hand_over(channel: &Channel, giver: Option<&Giver>) {
    let not_yet = || io::Error::other("the mount does not answer yet");
    let sent = giver.ok_or_else(not_yet).and_then(|giver| {
        let state = giver.stop()?.into_descriptors();
        let fds: Vec<_> = state.iter().map(AsFd::as_fd).collect();
        let sent = channel.send(&Report::State, &fds);
        if sent.is_err() {
            giver.resume()?;
        }
        sent
    });
    if let Err(e) = sent {
        let message = format!("cannot be handed over: {e}");
        let _ = channel.send(&Report::NotHandedOver { message }, &[]);
    }
}

/// Ends this process by SIGTERM, which also unmounts if this process has mounted. Without a mount
/// of its own, it may have the connection of a mount that it was told to take over, so it closes
/// that connection first.
fn end(giver: Option<&Giver>) {
    if giver.is_none() {
        connection::let_go();
    }
    let _ = kill(Pid::this(), Signal::SIGTERM);
}
