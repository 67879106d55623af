//! State that a process inherits from its caller and that a daemon must not keep: ignored and
//! blocked signals, and open descriptors.

use std::fs::File;
use std::os::fd::{BorrowedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::libc;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use nix::unistd::{dup2_stderr, dup2_stdin, dup2_stdout};
use tensorfs::internal::sync::Mutex;

/// Environment variable with the descriptors that this program got from the previous program in the
/// same process. The format is `NAME=NUMBER`, separated by spaces.
pub(crate) const HANDED_OVER: &str = "TENSORFS_HANDED_OVER";

/// Signals that the caller may have set to be ignored, as nohup and shells do.
const IGNORABLE: [Signal; 8] = [
    Signal::SIGHUP,
    Signal::SIGINT,
    Signal::SIGQUIT,
    Signal::SIGTERM,
    Signal::SIGALRM,
    Signal::SIGUSR1,
    Signal::SIGUSR2,
    Signal::SIGCHLD,
];

/// Descriptors of the caller that are still open in this process.
static DESCRIPTORS: Mutex<Vec<RawFd>> = Mutex::new(Vec::new());

/// Whether standard output was closed when the process started.
static OUTPUT_CLOSED: AtomicBool = AtomicBool::new(false);

extern "C" fn note_output() {
    // SAFETY: the call takes two numbers, and fails if there is no such descriptor.
    let flags = unsafe { libc::fcntl(libc::STDOUT_FILENO, libc::F_GETFD) };
    OUTPUT_CLOSED.store(flags == -1, Ordering::Relaxed);
}

// Before `main`, Rust's runtime opens `/dev/null` in place of a closed standard output.
#[unsafe(link_section = ".init_array")]
#[used]
static NOTE_OUTPUT: extern "C" fn() = note_output;

/// Whether standard output was closed at the start of the process, so that output would be lost.
pub(crate) fn is_output_closed() -> bool {
    OUTPUT_CLOSED.load(Ordering::Relaxed)
}

/// Unblocks all signals, and restores the default action of SIGCHLD: while SIGCHLD is ignored,
/// waiting for a child fails. Must be called before the first thread starts.
pub(crate) fn restore_signals() {
    restore(Signal::SIGCHLD);
    // The previous program in this process left its signals blocked. So a signal that ends the
    // process waits until this program handles it.
    if std::env::var_os(HANDED_OVER).is_none() {
        // With these arguments the call cannot fail.
        let _ = SigSet::empty().thread_set_mask();
    }
}

/// Restores the default action of every signal in `IGNORABLE`.
pub(crate) fn restore_ignored() {
    IGNORABLE.into_iter().for_each(restore);
}

/// Restores the default action of `signal`.
pub(crate) fn restore(signal: Signal) {
    let default = SigAction::new(SigHandler::SigDfl, SaFlags::empty(), SigSet::empty());
    // SAFETY: no handler of this process is replaced, for it installs none for these signals.
    let _ = unsafe { sigaction(signal, &default) };
}

/// Records the inherited descriptors above standard error, and makes them close-on-exec. Must be
/// called before the process opens descriptors of its own.
pub(crate) fn note_descriptors() {
    let entries = std::fs::read_dir("/proc/self/fd").into_iter().flatten().filter_map(Result::ok);
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<RawFd>().ok());
    let mut descriptors: Vec<RawFd> = numbers.filter(|&number| number > 2).collect();
    // The descriptor of the folder is closed by now. A descriptor that is open and not
    // close-on-exec was inherited.
    descriptors.retain(|&number| {
        // SAFETY: the number is used for these fcntl calls only, which fail if it is not open.
        let descriptor = unsafe { BorrowedFd::borrow_raw(number) };
        let flags = fcntl(descriptor, FcntlArg::F_GETFD);
        let inherited = flags.is_ok_and(|flags| flags & FdFlag::FD_CLOEXEC.bits() == 0);
        inherited && fcntl(descriptor, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC)).is_ok()
    });
    *DESCRIPTORS.lock() = descriptors;
}

/// Closes the inherited descriptors, and replaces the standard streams by `/dev/null`.
///
/// # Errors
/// If `/dev/null` cannot be opened.
pub(crate) fn let_go() -> std::io::Result<()> {
    let null = File::options().read(true).write(true).open("/dev/null")?;
    dup2_stdin(&null)?;
    dup2_stdout(&null)?;
    dup2_stderr(&null)?;
    let mut descriptors = DESCRIPTORS.lock();
    for descriptor in descriptors.drain(..) {
        let _ = nix::unistd::close(descriptor);
    }
    Ok(())
}

/// Makes `command` start without blocked signals, although this process blocks some.
pub(crate) fn unblock_signals_of(command: &mut Command) -> &mut Command {
    let unblock = || Ok(SigSet::empty().thread_set_mask()?);
    // SAFETY: the closure makes one system call, and takes no lock and no memory.
    unsafe { command.pre_exec(unblock) }
}
