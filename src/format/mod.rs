//! File formats: bytes to descriptions and back, one file per format.
//!
//! Pure: nothing here opens a file. Errors are faults without a path; callers add it.

pub mod bintensors;
pub mod dcp;
pub mod flat;
pub mod json;
pub mod manifest;
pub mod names;
mod plain;
pub mod safetensors;
pub mod weight_map;

use crate::words;

/// A format that whole checkpoints are stored in, and shown as.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// JSON header.
    #[default]
    Safetensors,
    /// Binary header.
    Bintensors,
}

words!(Format { Safetensors = "safetensors", Bintensors = "bintensors" });

impl Format {
    /// Suffix of the names of its files.
    pub fn suffix(self) -> &'static str {
        match self {
            Format::Safetensors => names::SUFFIX,
            Format::Bintensors => names::BINTENSORS_SUFFIXES[0],
        }
    }

    /// The format that a file of this name is in, as far as the name tells.
    pub fn of_name(name: &str) -> Option<Format> {
        if name.ends_with(names::SUFFIX) {
            return Some(Format::Safetensors);
        }
        names::BINTENSORS_SUFFIXES
            .iter()
            .any(|suffix| name.ends_with(suffix))
            .then_some(Format::Bintensors)
    }
}
