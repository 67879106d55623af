//! The native part of the Python package: it opens checkpoints, plans loads and reads. The public part is written in
//! Python. The native part trusts the memory addresses that the public part passes.

mod ahead;
mod checkpoint;
mod consolidate;
mod dlpack;
mod errors;
mod loading;
mod memory;
mod slicing;
mod tensor_writer;
mod waiting;

use std::path::PathBuf;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tensorfs::internal::error::{self, SCHEMES};

#[pymodule(gil_used = false)]
fn _tensorfs(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<ahead::Ahead>()?;
    module.add_class::<checkpoint::Checkpoint>()?;
    module.add_class::<loading::Cancel>()?;
    module.add_class::<loading::Loader>()?;
    module.add_class::<loading::Plan>()?;
    module.add_class::<memory::Area>()?;
    module.add_class::<memory::Tensor>()?;
    module.add_class::<tensor_writer::TensorizerWriter>()?;
    module.add_function(wrap_pyfunction!(checkpoint::describe, module)?)?;
    module.add_function(wrap_pyfunction!(consolidate::consolidate, module)?)?;
    module.add_function(wrap_pyfunction!(loading::release_pinned, module)?)?;
    module.add_function(wrap_pyfunction!(dlpack::memory_of, module)?)?;
    module.add_function(wrap_pyfunction!(slicing::load_indexed, module)?)?;
    module.add_function(wrap_pyfunction!(memory::unwritable, module)?)?;
    module.add_function(wrap_pyfunction!(tensor_writer::derive_key, module)?)?;
    module.add_function(wrap_pyfunction!(loading::can_cast, module)?)?;
    module.add_function(wrap_pyfunction!(parse_size, module)?)?;
    module.add_function(wrap_pyfunction!(process_token, module)?)?;
    module.add_function(wrap_pyfunction!(real_name, module)?)?;
    module.add_function(wrap_pyfunction!(expect_local_path, module)?)?;
    module.add("SCHEMES", SCHEMES.map(|(name, _)| name).to_vec())?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))
}

/// The number of bytes of a size in the notation of options, such as `16M`.
#[pyfunction]
fn parse_size(text: &str) -> Option<u64> {
    tensorfs::internal::size::parse_size(text)
}

/// A path as it is, or a URL without the parts that may be secret.
#[pyfunction]
fn real_name(name: PathBuf) -> String {
    error::real_name(&name)
}

/// Refuses a URL where only a path of this machine is possible. `name` is the name of the argument.
#[pyfunction]
fn expect_local_path(name: &str, path: PathBuf) -> PyResult<()> {
    let checked = error::expect_local_path(&path);
    checked.map_err(|why| PyValueError::new_err(format!("{name}: {why}")))
}

/// A number for this process. The processes from which it was forked have other numbers, even if process ids repeat.
#[pyfunction]
fn process_token() -> u64 {
    tensorfs::internal::process::token()
}
