//! A file that assigns a value to each tensor, in JSON: `{"NAME": VALUE, ...}`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::error::{ErrorKind, quoted, shown_path};
use crate::format::json::{UniqueMap, object};
use crate::hash::Digest;

/// The values that a file assigns to tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NameMap<T> {
    /// The path of the file.
    pub path: PathBuf,
    digest: Digest,
    pub(super) values: BTreeMap<String, T>,
}

impl<T> NameMap<T> {
    /// Parses the text of a file, whose form `form` describes in errors. `value` converts a JSON value, or
    /// returns why it is not valid.
    ///
    /// # Errors
    /// A message of one line with the file.
    pub(super) fn parse(
        path: &Path,
        text: &[u8],
        form: &str,
        value: impl Fn(&Value) -> Result<T, String>,
    ) -> Result<NameMap<T>, String> {
        let fail = |why: String| format!("{}: {why}", shown_path(path));
        let UniqueMap(object) = object::<UniqueMap<Value>>(text, ErrorKind::View)
            .map_err(|fault| fail(format!("{form}: {}", fault.message)))?;
        if object.is_empty() {
            return Err(fail(format!("{form}; it names no tensor")));
        }
        let values = object.into_iter().map(|(name, found)| match value(&found) {
            Ok(value) => Ok((name, value)),
            Err(why) => Err(fail(format!("tensor {}: {why}", quoted(&name)))),
        });
        let (values, digest) = (values.collect::<Result<_, _>>()?, Digest::of(text));
        Ok(NameMap { path: path.to_owned(), digest, values })
    }

    /// The file, and the hash of its text.
    pub(super) fn read_from(&self) -> (&Path, Digest) {
        (&self.path, self.digest)
    }
}
