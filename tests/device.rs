//! Loading to GPUs, on a driver whose devices are memory of the process: see tests/fakecuda.
//!
//! This command runs more random plans, which take a minute on a slow machine:
//!
//! ```sh
//! TENSORFS_TEST_PLANS=10000 cargo test -p tensorfs --features cuda --test device
//! ```

#![allow(clippy::unwrap_used, reason = "a test that panics has failed, as it should")]

mod common;
#[path = "device/fake.rs"]
mod fake;
#[path = "device/theirs.rs"]
mod theirs;
#[path = "device/views.rs"]
mod views;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use common::boxes::checkpoint;
use common::requests::{RandomRequest, expected, limits, requests, tensor_requests};
use common::{Box_, Cut, write_dcp, write_dense_dcp, write_hf};
use fake::{Fake, check_filled};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use tensorfs::internal::checkpoint::Checkpoint;
use tensorfs::internal::device::{DeviceRegion, ForeignStream, Gpu};
use tensorfs::internal::format::safetensors;
use tensorfs::internal::io::{Backend, DirectIo, Settings};
use tensorfs::internal::loader::{DeviceStats, Loader, LoaderConfig};
use tensorfs::internal::plan::{Plan, PlanLimits, TensorRequest};
use tensorfs::{Dtype, Error, ErrorKind};

/// Random plans, where `TENSORFS_TEST_PLANS` does not say how many.
const PLANS: u32 = 4_000;

/// Plans of one checkpoint: to write one takes longer than to load it.
const PLANS_EACH: u32 = 20;

/// One plan of a checkpoint, and how it is carried out.
#[derive(Clone, Debug)]
struct Case {
    requests: Vec<RandomRequest>,
    limits: PlanLimits,
    seed: u64,
    delay: u64,
    ordinal: u32,
    /// Whether memory is given, also where a request has no address.
    fill: bool,
}

fn case() -> impl Strategy<Value = Case> {
    let how = (any::<u64>(), 0u64..100, 0u32..2, any::<bool>());
    (requests(), limits(), how).prop_map(|(requests, limits, (seed, delay, ordinal, fill))| Case {
        requests,
        limits: PlanLimits { in_place: false, align: limits.align.max(16), ..limits },
        seed,
        delay,
        ordinal,
        fill,
    })
}

/// A loader of many small reads, all of them past or all by way of the page cache.
fn loader(depth: usize, direct: bool) -> Loader {
    let direct = if direct { DirectIo::Always } else { DirectIo::Never };
    let settings = Settings { direct, backend: Backend::Pread, ..Settings::default() };
    Loader::new(LoaderConfig { settings, depth, ..LoaderConfig::device() })
}

/// A tensor of `shape`, of which each of `parts` ranks has its columns.
fn columns(name: &str, dtype: Dtype, shape: [u64; 2], parts: u64) -> Cut {
    let width = shape[1] / parts;
    let part = |at| Box_ { offset: vec![0, at * width], shape: vec![shape[0], width] };
    let boxes = (0..parts).map(|at| (at as usize, part(at))).collect();
    Cut { name: name.to_owned(), dtype, shape: shape.to_vec(), boxes }
}

/// A checkpoint with everything that a load can meet: columns, casts, plain tensors.
fn mixed(folder: &Path) -> (Vec<Cut>, Arc<Checkpoint>) {
    let tensors = vec![
        columns("a", Dtype::F32, [24, 64], 2),
        columns("b", Dtype::Bf16, [64, 64], 1),
        columns("c", Dtype::F32, [40, 32], 1),
        columns("d", Dtype::I32, [16, 32], 2),
    ];
    write_dcp(folder, &tensors);
    (tensors, Checkpoint::open(folder).unwrap())
}

fn mixed_requests() -> Vec<TensorRequest> {
    let cast = |tensor, to| TensorRequest { cast: Some(to), ..TensorRequest::whole(tensor) };
    vec![
        cast(0, Dtype::Bf16),
        TensorRequest::whole(1),
        cast(2, Dtype::F16),
        TensorRequest::whole(3),
    ]
}

/// Reads of at most `len` bytes.
fn reads(len: u64) -> PlanLimits {
    PlanLimits { chunk: len, moved: len, ..PlanLimits::device() }
}

/// Small reads, so that there are several.
fn small() -> LoaderConfig {
    let limits = reads(4096);
    LoaderConfig { limits, depth: 3, ..LoaderConfig::device() }
}

#[test]
fn any_parts_of_any_boxes_arrive_as_they_are_however_late_copies_are() {
    let fake = Fake::new();
    let plans = std::env::var("TENSORFS_TEST_PLANS").map_or(PLANS, |plans| plans.parse().unwrap());
    let cases = plans.div_ceil(PLANS_EACH);
    let mut runner =
        TestRunner::new(Config { cases, failure_persistence: None, ..Config::default() });
    let each = prop::collection::vec(case(), PLANS_EACH as usize);
    let how = (0usize..3, any::<bool>(), 0usize..9);
    let met = Met::default();
    let outcome =
        runner.run(&(checkpoint(), each, how), |(tensors, each, (form, direct, depth))| {
            let folder = tempfile::tempdir().unwrap();
            let write = [write_hf, write_dcp, write_dense_dcp][form];
            write(folder.path(), &tensors);
            let checkpoint = Checkpoint::open(folder.path()).unwrap();
            let loader = loader(depth, direct);
            for case in each {
                load_one(&fake, &loader, &checkpoint, &tensors, &case)?;
                met.count(&fake);
            }
            drop(loader);
            fake.assert_clean();
            Ok(())
        });
    outcome.unwrap_or_else(|e| panic!("{e}"));
    // Else the plans were not as many kinds as they should be.
    for (name, times) in FUNCTIONS_MET.iter().zip(&met.0) {
        assert!(times.load(Ordering::Relaxed) >= u64::from(plans / 100), "{name}: {times:?}");
    }
}

/// Functions that random plans call often, and how often they did.
const FUNCTIONS_MET: [&str; 3] = ["cuMemcpyHtoDAsync_v2", "cuMemcpy2DAsync_v2", "cuLaunchKernel"];

#[derive(Default)]
struct Met([AtomicU64; FUNCTIONS_MET.len()]);

impl Met {
    fn count(&self, fake: &Fake) {
        let report = fake.report();
        for (name, times) in FUNCTIONS_MET.iter().zip(&self.0) {
            times.fetch_add(report.calls(name), Ordering::Relaxed);
        }
    }
}

fn load_one(
    fake: &Fake,
    loader: &Loader,
    checkpoint: &Checkpoint,
    tensors: &[Cut],
    case: &Case,
) -> Result<(), TestCaseError> {
    fake.set("seed", case.seed);
    fake.set("delay", case.delay);
    fake.forget();
    let gpu = Gpu::open(case.ordinal).unwrap();
    let mut tensor_requests = tensor_requests(checkpoint, tensors, &case.requests);
    for tensor_request in &mut tensor_requests {
        // Given memory is aligned to its elements, as that of torch is.
        tensor_request.destination =
            tensor_request.destination.filter(|_| case.fill).map(|at| at / 16 * 16);
    }
    let plan = Plan::new(checkpoint.catalog(), &tensor_requests, &case.limits).unwrap();
    let regions: Vec<DeviceRegion> = match case.fill {
        false => gpu.regions(&plan.regions).unwrap(),
        true => {
            let lens = plan.regions.iter().map(|len| gpu.allocate((*len).max(1)).unwrap());
            // SAFETY: the memory lives as long as the region, and is used by the load alone.
            let foreign =
                lens.map(|own| unsafe { gpu.foreign(own.address(), own.len(), Box::new(own)) });
            foreign.map(DeviceRegion::whole).collect()
        }
    };
    let mut last = 0;
    let report = loader.fill_device(&gpu, checkpoint, &plan, &regions, None, &mut |progress| {
        last = progress.read;
        progress.read <= progress.total
    });
    let report = report.unwrap();
    prop_assert!(plan.read == 0 || last == plan.read);
    prop_assert_eq!(report.events.len(), plan.chunks.len());
    check_calls(fake, &plan, report.stats.device.unwrap().copies)?;
    check_filled(&plan, &regions, tensors, &tensor_requests)
}

/// No more copies than the plan has moves, each row of runs counted; none on the device but for
/// runs that are cast.
fn check_calls(fake: &Fake, plan: &Plan, copies: u64) -> Result<(), TestCaseError> {
    let calls = fake.report();
    prop_assert_eq!(calls.violations.len(), 0, "{:?}", calls.violations);
    let (mut rows, mut cast_rows) = (0, 0);
    for one in &plan.moves {
        let inner = one.copy.map(|id| plan.copies[id as usize].innermost().unwrap().count);
        // A read may begin and end within a row.
        let most = inner.map_or(1, |inner| one.runs.div_ceil(inner) + 1);
        rows += most;
        cast_rows += if one.cast.is_some() && one.copy.is_some() { most } else { 0 };
    }
    prop_assert!(copies <= rows);
    // Rows that are cast are copied once more, on the device.
    let on_host = calls.calls("cuMemcpyHtoDAsync_v2") + calls.calls("cuMemcpy2DAsync_v2");
    prop_assert!((copies..=copies + cast_rows).contains(&on_host));
    if cast_rows == 0 {
        prop_assert!(!calls.copied.contains_key("device_to_device"));
        prop_assert_eq!(on_host, copies);
    }
    prop_assert!(plan.copies.is_empty() || copies > 0);
    prop_assert!(calls.calls("cuMemHostRegister_v2") <= 1, "one step is enough for all plans");
    prop_assert!(calls.calls("cuEventCreate") <= plan.chunks.len() as u64);
    Ok(())
}

/// Functions of the driver that a load calls.
const FUNCTIONS: &[&str] = &[
    "cuInit",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuMemGetInfo_v2",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoH_v2",
    "cuMemcpy2DAsync_v2",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuModuleGetFunction",
    "cuLaunchKernel",
];

/// Those whose failure is no failure of the load: something else does, or nothing is asked for.
const HARMLESS: &[&str] = &[
    "cuDevicePrimaryCtxRelease_v2",
    "cuMemFree_v2",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize",
    "cuEventDestroy_v2",
    "cuModuleUnload",
];

/// Opens a GPU and loads `mixed` with a loader of its own: into memory that is given, and into
/// new memory.
fn load_mixed(fake: &Fake, tensors: &[Cut], checkpoint: &Checkpoint) -> Result<(), Error> {
    fake.forget();
    let gpu = Gpu::open(1)?;
    let loader = Loader::new(small());
    let tensor_requests = mixed_requests();
    let plan = loader.plan(checkpoint, &tensor_requests)?;
    let regions = gpu.regions(&plan.regions)?;
    // SAFETY: the legacy stream is always there.
    let legacy = unsafe { ForeignStream::from_raw(0) };
    loader.fill_device(&gpu, checkpoint, &plan, &regions, Some(legacy), &mut |_| true)?;
    let loaded = loader.load_device(&gpu, checkpoint, &tensor_requests, &mut |_| true)?;
    for (number, (tensor_request, placement)) in
        tensor_requests.iter().zip(&plan.placements).enumerate()
    {
        let region = &regions[placement.region as usize];
        let mut bytes = vec![0; placement.len as usize];
        region.memory.read(region.offset + placement.offset, &mut bytes)?;
        let expected = expected(&tensors[tensor_request.tensor], tensor_request);
        assert!(bytes == expected && loaded.bytes(number)? == expected, "other bytes arrived");
    }
    Ok(())
}

#[test]
fn a_call_that_fails_is_one_error_and_leaves_nothing_behind() {
    let fake = Fake::new();
    let folder = tempfile::tempdir().unwrap();
    let (tensors, checkpoint) = mixed(folder.path());
    fake.set("delay", 200);
    load_mixed(&fake, &tensors, &checkpoint).unwrap();
    let usual = fake.report();
    for function in FUNCTIONS {
        let times = usual.calls(function);
        assert!(times > 0 || *function == "cuStreamSynchronize", "{function} is not called");
        for nth in [1, 2, 3, times / 2, times].into_iter().filter(|nth| (1..=times).contains(nth)) {
            fake.set("fail", format!("{function}:{nth}:999"));
            let outcome = load_mixed(&fake, &tensors, &checkpoint);
            fake.set("fail", "");
            fake.assert_clean();
            match outcome {
                Err(error) => {
                    assert!(!HARMLESS.contains(function), "{function} {nth}: {error}");
                    let Error::Device { device, message, call: Some(call) } = &error else {
                        panic!("{function} {nth}: {error:?}");
                    };
                    assert!(device.starts_with("cuda"), "{error}");
                    assert_eq!((call.function, call.code), (*function, 999));
                    assert_eq!(call.name, "CUDA_ERROR_UNKNOWN");
                    assert!(message.contains(function) && message.contains("999"), "{error}");
                    assert_eq!(error.kind(), ErrorKind::Device);
                }
                // To bind a context is tried again where something is given back; how many events
                // there are depends on how late copies are.
                Ok(()) if function.starts_with("cuCtx") && nth > 1 => {}
                Ok(()) if fake.report().calls(function) < nth => {}
                Ok(()) => assert!(HARMLESS.contains(function), "{function} {nth} did not matter"),
            }
            load_mixed(&fake, &tensors, &checkpoint).unwrap();
        }
    }
}

#[test]
fn a_load_that_is_stopped_anywhere_ends_and_the_next_one_goes_on() {
    let fake = Fake::new();
    let folder = tempfile::tempdir().unwrap();
    let (tensors, checkpoint) = mixed(folder.path());
    let gpu = Gpu::open(0).unwrap();
    let loader = Loader::new(small());
    fake.set("delay", 500);
    for stop in 0..6 {
        fake.set("seed", stop + 1);
        let mut asked = 0;
        let outcome = loader.load_device(&gpu, &checkpoint, &mixed_requests(), &mut |_| {
            asked += 1;
            asked <= stop
        });
        let error = outcome.unwrap_err();
        assert!(error.to_string().contains("stopped"), "{error}");
        assert_eq!(fake.report().live["device_bytes"], 0);
    }
    let loaded = loader.load_device(&gpu, &checkpoint, &mixed_requests(), &mut |_| true).unwrap();
    for (number, tensor_request) in mixed_requests().iter().enumerate() {
        let bytes = loaded.bytes(number).unwrap();
        assert!(
            bytes == expected(&tensors[tensor_request.tensor], tensor_request),
            "other bytes arrived"
        );
        assert_eq!(loaded.shape(number), tensors[tensor_request.tensor].shape);
        assert_eq!(
            loaded.dtype(number),
            tensor_request.cast.unwrap_or(tensors[tensor_request.tensor].dtype)
        );
    }
}

#[test]
fn a_shard_that_is_cut_off_while_it_is_loaded_is_an_error_that_names_it() {
    let fake = Fake::new();
    let folder = tempfile::tempdir().unwrap();
    let tensor = columns("a", Dtype::F32, [256, 256], 1);
    write_hf(folder.path(), &[tensor]);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let gpu = Gpu::open(0).unwrap();
    let loader = Loader::new(small());
    fake.set("delay", 500);
    let path = checkpoint.sources()[0].path();
    let outcome = loader.load_device(&gpu, &checkpoint, &[TensorRequest::whole(0)], &mut |_| {
        std::fs::File::options().write(true).open(path).unwrap().set_len(5000).unwrap();
        true
    });
    let error = outcome.unwrap_err();
    assert_eq!((error.kind(), error.path()), (ErrorKind::Changed, Some(path)), "{error}");
}

/// Loads one tensor of `len` bytes with `tune`, and tells how its memory was pinned.
fn load_plain(len: u64, tune: LoaderConfig) -> Result<(DeviceStats, Loader), Error> {
    let folder = tempfile::tempdir().unwrap();
    let tensor = columns("a", Dtype::I32, [len / 256, 64], 1);
    write_hf(folder.path(), std::slice::from_ref(&tensor));
    load_first(folder.path(), &expected(&tensor, &TensorRequest::whole(0)), tune)
}

/// Makes a tensor of zeros, which is faster.
fn load_zeros(len: u64, tune: LoaderConfig) -> Result<(DeviceStats, Loader), Error> {
    let folder = tempfile::tempdir().unwrap();
    load_first(&write_zeros(folder.path(), len), &vec![0; len as usize], tune)
}

fn write_zeros(folder: &Path, len: u64) -> PathBuf {
    let path = folder.join("model.safetensors");
    let entry = [("a", Dtype::U8, &[len][..], len)];
    let header = safetensors::encode(&BTreeMap::new(), entry.into_iter(), 8).unwrap();
    std::fs::write(&path, &header).unwrap();
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.set_len(header.len() as u64 + len).unwrap();
    path
}

fn load_first(
    path: &Path,
    bytes: &[u8],
    tune: LoaderConfig,
) -> Result<(DeviceStats, Loader), Error> {
    let checkpoint = Checkpoint::open(path).unwrap();
    let gpu = Gpu::open(0)?;
    let loader = Loader::new(tune);
    let loaded =
        loader.load_device(&gpu, &checkpoint, &[TensorRequest::whole(0)], &mut |_| true)?;
    assert!(loaded.bytes(0).unwrap() == bytes, "other bytes arrived");
    Ok((loaded.report.stats.device.unwrap(), loader))
}

#[test]
fn memory_that_cannot_be_registered_comes_from_the_driver_and_else_is_not_pinned() {
    let fake = Fake::new();
    assert_eq!(load_plain(1 << 16, small()).unwrap().0.pinning, "registered");
    fake.forget();
    fake.set("fail", "cuMemHostRegister_v2:1:2");
    assert_eq!(load_plain(1 << 16, small()).unwrap().0.pinning, "allocated");
    fake.assert_clean();
    fake.forget();
    fake.set("fail", "cuMemHostRegister_v2:1:2,cuMemHostAlloc:1:2");
    fake.set("strict", 0);
    assert_eq!(load_plain(1 << 16, small()).unwrap().0.pinning, "pageable");
    // A driver that takes only pinned memory finds out what is not.
    fake.forget();
    fake.set("strict", 1);
    let error = load_plain(1 << 16, small()).unwrap_err();
    assert!(error.to_string().contains("cuMemcpyHtoDAsync_v2"), "{error}");
}

#[test]
fn pinned_memory_grows_in_steps_is_kept_and_is_let_go_of_when_asked() {
    let fake = Fake::new();
    fake.set("delay", 2000);
    // One read takes more than half of a step.
    let limits = reads(1 << 20);
    let tune = LoaderConfig { limits, depth: 8, staging: 4 << 20, ..LoaderConfig::device() };
    let (stats, loader) = load_zeros(8 << 20, tune).unwrap();
    let pinned = fake.report();
    assert!(stats.pinned <= 4 << 20, "{stats:?}");
    assert_eq!(pinned.live["registered_bytes"], stats.pinned);
    assert!(pinned.calls("cuMemHostRegister_v2") <= 2);
    assert_eq!(stats.copies, 8);
    loader.release();
    assert_eq!(fake.report().live["registered_bytes"], 0);
    drop(loader);
    // The second step is refused: the first suffices.
    fake.set("fail", "cuMemHostRegister_v2:2:2,cuMemHostAlloc:1:2");
    fake.forget();
    let limits = reads(40 << 20);
    let tune = LoaderConfig { limits, depth: 8, staging: 100 << 20, ..LoaderConfig::device() };
    let (stats, _loader) = load_zeros(80 << 20, tune).unwrap();
    assert_eq!((stats.pinned, stats.pinning), (64 << 20, "registered"));
    assert_eq!(fake.report().calls("cuMemHostAlloc"), 1);
}

#[test]
fn a_read_larger_than_what_is_pinned_gets_memory_of_its_length() {
    let fake = Fake::new();
    let folder = tempfile::tempdir().unwrap();
    let tensor = columns("a", Dtype::I32, [3 << 10, 256], 1);
    write_hf(folder.path(), std::slice::from_ref(&tensor));
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let gpu = Gpu::open(0).unwrap();
    let loader = Loader::new(LoaderConfig { staging: 1 << 20, ..LoaderConfig::device() });
    let rows =
        |rows| TensorRequest { part: Some(vec![0..rows, 0..256]), ..TensorRequest::whole(0) };
    for rows in [rows(1), rows(3 << 10), rows(64)] {
        let loaded =
            loader.load_device(&gpu, &checkpoint, std::slice::from_ref(&rows), &mut |_| true);
        let bytes = loaded.unwrap().bytes(0).unwrap();
        assert!(bytes == expected(&tensor, &rows), "other bytes arrived");
    }
    assert!(fake.report().live["registered_bytes"] <= 8 << 20);
}

#[test]
fn loads_to_two_gpus_and_two_to_one_go_on_at_the_same_time() {
    let fake = Fake::new();
    fake.set("delay", 300);
    let folder = tempfile::tempdir().unwrap();
    let (tensors, checkpoint) = mixed(folder.path());
    let loader = Loader::new(small());
    std::thread::scope(|scope| {
        for ordinal in [0, 1, 0, 1] {
            let (loader, checkpoint, tensors) = (&loader, &checkpoint, &tensors);
            scope.spawn(move || {
                let gpu = Gpu::open(ordinal).unwrap();
                let loaded = loader.load_device(&gpu, checkpoint, &mixed_requests(), &mut |_| true);
                let loaded = loaded.unwrap();
                for (number, tensor_request) in mixed_requests().iter().enumerate() {
                    assert_eq!(loaded.place(number).memory.gpu().ordinal(), ordinal);
                    let bytes = loaded.bytes(number).unwrap();
                    assert!(
                        bytes == expected(&tensors[tensor_request.tensor], tensor_request),
                        "other bytes arrived"
                    );
                }
            });
        }
    });
}

#[test]
fn loads_that_share_too_little_pinned_memory_all_end() {
    let fake = Fake::new();
    fake.set("delay", 1000);
    let folder = tempfile::tempdir().unwrap();
    let path = write_zeros(folder.path(), 12 << 20);
    let checkpoint = Checkpoint::open(&path).unwrap();
    // The memory pinned first is enough for one read.
    let limits = reads(1536 << 10);
    let loader = Loader::new(LoaderConfig { limits, staging: 1, ..LoaderConfig::device() });
    std::thread::scope(|scope| {
        for _ in 0..3 {
            let (loader, checkpoint) = (&loader, &checkpoint);
            scope.spawn(move || {
                let gpu = Gpu::open(0).unwrap();
                let loaded =
                    loader.load_device(&gpu, checkpoint, &[TensorRequest::whole(0)], &mut |_| true);
                let bytes = loaded.unwrap().bytes(0).unwrap();
                assert!(bytes == vec![0; 12 << 20], "other bytes arrived");
            });
        }
    });
}

#[test]
fn a_tensor_keeps_its_memory_when_the_load_and_the_loader_are_gone() {
    let fake = Fake::new();
    let folder = tempfile::tempdir().unwrap();
    let (tensors, checkpoint) = mixed(folder.path());
    let place = {
        let gpu = Gpu::open(0).unwrap();
        let loader = Loader::new(small());
        let loaded = loader.load_device(&gpu, &checkpoint, &mixed_requests(), &mut |_| true);
        loaded.unwrap().place(1)
    };
    let mut bytes = vec![0; place.len as usize];
    place.memory.read(place.offset, &mut bytes).unwrap();
    assert!(bytes == expected(&tensors[1], &mixed_requests()[1]), "other bytes arrived");
    assert!(place.address().is_multiple_of(256));
    drop(place);
    fake.assert_clean();
}

#[test]
fn regions_share_few_allocations_and_no_bytes() {
    let fake = Fake::new();
    let gpu = Gpu::open(0).unwrap();
    let lens = [200 << 20, 100 << 20, 3, 0, 257, 1];
    let regions = gpu.regions(&lens).unwrap();
    assert_eq!(fake.report().calls("cuMemAlloc_v2"), 2);
    assert_eq!(regions.iter().map(|region| region.len).collect::<Vec<_>>(), lens);
    for (number, region) in regions.iter().enumerate() {
        assert!(region.address().is_multiple_of(256));
        assert!(region.offset + region.len <= region.memory.len());
        let (start, end) = (region.address(), region.address() + region.len);
        let meets =
            |other: &&DeviceRegion| start < other.address() + other.len && other.address() < end;
        assert_eq!(regions[..number].iter().find(meets).map(|_| ()), None);
    }
}

#[test]
fn what_is_larger_than_the_memory_of_the_gpu_is_refused_with_numbers() {
    let fake = Fake::new();
    fake.set("capacity", 100_000);
    let error = load_plain(1 << 17, small()).unwrap_err().to_string();
    assert!(error.contains("takes 131072 bytes") && error.contains("100000 of 100000"), "{error}");
}

#[test]
fn work_of_somebody_else_in_the_memory_is_waited_for() {
    let fake = Fake::new();
    let folder = tempfile::tempdir().unwrap();
    let (tensors, checkpoint) = mixed(folder.path());
    let gpu = Gpu::open(0).unwrap();
    let loader = Loader::new(small());
    let plan = loader.plan(&checkpoint, &mixed_requests()).unwrap();
    let regions = gpu.regions(&plan.regions).unwrap();
    let stream = theirs::Stream::new(&gpu);
    // It takes longer than the load, and writes to all that is loaded.
    fake.set("delay", 3_000);
    let junk = theirs::pinned(1 << 16);
    for region in regions.iter().cycle().take(100 * regions.len()) {
        stream.copy(&junk, region);
    }
    // SAFETY: it is of this GPU and lives until it is dropped below.
    let after = unsafe { ForeignStream::from_raw(stream.handle()) };
    let progress = &mut |_| true;
    loader.fill_device(&gpu, &checkpoint, &plan, &regions, Some(after), progress).unwrap();
    for (tensor_request, placement) in mixed_requests().iter().zip(&plan.placements) {
        let region = &regions[placement.region as usize];
        let mut bytes = vec![0; placement.len as usize];
        region.memory.read(region.offset + placement.offset, &mut bytes).unwrap();
        assert!(
            bytes == expected(&tensors[tensor_request.tensor], tensor_request),
            "other bytes arrived"
        );
    }
    drop((stream, junk));
}

#[test]
fn a_thread_keeps_the_context_that_was_bound_to_it() {
    let _fake = Fake::new();
    let gpu = Gpu::open(1).unwrap();
    let other = theirs::Context::bind(0);
    gpu.memory().unwrap();
    gpu.allocate(100).unwrap();
    assert_eq!(theirs::current(), other.handle());
}

/// Codes of the driver, as `cuda.h` has them.
const INVALID_VALUE: u32 = 1;
const INVALID_CONTEXT: u32 = 201;
const ALREADY_REGISTERED: u32 = 712;
const NOT_REGISTERED: u32 = 713;

#[test]
fn the_driver_for_tests_refuses_what_no_correct_program_does() {
    let fake = Fake::new();
    let gpu = Gpu::open(0).unwrap();
    assert_eq!(theirs::free(0), INVALID_CONTEXT);
    let stream = theirs::Stream::new(&gpu);
    let (memory, from) = (theirs::allocate(100), theirs::pinned(8192));
    let copy = |to, from, len| theirs::copy(to, from, len, stream.handle());
    assert_eq!(copy(memory, from.address(), 101), INVALID_VALUE);
    assert_eq!(copy(memory + 1, from.address(), 100), INVALID_VALUE);
    assert_eq!(copy(memory, from.address() + 8100, 100), INVALID_VALUE);
    let bytes = vec![7; 200];
    let address = bytes.as_ptr().addr() as u64;
    assert_eq!(copy(memory, address, 100), INVALID_VALUE);
    assert_eq!(theirs::register(&bytes[..50]), 0);
    assert_eq!(theirs::register(&bytes[40..60]), ALREADY_REGISTERED);
    assert_eq!(theirs::register(&bytes[50..]), 0);
    // Two registrations are not one.
    assert_eq!(copy(memory, address, 100), INVALID_VALUE);
    assert_eq!(copy(memory, address + 50, 100), 0);
    assert_eq!(theirs::unregister(&bytes[50..]), 0);
    assert_eq!(theirs::unregister(&bytes[50..]), NOT_REGISTERED);
    assert_eq!(theirs::unregister(&bytes), 0);
    // The stand-in reports memory that is freed while work uses it, more surely if the work is
    // late.
    fake.forget();
    fake.set("delay", 20_000);
    for _ in 0..20 {
        assert_eq!(copy(memory, from.address(), 100), 0);
    }
    assert_eq!(theirs::free(memory), 0);
    assert_eq!(theirs::free(memory), INVALID_VALUE);
    assert_eq!(fake.report().violations, ["100 bytes of a device are freed while work uses them"]);
    fake.set("delay", 0);
    drop(stream);
    fake.forget();
}

#[test]
fn a_gpu_that_is_not_there_is_an_error_that_says_how_many_are() {
    let fake = Fake::new();
    let error = Gpu::open(7).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Device);
    assert_eq!(error.to_string(), "cuda:7: there is no such GPU; the driver sees 2");
    fake.set("devices", 0);
    assert_eq!(Gpu::count().unwrap(), 0);
    assert!(Gpu::open(0).unwrap_err().to_string().contains("the driver sees 0"));
    fake.set("fail", "cuInit:1:100");
    fake.forget();
    let error = Gpu::open(0).unwrap_err().to_string();
    assert!(error.contains("cuInit failed: no CUDA-capable device is detected"), "{error}");
}

/// Path of the driver for child processes of the test below.
const CHILD: &str = "TENSORFS_TEST_DRIVER";

#[test]
fn a_driver_that_is_absent_or_lacks_a_function_is_an_error_and_no_panic() {
    if std::env::var_os(CHILD).is_some() {
        // This part runs in a child process. The parent looks at the output.
        println!("said: {}", Gpu::open(0).unwrap_err());
        return;
    }
    let said = |folder: &Path| {
        let name = "a_driver_that_is_absent_or_lacks_a_function_is_an_error_and_no_panic";
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args([name, "--exact", "--nocapture"]).env(CHILD, "1");
        let output = child.env("LD_LIBRARY_PATH", folder).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
        let (_, said) = text.split_once("said: ").unwrap();
        said.lines().next().unwrap().to_owned()
    };
    let folder = tempfile::tempdir().unwrap();
    // Files that are no libraries keep those of the system from being found.
    for name in [
        "libcuda.so",
        "libcuda.so.1",
        "libcuda.so.12",
        "libcuda.so.11",
        "libcuda.so.10",
        "libcuda.so.9",
        "libnvcuda.so",
        "libnvcuda.so.1",
    ] {
        std::fs::write(folder.path().join(name), b"no library").unwrap();
    }
    let absent = said(folder.path());
    assert_eq!(absent, "cuda:0: there is no NVIDIA driver: libcuda.so.1 cannot be loaded");
    let path = folder.path().join("libcuda.so");
    let mut library = std::fs::read(fake::library()).unwrap();
    for function in FUNCTIONS {
        rename(&mut library, function, b'X');
        std::fs::write(&path, &library).unwrap();
        let lacks = said(folder.path());
        assert_eq!(lacks, format!("cuda:0: the NVIDIA driver lacks {function}; update it"));
        rename(&mut library, &format!("X{}", &function[1..]), b'c');
    }
}

/// Gives a function of a library another name, by another first letter.
fn rename(library: &mut [u8], function: &str, letter: u8) {
    let name = [b"\0", function.as_bytes(), b"\0"].concat();
    let mut from = 0;
    while let Some(at) = fake::find(&library[from..], &name) {
        library[from + at + 1] = letter;
        from += at + 1;
    }
    assert!(from > 0, "no name {function} in the library");
}
