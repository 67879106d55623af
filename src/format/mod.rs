//! File formats: bytes to descriptions and back, one file per format.
//!
//! Pure: nothing here opens a file. Errors are faults without a path; callers add it.

pub mod dcp;
pub mod json;
pub mod manifest;
pub mod names;
pub mod safetensors;
pub mod weight_map;
