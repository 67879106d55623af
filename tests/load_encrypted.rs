//! Tests of loads of encrypted tensorizer files. Whole pieces are decrypted in their final place. Other
//! pieces are decrypted in a buffer.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;

use proptest::prelude::*;
use tensorfs::internal::consolidate::{TensorBytes, TensorWriter, WriteKey};
use tensorfs::internal::format::tensorizer::encode::{ENTRIES_LEN, NewTensor};
use tensorfs::internal::format::tensorizer::keys::Secret;
use tensorfs::internal::format::tensorizer::secretbox::DataKey;
use tensorfs::internal::io::{Backend, DirectIo, Region, Settings};
use tensorfs::internal::loader::{Loader, LoaderConfig};
use tensorfs::internal::plan::TensorRequest;
use tensorfs::{Checkpoint, Dtype, ErrorKind, OpenOptions, Result};

const KEY: [u8; 32] = [9; 32];

/// Length of the pieces that are written.
const PIECE_LEN: u64 = 2 << 20;

const PAGE: usize = 4096;

/// Tensors in memory.
struct InMemory<'a>(&'a [Vec<u8>]);

impl TensorBytes for InMemory<'_> {
    fn read(&self, index: usize, offset: u64, target: &mut [u8]) -> Result<()> {
        let start = offset as usize;
        target.copy_from_slice(&self.0[index][start..start + target.len()]);
        Ok(())
    }

    fn in_memory(&self, index: usize, range: &Range<u64>) -> Option<&[u8]> {
        Some(&self.0[index][range.start as usize..range.end as usize])
    }
}

/// Bytes of the tensor with the number `number`.
fn plain(number: usize, len: u64) -> Vec<u8> {
    (0..len as u32)
        .map(|byte| ((byte ^ number as u32).wrapping_mul(2_654_435_761) >> 13) as u8)
        .collect()
}

/// A checkpoint with tensors of `dtype`, one dimension and these bytes, encrypted.
fn written(folder: &Path, dtype: Dtype, data: &[Vec<u8>]) -> Arc<Checkpoint> {
    let width = dtype.bits() / 8;
    let tensor = |(number, bytes): (usize, &Vec<u8>)| {
        NewTensor::of_state_dict(&number.to_string(), dtype, &[bytes.len() as u64 / width])
            .expect("it works")
    };
    let tensors: Vec<NewTensor> = data.iter().enumerate().map(tensor).collect();
    let path = folder.join("a.tensors");
    let file = File::create(&path).expect("it works");
    let writer = TensorWriter::new(0, ENTRIES_LEN);
    let mut writer = writer.encrypted(&WriteKey::new(DataKey::new(&KEY), None));
    let headers = writer.describe(&tensors, &path).expect("it works");
    writer.write(&headers, &InMemory(data), &file, &path, &mut |_| Ok(())).expect("it works");
    writer.finish(&file, &path).expect("it works");
    let secret = Some(Arc::new(Secret::parse_key(&KEY).expect("it works")));
    Checkpoint::open_with(folder, &OpenOptions { secret, ..OpenOptions::default() })
        .expect("it works")
}

/// A page-aligned place in `memory`.
fn first_page(memory: &mut [u8]) -> NonNull<u8> {
    let skip = memory.as_ptr().align_offset(PAGE);
    NonNull::new(memory[skip..].as_mut_ptr()).expect("it works")
}

/// `direct`: reads go past the page cache. `threads`: without io_uring.
fn loader(direct: bool, threads: bool, staging: u64) -> Loader {
    let settings = Settings {
        direct: if direct { DirectIo::Always } else { DirectIo::Never },
        backend: if threads { Backend::Pread } else { Backend::Auto },
        ..Settings::default()
    };
    Loader::new(LoaderConfig { settings, staging, inline_max_bytes: 0, ..LoaderConfig::default() })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]

    #[test]
    fn any_parts_of_encrypted_tensors_are_loaded_to_any_place(
        lens in proptest::collection::vec(1..3 * PIECE_LEN, 1..4),
        wide: bool,
        parts in proptest::collection::vec(proptest::option::of((0.0..1.0, 0.0..1.0)), 4),
        places in proptest::option::of(proptest::collection::vec(0..PAGE, 4)),
        how: [bool; 2],
        staging in proptest::sample::select(vec![0, 128 << 20]),
    ) {
        let (dtype, width) = if wide { (Dtype::F32, 4) } else { (Dtype::U8, 1) };
        let lens = lens.iter().map(|len| len.next_multiple_of(width));
        let data: Vec<Vec<u8>> = lens.enumerate().map(|(number, len)| plain(number, len)).collect();
        let folder = tempfile::tempdir().unwrap();
        let checkpoint = written(folder.path(), dtype, &data);
        let loader = loader(how[0], how[1], staging);
        let mut requests = Vec::new();
        let mut wanted = Vec::new();
        let mut longest = 0;
        for (number, bytes) in data.iter().enumerate() {
            let count = bytes.len() as u64 / width;
            let part = parts[number].map(|(a, b): (f64, f64)| {
                let [a, b] = [a, b].map(|place| (place * count as f64) as u64);
                a.min(b)..a.max(b)
            });
            let range = part.clone().unwrap_or(0..count);
            wanted.push(&bytes[(range.start * width) as usize..(range.end * width) as usize]);
            longest += if part.is_none() && bytes.len() >= 1 << 20 { bytes.len() as u64 } else { 0 };
            let part = part.map(|part| vec![part]);
            requests.push(TensorRequest { tensor: number, part, ..TensorRequest::default() });
        }
        let stats = if let Some(places) = places {
            let mut memories: Vec<Vec<u8>> =
                data.iter().map(|bytes| vec![0xEE; bytes.len() + 3 * PAGE]).collect();
            for ((request, memory), place) in requests.iter_mut().zip(&mut memories).zip(places) {
                let place = place / width as usize * width as usize;
                request.destination = Some((first_page(memory).as_ptr().addr() + place) as u64);
            }
            let plan = loader.plan(&checkpoint, &requests).unwrap();
            let mut regions: Vec<_> = plan.regions.iter().map(|&len| Region::new(len).unwrap()).collect();
            for (placement, memory) in plan.placements.iter().zip(&mut memories) {
                let len = plan.regions[placement.region as usize] as usize;
                // SAFETY: the memory outlives the region, and is read after the load alone.
                let region = unsafe { Region::foreign(first_page(memory), len, Box::new(())) };
                regions[placement.region as usize] = region;
            }
            // SAFETY: the plan's own, each of other memory, which nobody else uses meanwhile.
            let report = unsafe { loader.fill(&checkpoint, &plan, &regions, &mut |_| true) };
            prop_assert!(regions.iter().all(|region| Arc::strong_count(region) == 1));
            drop(regions);
            for ((placement, memory), wanted) in plan.placements.iter().zip(&memories).zip(wanted) {
                let start = memory.as_ptr().align_offset(PAGE) + placement.offset as usize;
                let (before, rest) = memory.split_at(start);
                let (found, behind) = rest.split_at(wanted.len());
                prop_assert!(found == wanted, "other bytes");
                prop_assert!(before.iter().chain(behind).all(|&byte| byte == 0xEE), "more bytes");
            }
            report.unwrap().stats
        } else {
            let loaded = loader.load(&checkpoint, &requests, &mut |_| true).unwrap();
            for (number, wanted) in wanted.into_iter().enumerate() {
                prop_assert!(loaded.bytes(number) == wanted, "other bytes");
            }
            loaded.report.stats
        };
        prop_assert!(stats.placed >= longest, "{} of {longest} bytes in their place", stats.placed);
    }
}

#[test]
fn a_changed_byte_of_any_piece_fails_the_load() {
    let data = [plain(0, 5 << 20), plain(1, 3)];
    for byte in [0, PIECE_LEN + 7, (5 << 20) - 1] {
        let folder = tempfile::tempdir().unwrap();
        let checkpoint = written(folder.path(), Dtype::U8, &data);
        let start = checkpoint.catalog().tensor_at(0).first_piece().range.start;
        let file = File::options().read(true).write(true).open(folder.path().join("a.tensors"));
        let (file, mut changed) = (file.unwrap(), [0]);
        file.read_exact_at(&mut changed, start + byte).unwrap();
        file.write_all_at(&[changed[0] ^ 1], start + byte).unwrap();
        let secret = Some(Arc::new(Secret::parse_key(&KEY).unwrap()));
        let options = OpenOptions { secret, ..OpenOptions::default() };
        let checkpoint = Checkpoint::open_with(folder.path(), &options).unwrap();
        for (direct, threads) in [(false, false), (false, true), (true, false), (true, true)] {
            let loader = loader(direct, threads, 128 << 20);
            let Err(failed) = loader.load_all(&checkpoint) else { panic!("byte {byte}: loaded") };
            assert_eq!(failed.kind(), ErrorKind::DecryptFailed, "{failed}");
        }
    }
}
