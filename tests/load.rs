//! Tests that plan and load random requests for random checkpoints.

#![allow(clippy::unwrap_used, reason = "a test that panics has failed, as it should")]

mod common;

use std::ptr::NonNull;
use std::sync::Arc;

use common::boxes::checkpoint;
use common::requests::{expected, limits, requests, tensor_requests};
use common::{Box_, Cut, write_dcp, write_dense_dcp, write_hf};
use proptest::prelude::*;
use tensorfs::Dtype;
use tensorfs::internal::checkpoint::Checkpoint;
use tensorfs::internal::io::{Backend, DirectIo, Region, Settings};
use tensorfs::internal::loader::{Loader, LoaderConfig, PageSize};
use tensorfs::internal::plan::{ChunkTarget, Plan, PlanLimits, TensorRequest};

fn loader(limits: PlanLimits, [direct, threads, near]: [bool; 3], depth: usize) -> Loader {
    let settings = Settings {
        direct: if direct { DirectIo::Always } else { DirectIo::Never },
        backend: if threads { Backend::Pread } else { Backend::Auto },
        ..Settings::default()
    };
    let inline_max_bytes = if near { LoaderConfig::default().inline_max_bytes } else { 0 };
    let pages = [None, Some(PageSize::Huge), Some(PageSize::Small)][depth % 3];
    Loader::new(LoaderConfig {
        settings,
        depth,
        limits,
        inline_max_bytes,
        populate_min_bytes: 0,
        pages,
        ..LoaderConfig::default()
    })
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
        tensors in checkpoint(), requests in requests(), limits in limits(), form in 0usize..3,
        how in any::<[bool; 3]>(), depth in 0usize..4,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let write = [write_hf, write_dcp, write_dense_dcp][form];
        write(folder.path(), &tensors);
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let mut tensor_requests = tensor_requests(&checkpoint, &tensors, &requests);
        tensor_requests.iter_mut().for_each(|tensor_request| tensor_request.destination = None);
        let loader = loader(limits, how, depth);
        let mut last = 0;
        let loaded = loader.load(&checkpoint, &tensor_requests, &mut |progress| {
            last = progress.read;
            progress.read <= progress.total
        });
        let loaded = loaded.unwrap();
        prop_assert_eq!(last, loaded.report.stats.read);
        for (number, tensor_request) in tensor_requests.iter().enumerate() {
            let tensor = &tensors[tensor_request.tensor];
            prop_assert_eq!(loaded.bytes(number), &expected(tensor, tensor_request)[..]);
            let width = (loaded.dtype(number).bits() / 8).max(1) as usize;
            prop_assert!((loaded.bytes(number).as_ptr() as usize).is_multiple_of(width));
            let mut copy = vec![0; loaded.bytes(number).len()];
            let part = tensor_request.part.as_deref();
            if tensor_request.cast.is_none()
                && loader.copy_from_page_cache(&checkpoint, tensor_request.tensor, part, &mut copy).unwrap()
            {
                prop_assert_eq!(&copy[..], loaded.bytes(number));
            }
        }
    }

    #[test]
    fn memory_that_waits_gets_its_bytes_and_no_others(
        tensors in checkpoint(), requests in requests(), limits in limits(), whole in any::<bool>(),
        how in any::<[bool; 3]>(), depth in 0usize..4,
    ) {
        let folder = tempfile::tempdir().unwrap();
        if whole { write_hf(folder.path(), &tensors) } else { write_dcp(folder.path(), &tensors) };
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let mut tensor_requests = tensor_requests(&checkpoint, &tensors, &requests);
        let loader = loader(limits, how, depth);
        let lens: Vec<usize> =
            tensor_requests.iter().map(|tensor_request| expected(&tensors[tensor_request.tensor], tensor_request).len()).collect();
        let mut memories: Vec<Vec<u8>> =
            lens.iter().map(|len| vec![0xEE; len + 5 * 4096]).collect();
        for (tensor_request, memory) in tensor_requests.iter_mut().zip(&mut memories) {
            let page = first_page(memory).as_ptr().addr() as u64;
            tensor_request.destination = tensor_request.destination.map(|at| page + at);
        }
        let plan = loader.plan(&checkpoint, &tensor_requests).unwrap();
        let mut regions: Vec<_> = plan.regions.iter().map(|&len| Region::new(len).unwrap()).collect();
        for ((tensor_request, placement), memory) in tensor_requests.iter().zip(&plan.placements).zip(&mut memories) {
            prop_assert_eq!(plan.given[placement.region as usize], tensor_request.destination.is_some());
            if tensor_request.destination.is_some() {
                let len = plan.regions[placement.region as usize] as usize;
                prop_assert_eq!(len as u64, placement.offset + placement.len);
                // SAFETY: the memory outlives the regions, and is read after the load alone.
                let region = unsafe { Region::foreign(first_page(memory), len, Box::new(())) };
                regions[placement.region as usize] = region;
            }
        }
        // SAFETY: the plan's own, each of other memory, which nobody else uses meanwhile.
        unsafe { loader.fill(&checkpoint, &plan, &regions, &mut |_| true) }.unwrap();
        prop_assert!(regions.iter().all(|region| Arc::strong_count(region) == 1));
        drop(regions);
        for ((tensor_request, placement), memory) in tensor_requests.iter().zip(&plan.placements).zip(&memories) {
            if tensor_request.destination.is_none() {
                continue;
            }
            let start = memory.as_ptr().align_offset(4096) + placement.offset as usize;
            let end = start + placement.len as usize;
            prop_assert_eq!(&memory[start..end], &expected(&tensors[tensor_request.tensor], tensor_request)[..]);
            prop_assert!(memory[..start].iter().chain(&memory[end..]).all(|&byte| byte == 0xEE));
        }
    }

    #[test]
    fn plans_read_every_wanted_byte_and_move_each_to_one_place(
        tensors in checkpoint(), requests in requests(), limits in limits(), whole in any::<bool>(),
    ) {
        let folder = tempfile::tempdir().unwrap();
        if whole { write_hf(folder.path(), &tensors) } else { write_dcp(folder.path(), &tensors) };
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let tensor_requests = tensor_requests(&checkpoint, &tensors, &requests);
        let plan = Plan::new(checkpoint.catalog(), &tensor_requests, &limits).unwrap();
        prop_assert_eq!(&plan, &Plan::new(checkpoint.catalog(), &tensor_requests, &limits).unwrap());
        // How often each byte of each region is written to; pages of reads in place belong to one.
        let mut written: Vec<Vec<u8>> =
            plan.regions.iter().map(|&len| vec![0; len as usize]).collect();
        for chunk in &plan.chunks {
            let shard = checkpoint.catalog().shard(chunk.shard);
            prop_assert!(chunk.range.start < chunk.range.end);
            let most = match chunk.target {
                ChunkTarget::Place { .. } => limits.chunk,
                ChunkTarget::Unaligned { .. } => limits.unaligned,
                ChunkTarget::Spread(_) => limits.moved,
            };
            prop_assert!(chunk.range.end - chunk.range.start <= most);
            prop_assert!(chunk.range.end <= shard.file_len);
            match &chunk.target {
                ChunkTarget::Place { region, offset } => {
                    prop_assert!(limits.in_place);
                    prop_assert_eq!(offset % 4096, chunk.range.start % 4096);
                    let (first, len) = (offset / 4096 * 4096, chunk.range.end - chunk.range.start);
                    let end = (offset + len).next_multiple_of(4096);
                    for byte in first..end {
                        written[*region as usize][byte as usize] += 1;
                    }
                }
                ChunkTarget::Unaligned { region, offset } => {
                    prop_assert!(limits.in_place);
                    let len = chunk.range.end - chunk.range.start;
                    for byte in *offset..offset + len {
                        written[*region as usize][byte as usize] += 1;
                    }
                }
                ChunkTarget::Spread(moves) => {
                    for one in &plan.moves[moves.start as usize..moves.end as usize] {
                        for k in 0..one.runs {
                            let place = |k| {
                                let copy = one.copy.map(|id| &plan.copies[id as usize]);
                                copy.map_or((0, 0), |copy| copy.run(one.first + k))
                            };
                            let ((from0, to0), (from, to)) = (place(0), place(k));
                            let end = one.from + (from - from0) + one.run_len;
                            prop_assert!(end <= chunk.range.end - chunk.range.start);
                            for byte in 0..one.placed_len() {
                                let at = one.offset + (to - to0) + byte;
                                written[one.region as usize][at as usize] += 1;
                            }
                        }
                    }
                }
            }
        }
        prop_assert!(written.iter().flatten().all(|&times| times <= 1));
        let mut wanted = 0;
        for (tensor_request, placement) in tensor_requests.iter().zip(&plan.placements) {
            let region = &written[placement.region as usize];
            let bytes = placement.offset as usize..(placement.offset + placement.len) as usize;
            prop_assert!(region[bytes].iter().all(|&times| times == 1));
            let tensor = checkpoint.catalog().tensor_at(tensor_request.tensor);
            let elements: u64 = placement.shape.iter().product();
            prop_assert_eq!(placement.dtype, tensor_request.cast.unwrap_or(tensor.dtype));
            prop_assert_eq!(placement.len, elements * placement.dtype.bits() / 8);
            if tensor_request.destination.is_some() {
                prop_assert_eq!(placement.offset, tensor_request.destination.unwrap() % 4096);
                let before = &region[..placement.offset as usize];
                prop_assert!(before.iter().all(|&times| times == 0), "bytes of somebody else");
            } else if !limits.in_place {
                prop_assert!(placement.offset.is_multiple_of(limits.align));
            }
            wanted += placement.len;
        }
        prop_assert_eq!(plan.wanted, wanted);
    }
}

#[test]
fn what_the_page_cache_holds_is_copied_at_once_whether_runs_are_near_or_far_apart() {
    let folder = tempfile::tempdir().unwrap();
    let shapes: [&[u64]; 4] = [&[300, 1000], &[7, 5, 9000], &[3, 200, 3, 40], &[70_000, 4]];
    let tensor = |(number, shape): (usize, &&[u64])| Cut {
        name: format!("t{number}"),
        dtype: Dtype::U8,
        shape: shape.to_vec(),
        boxes: vec![(0, Box_ { offset: vec![0; shape.len()], shape: shape.to_vec() })],
    };
    let tensors: Vec<Cut> = shapes.iter().enumerate().map(tensor).collect();
    write_hf(folder.path(), &tensors);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let loader = Loader::new(LoaderConfig::default());
    let mut copied = 0;
    for (at, shape) in shapes.iter().enumerate() {
        for (from, to) in [(0, 1), (1, 2), (1, 9), (3, 4), (0, 9)] {
            for cut in 0..shape.len() {
                let part = |(dim, &size): (usize, &u64)| {
                    if dim < cut { 0..size } else { size * from / 9..(size * to).div_ceil(9) }
                };
                let part: Vec<_> = shape.iter().enumerate().map(part).collect();
                let tensor_request =
                    TensorRequest { part: Some(part.clone()), ..TensorRequest::whole(at) };
                let right = expected(&tensors[at], &tensor_request);
                let mut bytes = vec![0; right.len()];
                if loader.copy_from_page_cache(&checkpoint, at, Some(&part), &mut bytes).unwrap() {
                    assert!(bytes == right, "{part:?} of {shape:?}");
                    copied += 1;
                }
                let mut longer = vec![0; right.len() + 1];
                assert!(
                    !loader
                        .copy_from_page_cache(&checkpoint, at, Some(&part), &mut longer)
                        .unwrap()
                );
                let outside: Vec<_> = part.iter().map(|r| r.start + 1..r.end + 8 * r.end).collect();
                assert!(
                    !loader
                        .copy_from_page_cache(&checkpoint, at, Some(&outside), &mut bytes)
                        .unwrap()
                );
            }
        }
    }
    // The kernel may not say what it holds.
    assert!(copied > 0 || checkpoint.sources()[0].may_block());
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
        let tensor_request = TensorRequest { part: Some(part), ..TensorRequest::whole(0) };
        let loader = Loader::new(LoaderConfig::default());
        let error =
            loader.load(&checkpoint, &[tensor_request], &mut |_| true).unwrap_err().to_string();
        assert!(error.contains("`a`") && error.contains("[4, 8]"), "{error}");
    }
}

/// A checkpoint of one tensor `a`, `len` bytes of I32 that begin on no page.
fn of_one_tensor(folder: &std::path::Path, len: u64) -> Arc<Checkpoint> {
    let shape = vec![len / 4];
    let whole = Box_ { offset: vec![0], shape: shape.clone() };
    let tensor =
        Cut { name: "a".to_owned(), dtype: tensorfs::Dtype::I32, shape, boxes: vec![(0, whole)] };
    write_hf(folder, &[tensor]);
    Checkpoint::open(folder).unwrap()
}

#[test]
fn a_read_that_takes_more_memory_than_loads_may_goes_out_alone() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = of_one_tensor(folder.path(), 3 << 20);
    for (in_place, staging) in [(false, 1 << 20), (false, 0), (true, 0)] {
        let limits = PlanLimits { chunk: 4096, in_place, ..PlanLimits::default() };
        let loader = Loader::new(LoaderConfig {
            limits,
            staging,
            inline_max_bytes: 0,
            ..LoaderConfig::default()
        });
        let loaded = loader.load_all(&checkpoint).unwrap();
        let expected = common::bytes("a", tensorfs::Dtype::I32, &[3 << 18]);
        assert!(loaded.bytes(0) == expected, "in_place: {in_place}, staging: {staging}");
    }
}

/// Loads the tensor of `checkpoint` to memory whose place in a page is not that of the file.
fn load_unaligned(loader: &Loader, checkpoint: &Checkpoint) -> tensorfs::Result<Vec<u8>> {
    let len = 5 << 20;
    let mut memory = vec![0xEE; len + 3 * 4096];
    let first = first_page(&mut memory);
    // The header of the file ends at a multiple of 8.
    let request = TensorRequest {
        destination: Some(first.as_ptr().addr() as u64 + 4096 + 3),
        ..TensorRequest::whole(0)
    };
    let plan = loader.plan(checkpoint, &[request])?;
    let is_unaligned = |target: &ChunkTarget| matches!(target, ChunkTarget::Unaligned { .. });
    assert!(plan.chunks.len() > 1);
    assert!(plan.chunks.iter().all(|chunk| is_unaligned(&chunk.target)));
    // SAFETY: the memory has this page.
    let page = unsafe { first.add(4096) };
    // SAFETY: the memory outlives the region, and is read after the load alone.
    let region = unsafe { Region::foreign(page, plan.regions[0] as usize, Box::new(())) };
    // SAFETY: memory that nobody else uses meanwhile.
    let done =
        unsafe { loader.fill(checkpoint, &plan, std::slice::from_ref(&region), &mut |_| true) };
    assert_eq!(Arc::strong_count(&region), 1);
    drop(region);
    let start = page.as_ptr().addr() + 3 - memory.as_ptr().addr();
    let others = memory[..start].iter().chain(&memory[start + len..]);
    assert!(others.clone().all(|&byte| byte == 0xEE));
    done.map(|report| {
        assert_eq!(report.stats.placed, len as u64);
        memory[start..start + len].to_vec()
    })
}

#[test]
fn a_long_run_is_read_to_memory_at_any_byte_and_a_cut_shard_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = of_one_tensor(folder.path(), 5 << 20);
    let expected = common::bytes("a", tensorfs::Dtype::I32, &[5 << 18]);
    let ways = (0..8).map(|bits| [bits & 1 != 0, bits & 2 != 0, bits & 4 != 0]);
    for how in ways.clone() {
        let loaded = load_unaligned(&loader(PlanLimits::default(), how, 3), &checkpoint).unwrap();
        assert!(loaded == expected, "{how:?}");
    }
    let path = checkpoint.sources()[0].path();
    std::fs::File::options().write(true).open(path).unwrap().set_len(3 << 20).unwrap();
    for how in ways {
        let loaded = load_unaligned(&loader(PlanLimits::default(), how, 3), &checkpoint);
        assert_eq!(loaded.unwrap_err().kind(), tensorfs::ErrorKind::Changed, "{how:?}");
    }
}

#[test]
fn limits_may_be_as_large_as_numbers_are() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = of_one_tensor(folder.path(), 3 << 20);
    let most = u64::MAX;
    for (in_place, own) in [(true, most), (true, 1), (false, most), (false, 1)] {
        let limits = PlanLimits {
            chunk: most,
            moved: most,
            gap: most,
            dedicated_min_bytes: own,
            place: own,
            unaligned: most,
            slab: most,
            in_place,
            align: 64,
        };
        let loader = Loader::new(LoaderConfig {
            limits,
            inline_max_bytes: 0,
            staging: most,
            ..LoaderConfig::default()
        });
        let part = |range| TensorRequest { part: Some(vec![range]), ..TensorRequest::whole(0) };
        let tensor_requests = [part(0..100), TensorRequest::whole(0), part(1000..1 << 19)];
        let loaded = loader.load(&checkpoint, &tensor_requests, &mut |_| true).unwrap();
        let expected = common::bytes("a", tensorfs::Dtype::I32, &[3 << 18]);
        assert!(loaded.bytes(1) == expected, "in_place: {in_place}, own: {own}");
        assert!(loaded.bytes(2) == &expected[4000..4 << 19]);
    }
}

/// One tensor of zeros that no disk holds; none where no file system takes it.
fn sparse(shape: &[u64]) -> Option<(tempfile::TempDir, Arc<Checkpoint>)> {
    let folder = tempfile::tempdir_in("/dev/shm").ok()?;
    let path = folder.path().join("model.safetensors");
    let len: u64 = shape.iter().product();
    let header =
        format!(r#"{{"a":{{"dtype":"F8_E4M3","shape":{shape:?},"data_offsets":[0,{len}]}}}}"#);
    let start = [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat();
    std::fs::write(&path, &start).unwrap();
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.set_len(start.len() as u64 + len).ok()?;
    let checkpoint = Checkpoint::open(&path).unwrap();
    Some((folder, checkpoint))
}

#[test]
fn a_long_part_is_copied_as_it_is_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let shape = vec![2501, 10_000];
    let boxes = vec![(0, Box_ { offset: vec![0, 0], shape: shape.clone() })];
    let tensor = Cut { name: "a".to_owned(), dtype: Dtype::U8, shape, boxes };
    write_hf(folder.path(), &[tensor]);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let loader = Loader::new(LoaderConfig::default());
    for columns in [100..1200, 8000..8001, 0..9999] {
        let part = vec![1..2501, columns];
        let tensor_requests =
            [TensorRequest { part: Some(part.clone()), ..TensorRequest::whole(0) }];
        let right = loader.load(&checkpoint, &tensor_requests, &mut |_| true).unwrap();
        let mut bytes = vec![0; right.bytes(0).len()];
        let copied = loader.copy_from_page_cache(&checkpoint, 0, Some(&part), &mut bytes).unwrap();
        assert!(copied || checkpoint.sources()[0].may_block());
        assert!(!copied || bytes == right.bytes(0), "{part:?}");
    }
}

#[test]
fn a_part_of_millions_of_runs_is_not_copied_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let shape = vec![(4 << 20) + 1, 2];
    let boxes = vec![(0, Box_ { offset: vec![0, 0], shape: shape.clone() })];
    let tensor = Cut { name: "a".to_owned(), dtype: Dtype::U8, shape, boxes };
    write_hf(folder.path(), &[tensor]);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let loader = Loader::new(LoaderConfig::default());
    let copied = |rows: u64| {
        let mut bytes = vec![0; rows as usize];
        loader.copy_from_page_cache(&checkpoint, 0, Some(&[0..rows, 1..2]), &mut bytes).unwrap()
    };
    assert!(copied(4 << 20) || checkpoint.sources()[0].may_block());
    assert!(!copied((4 << 20) + 1));
}

#[test]
fn the_ends_of_a_part_may_be_as_far_apart_as_any_file_is_long() {
    // Kernels before 6.5 say of each page in between whether they hold it.
    let Some((_folder, checkpoint)) = sparse(&[2, 1 << 57]) else {
        eprintln!("skipped: no such file here");
        return;
    };
    let tensor_requests =
        [TensorRequest { part: Some(vec![0..2, 0..1]), ..TensorRequest::whole(0) }];
    let loader = Loader::new(LoaderConfig::default());
    assert!(
        !loader
            .copy_from_page_cache(&checkpoint, 0, tensor_requests[0].part.as_deref(), &mut [1; 2])
            .unwrap()
    );
    assert_eq!(loader.load(&checkpoint, &tensor_requests, &mut |_| true).unwrap().bytes(0), [0, 0]);
}

#[test]
fn small_tensors_share_no_more_memory_than_they_may() {
    let folder = tempfile::tempdir().unwrap();
    let whole = |shape: &[u64]| Box_ { offset: vec![0], shape: shape.to_vec() };
    let tensor = |n| {
        let shape = vec![4000];
        let boxes = vec![(0, whole(&shape))];
        Cut { name: format!("t{n}"), dtype: Dtype::U8, shape, boxes }
    };
    write_hf(folder.path(), &(0..6).map(tensor).collect::<Vec<_>>());
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let tensor_requests: Vec<TensorRequest> = (0..6).map(TensorRequest::whole).collect();
    let limits = PlanLimits {
        dedicated_min_bytes: 5000,
        slab: 10_000,
        in_place: false,
        ..PlanLimits::default()
    };
    let plan = Plan::new(checkpoint.catalog(), &tensor_requests, &limits).unwrap();
    assert_eq!(plan.regions.len(), 3);
    assert!(plan.regions.iter().all(|&len| len <= limits.slab), "{:?}", plan.regions);
}

#[test]
fn a_tensor_longer_than_memory_is_refused_before_its_reads_are_planned() {
    let len = 1u64 << 58;
    let Some((_folder, checkpoint)) = sparse(&[len]) else {
        eprintln!("skipped: no file of {len} bytes here");
        return;
    };
    let loader = Loader::new(LoaderConfig::default());
    for (cast, needed) in [(None, len), (Some(tensorfs::Dtype::F32), 4 * len)] {
        let tensor_requests = [TensorRequest { cast, ..TensorRequest::whole(0) }];
        let error = loader.load(&checkpoint, &tensor_requests, &mut |_| true).unwrap_err();
        assert_eq!(error.kind(), tensorfs::ErrorKind::OutOfMemory, "{error}");
        assert!(error.to_string().contains(&format!("takes {needed} bytes of memory")), "{error}");
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
    let limits = PlanLimits { chunk: 4096, ..PlanLimits::default() };
    let tensor_requests = [TensorRequest::whole(0)];
    for (inline_max_bytes, populate_min_bytes) in [(0, 0), (0, u64::MAX), (u64::MAX, u64::MAX)] {
        let loader = Loader::new(LoaderConfig {
            limits,
            depth: 3,
            inline_max_bytes,
            populate_min_bytes,
            ..LoaderConfig::default()
        });
        let stopped =
            loader.load(&checkpoint, &tensor_requests, &mut |progress| progress.read < 10_000);
        assert_eq!(stopped.unwrap_err().kind(), tensorfs::ErrorKind::Cancelled);
        // The same loader goes on.
        assert_eq!(loader.load_all(&checkpoint).unwrap().bytes(0).len(), 1 << 18);
    }
    let loader = Loader::new(LoaderConfig { limits, depth: 3, ..LoaderConfig::default() });
    let path = checkpoint.sources()[0].path();
    std::fs::File::options().write(true).open(path).unwrap().set_len(1000).unwrap();
    let error = loader.load_all(&checkpoint).unwrap_err();
    assert_eq!(error.kind(), tensorfs::ErrorKind::Changed, "{error}");
    assert_eq!(error.path(), Some(path));
}

#[test]
fn a_read_that_is_longer_than_all_memory_for_reads_is_loaded_all_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let shape = vec![1 << 16];
    let whole = Box_ { offset: vec![0], shape: shape.clone() };
    let tensor =
        Cut { name: "a".to_owned(), dtype: tensorfs::Dtype::I32, shape, boxes: vec![(0, whole)] };
    write_hf(folder.path(), &[tensor]);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let limits =
        PlanLimits { chunk: 4096, moved: 128 << 10, in_place: false, ..PlanLimits::default() };
    let right = Loader::new(LoaderConfig::default()).load_all(&checkpoint).unwrap();
    for staging in [1, 128 << 10] {
        let tune = LoaderConfig { limits, staging, inline_max_bytes: 0, ..LoaderConfig::default() };
        let loaded = Loader::new(tune).load_all(&checkpoint).unwrap();
        assert_eq!(loaded.bytes(0), right.bytes(0));
    }
}
