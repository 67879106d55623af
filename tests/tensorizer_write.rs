//! Tests of written tensorizer files: they can be read back, their hashes match, and tensors that the format cannot
//! hold are refused.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use proptest::prelude::*;
use sha2::{Digest as _, Sha256};
use tensorfs::internal::consolidate::{
    Copier, MemoryFile, NewFile, TensorBytes, TensorWriter, TensorizerFile, Watch, WriteKey,
    WriteOptions,
};
use tensorfs::internal::format::tensorizer::crypt::Encryption;
use tensorfs::internal::format::tensorizer::encode::{
    ENTRIES_LEN, FileEncoder, NewTensor, entries_len,
};
use tensorfs::internal::format::tensorizer::keys::KeyDerivation;
use tensorfs::internal::format::tensorizer::secretbox::{DataKey, PieceNonce};
use tensorfs::internal::format::tensorizer::{hashes, parse_file};
use tensorfs::internal::io::Settings;
use tensorfs::{Checkpoint, Dtype, Error, ErrorKind, FileSpec, OutputFormat, Result};

/// Tensors in memory.
struct InMemory<'a> {
    data: &'a [Vec<u8>],
    /// Whether the writer sees them, or has to copy.
    is_seen: bool,
}

impl TensorBytes for InMemory<'_> {
    fn read(&self, index: usize, offset: u64, target: &mut [u8]) -> Result<()> {
        let start = offset as usize;
        target.copy_from_slice(&self.data[index][start..start + target.len()]);
        Ok(())
    }

    fn in_memory(&self, index: usize, range: &Range<u64>) -> Option<&[u8]> {
        let bytes = &self.data[index][range.start as usize..range.end as usize];
        self.is_seen.then_some(bytes)
    }
}

/// Writes a file by as many calls as `calls` has numbers of tensors.
fn written(tensors: &[NewTensor], data: &[Vec<u8>], calls: &[usize], is_seen: bool) -> Vec<u8> {
    let folder = tempfile::tempdir().expect("it works");
    let path = folder.path().join("a.tensors");
    let file = File::create(&path).expect("it works");
    let mut writer = TensorWriter::new(0, entries_len(tensors).expect("it works"));
    let mut first = 0;
    for &count in calls {
        let headers = writer.describe(&tensors[first..first + count], &path).expect("it works");
        let bytes = InMemory { data: &data[first..first + count], is_seen };
        let mut progress = |_| Ok(());
        writer.write(&headers, &bytes, &file, &path, &mut progress).expect("it works");
        writer.finish(&file, &path).expect("it works");
        first += count;
    }
    let bytes = std::fs::read(&path).expect("it works");
    assert_eq!(bytes.len() as u64, writer.end());
    bytes
}

/// Checks both hashes in each header. Returns their number.
fn check_hashes(file: &[u8]) -> usize {
    let tensors = hashes(&mut &*file).expect("it works").expect("it works");
    for tensor in &tensors {
        let mut hashed = file[tensor.range.start as usize..tensor.range.end as usize].to_vec();
        for place in tensor.hashes.places() {
            let start = (place.start - tensor.range.start) as usize;
            hashed[start..start + (place.end - place.start) as usize].fill(0);
        }
        let crc32 = crc32fast::hash(&hashed).to_le_bytes();
        assert_eq!(tensor.hashes.crc32, Some(crc32), "{}", tensor.name);
        assert_eq!(tensor.hashes.sha256, Some(Sha256::digest(&hashed).into()), "{}", tensor.name);
        assert_eq!(tensor.hashes.places().count(), 2);
    }
    tensors.len()
}

fn dtypes() -> Vec<Dtype> {
    let is_lost = |dtype: &Dtype| matches!(dtype, Dtype::F6E2M3 | Dtype::F6E3M2);
    Dtype::ALL.iter().copied().filter(|dtype| !is_lost(dtype)).collect()
}

/// Names without the one first byte that marks a path.
const NAME: &str = "[^\u{1e}]\\PC{0,12}";

proptest! {
    #[test]
    fn files_of_random_tensors_are_read_back_with_their_hashes(
        tensors in prop::collection::btree_map(
            NAME, (prop::sample::select(dtypes()), prop::collection::vec(0_u64..6, 0..4), 0_u8..3), 1..20,
        ),
        first in 0_usize..20,
        is_seen: bool,
    ) {
        let mut expected = BTreeMap::new();
        let (mut new, mut data) = (Vec::new(), Vec::new());
        for (index, (name, (dtype, mut shape, kind))) in tensors.into_iter().enumerate() {
            if dtype == Dtype::F4 {
                shape.push(2 * (index as u64 % 4));
            }
            let len = dtype.bits_of(&shape).unwrap() / 8;
            let bytes: Vec<u8> = (0..len).map(|byte| (byte * 7 + index as u64) as u8).collect();
            let tensor = NewTensor::of_state_dict(&name, dtype, &shape).unwrap();
            prop_assert_eq!(tensor.data_len, Some(len));
            new.push(NewTensor { kind, module: index as u16, ..tensor });
            data.push(bytes.clone());
            expected.insert(name, (dtype, shape, bytes));
        }
        let first = first.min(new.len());
        let file = written(&new, &data, &[first, new.len() - first], is_seen);
        let description = parse_file(&file).unwrap();
        let tensor = |t: tensorfs::internal::format::TensorDescription<'_>| {
            let len = t.facts.dtype.bits_of(t.shape).unwrap() / 8;
            let bytes = file[t.start as usize..(t.start + len) as usize].to_vec();
            (t.name.to_owned(), (t.facts.dtype, t.shape.to_vec(), bytes))
        };
        let found: BTreeMap<_, _> = description.tensors().map(tensor).collect();
        prop_assert_eq!(check_hashes(&file), found.len());
        prop_assert_eq!(found, expected);
    }
}

fn tensor(name: &str, shape: &[u64]) -> NewTensor {
    let len = shape.iter().product();
    let tensor = NewTensor::of_state_dict(name, Dtype::U8, &[len]);
    NewTensor { shape: shape.to_vec(), ..tensor.expect("it works") }
}

#[test]
fn a_tensor_longer_than_a_step_has_the_same_hashes_whether_it_is_copied_or_not() {
    let len = (9 << 20) + 3;
    let long: Vec<u8> = (0..len as u32).map(|byte| ((byte * 31) >> 7) as u8).collect();
    let tensors = [tensor("a", &[5]), tensor("long", &[len]), tensor("b", &[3])];
    let data = [vec![1; 5], long.clone(), vec![2; 3]];
    let files = [true, false].map(|is_seen| written(&tensors, &data, &[3], is_seen));
    assert!(files[0] == files[1]);
    assert_eq!(check_hashes(&files[0]), 3);
    let description = parse_file(&files[0]).unwrap();
    let start = description.tensors().nth(1).unwrap().start as usize;
    assert!(files[0][start..start + long.len()] == long);
}

/// A nonce that is good for one tensor.
fn no_nonce() -> PieceNonce {
    PieceNonce::new([7; 24])
}

#[test]
fn encrypted_tensors_open_piece_by_piece_and_have_the_hash_of_their_plain_data() {
    const LONG: u64 = (9 << 20) + 3;
    let key = DataKey::new(&[9; 32]);
    let derivation = KeyDerivation { ops_limit: 1, mem_limit: 8 << 10, salt: [3; 16] };
    for derivation in [None, Some(derivation)] {
        let long: Vec<u8> = (0..LONG as u32).map(|byte| ((byte * 31) >> 7) as u8).collect();
        let data = [vec![1; 5], long, vec![2; 3]];
        let tensors = [tensor("a", &[5]), tensor("long", &[LONG]), tensor("b", &[3])];
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.tensors");
        let file = File::create(&path).unwrap();
        let writer = TensorWriter::new(0, ENTRIES_LEN);
        let mut writer = writer.encrypted(&WriteKey::new(DataKey::new(&[9; 32]), derivation));
        let headers = writer.describe(&tensors, &path).unwrap();
        let bytes = InMemory { data: &data, is_seen: true };
        writer.write(&headers, &bytes, &file, &path, &mut |_| Ok(())).unwrap();
        writer.finish(&file, &path).unwrap();
        let file = std::fs::read(&path).unwrap();
        assert_eq!((file[5], file[9], file.len() as u64), (3, 0, writer.end()));
        let mut nonces = Vec::new();
        for ((header, plain), tensor) in headers.iter().zip(&data).zip(&tensors) {
            let (start, data_start) = (header.start as usize, header.data_start() as usize);
            let stored = &file[start..data_start];
            // Behind the name, the dtype `|u1`, one dimension, and a SHA-256 alone.
            let hashes = 13 + tensor.name.len() + 1 + 3 + 1 + 4;
            assert_eq!(stored[hashes..hashes + 5], [35, 0, 1, 1, 32]);
            let section = &stored[hashes + 37..stored.len() - 8];
            let encryption = Encryption::parse(section, header.data_len).unwrap().unwrap();
            assert_eq!(encryption.derivation, derivation);
            nonces.push(*encryption.nonce().bytes());
            let mut opened = file[data_start..data_start + plain.len()].to_vec();
            assert!(opened != *plain, "the file has the plain data");
            for index in 0..encryption.pieces() {
                let piece = encryption.piece(index);
                let piece = &mut opened[piece.start as usize..piece.end as usize];
                encryption.open(&key, index, piece).unwrap();
            }
            assert!(opened == *plain);
            let mut hashed = stored[..hashes + 37].to_vec();
            hashed[hashes + 5..].fill(0);
            hashed.extend_from_slice(&stored[stored.len() - 8..]);
            hashed.extend_from_slice(plain);
            assert_eq!(stored[hashes + 5..hashes + 37], Sha256::digest(&hashed)[..]);
        }
        nonces.sort();
        nonces.dedup();
        assert_eq!(nonces.len(), tensors.len(), "each tensor has its own nonce");
        let empty = writer.describe(&[tensor("empty", &[0])], &path).unwrap_err();
        assert!(empty.to_string().contains("cannot encrypt a tensor without bytes"), "{empty}");
    }
}

#[test]
fn a_long_file_has_the_same_bytes_if_its_space_is_reserved_before_each_call() {
    let lens = [(6 << 20) + 3, 5, 4097, (9 << 20) + 1, 70_000, (4 << 20) - 1];
    let new = |(number, &len): (usize, &u64)| tensor(&number.to_string(), &[len]);
    let tensors: Vec<NewTensor> = lens.iter().enumerate().map(new).collect();
    let bytes = |&len: &u64| (0..len as u32).map(|byte| ((byte * 31) >> 5) as u8).collect();
    let data: Vec<Vec<u8>> = lens.iter().map(bytes).collect();
    let expected = written(&tensors, &data, &[2, 4], true);
    assert_eq!(check_hashes(&expected), lens.len());
    let folder = tempfile::tempdir().unwrap();
    for is_seen in [true, false] {
        let path = folder.path().join("a.tensors");
        let mut file = MemoryFile::create(&path, false).unwrap();
        let mut writer = TensorWriter::new(0, entries_len(&tensors).unwrap());
        for part in [0..2, 2..6] {
            let headers = writer.describe(&tensors[part.clone()], &path).unwrap();
            file.reserve(writer.end()).unwrap();
            let bytes = InMemory { data: &data[part], is_seen };
            writer.write(&headers, &bytes, file.writer(), &path, &mut |_| Ok(())).unwrap();
            writer.finish(file.writer(), &path).unwrap();
        }
        file.publish().unwrap();
        assert!(std::fs::read(&path).unwrap() == expected, "in memory: {is_seen}");
        std::fs::remove_file(&path).unwrap();
    }
}

#[test]
fn the_version_is_the_lowest_that_the_tensors_need() {
    let dtype = |dtype: Dtype, shape: &[u64]| NewTensor::of_state_dict("a", dtype, shape).unwrap();
    let meta = |tensor: NewTensor| NewTensor { data_len: None, ..tensor };
    let long = dtype(Dtype::F32, &[1 << 32, 0]);
    for (tensor, is_encrypted, version, flags) in [
        (dtype(Dtype::F32, &[2]), false, 1, 0),
        (dtype(Dtype::Bf16, &[2]), false, 2, 0),
        (meta(dtype(Dtype::F32, &[2])), false, 4, 0),
        (long.clone(), false, 5, 2),
        (dtype(Dtype::F32, &[u32::MAX.into(), 0]), false, 1, 0),
        (dtype(Dtype::Bf16, &[2]), true, 3, 0),
        (meta(dtype(Dtype::F32, &[2])), true, 4, 1),
        (long, true, 5, 3),
    ] {
        let mut encoder = FileEncoder::new(0, ENTRIES_LEN);
        let tensor = if is_encrypted && tensor.data_len == Some(0) {
            // Empty tensors cannot be encrypted.
            NewTensor { shape: vec![1 << 32, 1], data_len: Some(1 << 34), ..tensor }
        } else {
            tensor
        };
        if is_encrypted {
            encoder = encoder.encrypted(None);
        }
        encoder.add_all(std::slice::from_ref(&tensor), &mut no_nonce).unwrap();
        let head = encoder.head();
        assert_eq!((head[5], head[9]), (version, flags), "{tensor:?}");
        assert_eq!(head.len() as u64, 73 + ENTRIES_LEN);
    }
}

#[test]
fn a_dimension_of_more_than_32_bits_gives_a_version_to_each_entry() {
    let tensors = [tensor("a", &[3]), tensor("long", &[1 << 40, 0]), tensor("b", &[2])];
    let data = [vec![1; 3], Vec::new(), vec![2; 2]];
    let file = written(&tensors, &data, &[1, 2], true);
    let description = parse_file(&file).unwrap();
    let found: Vec<_> = description.tensors().map(|t| (t.name, t.shape.to_vec())).collect();
    assert_eq!(found, [("a", vec![3]), ("long", vec![1 << 40, 0]), ("b", vec![2])]);
    assert_eq!(check_hashes(&file), 3);
}

#[test]
fn the_list_of_tensors_grows_in_steps_and_is_refused_where_no_reader_takes_it() {
    let many = |count: usize| (0..count).map(|i| tensor(&format!("{i:0100}"), &[1])).collect();
    let small: Vec<NewTensor> = many(10);
    assert_eq!(entries_len(&small).unwrap(), 256 << 10);
    let tensors: Vec<NewTensor> = many(5000);
    assert_eq!(entries_len(&tensors).unwrap(), 3 * (256 << 10));
    let data = vec![vec![9]; tensors.len()];
    let file = written(&tensors, &data, &[2000, 3000], true);
    assert_eq!(parse_file(&file).unwrap().tensors().count(), 5000);
    let huge: Vec<NewTensor> = many(130_000);
    let fault = entries_len(&huge).unwrap_err();
    assert_eq!(fault.kind, ErrorKind::HeaderTooLarge);
    assert!(fault.message.contains("at most 16777216 are read"), "{}", fault.message);
}

#[test]
fn tensors_that_the_format_cannot_hold_are_refused_by_name_and_change_nothing() {
    let new = |name: &str, dtype, shape: &[u64]| NewTensor::of_state_dict(name, dtype, shape);
    for (fault, kind) in [
        (new("a", Dtype::F6E2M3, &[4]), ErrorKind::UnknownDtype),
        (new("a", Dtype::F4, &[4, 3]), ErrorKind::Misaligned),
        (new("a", Dtype::F4, &[]), ErrorKind::Misaligned),
        (new("\u{1e}[\"a\"]", Dtype::F32, &[4]), ErrorKind::HeaderDecode),
        (new("a", Dtype::F32, &[1 << 32, 1 << 32]), ErrorKind::Overflow),
    ] {
        let fault = fault.unwrap_err();
        assert_eq!(fault.kind, kind);
        assert!(fault.tensor.is_some());
    }
    let mut encoder = FileEncoder::new(0, 300);
    encoder.add_all(&[tensor("a", &[1])], &mut no_nonce).unwrap();
    let before = encoder.head();
    let named = |name: Vec<u8>| NewTensor { name, ..tensor("x", &[1]) };
    let ranks = vec![1; 256];
    for (refused, kind) in [
        (named(Vec::new()), ErrorKind::HeaderDecode),
        (named(vec![b'x'; 1 << 16]), ErrorKind::HeaderDecode),
        (named(vec![b'x'; 250]), ErrorKind::HeaderTooLarge),
        (tensor("a", &[1]), ErrorKind::DuplicateKey),
        (named(vec![0xff]), ErrorKind::HeaderUtf8),
        (named(b"\x1e[\"\\ud800\"]".to_vec()), ErrorKind::HeaderDecode),
        (named(b"\x1e[\"a\"]".to_vec()), ErrorKind::DuplicateKey),
        (named(b"\x1e[\"a\",0]".to_vec()), ErrorKind::DuplicateKey),
        (tensor("x", &ranks), ErrorKind::HeaderDecode),
        (NewTensor { kind: 3, ..tensor("x", &[1]) }, ErrorKind::HeaderDecode),
        (NewTensor { dtype: String::new(), ..tensor("x", &[1]) }, ErrorKind::HeaderDecode),
        (NewTensor { dtype: "<U4".to_owned(), ..tensor("x", &[1]) }, ErrorKind::UnknownDtype),
        (NewTensor { dtype: ">f4".to_owned(), ..tensor("x", &[1]) }, ErrorKind::UnknownDtype),
        (NewTensor { dtype: "<V2".to_owned(), ..tensor("x", &[1]) }, ErrorKind::UnknownDtype),
        (
            NewTensor { dtype: "<f4\0torch.x".to_owned(), ..tensor("x", &[1]) },
            ErrorKind::UnknownDtype,
        ),
        (NewTensor { dtype: "<f4".to_owned(), ..tensor("x", &[1]) }, ErrorKind::SizeMismatch),
        (
            NewTensor { data_len: Some(1 << 63), ..tensor("x", &[1 << 59, 0]) },
            ErrorKind::SizeMismatch,
        ),
        (long_total(), ErrorKind::Overflow),
    ] {
        let fault =
            encoder.add_all(&[tensor("b", &[1 << 32, 0]), refused], &mut no_nonce).unwrap_err();
        assert_eq!(fault.kind, kind, "{fault:?}");
        assert!(encoder.head() == before && encoder.count() == 1, "{kind:?}");
    }
}

/// A tensor that no file can hold.
fn long_total() -> NewTensor {
    let shape = vec![1 << 63];
    NewTensor { shape, data_len: Some(1 << 63), ..tensor("x", &[1]) }
}

/// The open file without a name in `folder`.
fn nameless(folder: &Path) -> File {
    let open = std::fs::read_dir("/proc/self/fd").expect("it works").filter_map(|entry| {
        let path = entry.expect("it works").path();
        std::fs::read_link(&path).ok().filter(|link| link.starts_with(folder)).map(|_| path)
    });
    let path = open.last().expect("a file is being written");
    std::fs::OpenOptions::new().read(true).write(true).open(path).expect("it works")
}

fn all_bytes(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; file.metadata().expect("it works").len() as usize];
    file.read_exact_at(&mut bytes, 0).expect("it works");
    bytes
}

/// A fixture of tensors in several pieces.
const PIECES: &str = "tests/fixtures/dcp/grid_2d/shards";

/// Writes `source` as a tensorizer file.
fn convert(
    source: &str,
    target: &Path,
    verify: bool,
    progress: &mut dyn FnMut(u64) -> Result<()>,
) -> Result<TensorizerFile> {
    let checkpoint = Checkpoint::open(source.as_ref())?;
    let spec = FileSpec::single("model.safetensors", OutputFormat::Safetensors);
    let file = TensorizerFile::new(&checkpoint, &spec, None)?;
    let options = WriteOptions { verify, ..WriteOptions::default() };
    let mut watch = Watch { progress, bytes: None };
    let content = NewFile::Tensorizer(&file);
    Copier::new(Settings::default()).write_file(content, target, options, &mut watch)?;
    Ok(file)
}

/// Name, dtype and shape of each tensor.
type Facts = Vec<(String, Dtype, Vec<u64>)>;

/// The tensors of a checkpoint, and their bytes in the order of the safetensors package.
fn content(source: &Path) -> (Facts, Vec<u8>) {
    let checkpoint = Checkpoint::open(source).expect("it works");
    let tensor = |t: tensorfs::Tensor<'_>| (t.name.to_owned(), t.dtype, t.shape.to_vec());
    let tensors = checkpoint.catalog().tensors().map(tensor).collect();
    let spec = FileSpec::saved("a.safetensors", OutputFormat::Safetensors);
    let reader =
        tensorfs::Reader::open(&tensorfs::VirtualFile::new(&checkpoint, spec)).expect("it works");
    let mut bytes = vec![0; reader.len() as usize];
    reader.read_at(0, &mut bytes).expect("it works");
    let header = u64::from_le_bytes(std::array::from_fn(|i| bytes[i]));
    (tensors, bytes.split_off(8 + header as usize))
}

#[test]
fn a_checkpoint_of_pieces_and_one_with_meta_tensors_keep_their_tensors() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.tensors");
    for (source, version) in [(PIECES, 2), ("tests/fixtures/tensorizer/meta.tensors", 4)] {
        let file = convert(source, &path, true, &mut |_| Ok(())).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        assert_eq!((bytes.len() as u64, bytes[5]), (file.len(), version));
        assert_eq!(check_hashes(&bytes), file.tensor_count());
        assert!(content(&path) == content(source.as_ref()), "{source}");
        std::fs::remove_file(&path).unwrap();
    }
}

#[test]
fn a_conversion_that_its_caller_ends_or_that_reads_other_bytes_back_leaves_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.tensors");
    let names = || std::fs::read_dir(folder.path()).unwrap().count();
    let stopped = convert(PIECES, &path, false, &mut |_| Err(Error::cancelled("stopped")));
    assert_eq!(stopped.map(|_| ()).unwrap_err().to_string(), "stopped");
    assert_eq!(names(), 0);
    let mut is_changed = false;
    let failed = convert(PIECES, &path, true, &mut |_| {
        // The last report of the writing comes before the first byte is read back.
        if !is_changed && parse_file(&all_bytes(&nameless(folder.path()))).is_ok() {
            is_changed = true;
            nameless(folder.path()).write_all_at(b"x", 73).unwrap();
        }
        Ok(())
    });
    let message = failed.map(|_| ()).unwrap_err().to_string();
    assert!(is_changed && message.contains("read back differ"), "{message}");
    assert_eq!(names(), 0);
    std::fs::write(&path, "of the user").unwrap();
    let failed = convert(PIECES, &path, false, &mut |_| Ok(())).map(|_| ());
    assert_eq!(failed.unwrap_err().kind(), ErrorKind::Usage);
    assert_eq!(std::fs::read(&path).unwrap(), b"of the user");
}
