//! Converts errors of the library to Python exceptions. Python code chooses the class of each exception.

use std::io;

use nix::libc;
use pyo3::prelude::*;
use tensorfs::Error;
use tensorfs::internal::error::{real_name, shown};

/// The exception for `error`. `loaded` names the tensors of the load in which it occurred.
pub(crate) fn raised(py: Python<'_>, error: &Error, loaded: Option<&str>) -> PyErr {
    let path = error.path().map(real_name);
    let (errno, message) = match error {
        Error::Io { action, source, .. } => {
            (Some(errno(source)), shown(&format!("cannot {action}: {source}")))
        }
        _ => (None, error.to_string()),
    };
    let tensor = error.tensor().or(loaded);
    let facts = (error.kind().as_str(), message, path, tensor, errno);
    let made = py
        .import("tensorfs._errors")
        .and_then(|module| module.getattr("of_native"))
        .and_then(|of_native| of_native.call1(facts));
    made.map_or_else(|failed| failed, PyErr::from_value)
}

fn errno(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or(match error.kind() {
        io::ErrorKind::NotFound => libc::ENOENT,
        io::ErrorKind::PermissionDenied => libc::EACCES,
        io::ErrorKind::TimedOut => libc::ETIMEDOUT,
        io::ErrorKind::OutOfMemory => libc::ENOMEM,
        io::ErrorKind::StorageFull => libc::ENOSPC,
        _ => libc::EIO,
    })
}
