//! Tests that casts give the same bits as torch, and that the GPU kernels give the same bits as the
//! casts.
//!
//! `fixtures/casts/torch.json` holds hashes of the results of torch. The tests make the same inputs
//! again: all elements of 8 and 16 bits, and those elements of wider types for which an error in
//! rounding is likely.

#![allow(clippy::unwrap_used, reason = "a test that panics has failed, as it should")]

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use sha2::{Digest, Sha256};
use tensorfs::Dtype;
use tensorfs::internal::cast::Cast;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn ptx() -> String {
    fs::read_to_string(root().join("src/device/cast.ptx")).unwrap()
}

fn all_casts() -> Vec<Cast> {
    let pairs = Dtype::ALL.iter().flat_map(|&from| Dtype::ALL.iter().map(move |&to| (from, to)));
    pairs.filter_map(|(from, to)| Cast::new(from, to)).collect()
}

/// The cast of `from`, with the instructions of this processor and with those of any.
fn convert(cast: Cast, from: &[u8]) -> Vec<u8> {
    let mut to = vec![0; cast.len_after(from.len() as u64) as usize];
    cast.convert(from, &mut to);
    let mut anywhere = vec![0; to.len()];
    cast.convert_anywhere(from, &mut anywhere);
    assert!(to == anywhere, "{cast:?} of {} bytes", from.len());
    to
}

fn width(dtype: Dtype) -> usize {
    dtype.bits() as usize / 8
}

fn sha256(bytes: &[u8]) -> String {
    hexadecimal(&Sha256::digest(bytes))
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").unwrap();
        text
    })
}

/// The elements of `make.py`, by the same rules.
fn inputs(dtype: Dtype) -> Vec<u8> {
    const LOWER_F32: &[u32] =
        &[0, 1, 0x0FFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF];
    const LOWER_F64: &[u64] =
        &[0, 1, (1 << 28) - 1, 1 << 28, (1 << 28) + 1, 3 << 28, 1 << 41, 1 << 44, (1 << 48) - 1];
    match dtype.bits() {
        8 => (0..=u8::MAX).collect(),
        16 => (0..=u16::MAX).flat_map(u16::to_le_bytes).collect(),
        32 => {
            let halves =
                LOWER_F32.iter().flat_map(|low| (0..1u32 << 16).map(move |high| high << 16 | low));
            let random = random_words().map(|word| word as u32 & u32::MAX << ((word >> 32) % 24));
            halves.chain(random).flat_map(u32::to_le_bytes).collect()
        }
        _ => {
            let halves =
                LOWER_F64.iter().flat_map(|low| (0..1u64 << 16).map(move |high| high << 48 | low));
            let words: Vec<u64> = random_words().collect();
            let random = words.chunks(2).map(|pair| {
                let exponent = 1023 - 160 + (pair[1] >> 8) % 300;
                let fraction = pair[0] & ((1 << 52) - 1) & u64::MAX << (pair[1] % 52);
                pair[1] & 1 << 63 | exponent << 52 | fraction
            });
            halves.chain(random).flat_map(u64::to_le_bytes).collect()
        }
    }
}

/// SplitMix64 from 0.
fn random_words() -> impl Iterator<Item = u64> {
    (1..=1u64 << 20).map(|n| {
        let x = n.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let x = (x ^ x >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let x = (x ^ x >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ x >> 31
    })
}

/// Casts as torch did them, with the entry that says so.
fn goldens() -> Vec<(Cast, Value)> {
    let text = fs::read(root().join("tests/fixtures/casts/torch.json")).unwrap();
    let mut all: Value = serde_json::from_slice(&text).unwrap();
    let dtype = |entry: &Value, key: &str| Dtype::from_name(entry[key].as_str().unwrap()).unwrap();
    let entries = all["casts"].as_array_mut().unwrap().drain(..);
    entries
        .map(|entry| (Cast::new(dtype(&entry, "from"), dtype(&entry, "to")).unwrap(), entry))
        .collect()
}

#[test]
fn torch_was_asked_about_every_cast() {
    let asked: Vec<Cast> = goldens().into_iter().map(|(cast, _)| cast).collect();
    let all = all_casts();
    assert_eq!(asked.len(), all.len());
    assert_eq!(all.len(), 24);
    for cast in all {
        assert!(asked.contains(&cast), "{cast:?}");
    }
}

#[test]
fn readable_elements_become_what_torch_makes_of_them() {
    for (cast, entry) in goldens() {
        for (from, to) in entry["cases"].as_object().unwrap() {
            let bits = u64::from_str_radix(from, 16).unwrap().to_le_bytes();
            let mut result = convert(cast, &bits[..width(cast.from())]);
            result.reverse();
            let result = hexadecimal(&result).to_uppercase();
            assert_eq!(&result, to.as_str().unwrap(), "{cast:?} of {from}");
        }
    }
}

#[test]
fn all_elements_become_what_torch_makes_of_them() {
    for (cast, entry) in goldens() {
        let from = inputs(cast.from());
        let input = entry["input"].as_str().unwrap();
        assert_eq!(sha256(&from), input, "{cast:?}: this test and make.py cast other elements");
        let output = entry["output"].as_str().unwrap();
        assert_eq!(sha256(&convert(cast, &from)), output, "{cast:?}");
    }
}

#[test]
fn every_cast_has_its_kernel_and_every_kernel_its_cast() {
    let text = ptx();
    let entries: Vec<&str> = text
        .lines()
        .filter_map(|line| line.split_once(".entry "))
        .map(|(_, name)| name.trim_end_matches('('))
        .collect();
    let kernels: BTreeSet<&str> = all_casts().iter().map(|cast| cast.kernel()).collect();
    assert_eq!(kernels.len(), all_casts().len(), "two casts share a kernel");
    assert_eq!(entries.len(), kernels.len());
    assert_eq!(entries.into_iter().collect::<BTreeSet<_>>(), kernels);
}

#[test]
fn the_kernels_are_for_old_drivers_and_keep_subnormals() {
    let text = ptx();
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines.contains(&".version 8.0"));
    assert!(lines.contains(&".target sm_80"));
    assert!(lines.contains(&".address_size 64"));
    assert!(!text.contains(".ftz"), "an instruction that flushes subnormals to zero");
}

/// The kernels' source as a program for this machine; `None` where there is no C compiler.
fn kernels_as_a_program(folder: &Path) -> Option<PathBuf> {
    let program = folder.join("kernels");
    let names =
        all_casts().iter().fold(String::new(), |names, cast| names + "K(" + cast.kernel() + ") ");
    let compiled = Command::new("cc")
        .args(["-O2", "-ffp-contract=off", "-fno-strict-aliasing"])
        .arg(format!("-DKERNELS={names}"))
        .arg(root().join("tests/casts/host.c"))
        .arg("-o")
        .arg(&program)
        .output();
    match compiled {
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) => panic!("cc: {error}"),
        Ok(output) => {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            Some(program)
        }
    }
}

#[test]
fn the_source_of_the_kernels_gives_what_the_casts_give_at_any_alignment() {
    let folder = tempfile::Builder::new().prefix("tensorfs-test-casts").tempdir().unwrap();
    let Some(program) = kernels_as_a_program(folder.path()) else {
        eprintln!("not run: there is no cc");
        return;
    };
    for cast in all_casts() {
        let from = inputs(cast.from());
        let path = folder.path().join("from");
        fs::write(&path, &from).unwrap();
        let expected = convert(cast, &from);
        for shift in [0, 1] {
            let mut command = Command::new(&program);
            command.args([cast.kernel(), &width(cast.from()).to_string()]);
            command.args([width(cast.to()).to_string(), shift.to_string()]).arg(&path);
            let output = command.output().unwrap();
            assert!(output.status.success(), "{cast:?}: {output:?}");
            // Not assert_eq!, which would print millions of bytes.
            assert!(output.stdout == expected, "{cast:?}, source {shift} off alignment");
        }
    }
}
