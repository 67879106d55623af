//! The checkpoints that the bench writes. Their tensors have the names and shapes of Llama, in
//! bf16. A checkpoint may have any size.

use std::io;
use std::path::Path;

use tensorfs::Dtype;

use super::args::Made;
use crate::cli::saved::{Cut, Tensor, write_checkpoint};

/// Width of the model. If the rows are cut into `RANKS` parts, each part is 2 KiB long.
const HIDDEN: u64 = 4096;

/// Width of the MLP. Checkpoints that are cut by columns use `HIDDEN` instead, so that the parts of
/// all rows are 2 KiB long.
const INTERMEDIATE: u64 = 14336;

/// Number of rows of a key or value projection.
const KEYS: u64 = 1024;

/// Number of rows of an embedding.
const VOCABULARY: u64 = 32000;

/// Number of shards of each checkpoint.
const RANKS: u64 = 4;

/// Writes a checkpoint of about `size` bytes into `folder`.
pub(super) fn make(folder: &Path, made: Made, size: u64) -> io::Result<()> {
    let (cut, intermediate) = match made {
        Made::Hf => (Cut::HuggingFace(RANKS), INTERMEDIATE),
        Made::DcpRows => (Cut::Dcp(RANKS, 1), INTERMEDIATE),
        Made::DcpColumns => (Cut::Dcp(1, RANKS), HIDDEN),
    };
    write_checkpoint(folder, &llama(size, intermediate), cut)
}

/// Tensors with a total size of about `size` bytes. The number of layers is chosen first, and then
/// the number of rows of all tensors is scaled.
fn llama(size: u64, intermediate: u64) -> Vec<Tensor> {
    let layer = (2 * HIDDEN + 2 * KEYS) * HIDDEN + 3 * HIDDEN * intermediate;
    let embeddings = 2 * VOCABULARY * HIDDEN;
    let layers = ((size / 2).saturating_sub(embeddings) as f64 / layer as f64).round().max(1.0);
    let factor = (size / 2) as f64 / (embeddings as f64 + layers * layer as f64);
    let rows = |rows: u64| ((rows as f64 * factor) as u64 / RANKS).max(1) * RANKS;
    let tensor = |name: String, shape: &[u64]| Tensor {
        name: format!("{name}.weight"),
        dtype: Dtype::Bf16,
        shape: shape.to_vec(),
    };
    let mut tensors = vec![tensor("model.embed_tokens".to_owned(), &[rows(VOCABULARY), HIDDEN])];
    for number in 0..layers as u64 {
        let shapes: [(&str, &[u64]); 9] = [
            ("input_layernorm", &[HIDDEN]),
            ("mlp.down_proj", &[rows(HIDDEN), intermediate]),
            ("mlp.gate_proj", &[rows(intermediate), HIDDEN]),
            ("mlp.up_proj", &[rows(intermediate), HIDDEN]),
            ("post_attention_layernorm", &[HIDDEN]),
            ("self_attn.k_proj", &[rows(KEYS), HIDDEN]),
            ("self_attn.o_proj", &[rows(HIDDEN), HIDDEN]),
            ("self_attn.q_proj", &[rows(HIDDEN), HIDDEN]),
            ("self_attn.v_proj", &[rows(KEYS), HIDDEN]),
        ];
        let name = |part: &str| format!("model.layers.{number}.{part}");
        tensors.extend(shapes.iter().map(|(part, shape)| tensor(name(part), shape)));
    }
    tensors.push(tensor("model.norm".to_owned(), &[HIDDEN]));
    tensors.push(tensor("lm_head".to_owned(), &[rows(VOCABULARY), HIDDEN]));
    tensors
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_made_checkpoint_has_the_size_asked_for() {
        for size in [4u64 << 20, 64 << 20, 1 << 30, 4 << 30, 16 << 30] {
            for intermediate in [HIDDEN, INTERMEDIATE] {
                let bytes: u64 = llama(size, intermediate).iter().map(Tensor::len).sum();
                let off = bytes.abs_diff(size) as f64 / size as f64;
                assert!(off < 0.1, "{bytes} bytes instead of {size}");
            }
        }
    }

    #[test]
    fn every_row_of_a_piece_cut_by_columns_has_two_kib() {
        for tensor in llama(1 << 30, HIDDEN).iter().filter(|tensor| tensor.shape.len() == 2) {
            assert_eq!(tensor.shape[1] * 2 / RANKS, 2048, "{}", tensor.name);
            assert_eq!(tensor.shape[0] % RANKS, 0, "{}", tensor.name);
        }
    }
}
