//! Random wishes of random checkpoints, planned and loaded.

#![allow(clippy::unwrap_used, reason = "a test that panics has failed, as it should")]

mod common;

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use common::boxes::checkpoint;
use common::{Box_, Cut, bytes, write_dcp, write_hf};
use proptest::prelude::*;
use tensorfs::Dtype;
use tensorfs::cast::Cast;
use tensorfs::checkpoint::Checkpoint;
use tensorfs::io::{Backend, Direct, Region, Settings};
use tensorfs::loader::{Loader, Tune};
use tensorfs::plan::{Limits, Plan, Target, Want};

/// Small, so that small tensors take several reads; whole pages.
fn limits() -> impl Strategy<Value = Limits> {
    let sizes = (1u64..4, 0u64..200, 0u64..2000, 1u64..20_000);
    (sizes, any::<bool>(), 0u32..9).prop_map(|((pages, gap, own, slab), in_place, align)| Limits {
        chunk: 4096 * pages,
        moved: 4096 * (pages % 3 + 1),
        gap,
        own,
        slab,
        in_place,
        align: 1 << align,
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

/// What is wished for, by numbers that fit any checkpoint.
#[derive(Clone, Debug)]
struct Wish {
    tensor: usize,
    part: Vec<(u16, u16)>,
    /// Another element type, where there is one.
    cast: Option<usize>,
    /// Byte of a page at which memory waits; beyond it, the one that agrees with the file.
    at: Option<u64>,
}

fn wishes() -> impl Strategy<Value = Vec<Wish>> {
    let part = prop::collection::vec((any::<u16>(), any::<u16>()), 0..6);
    let (cast, at) = (prop::option::of(0usize..3), prop::option::of(0u64..8192));
    let wish = (0usize..3, part, cast, at).prop_map(|(tensor, part, cast, at)| Wish {
        tensor,
        part,
        cast,
        at,
    });
    prop::collection::vec(wish, 0..6)
}

fn wants(checkpoint: &Checkpoint, tensors: &[Cut], wishes: &[Wish]) -> Vec<Want> {
    // The catalog has the tensors by name, which is their order.
    let want = |wish: &Wish| {
        let cut = &tensors[wish.tensor];
        let cast = wish.cast.map(|number| [Dtype::F32, Dtype::F16, Dtype::Bf16][number]);
        let tensor = checkpoint.catalog().tensor_at(wish.tensor);
        let agreeing = tensor.first_piece().range.start % 4096;
        Want {
            tensor: wish.tensor,
            part: part(&cut.shape, &wish.part),
            cast: cast.filter(|&to| Cast::new(cut.dtype, to).is_some()),
            at: wish.at.map(|at| if at < 4096 { at } else { agreeing }),
        }
    };
    wishes.iter().map(want).collect()
}

fn expected(tensor: &Cut, want: &Want) -> Vec<u8> {
    let bytes = match &want.part {
        None => bytes(&tensor.name, tensor.dtype, &tensor.shape),
        Some(part) => tensor.piece(&Box_ {
            offset: part.iter().map(|range| range.start).collect(),
            shape: part.iter().map(|range| range.end - range.start).collect(),
        }),
    };
    match want.cast.and_then(|to| Cast::new(tensor.dtype, to)) {
        None => bytes,
        Some(cast) => {
            let mut after = vec![0; cast.len_after(bytes.len() as u64) as usize];
            cast.convert(&bytes, &mut after);
            after
        }
    }
}

fn loader(limits: Limits, [direct, threads, near]: [bool; 3], depth: usize) -> Loader {
    let settings = Settings {
        direct: if direct { Direct::Always } else { Direct::Never },
        backend: if threads { Backend::Pread } else { Backend::Auto },
        ..Settings::default()
    };
    let near = if near { Tune::default().near } else { 0 };
    Loader::new(Tune { settings, depth, limits, near, ..Tune::default() })
}

/// A page-aligned place in `memory`.
fn first_page(memory: &mut [u8]) -> NonNull<u8> {
    let skip = memory.as_ptr().align_offset(4096);
    NonNull::new(memory[skip..].as_mut_ptr()).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn any_parts_of_any_boxes_are_loaded_as_they_are(
        tensors in checkpoint(), wishes in wishes(), limits in limits(), whole in any::<bool>(),
        how in any::<[bool; 3]>(), depth in 0usize..4,
    ) {
        let folder = tempfile::tempdir().unwrap();
        if whole { write_hf(folder.path(), &tensors) } else { write_dcp(folder.path(), &tensors) };
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let mut wants = wants(&checkpoint, &tensors, &wishes);
        wants.iter_mut().for_each(|want| want.at = None);
        let loader = loader(limits, how, depth);
        let mut last = 0;
        let loaded = loader.load(&checkpoint, &wants, &mut |progress| {
            last = progress.read;
            progress.read <= progress.total
        });
        let loaded = loaded.unwrap();
        prop_assert_eq!(last, loaded.report.stats.read);
        for (number, want) in wants.iter().enumerate() {
            let tensor = &tensors[want.tensor];
            prop_assert_eq!(loaded.bytes(number), &expected(tensor, want)[..]);
            let width = (loaded.dtype(number).bits() / 8).max(1) as usize;
            prop_assert!((loaded.bytes(number).as_ptr() as usize).is_multiple_of(width));
        }
    }

    #[test]
    fn memory_that_waits_gets_its_bytes_and_no_others(
        tensors in checkpoint(), wishes in wishes(), limits in limits(), whole in any::<bool>(),
        how in any::<[bool; 3]>(), depth in 0usize..4,
    ) {
        let folder = tempfile::tempdir().unwrap();
        if whole { write_hf(folder.path(), &tensors) } else { write_dcp(folder.path(), &tensors) };
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let mut wants = wants(&checkpoint, &tensors, &wishes);
        let loader = loader(limits, how, depth);
        let lens: Vec<usize> =
            wants.iter().map(|want| expected(&tensors[want.tensor], want).len()).collect();
        let mut memories: Vec<Vec<u8>> =
            lens.iter().map(|len| vec![0xEE; len + 5 * 4096]).collect();
        for (want, memory) in wants.iter_mut().zip(&mut memories) {
            let page = first_page(memory).as_ptr().addr() as u64;
            want.at = want.at.map(|at| page + at);
        }
        let plan = loader.plan(&checkpoint, &wants).unwrap();
        let mut regions: Vec<_> = plan.regions.iter().map(|&len| Region::new(len).unwrap()).collect();
        for ((want, placement), memory) in wants.iter().zip(&plan.placements).zip(&mut memories) {
            prop_assert_eq!(plan.given[placement.region as usize], want.at.is_some());
            if want.at.is_some() {
                let len = plan.regions[placement.region as usize] as usize;
                prop_assert_eq!(len as u64, placement.at + placement.len);
                // SAFETY: the memory outlives the regions, and is read after the load alone.
                let region = unsafe { Region::foreign(first_page(memory), len, Box::new(())) };
                regions[placement.region as usize] = region;
            }
        }
        loader.fill(&checkpoint, &plan, &regions, &mut |_| true).unwrap();
        prop_assert!(regions.iter().all(|region| Arc::strong_count(region) == 1));
        drop(regions);
        for ((want, placement), memory) in wants.iter().zip(&plan.placements).zip(&memories) {
            if want.at.is_none() {
                continue;
            }
            let start = memory.as_ptr().align_offset(4096) + placement.at as usize;
            let end = start + placement.len as usize;
            prop_assert_eq!(&memory[start..end], &expected(&tensors[want.tensor], want)[..]);
            prop_assert!(memory[..start].iter().chain(&memory[end..]).all(|&byte| byte == 0xEE));
        }
    }

    #[test]
    fn plans_read_every_wanted_byte_and_move_each_to_one_place(
        tensors in checkpoint(), wishes in wishes(), limits in limits(), whole in any::<bool>(),
    ) {
        let folder = tempfile::tempdir().unwrap();
        if whole { write_hf(folder.path(), &tensors) } else { write_dcp(folder.path(), &tensors) };
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let wants = wants(&checkpoint, &tensors, &wishes);
        let plan = Plan::new(checkpoint.catalog(), &wants, &limits).unwrap();
        prop_assert_eq!(&plan, &Plan::new(checkpoint.catalog(), &wants, &limits).unwrap());
        // How often each byte of each region is written to; pages of reads in place belong to one.
        let mut written: Vec<Vec<u8>> =
            plan.regions.iter().map(|&len| vec![0; len as usize]).collect();
        for chunk in &plan.chunks {
            let shard = checkpoint.catalog().shard(chunk.shard);
            prop_assert!(chunk.range.start < chunk.range.end);
            let most = match chunk.target { Target::Place { .. } => limits.chunk, _ => limits.moved };
            prop_assert!(chunk.range.end - chunk.range.start <= most);
            prop_assert!(chunk.range.end <= shard.file_len);
            match &chunk.target {
                Target::Place { region, at } => {
                    prop_assert!(limits.in_place);
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
                            for byte in 0..one.placed_len() {
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
            prop_assert_eq!(placement.dtype, want.cast.unwrap_or(tensor.dtype));
            prop_assert_eq!(placement.len, elements * placement.dtype.bits() / 8);
            if want.at.is_some() {
                prop_assert_eq!(placement.at, want.at.unwrap() % 4096);
                let before = &region[..placement.at as usize];
                prop_assert!(before.iter().all(|&times| times == 0), "bytes of somebody else");
            } else if !limits.in_place {
                prop_assert!(placement.at.is_multiple_of(limits.align));
            }
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
        let want = Want { part: Some(part), ..Want::whole(0) };
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
    let wants = [Want::whole(0)];
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
