//! The tensors that a checkpoint should hold, according to a file other than its shards: a tensorfs
//! manifest, the header of a safetensors file, or a weight map.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::dtype::Dtype;
use crate::error::{ErrorKind, Fault, quoted};
use crate::format::json::{UniqueMap, object};
use crate::format::weight_map::WeightMap;
use crate::format::{ShardDescription, TensorDescription};

/// Value of the `format` key of a manifest.
const FORMAT: &str = "tensorfs-manifest";

/// Suffix of the file name of a manifest: `model.safetensors` has `model.tensorfs-manifest.json`.
pub const SUFFIX: &str = ".tensorfs-manifest.json";

/// Maximum length of a manifest that is read, in bytes.
pub const MANIFEST_LEN_MAX: u64 = 128 << 20;

/// Name of the manifest of the set that is shown as the file `output`. The name is the same for
/// each format.
pub fn file_name(output: &str) -> String {
    let suffix = super::OutputFormat::of_name(output).map_or("", super::OutputFormat::suffix);
    format!("{}{SUFFIX}", output.strip_suffix(suffix).unwrap_or(output))
}

/// Names of the tensors that a checkpoint should hold, with dtype and shape if known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reference {
    /// The dtype and shape of each tensor, as far as they are known.
    pub tensors: BTreeMap<String, Option<(Dtype, Vec<u64>)>>,
    /// Length in bytes of each shard file, if a manifest recorded them.
    pub shards: Option<BTreeMap<String, u64>>,
    /// Length in bytes of all tensors together, if a weight map records it.
    pub total_size: Option<u64>,
}

#[derive(Deserialize)]
struct ManifestJson {
    format: String,
    version: u64,
    shards: UniqueMap<u64>,
    tensors: UniqueMap<TensorJson>,
}

#[derive(Serialize, Deserialize)]
struct TensorJson {
    dtype: String,
    shape: Vec<u64>,
}

impl Reference {
    /// The tensors of a shard.
    pub fn from_description(shard: &ShardDescription) -> Reference {
        let known =
            |t: TensorDescription<'_>| (t.name.to_owned(), Some((t.facts.dtype, t.shape.to_vec())));
        let tensors = shard.tensors().map(known);
        Reference { tensors: tensors.collect(), shards: None, total_size: None }
    }

    /// Parses `text`, a manifest or a weight map.
    pub fn parse_json(text: &[u8]) -> Result<Reference, Fault> {
        #[derive(Deserialize)]
        struct Probe {
            format: Option<serde_json::Value>,
        }
        let probe: Probe = object(text, ErrorKind::WeightMap)?;
        if probe.format.is_some() {
            return Reference::parse_manifest(text);
        }
        let map = WeightMap::parse(text)?;
        let total_size = map.metadata.get("total_size").and_then(serde_json::Value::as_u64);
        let tensors = map.shard_of.iter().map(|(name, _)| (name.to_owned(), None)).collect();
        Ok(Reference { tensors, shards: None, total_size })
    }

    fn parse_manifest(text: &[u8]) -> Result<Reference, Fault> {
        let json: ManifestJson = object(text, ErrorKind::WeightMap)?;
        if json.format != FORMAT || json.version != 1 {
            return Err(ErrorKind::WeightMap.fault(format!(
                "format {} version {}, expected `{FORMAT}` version 1",
                quoted(&json.format),
                json.version
            )));
        }
        let shards = Some(json.shards.0);
        let tensors = json.tensors.0.into_iter().map(|(name, tensor)| {
            let Some(dtype) = Dtype::from_name(&tensor.dtype) else {
                let message = format!("unknown dtype {}", quoted(&tensor.dtype));
                return Err(ErrorKind::UnknownDtype.fault(message).tensor(&name));
            };
            Ok((name, Some((dtype, tensor.shape))))
        });
        Ok(Reference { tensors: tensors.collect::<Result<_, _>>()?, shards, total_size: None })
    }
}

/// The text of a manifest: shard files with their lengths, tensors with dtype and shape.
pub fn encode<'a>(
    shards: impl Iterator<Item = (&'a str, u64)>,
    tensors: impl Iterator<Item = (&'a str, Dtype, &'a [u64])>,
) -> Vec<u8> {
    let shards: BTreeMap<&str, u64> = shards.collect();
    let tensors: BTreeMap<&str, TensorJson> = tensors
        .map(|(name, dtype, shape)| {
            (name, TensorJson { dtype: dtype.name().to_owned(), shape: shape.to_vec() })
        })
        .collect();
    let json = serde_json::json!({
        "format": FORMAT, "version": 1, "shards": shards, "tensors": tensors,
    });
    let mut text = format!("{json:#}").into_bytes();
    text.push(b'\n');
    text
}
