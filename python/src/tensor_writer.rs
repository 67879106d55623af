//! Writes tensors that Python code passes to a tensorizer file.

use std::io;
use std::mem;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::exceptions::{PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tensorfs::Error;
use tensorfs::internal::consolidate::{MemoryFile, TensorBytes, TensorWriter, WriteAt, WriteKey};
use tensorfs::internal::format::tensorizer::ENTRIES_LEN_MAX;
use tensorfs::internal::format::tensorizer::encode::{ENTRIES_LEN, NewTensor, entries_len};
use tensorfs::internal::format::tensorizer::keys::{KeyDerivation, SALT_LEN};
use tensorfs::internal::format::tensorizer::secretbox::{DataKey, KEY_LEN};
use tensorfs::internal::process::token;

use crate::errors::raised;
use crate::memory::bytes_at;
use crate::waiting::beside;

/// A tensor that is to be written: name, kind, number of the module, dtype, shape, address or `None`, and length in
/// bytes or `None`.
type GivenTensor = (Vec<u8>, u8, u16, String, Vec<u64>, Option<usize>, Option<usize>);

/// The place to which a file is written.
enum WriteTarget {
    /// A path. The file appears there once it is whole.
    Path(MemoryFile),
    /// A Python file object.
    Object(PythonFile),
}

impl WriteTarget {
    fn writer(&self) -> &dyn WriteAt {
        match self {
            WriteTarget::Path(file) => file.writer(),
            WriteTarget::Object(file) => file,
        }
    }

    /// The name for errors.
    fn shown(&self) -> &Path {
        match self {
            WriteTarget::Path(file) => file.target(),
            WriteTarget::Object(_) => Path::new("file object"),
        }
    }
}

/// A Python file object, in which bytes can be written at any offset.
struct PythonFile {
    file: Py<PyAny>,
    /// Locked while the file object is positioned and written. Contains the first exception that the file object has
    /// raised.
    exception: Mutex<Option<PyErr>>,
}

impl PythonFile {
    /// Writes all of `bytes` at `offset`. It repeats `write`, because an unbuffered file object may write only a part
    /// of the bytes.
    fn write(&self, py: Python<'_>, mut bytes: &[u8], offset: u64) -> PyResult<()> {
        let file = self.file.bind(py);
        file.call_method1("seek", (offset,))?;
        while !bytes.is_empty() {
            let answer = file.call_method1("write", (PyBytes::new(py, bytes),))?;
            let taken = answer.extract::<usize>().unwrap_or(0);
            match bytes.get(taken..) {
                Some(rest) if taken > 0 => bytes = rest,
                _ => return Err(PyOSError::new_err("the file took no bytes")),
            }
        }
        Ok(())
    }
}

impl WriteAt for PythonFile {
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        // This cannot deadlock, because no thread waits for this lock while it holds the GIL.
        let mut exception = self.exception.lock().unwrap_or_else(PoisonError::into_inner);
        Python::attach(|py| self.write(py, bytes, offset)).map_err(|error| {
            let failed = io::Error::other(error.to_string());
            exception.get_or_insert(error);
            failed
        })
    }
}

/// The bytes of tensors. The Python caller keeps the memory alive while it is written. `None` stands for zeros without
/// memory.
struct GivenTensors(Vec<Option<&'static [u8]>>);

impl TensorBytes for GivenTensors {
    fn read(&self, index: usize, offset: u64, target: &mut [u8]) -> tensorfs::Result<()> {
        let start = offset as usize;
        match self.0[index] {
            Some(bytes) => target.copy_from_slice(&bytes[start..start + target.len()]),
            None => target.fill(0),
        }
        Ok(())
    }

    fn in_memory(&self, index: usize, range: &Range<u64>) -> Option<&[u8]> {
        self.0[index]?.get(range.start as usize..range.end as usize)
    }
}

/// A file that is being written.
struct OpenWriter {
    target: WriteTarget,
    /// The writer is made at the first write, because the length of the list of tensors is not known before.
    writer: Option<TensorWriter>,
    /// Offset in the target at which the file begins.
    start: u64,
    entries_len: u64,
    /// The key of an encrypted file.
    key: Option<WriteKey>,
}

impl OpenWriter {
    fn parts(&mut self) -> (&mut WriteTarget, &mut TensorWriter) {
        let OpenWriter { target, writer, start, entries_len, key } = self;
        let writer = writer.get_or_insert_with(|| {
            let writer = TensorWriter::new(*start, *entries_len);
            if let Some(key) = key { writer.encrypted(key) } else { writer }
        });
        (target, writer)
    }

    /// Makes the list of tensors long enough for `tensors`, if nothing is written yet.
    fn reserve(&mut self, tensors: &[NewTensor]) -> tensorfs::Result<()> {
        if self.writer.is_none() {
            let shown = self.target.shown();
            let needed = entries_len(tensors).map_err(|fault| Error::refused(shown, fault))?;
            self.entries_len = self.entries_len.max(needed);
        }
        Ok(())
    }

    fn write(
        &mut self,
        tensors: &[NewTensor],
        bytes: &GivenTensors,
        is_stopped: &AtomicBool,
    ) -> tensorfs::Result<()> {
        self.reserve(tensors)?;
        let (target, writer) = self.parts();
        let headers = writer.describe(tensors, target.shown())?;
        if let WriteTarget::Path(file) = target {
            file.reserve(writer.end())?;
        }
        let mut progress = |_| match is_stopped.load(Ordering::Relaxed) {
            true => Err(Error::cancelled("interrupted")),
            false => Ok(()),
        };
        writer.write(&headers, bytes, target.writer(), target.shown(), &mut progress)
    }

    fn sync(&mut self) -> tensorfs::Result<()> {
        let (target, writer) = self.parts();
        writer.finish(target.writer(), target.shown())
    }
}

/// Writes a tensorizer file: TensorizerWriter(path=None, file=None, *, entries_len=262144, overwrite=True, key=None,
/// derivation=None).
///
/// Pass either `path` or `file`. The file at `path` appears whole at `finish`. `file` is an object with `seek`, `tell`
/// and `write`. The tensorizer file begins at its current position. `entries_len` is the least number of bytes for the
/// list of tensors, at most 16 MiB. The first `write` makes the list longer if its tensors need that. `key` has 32
/// bytes, and encrypts the data. `derivation` says how the key was derived from a passphrase, with the arguments of
/// `derive_key`: passes, bytes of memory, and salt.
///
/// write(tensors): `tensors` is a list of tuples (name, kind, module, dtype, shape, address, length). `name` is bytes:
/// UTF-8, or b"\x1e" and a path as a JSON array. `kind` is 0 for a parameter, 1 for a buffer, 2 for a value of a state
/// dict. `module` is the number of the module. `dtype` is the text that the format uses, such as "<f4" or
/// "<V2\0torch.bfloat16". `length` is in bytes. If it is None, the tensor is a meta tensor. If `address` is None, the
/// bytes of the tensor are zeros. The caller has to keep the memory unchanged until `write` returns. Hashes are
/// computed on several threads, without the GIL.
///
/// reserve(tensors) makes the list of tensors long enough for all of these tensors. Their addresses are not used. It
/// has an effect only before the first `write`.
///
/// sync() completes the file with the tensors that were written so far. finish() does the same, ends the writer, and
/// returns the length of the file in bytes. A file at a path appears then. abort() ends the writer, and no file is left
/// at a path. After an exception of write(), all methods except abort() fail.
///
/// A child of a fork cannot use the writer: each method raises an exception there.
#[pyclass(module = "tensorfs._tensorfs", frozen)]
pub(crate) struct TensorizerWriter {
    /// `None` once the writer has ended or failed.
    open: Arc<Mutex<Option<OpenWriter>>>,
    /// Token of the process that made the writer. In a child of a fork, a lock that a thread of that process held stays
    /// locked for ever.
    process: u64,
}

impl Drop for TensorizerWriter {
    fn drop(&mut self) {
        if token() != self.process {
            // The parent still uses the temporary file, so the child must not remove it.
            mem::forget(self.open.clone());
        }
    }
}

#[pymethods]
impl TensorizerWriter {
    #[new]
    #[pyo3(signature = (
        path = None, file = None, *, entries_len = ENTRIES_LEN, overwrite = true, key = None,
        derivation = None,
    ))]
    fn new(
        py: Python<'_>,
        path: Option<PathBuf>,
        file: Option<Py<PyAny>>,
        entries_len: u64,
        overwrite: bool,
        key: Option<&[u8]>,
        derivation: Option<(u64, u64, Vec<u8>)>,
    ) -> PyResult<TensorizerWriter> {
        let derivation = derivation
            .map(|(ops_limit, mem_limit, salt)| derivation_of(ops_limit, mem_limit, &salt))
            .transpose()?;
        let key = match (key, derivation) {
            (Some(key), derivation) => {
                let bytes = key.try_into().map_err(|_| {
                    let found = key.len();
                    PyValueError::new_err(format!("a key has {KEY_LEN} bytes, not {found}"))
                })?;
                Some(WriteKey::new(DataKey::new(bytes), derivation))
            }
            (None, None) => None,
            (None, Some(_)) => return Err(PyValueError::new_err("a derivation takes its key")),
        };
        if entries_len > ENTRIES_LEN_MAX {
            let message = format!("entries_len={entries_len}: expected at most {ENTRIES_LEN_MAX}");
            return Err(PyValueError::new_err(message));
        }
        let (target, start) = match (path, file) {
            (Some(path), None) => {
                let made = py.detach(|| MemoryFile::create(&path, overwrite));
                (WriteTarget::Path(made.map_err(|error| raised(py, &error, None))?), 0)
            }
            (None, Some(file)) => {
                let start = file.bind(py).call_method0("tell")?.extract()?;
                (WriteTarget::Object(PythonFile { file, exception: Mutex::default() }), start)
            }
            _ => return Err(PyValueError::new_err("give a path or a file")),
        };
        let entries_len = entries_len.max(1).next_multiple_of(ENTRIES_LEN);
        let open = OpenWriter { target, writer: None, start, entries_len, key };
        Ok(TensorizerWriter { open: Arc::new(Mutex::new(Some(open))), process: token() })
    }

    /// Writes tensors after those that were written before.
    fn write(&self, py: Python<'_>, tensors: Vec<GivenTensor>) -> PyResult<()> {
        let (mut new, mut bytes) = (Vec::new(), Vec::new());
        for (name, kind, module, dtype, shape, address, len) in tensors {
            let data_len = len.map(|len| len as u64);
            new.push(NewTensor { name, kind, module, dtype, shape, data_len });
            // SAFETY: the caller keeps these bytes, and does not write them, until this function
            // returns. It returns once no thread uses them. They are only read.
            let bytes_of = |address| unsafe { bytes_at(address, len.unwrap_or(0)) };
            bytes.push(address.map(bytes_of).transpose()?.map(|bytes| &*bytes));
        }
        let bytes = GivenTensors(bytes);
        self.run(py, move |open, is_stopped| open.write(&new, &bytes, is_stopped))
    }

    /// Makes the list of tensors long enough for these tensors.
    fn reserve(&self, py: Python<'_>, tensors: Vec<GivenTensor>) -> PyResult<()> {
        let announced = tensors.into_iter().map(|(name, kind, module, dtype, shape, _, len)| {
            let data_len = len.map(|len| len as u64);
            NewTensor { name, kind, module, dtype, shape, data_len }
        });
        let new: Vec<NewTensor> = announced.collect();
        self.run(py, move |open, _| open.reserve(&new))
    }

    /// Completes the file with the tensors that were written so far.
    fn sync(&self, py: Python<'_>) -> PyResult<()> {
        self.run(py, |open, _| open.sync())
    }

    /// Ends the file. Returns its length in bytes.
    fn finish(&self, py: Python<'_>) -> PyResult<u64> {
        let open = self.open.clone();
        let len = self.run(py, move |open, _| {
            open.sync()?;
            Ok(open.parts().1.end() - open.start)
        })?;
        let ended = py.detach(|| open.lock().unwrap_or_else(PoisonError::into_inner).take());
        let Some(OpenWriter { target, start, .. }) = ended else { return Err(closed()) };
        match target {
            WriteTarget::Object(file) => {
                file.file.bind(py).call_method1("seek", (start + len,))?;
            }
            WriteTarget::Path(file) => {
                let publish = move || file.publish();
                beside(py, "tensorfs-write", None, "write", None, publish)?
                    .map_err(|error| raised(py, &error, None))?;
            }
        }
        Ok(len)
    }

    /// Ends the writer. No file is left at a path.
    fn abort(&self, py: Python<'_>) -> PyResult<()> {
        self.check_process()?;
        let open = self.open.clone();
        drop(py.detach(|| open.lock().unwrap_or_else(PoisonError::into_inner).take()));
        Ok(())
    }

    /// Bytes of data of the tensors that were written so far.
    #[getter]
    fn data_len(&self, py: Python<'_>) -> PyResult<u64> {
        self.check_process()?;
        let open = self.open.clone();
        Ok(py.detach(|| {
            let open = open.lock().unwrap_or_else(PoisonError::into_inner);
            let writer = open.as_ref().and_then(|open| open.writer.as_ref());
            writer.map_or(0, TensorWriter::data_len)
        }))
    }
}

impl TensorizerWriter {
    fn check_process(&self) -> PyResult<()> {
        if token() == self.process {
            return Ok(());
        }
        let message = "the writer belongs to the process that made it; make another one after fork";
        Err(PyRuntimeError::new_err(message))
    }

    /// Runs `work` on another thread, without the GIL. If `work` fails, the writer ends.
    fn run<T: Send + 'static>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut OpenWriter, &AtomicBool) -> tensorfs::Result<T> + Send + 'static,
    ) -> PyResult<T> {
        self.check_process()?;
        let (open, is_stopped) = (self.open.clone(), Arc::new(AtomicBool::new(false)));
        let (ended, wait) = channel::<()>();
        let stop = is_stopped.clone();
        let outcome = beside(py, "tensorfs-write", None, "write", None, move || {
            let _ended = ended;
            let mut open = open.lock().unwrap_or_else(PoisonError::into_inner);
            let done = work(open.as_mut()?, &stop);
            let failed = if done.is_err() { open.take() } else { None };
            Some((done, failed))
        });
        match outcome {
            Ok(Some((Ok(done), _))) => Ok(done),
            Ok(Some((Err(error), failed))) => {
                let exception = failed.and_then(|open| match open.target {
                    WriteTarget::Object(file) => {
                        file.exception.into_inner().unwrap_or_else(PoisonError::into_inner)
                    }
                    WriteTarget::Path(_) => None,
                });
                Err(exception.unwrap_or_else(|| raised(py, &error, None)))
            }
            Ok(None) => Err(closed()),
            Err(interrupted) => {
                // Waits for `work`, so that no thread uses the memory any more when the exception is raised.
                is_stopped.store(true, Ordering::Relaxed);
                let _ = py.detach(move || wait.recv());
                Err(interrupted)
            }
        }
    }
}

/// Checks the parameters of a key derivation, so that readers can open the file.
fn derivation_of(ops_limit: u64, mem_limit: u64, salt: &[u8]) -> PyResult<KeyDerivation> {
    let salt = salt.try_into().map_err(|_| {
        PyValueError::new_err(format!("a salt has {SALT_LEN} bytes, not {}", salt.len()))
    })?;
    let derivation = KeyDerivation { ops_limit, mem_limit, salt };
    let refused = |what| PyValueError::new_err(format!("the key derivation {what}"));
    derivation.check().map_err(refused)?;
    Ok(derivation)
}

/// Derives the key from a passphrase, by Argon2id with this number of passes, bytes of memory, and salt.
#[pyfunction]
pub(crate) fn derive_key(
    py: Python<'_>,
    passphrase: Vec<u8>,
    ops_limit: u64,
    mem_limit: u64,
    salt: Vec<u8>,
) -> PyResult<Py<PyBytes>> {
    let derivation = derivation_of(ops_limit, mem_limit, &salt)?;
    let key = py
        .detach(|| derivation.derive(&passphrase))
        .map_err(|fault| PyValueError::new_err(fault.message))?;
    Ok(PyBytes::new(py, key.bytes()).unbind())
}

fn closed() -> PyErr {
    PyValueError::new_err("the writer has ended")
}
