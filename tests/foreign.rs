//! Tests of files of other formats. The message must name the format of each such file, and must
//! never name another format for a supported file.

#![allow(clippy::unwrap_used, reason = "a test that panics has failed, as it should")]

use std::path::Path;

use proptest::prelude::*;
use tensorfs::internal::format::foreign::{Evidence, FIRST_LEN, Foreign, LAST_LEN, weights_rank};
use tensorfs::internal::format::{Detected, InputFormat, TrainingState};
use tensorfs::{Checkpoint, ErrorKind};

fn foreign(name: &str, bytes: &[u8]) -> Option<Foreign> {
    let first = &bytes[..bytes.len().min(FIRST_LEN as usize)];
    let last = &bytes[bytes.len().saturating_sub(LAST_LEN as usize)..];
    Evidence { name, first, last, len: bytes.len() as u64 }.foreign()
}

/// A zip archive with one stored entry of this name, up to its end.
fn zip(entry: &str) -> Vec<u8> {
    let mut bytes = b"PK\x03\x04\x00\x00\x08\x08\x00\x00".to_vec();
    bytes.extend([0; 16]);
    bytes.extend((entry.len() as u16).to_le_bytes());
    bytes.extend([0, 0]);
    bytes.extend(entry.as_bytes());
    bytes.extend(b"\x80\x02}q\x00.PK\x01\x02");
    bytes.extend(b"PK\x05\x06");
    bytes.extend([0; 18]);
    bytes
}

fn padded(begin: &[u8]) -> Vec<u8> {
    let mut bytes = begin.to_vec();
    bytes.extend((0..200_u8).map(|byte| byte | 0x81));
    bytes
}

fn tar() -> Vec<u8> {
    let mut bytes = vec![0; 2048];
    bytes[..12].copy_from_slice(b"weights.ckpt");
    bytes[257..262].copy_from_slice(b"ustar");
    bytes
}

/// A gzip file without a time: its first bytes are a length that a header may have.
fn gzip(len: usize) -> Vec<u8> {
    let mut bytes = b"\x1f\x8b\x08\0\0\0\0\0\x02\xff".to_vec();
    bytes.resize(len, 0xa5);
    bytes
}

fn utf_16(bytes_of: fn(u16) -> [u8; 2]) -> Vec<u8> {
    "\u{feff}Zugriff verweigert\r\nnein".encode_utf16().flat_map(bytes_of).collect()
}

const LEGACY: &[u8] = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.";
const METADATA: &[u8] =
    b"\x80\x04\x95\x3e\x07\0\0\0\0\0\0\x8c%torch.distributed.checkpoint.metadata\x94";

/// Each kind of file, with a name, a word of its message, and the class of its error.
fn samples() -> Vec<(&'static str, Vec<u8>, &'static str, ErrorKind)> {
    use ErrorKind::{HeaderDecode, HeaderJson, HeaderTooLarge, LfsPointer, TooShort, ZipPrefix};
    let html = b"\n<!DOCTYPE html>\n<html><head><title>Sign in</title></head>";
    let lfs = b"version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 3\n";
    let large = HeaderTooLarge;
    let latin_1 = b"<html><head><title>Acc\xe8s refus\xe9</title></head><body>\xe9</body></html>";
    vec![
        ("pytorch_model.bin", zip("pytorch_model/data.pkl"), "a zip archive", HeaderDecode),
        ("model.safetensors", zip("model/data.pkl"), "a file of torch.save", ZipPrefix),
        ("model.tensors", zip("archive/data.pkl"), "a file of torch.save", ZipPrefix),
        ("old.safetensors", padded(LEGACY), "before torch 1.6", large),
        ("old.pth", padded(LEGACY), "not one that torch.save writes", HeaderDecode),
        ("__0_0.distcp", zip("archive/data.pkl"), "torch.distributed.checkpoint", ZipPrefix),
        ("__1_0.distcp", padded(b"\x28\xb5\x2f\xfd"), "zstd", large),
        (".metadata", padded(METADATA), "*.distcp", large),
        ("state.pkl", padded(b"\x80\x04\x95\x10\0\0\0\0\0\0\0}"), "a pickle of Python", large),
        ("a.npz", zip("w.npy"), "safetensors.numpy.save_file", ZipPrefix),
        ("a.npy", padded(b"\x93NUMPY\x01\0v\0{'descr'"), "one array of numpy", large),
        ("model.keras", zip("metadata.json"), "packed by zip", ZipPrefix),
        ("model.gguf", padded(b"GGUF\x03\0\0\0"), "GGUF", large),
        ("model.safetensors", padded(b"GGUF\x03\0\0\0"), "GGUF", large),
        ("ggml-model.bin", padded(b"lmgg\x01\0\0\0"), "GGML", large),
        ("config.json", b"{\n  \"hidden_size\": 8\n}".to_vec(), "name the folder", large),
        ("model.safetensors", b"{\"error\":\"no access\"}".to_vec(), "{\"error\":", large),
        ("x.h5.index.json", b"{\"weight_map\": {}, \"a\": 1}".to_vec(), "weight map", large),
        ("model.safetensors", html.to_vec(), "the title `Sign in`", large),
        ("model.safetensors", b"<?xml version=\"1.0\"?><Error/>".to_vec(), "is XML", large),
        ("model.safetensors", b"Entry not found".to_vec(), "`Entry not found`", large),
        ("model.safetensors", b"Gone".to_vec(), "`Gone`", TooShort),
        ("model.safetensors", lfs.to_vec(), "git lfs pull", LfsPointer),
        ("model.bt", b"# xet version 0\nfilesize = 3\n".to_vec(), "git-xet", large),
        ("model.safetensors", b"/annex/objects/SHA256E-s1".to_vec(), "git annex get", large),
        ("model.h5", padded(b"\x89HDF\r\n\x1a\n"), "HDF5", large),
        ("model.nemo", tar(), "packed by tar", large),
        ("m.safetensors.gz", padded(b"\x1f\x8b\x08\x08\x01\x02\x03\x04"), "packed by gzip", large),
        ("m.safetensors.xz", padded(b"\xfd7zXZ\0\x01\x02"), "packed by xz", large),
        ("model.onnx", padded(b"\x08\x07\x12\x07pytorch"), "an ONNX graph", large),
        ("model.tflite", padded(b"\x1c\0\0\0TFL3"), "TensorFlow Lite", large),
        ("m.ckpt.data-00000-of-00001", padded(b"\xff\xee\xdd\xcc"), "TensorFlow", large),
        ("flax_model.msgpack", padded(b"\xde\0\x10\xa3abc"), "flax", large),
        ("model.safetensors", Vec::new(), "is empty", TooShort),
        ("model.bt", Vec::new(), "is empty", TooShort),
        ("model.safetensors", vec![0; 4096], "1024 bytes of zeros", HeaderJson),
        ("model.safetensors", padded(&[0; 8]), "8 bytes of zeros", HeaderJson),
        ("m.safetensors", gzip(600_000), "packed by gzip", ErrorKind::HeaderUtf8),
        ("m.safetensors", gzip(60), "packed by gzip", ErrorKind::HeaderLength),
        ("model.safetensors", latin_1.to_vec(), "the title `Acc\u{e8}s refus\u{e9}`", large),
        ("model.safetensors", utf_16(u16::to_le_bytes), "`Zugriff verweigert`", large),
        ("model.safetensors", utf_16(u16::to_be_bytes), "`Zugriff verweigert`", large),
        ("model.safetensors", padded(b"\x7fELF\x02\x01\x01\0"), "a program or a library", large),
        ("state.pkl", b"(dp0\nVa\np1\nI1\ns.".to_vec(), "a pickle of Python", large),
        ("state.pkl", b"}q\0X\x01\0\0\0aq\x01K\x01s.".to_vec(), "a pickle of Python", large),
        ("m.safetensors.incomplete", vec![0; 4096], "`*.incomplete`", HeaderJson),
        ("model.safetensors.aria2", padded(b"\0\x01\0\0\0\x01"), "`*.aria2`", large),
    ]
}

/// The refusal of a file of this name, by all that reads it.
fn refusal(name: &str, bytes: &[u8]) -> (ErrorKind, String) {
    let mut reader = bytes;
    let fault = match InputFormat::detect(name, &mut reader).unwrap() {
        Err(fault) => fault,
        Ok(detected) => {
            detected.parse(name, &mut reader, TrainingState::None).unwrap().unwrap_err()
        }
    };
    (fault.kind, fault.message)
}

#[test]
fn a_file_of_another_format_is_refused_as_what_it_is_and_keeps_the_class_of_its_error() {
    for (name, bytes, word, kind) in samples() {
        let (found, message) = refusal(name, &bytes);
        assert!(message.contains(word), "{name}: {message}");
        assert_eq!(found, kind, "{name}: {message}");
        assert!(!message.contains("announces a header"), "{name}: {message}");
    }
}

#[test]
fn a_file_that_is_named_alone_is_refused_as_what_it_is() {
    let folder = tempfile::tempdir().unwrap();
    for (name, bytes, word, kind) in samples() {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        for outcome in [Checkpoint::open(&path), Checkpoint::of_files(std::slice::from_ref(&path))]
        {
            let error = outcome.unwrap_err();
            let text = error.to_string();
            assert!(text.contains(word) && text.contains(name), "{text}");
            assert_eq!(error.kind(), kind, "{text}");
        }
        // A `.distcp` file and a `.metadata` in one folder are a checkpoint.
        std::fs::remove_file(&path).unwrap();
    }
}

#[test]
fn a_folder_of_other_weights_names_one_of_them_and_how_many_there_are() {
    let message = |files: &[(&str, Vec<u8>)]| {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("step-4")).unwrap();
        for (name, bytes) in files {
            std::fs::write(folder.path().join(name), bytes).unwrap();
        }
        Checkpoint::open(folder.path()).unwrap_err().to_string()
    };
    let model = |number| format!("pytorch_model-0000{number}-of-00002.bin");
    let torch = zip("m/data.pkl");
    let text = message(&[
        (&model(1), torch.clone()),
        (&model(2), torch.clone()),
        ("optimizer.pt", torch.clone()),
        ("config.json", b"{}".to_vec()),
    ]);
    // Files of torch.save are read, so the damaged ones are a set that is refused.
    let first = model(1);
    let words = [first.as_str(), "a zip archive that is not valid"];
    assert!(words.iter().all(|word| text.contains(word)), "{text}");
    let llama = |name| (name, padded(b"GGUF\x03\0\0\0"));
    let text = message(&[llama("a.gguf"), llama("b.gguf"), ("config.json", b"{}".to_vec())]);
    let words = ["no safetensors", "a.gguf", "(and 1 other such file)", "llama.cpp"];
    assert!(words.iter().all(|word| text.contains(word)), "{text}");
    let items = zip("archive/data.pkl");
    let text = message(&[("step-4/__0_0.distcp", items), ("step-4/.metadata", padded(METADATA))]);
    let words = ["step-4/.metadata", "its pickle is not one that torch.save writes"];
    assert!(words.iter().all(|word| text.contains(word)), "{text}");
    let text = message(&[("step-4/.metadata", padded(METADATA))]);
    let words = ["step-4/.metadata", "is the metadata", "name the folder that has both"];
    assert!(words.iter().all(|word| text.contains(word)), "{text}");
    let text = message(&[("config.json", b"{}".to_vec()), ("tokenizer.json", b"{}".to_vec())]);
    assert!(text.contains("; config.json is there without weights; fetch or save them"), "{text}");
    let text = message(&[("tokenizer.json", b"{}".to_vec())]);
    assert!(text.ends_with("here or below"), "{text}");
    let text = message(&[("model.safetensors.part", vec![1, 2, 3])]);
    assert!(text.contains("`*.part`"), "{text}");
}

#[test]
fn a_weight_map_that_is_something_else_is_refused_as_that() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors.index.json");
    for (text, word) in [
        ("<!doctype html><title>Gone</title>", "it is an HTML page with the title `Gone`"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:1", "it is a git-lfs pointer"),
    ] {
        std::fs::write(&path, text).unwrap();
        let error = Checkpoint::open(folder.path()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::WeightMap);
        assert!(error.to_string().contains(word), "{error}");
    }
}

#[test]
fn a_safetensors_file_with_the_header_length_of_a_zip_archive_is_read() {
    let len = u32::from_le_bytes(*b"PK\x03\x04") as usize;
    let mut bytes = vec![0; 8 + len];
    bytes[..8].copy_from_slice(&(len as u64).to_le_bytes());
    bytes[8] = b'{';
    let detected = InputFormat::detect("model.safetensors", &mut bytes.as_slice()).unwrap();
    let expected = Detected {
        format: InputFormat::Safetensors,
        description_len: 8 + len as u64,
        is_encrypted: false,
    };
    assert_eq!(detected, Ok(expected));
    assert_eq!(foreign("model.safetensors", &bytes), None);
    // One that cannot be: its header would not fit.
    assert_eq!(foreign("model.zip", &bytes[..1000]), Some(Foreign::Packed("zip")));
}

#[test]
fn no_file_that_is_read_is_taken_for_another_one() {
    let mut count = 0;
    for folder in ["safetensors", "bintensors", "tensorizer"] {
        for entry in std::fs::read_dir(Path::new("tests/fixtures").join(folder)).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                continue;
            }
            let bytes = std::fs::read(&path).unwrap();
            for name in ["model.safetensors", "a.pt", ".metadata", "x.incomplete", "a.msgpack"] {
                assert_eq!(foreign(name, &bytes), None, "{}", path.display());
            }
            count += 1;
        }
    }
    assert!(count > 20);
}

proptest! {
    #[test]
    fn any_bytes_are_judged_and_a_file_that_is_read_is_never_another_one(
        mut bytes in prop::collection::vec(any::<u8>(), 0..600),
        sample in prop::option::of(0..samples().len()),
        keep in 0..300_usize,
        name in "[a-z.]{0,12}(\\.pt|\\.safetensors|\\.bt|\\.tensors|\\.onnx|\\.msgpack|\\.part|)",
    ) {
        if let Some(sample) = sample {
            let begin = &samples()[sample].1;
            let keep = keep.min(begin.len());
            bytes.splice(..bytes.len().min(keep), begin[..keep].iter().copied());
        }
        let found = foreign(&name, &bytes);
        let _ = weights_rank(&name);
        let mut reader = bytes.as_slice();
        if let Ok(detected) = InputFormat::detect(&name, &mut reader).unwrap()
            && detected.parse(&name, &mut reader, TrainingState::None).unwrap().is_ok()
        {
            prop_assert_eq!(found, None);
        }
    }

    #[test]
    fn a_valid_header_of_any_content_is_never_another_file(
        names in prop::collection::btree_set("[ -~]{0,30}", 0..8),
        name in "[a-z]{0,6}(\\.pt|\\.distcp|\\.safetensors|\\.incomplete|\\.msgpack|\\.json|)",
    ) {
        let entries: Vec<String> = names.iter().enumerate().map(|(index, name)| {
            let name = serde_json::to_string(name).unwrap();
            format!("{name}:{{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[{index},{}]}}", index + 1)
        }).collect();
        let header = format!("{{{}}}", entries.join(","));
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.extend(vec![0x50; names.len()]);
        prop_assert_eq!(foreign(&name, &bytes), None);
    }
}
