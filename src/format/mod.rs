//! File formats: bytes to descriptions and back, one file per format.
//!
//! The module is pure: it opens no file. Its errors are faults without a path. The callers add the
//! path.

pub mod bintensors;
pub mod dcp;
pub mod deepspeed;
mod description;
pub mod flat;
pub mod foreign;
mod input;
pub mod json;
pub mod manifest;
pub mod names;
mod output;
pub mod pickle;
mod plain;
mod range_reader;
pub mod safetensors;
pub mod tensorizer;
pub mod weight_map;

pub use description::{FileRank, PiecePlace, ShardDescription, TensorDescription};
pub use input::{Detected, InputFormat};
pub use output::OutputFormat;
pub use pickle::TrainingState;
pub use range_reader::RangeReader;
