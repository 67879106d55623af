//! Tests of tied weights in files of FSDP1.

use super::*;
use crate::dtype::Dtype;

// If two units of FSDP1 share a weight, torch saves its second name as a plain tensor of one dimension.
#[test]
fn a_piece_of_a_tied_weight_is_no_whole_tensor() {
    let tensor = |name: &str, shape: &[u64], whole: Option<&[u64]>| ModelTensor {
        name: name.to_owned(),
        place: TensorPlace {
            dtype: Dtype::F32,
            shape: shape.to_vec(),
            start: 0,
            strides: None,
            is_placeholder: false,
        },
        part_of: whole.map(|whole| [vec![0; whole.len()], whole.to_vec()]),
    };
    let head = || tensor("head.weight", &[6, 4], Some(&[12, 4]));
    let fault = check_tied(&[&head(), &tensor("emb.weight", &[24], None)], 2).unwrap_err();
    assert!(fault.message.contains("1 / 2 of a tensor that is cut"), "{fault:?}");
    for other in [
        tensor("norm.weight", &[4], None),
        tensor("bn.running_mean", &[24], None),
        tensor("emb.weight", &[6, 4], None),
        tensor("emb.weight", &[0], None),
    ] {
        assert!(check_tied(&[&head(), &other], 2).is_ok());
    }
}
