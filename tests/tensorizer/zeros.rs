//! Tensors of which a file has the shape only.

use tensorfs::internal::format::tensorizer::parse_file;
use tensorfs::{Checkpoint, Dtype, ErrorKind};

use super::written::{StoredTensor, TensorizerFile};
use super::{ZEROS_START, check, read, versioned};

/// A tensor of which the file has the shape only.
fn meta(name: &str, dtype: &str, shape: &[u64]) -> StoredTensor {
    StoredTensor { version: 5, ..StoredTensor::new(name, dtype, shape, &[]) }
}

/// A file of version 5 with these tensors between two others.
fn file_with(metas: Vec<StoredTensor>) -> TensorizerFile {
    let mut file = versioned();
    let last = file.tensors.pop();
    file.tensors.extend(metas.into_iter().chain(last));
    file
}

#[test]
fn tensors_without_data_are_zeros_of_their_own_behind_the_file() {
    let opaque = "<V2\0torch.bfloat16";
    let file = file_with(vec![
        meta("m.f32", "<f4", &[3, 5]),
        meta("m.scalar", "<i8", &[]),
        meta("m.none", opaque, &[7, 0]),
        meta("m.bf16", opaque, &[9]),
    ]);
    let bytes = file.bytes();
    let description = parse_file(&bytes).unwrap();
    check(&description, &bytes);
    let found = read(&description, &bytes);
    assert_eq!(found["m.f32"], (Dtype::F32, vec![3, 5], vec![0; 60]));
    assert_eq!(found["m.scalar"], (Dtype::I64, vec![], vec![0; 8]));
    assert_eq!(found["m.none"], (Dtype::Bf16, vec![7, 0], vec![]));
    assert_eq!(found["m.bf16"], (Dtype::Bf16, vec![9], vec![0; 18]));
    assert_eq!(found["b.c"], (Dtype::Bf16, vec![4], vec![9; 8]));
    for tensor in description.tensors() {
        let is_meta = tensor.name.starts_with("m.") && !tensor.shape.contains(&0);
        assert_eq!(tensor.start >= ZEROS_START, is_meta, "{}", tensor.name);
    }
}

#[test]
fn tensors_without_data_pass_2_to_the_62_bytes_in_no_file() {
    // A tensor has less than 2^64 bits.
    let half = (1_u64 << 61) - 64;
    let file = |sizes: &[u64]| {
        let tensor = |(number, size): (usize, &u64)| meta(&format!("m{number}"), "|u1", &[*size]);
        parse_file(&file_with(sizes.iter().enumerate().map(tensor).collect()).bytes())
    };
    assert!(file(&[half, half, 128]).is_ok());
    for sizes in [vec![half, half, 129], vec![half; 9], vec![128, half, half + 1]] {
        let fault = file(&sizes).unwrap_err();
        assert_eq!(fault.kind, ErrorKind::Overflow, "{sizes:?}");
        assert!(fault.message.contains("pass 4611686018427387904 bytes; save"), "{fault}");
    }
}

#[test]
fn a_checkpoint_of_2_to_the_63_bytes_is_refused_though_each_of_its_files_is_read() {
    let half = (1_u64 << 61) - 64;
    // The lengths of five files pass 2^64.
    for (count, is_good) in [(1, true), (3, false), (5, false)] {
        let folder = tempfile::tempdir().unwrap();
        for number in 1..=count {
            let metas = [2 * number, 2 * number + 1];
            let metas = metas.map(|n| meta(&format!("m{n}"), "|u1", &[half]));
            let file = TensorizerFile { tensors: metas.to_vec(), ..versioned() };
            let name = format!("m-{number:05}-of-{count:05}.tensors");
            std::fs::write(folder.path().join(name), file.bytes()).unwrap();
        }
        let opened = Checkpoint::open(folder.path());
        assert_eq!(opened.is_ok(), is_good, "{count}");
        let Err(error) = opened else { continue };
        assert_eq!(error.kind(), ErrorKind::Overflow, "{error}");
        assert!(error.to_string().contains("less than 2^63; check the shapes"), "{error}");
    }
}
