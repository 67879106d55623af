//! Random wishes of random checkpoints, planned and loaded.

#![allow(clippy::unwrap_used, reason = "a test that panics has failed, as it should")]

mod common;

use std::ops::Range;

use common::boxes::checkpoint;
use common::{Box_, Cut, bytes, write_dcp, write_hf};
use proptest::prelude::*;
use tensorfs::checkpoint::Checkpoint;
use tensorfs::io::{Backend, Direct, Settings};
use tensorfs::loader::{Loader, Tune};
use tensorfs::plan::{Limits, Plan, Target, Want};

/// Small, so that small tensors take several reads; whole pages.
fn limits() -> impl Strategy<Value = Limits> {
    (1u64..4, 0u64..200, 0u64..2000, 1u64..20_000).prop_map(|(pages, gap, own, slab)| Limits {
        chunk: 4096 * pages,
        gap,
        own,
        slab,
    })
}

/// In each dimension a part of it, by two numbers; where there are none, all.
fn part(shape: &[u64], choices: &[(u16, u16)]) -> Option<Vec<Range<u64>>> {
    let ranges = shape.iter().zip(choices).map(|(&size, &(a, b))| {
        // Along the last dimension at multiples of 4: whole bytes for every dtype.
        let step = if size.is_multiple_of(4) { 4 } else { 1 };
        let (a, b) = (u64::from(a) % (size / step + 1), u64::from(b) % (size / step + 1));
        a.min(b) * step..a.max(b) * step
    });
    (choices.len() >= shape.len()).then(|| ranges.collect())
}

fn wishes() -> impl Strategy<Value = Vec<(usize, Vec<(u16, u16)>)>> {
    let choices = prop::collection::vec((any::<u16>(), any::<u16>()), 0..6);
    prop::collection::vec((0usize..3, choices), 0..6)
}

fn wants(tensors: &[Cut], wishes: &[(usize, Vec<(u16, u16)>)]) -> Vec<Want> {
    // The catalog has the tensors by name, which is their order.
    let want = |(tensor, choices): &(usize, Vec<(u16, u16)>)| Want {
        tensor: *tensor,
        part: part(&tensors[*tensor].shape, choices),
    };
    wishes.iter().map(want).collect()
}

fn expected(tensor: &Cut, part: &Option<Vec<Range<u64>>>) -> Vec<u8> {
    match part {
        None => bytes(&tensor.name, tensor.dtype, &tensor.shape),
        Some(part) => tensor.piece(&Box_ {
            offset: part.iter().map(|range| range.start).collect(),
            shape: part.iter().map(|range| range.end - range.start).collect(),
        }),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn any_parts_of_any_boxes_are_loaded_as_they_are(
        tensors in checkpoint(), wishes in wishes(), limits in limits(), whole in any::<bool>(),
        direct in any::<bool>(), threads in any::<bool>(), depth in 0usize..4,
    ) {
        let folder = tempfile::tempdir().unwrap();
        if whole { write_hf(folder.path(), &tensors) } else { write_dcp(folder.path(), &tensors) };
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let wants = wants(&tensors, &wishes);
        let settings = Settings {
            direct: if direct { Direct::Always } else { Direct::Never },
            backend: if threads { Backend::Pread } else { Backend::Auto },
            ..Settings::default()
        };
        let loader = Loader::new(Tune { settings, depth, limits, ..Tune::default() });
        let mut last = 0;
        let loaded = loader.load(&checkpoint, &wants, &mut |progress| {
            last = progress.read;
            progress.read <= progress.total
        });
        let loaded = loaded.unwrap();
        prop_assert_eq!(last, loaded.stats.read);
        for (number, want) in wants.iter().enumerate() {
            let tensor = &tensors[want.tensor];
            prop_assert_eq!(loaded.bytes(number), &expected(tensor, &want.part)[..]);
            let width = (tensor.dtype.bits() / 8).max(1) as usize;
            prop_assert!((loaded.bytes(number).as_ptr() as usize).is_multiple_of(width));
        }
    }

    #[test]
    fn plans_read_every_wanted_byte_and_move_each_to_one_place(
        tensors in checkpoint(), wishes in wishes(), limits in limits(), whole in any::<bool>(),
    ) {
        let folder = tempfile::tempdir().unwrap();
        if whole { write_hf(folder.path(), &tensors) } else { write_dcp(folder.path(), &tensors) };
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let wants = wants(&tensors, &wishes);
        let plan = Plan::new(checkpoint.catalog(), &wants, &limits).unwrap();
        prop_assert_eq!(&plan, &Plan::new(checkpoint.catalog(), &wants, &limits).unwrap());
        // How often each byte of each region is written to; pages of reads in place belong to one.
        let mut written: Vec<Vec<u8>> =
            plan.regions.iter().map(|&len| vec![0; len as usize]).collect();
        for chunk in &plan.chunks {
            let shard = checkpoint.catalog().shard(chunk.shard);
            prop_assert!(chunk.range.start < chunk.range.end);
            prop_assert!(chunk.range.end - chunk.range.start <= limits.chunk);
            prop_assert!(chunk.range.end <= shard.file_len);
            match &chunk.target {
                Target::Place { region, at } => {
                    prop_assert_eq!(at % 4096, chunk.range.start % 4096);
                    let (first, len) = (at / 4096 * 4096, chunk.range.end - chunk.range.start);
                    let end = (at + len).next_multiple_of(4096);
                    for byte in first..end {
                        written[*region as usize][byte as usize] += 1;
                    }
                }
                Target::Spread(moves) => {
                    for one in &plan.moves[moves.start as usize..moves.end as usize] {
                        for k in 0..one.runs {
                            let place = |k| {
                                let strides = one.strides.map(|id| &plan.strides[id as usize]);
                                strides.map_or((0, 0), |strides| strides.run(one.first + k))
                            };
                            let ((from0, to0), (from, to)) = (place(0), place(k));
                            let end = one.from + (from - from0) + one.run_len;
                            prop_assert!(end <= chunk.range.end - chunk.range.start);
                            for byte in 0..one.run_len {
                                let at = one.at + (to - to0) + byte;
                                written[one.region as usize][at as usize] += 1;
                            }
                        }
                    }
                }
            }
        }
        prop_assert!(written.iter().flatten().all(|&times| times <= 1));
        let mut wanted = 0;
        for (want, placement) in wants.iter().zip(&plan.placements) {
            let region = &written[placement.region as usize];
            let bytes = placement.at as usize..(placement.at + placement.len) as usize;
            prop_assert!(region[bytes].iter().all(|&times| times == 1));
            let tensor = checkpoint.catalog().tensor_at(want.tensor);
            let elements: u64 = placement.shape.iter().product();
            prop_assert_eq!(placement.len, elements * tensor.dtype.bits() / 8);
            wanted += placement.len;
        }
        prop_assert_eq!(plan.wanted, wanted);
    }
}

#[test]
fn a_part_outside_of_its_tensor_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let whole = Box_ { offset: vec![0, 0], shape: vec![4, 8] };
    let tensor = Cut {
        name: "a".to_owned(),
        dtype: tensorfs::Dtype::F32,
        shape: vec![4, 8],
        boxes: vec![(0, whole)],
    };
    write_hf(folder.path(), &[tensor]);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    for part in [Vec::new(), vec![0..5, 0..8], vec![0..4, 0..8, 0..1]] {
        let want = Want { tensor: 0, part: Some(part) };
        let loader = Loader::new(Tune::default());
        let error = loader.load(&checkpoint, &[want], &mut |_| true).unwrap_err().to_string();
        assert!(error.contains("`a`") && error.contains("[4, 8]"), "{error}");
    }
}

#[test]
fn a_load_that_is_stopped_or_meets_a_changed_shard_gives_nothing_out() {
    let folder = tempfile::tempdir().unwrap();
    let shape = vec![1 << 10, 64];
    let whole = Box_ { offset: vec![0, 0], shape: shape.clone() };
    let tensor =
        Cut { name: "a".to_owned(), dtype: tensorfs::Dtype::I32, shape, boxes: vec![(0, whole)] };
    write_hf(folder.path(), &[tensor]);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let limits = Limits { chunk: 4096, ..Limits::default() };
    let loader = Loader::new(Tune { limits, depth: 3, ..Tune::default() });
    let wants = [Want { tensor: 0, part: None }];
    let stopped = loader.load(&checkpoint, &wants, &mut |progress| progress.read < 10_000);
    assert!(stopped.unwrap_err().to_string().contains("stopped"));
    // The same loader goes on.
    assert_eq!(loader.load_all(&checkpoint).unwrap().bytes(0).len(), 1 << 18);
    let path = checkpoint.sources()[0].path();
    std::fs::File::options().write(true).open(path).unwrap().set_len(1000).unwrap();
    let error = loader.load_all(&checkpoint).unwrap_err();
    assert_eq!(error.class(), tensorfs::Class::Changed, "{error}");
    assert_eq!(error.path(), Some(path));
}
