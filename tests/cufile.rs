//! Loading to GPUs by cuFile, on a library and a driver whose devices are memory of the process:
//! see tests/fakecufile and tests/fakecuda. `TENSORFS_TEST_PLANS` sets a larger number of random
//! plans.

#![allow(clippy::unwrap_used, reason = "a test that panics has failed, as it should")]

mod common;
#[path = "device/fake.rs"]
#[allow(dead_code, reason = "the test of devices uses all")]
mod fake;
#[path = "device/files.rs"]
mod files;
#[path = "device/theirs.rs"]
#[allow(dead_code, reason = "the test of devices uses all")]
mod theirs;
#[path = "common/tensorizer.rs"]
#[allow(dead_code, reason = "the test of tensorizer files uses all")]
mod written;

use std::fs::File;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use common::boxes::checkpoint;
use common::requests::{RandomRequest, expected, limits, requests, tensor_requests};
use common::{Box_, Cut, write_dcp, write_hf};
use fake::check_filled;
use files::CuFile;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use tensorfs::internal::checkpoint::Checkpoint;
use tensorfs::internal::device::{ForeignStream, Gpu};
use tensorfs::internal::io::{DirectIo, Settings};
use tensorfs::internal::loader::{CUFILE_MODULE, DeviceStats, Loader, LoaderConfig, Report};
use tensorfs::internal::plan::{Plan, PlanLimits, TensorRequest};
use tensorfs::{Dtype, Error, ErrorKind};
use written::{StoredTensor, TensorizerFile};

/// Random plans, where `TENSORFS_TEST_PLANS` does not say how many.
const PLANS: u32 = 1_000;

/// Plans of one checkpoint: to write one takes longer than to load it.
const PLANS_EACH: u32 = 20;

/// A character device that every machine has, in place of that of the kernel module.
const MODULE: &str = "/dev/null";

/// Functions of the library that a load calls.
const FUNCTIONS: [&str; 7] = [
    "cuFileSetParameterBool",
    "cuFileDriverOpen",
    "cuFileHandleRegister",
    "cuFileHandleDeregister",
    "cuFileBufRegister",
    "cuFileBufDeregister",
    "cuFileRead",
];

/// Loads by cuFile, in small reads.
fn tune() -> LoaderConfig {
    let limits = PlanLimits { chunk: 64 << 10, moved: 64 << 10, ..PlanLimits::device() };
    LoaderConfig { limits, depth: 3, cufile: Some(MODULE.into()), ..LoaderConfig::device() }
}

fn timeout(timeout: Duration) -> LoaderConfig {
    LoaderConfig { settings: Settings { timeout: Some(timeout), ..Settings::default() }, ..tune() }
}

/// A whole tensor of `len` bytes.
fn plain(name: &str, len: u64) -> Cut {
    let shape = vec![len / 256, 64];
    let whole = Box_ { offset: vec![0, 0], shape: shape.clone() };
    Cut { name: name.to_owned(), dtype: Dtype::I32, shape, boxes: vec![(0, whole)] }
}

/// Two tensors in a shard each, of which the first is long enough for its memory to be registered.
fn two(folder: &Path) -> (Vec<Cut>, Arc<Checkpoint>) {
    let tensors = vec![plain("a", 2 << 20), plain("b", 192 << 10)];
    write_hf(folder, &tensors);
    (tensors, Checkpoint::open(folder).unwrap())
}

/// Loads them to new memory with a loader of its own.
fn load(tensors: &[Cut], checkpoint: &Checkpoint, tune: LoaderConfig) -> Result<Report, Error> {
    let gpu = Gpu::open(0)?;
    let tensor_requests: Vec<TensorRequest> =
        (0..tensors.len()).map(TensorRequest::whole).collect();
    let loaded =
        Loader::new(tune).load_device(&gpu, checkpoint, &tensor_requests, &mut |_| true)?;
    for (number, tensor_request) in tensor_requests.iter().enumerate() {
        let bytes = loaded.bytes(number)?;
        assert!(
            bytes == expected(&tensors[tensor_request.tensor], tensor_request),
            "other bytes arrived"
        );
    }
    Ok(loaded.report)
}

fn device(report: Report) -> DeviceStats {
    report.stats.device.unwrap()
}

/// One plan of a checkpoint, and what becomes of its reads.
#[derive(Clone, Debug)]
struct Case {
    requests: Vec<RandomRequest>,
    limits: PlanLimits,
    /// Whether memory is given, also where a request has no address.
    fill: bool,
    short: u64,
    late: u64,
    fail: Option<(usize, u64, u32)>,
}

fn case() -> impl Strategy<Value = Case> {
    let code = prop::sample::select(vec![5, 22, 5001, 5030]);
    let fail = prop::option::of((0..FUNCTIONS.len(), 1u64..6, code));
    let short = prop::sample::select(vec![0u64, 1, 7, 100, 4096]);
    let how = (any::<bool>(), short, 0u64..2, fail);
    (requests(), limits(), how).prop_map(|(requests, limits, (fill, short, late, fail))| Case {
        requests,
        limits: PlanLimits { in_place: false, align: limits.align.max(16), ..limits },
        fill,
        short,
        late,
        fail,
    })
}

#[test]
fn any_parts_of_any_boxes_arrive_as_they_are_whatever_cufile_does_of_it() {
    let fake = CuFile::new();
    let plans = std::env::var("TENSORFS_TEST_PLANS").map_or(PLANS, |plans| plans.parse().unwrap());
    let cases = plans.div_ceil(PLANS_EACH);
    let mut runner =
        TestRunner::new(Config { cases, failure_persistence: None, ..Config::default() });
    let each = prop::collection::vec(case(), PLANS_EACH as usize);
    let (some, all) = (AtomicU64::new(0), AtomicU64::new(0));
    let outcome = runner.run(&(checkpoint(), each, any::<bool>()), |(tensors, each, whole)| {
        let folder = tempfile::tempdir().unwrap();
        if whole {
            write_hf(folder.path(), &tensors)
        } else {
            write_dcp(folder.path(), &tensors)
        };
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        for case in each {
            let (bytes, plain) = load_one(&fake, &checkpoint, &tensors, &case)?;
            some.fetch_add(u64::from(bytes > 0), Ordering::Relaxed);
            all.fetch_add(u64::from(bytes > 0 && plain), Ordering::Relaxed);
        }
        fake.assert_clean();
        Ok(())
    });
    outcome.unwrap_or_else(|e| panic!("{e}"));
    // Else the plans were not as many kinds as they should be.
    for times in [some.load(Ordering::Relaxed), all.load(Ordering::Relaxed)] {
        assert!(times >= u64::from(plans / 20), "{some:?} {all:?}");
    }
}

/// The bytes that cuFile read, and whether nothing else was needed.
fn load_one(
    fake: &CuFile,
    checkpoint: &Checkpoint,
    tensors: &[Cut],
    case: &Case,
) -> Result<(u64, bool), TestCaseError> {
    fake.forget();
    fake.set("short", case.short);
    // Else a load takes a thousand times as long.
    fake.set("late", if (1..4096).contains(&case.short) { 0 } else { case.late });
    let fail = case.fail.map(|(name, nth, code)| format!("{}:{nth}:{code}", FUNCTIONS[name]));
    fake.set("fail", fail.unwrap_or_default());
    let gpu = Gpu::open(1).unwrap();
    let loader = Loader::new(tune());
    let mut tensor_requests = tensor_requests(checkpoint, tensors, &case.requests);
    for tensor_request in &mut tensor_requests {
        tensor_request.destination =
            tensor_request.destination.filter(|_| case.fill).map(|at| at / 16 * 16);
    }
    let plan = Plan::new(checkpoint.catalog(), &tensor_requests, &case.limits).unwrap();
    let regions = gpu.regions(&plan.regions).unwrap();
    let mut last = 0;
    let report = loader.fill_device(&gpu, checkpoint, &plan, &regions, None, &mut |progress| {
        last = progress.read;
        progress.total == plan.read && progress.read <= progress.total
    });
    let report = report.unwrap();
    prop_assert!(plan.read == 0 || last == plan.read);
    prop_assert_eq!(report.events.len(), plan.chunks.len());
    check_filled(&plan, &regions, tensors, &tensor_requests)?;
    let stats = device(report);
    let moved = fake.cuda.report().copied.get("file_to_device").copied().unwrap_or(0);
    prop_assert!(stats.cufile <= moved, "{stats:?} {moved}");
    prop_assert_eq!(stats.cufile == 0, stats.cufile_unused.is_some());
    Ok((stats.cufile, stats.copies == 0))
}

#[test]
fn reads_go_from_the_file_to_the_device_and_the_rest_as_ever() {
    let fake = CuFile::new();
    let folder = tempfile::tempdir().unwrap();
    let (tensors, checkpoint) = two(folder.path());
    let report = load(&tensors, &checkpoint, tune()).unwrap();
    assert_eq!(report.stats.reads, report.stats.reads_direct);
    let stats = device(report);
    assert_eq!((stats.cufile, stats.cufile_unused), ((2 << 20) + (192 << 10), None));
    assert_eq!((stats.copies, stats.pinned), (0, 0));
    let calls = fake.report();
    assert!(FUNCTIONS.iter().all(|name| calls.calls(name) > 0), "{calls:?}");
    assert_eq!(calls.calls("cuFileBufRegister"), 1);
    // One tensor is cast, which cuFile cannot.
    let gpu = Gpu::open(0).unwrap();
    let floats = Cut { dtype: Dtype::F32, ..plain("b", 128 << 10) };
    let folder = tempfile::tempdir().unwrap();
    let tensors = [plain("a", 128 << 10), floats];
    write_hf(folder.path(), &tensors);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let tensor_requests = [
        TensorRequest::whole(0),
        TensorRequest { cast: Some(Dtype::Bf16), ..TensorRequest::whole(1) },
    ];
    let loaded = Loader::new(tune())
        .load_device(&gpu, &checkpoint, &tensor_requests, &mut |_| true)
        .unwrap();
    for (number, tensor_request) in tensor_requests.iter().enumerate() {
        assert!(loaded.bytes(number).unwrap() == expected(&tensors[number], tensor_request));
    }
    let stats = loaded.report.stats.device.as_ref().unwrap();
    assert_eq!(stats.cufile, 128 << 10);
    assert!(stats.copies > 0);
}

#[test]
fn zeros_that_no_file_holds_do_not_go_by_cufile() {
    let _fake = CuFile::new();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.tensors");
    let stored: Vec<u8> = (0..128 << 10).map(|n: u32| (n % 251) as u8).collect();
    let tensors = vec![
        StoredTensor::new("a", "|u1", &[128 << 10], &stored),
        StoredTensor::new("m", "<f4", &[300, 200], &[]),
    ];
    std::fs::write(&path, TensorizerFile::new(4, tensors).bytes()).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    let requests = [TensorRequest::whole(0), TensorRequest::whole(1)];
    let gpu = Gpu::open(0).unwrap();
    let loaded =
        Loader::new(tune()).load_device(&gpu, &checkpoint, &requests, &mut |_| true).unwrap();
    assert!(loaded.bytes(0).unwrap() == stored);
    assert!(loaded.bytes(1).unwrap() == vec![0; 240_000]);
    assert_eq!(loaded.report.stats.device.as_ref().unwrap().cufile, 128 << 10);
}

#[test]
fn what_cufile_refuses_is_read_as_ever() {
    let fake = CuFile::new();
    let folder = tempfile::tempdir().unwrap();
    let (tensors, checkpoint) = two(folder.path());
    load(&tensors, &checkpoint, tune()).unwrap();
    let usual = fake.report();
    for function in FUNCTIONS {
        let times = usual.calls(function);
        // How often a shard is opened depends on which reader is done with it first.
        let last = if function.contains("Handle") { 2 } else { times };
        for nth in [1, 2, last].into_iter().filter(|nth| (1..=last).contains(nth)) {
            for code in [5, 5030] {
                fake.forget();
                fake.set("fail", format!("{function}:{nth}:{code}"));
                let stats = device(load(&tensors, &checkpoint, tune()).unwrap());
                assert_eq!(stats.cufile == 0, stats.cufile_unused.is_some(), "{function} {nth}");
                let part = matches!(function, "cuFileHandleRegister" | "cuFileRead");
                assert_eq!(stats.copies > 0, part || function == "cuFileDriverOpen", "{function}");
                fake.assert_clean();
            }
        }
    }
    // None of its reads succeeds.
    for (code, why) in [(5, "Input/output error"), (5030, "failed with 5030")] {
        fake.set("fail", format!("cuFileRead:0:{code}"));
        let why_not = device(load(&tensors, &checkpoint, tune()).unwrap()).cufile_unused.unwrap();
        assert!(why_not.contains(why) && why_not.contains(".safetensors: cuFileRead"), "{why_not}");
    }
    fake.set("fail", "cuFileDriverOpen:0:5011");
    let why_not = device(load(&tensors, &checkpoint, tune()).unwrap()).cufile_unused.unwrap();
    assert_eq!(why_not, "cuFileDriverOpen failed with 5011");
}

#[test]
fn it_is_used_only_where_it_was_asked_for_and_the_module_is_there() {
    let fake = CuFile::new();
    let folder = tempfile::tempdir().unwrap();
    let (tensors, checkpoint) = two(folder.path());
    let stats =
        device(load(&tensors, &checkpoint, LoaderConfig { cufile: None, ..tune() }).unwrap());
    assert_eq!((stats.cufile, stats.cufile_unused), (0, None));
    let unused = |tune| {
        let stats = device(load(&tensors, &checkpoint, tune).unwrap());
        assert!(stats.cufile == 0 && stats.copies > 0);
        stats.cufile_unused.unwrap()
    };
    // A machine with the module has none of these files.
    let absent = folder.path().join("nvidia-fs0");
    let with = |path: &Path| LoaderConfig { cufile: Some(path.to_owned()), ..tune() };
    assert_eq!(unused(with(&absent)), format!("no {}", absent.display()));
    File::create(&absent).unwrap();
    assert_eq!(unused(with(&absent)), format!("no {}", absent.display()));
    let settings = Settings { direct: DirectIo::Never, ..Settings::default() };
    let why = unused(LoaderConfig { settings, ..tune() });
    assert_eq!(why, "shards are to be read through the page cache");
    assert_eq!(fake.report().calls("cuFileDriverOpen"), 0);
    assert_eq!(CUFILE_MODULE, "/dev/nvidia-fs0");
}

/// Set for children of the test below.
const CHILD: &str = "TENSORFS_TEST_LIBRARY";

#[test]
fn a_library_that_is_absent_or_lacks_a_function_leaves_all_to_other_reads() {
    let name = "a_library_that_is_absent_or_lacks_a_function_leaves_all_to_other_reads";
    let folder = tempfile::tempdir().unwrap();
    if std::env::var_os(CHILD).is_some() {
        // In a child, which loads no library before. The parent looks at the output of this
        // process.
        let _fake = fake::Fake::new();
        let (tensors, checkpoint) = two(folder.path());
        let stats = device(load(&tensors, &checkpoint, tune()).unwrap());
        println!("said: {}", stats.cufile_unused.unwrap_or_else(|| "nothing".to_owned()));
        return;
    }
    let said = || {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args([name, "--exact", "--nocapture"]).env(CHILD, "1");
        let output = child.env("LD_LIBRARY_PATH", folder.path()).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
        let (_, said) = text.split_once("said: ").unwrap();
        said.lines().next().unwrap().to_owned()
    };
    let path = folder.path().join("libcufile.so.0");
    // Files that are no libraries keep those of the system from being found.
    std::fs::write(&path, b"no library").unwrap();
    std::fs::write(folder.path().join("libcufile.so"), b"no library").unwrap();
    assert_eq!(said(), "libcufile.so.0 cannot be loaded");
    let library = std::fs::read(files::library()).unwrap();
    for function in FUNCTIONS {
        let mut lacking = library.clone();
        let symbol = [b"\0", function.as_bytes(), b"\0"].concat();
        while let Some(at) = fake::find(&lacking, &symbol) {
            lacking[at + 1] = b'X';
        }
        std::fs::write(&path, &lacking).unwrap();
        let lacks = format!("libcufile.so.0 lacks {function}");
        let old = function == "cuFileSetParameterBool";
        assert_eq!(said(), if old { "nothing".to_owned() } else { lacks });
    }
}

#[test]
fn a_shard_that_is_cut_off_or_written_to_while_it_is_loaded_is_an_error_that_names_it() {
    let fake = CuFile::new();
    for len in [5000, 4 << 20] {
        let folder = tempfile::tempdir().unwrap();
        let (tensors, checkpoint) = two(folder.path());
        let path = checkpoint.sources()[0].path();
        fake.set("late", 5);
        let gpu = Gpu::open(0).unwrap();
        let tensor_requests: Vec<TensorRequest> =
            (0..tensors.len()).map(TensorRequest::whole).collect();
        let loader = Loader::new(tune());
        let outcome = loader.load_device(&gpu, &checkpoint, &tensor_requests, &mut |_| {
            File::options().write(true).open(path).unwrap().set_len(len).unwrap();
            true
        });
        let error = outcome.unwrap_err();
        assert_eq!((error.kind(), error.path()), (ErrorKind::Changed, Some(path)), "{error}");
        drop((gpu, loader));
        fake.assert_clean();
    }
}

#[test]
fn a_load_that_is_stopped_anywhere_ends_and_lets_go_of_its_memory() {
    let fake = CuFile::new();
    let folder = tempfile::tempdir().unwrap();
    let (tensors, checkpoint) = two(folder.path());
    let gpu = Gpu::open(0).unwrap();
    let loader = Loader::new(tune());
    let tensor_requests: Vec<TensorRequest> =
        (0..tensors.len()).map(TensorRequest::whole).collect();
    fake.set("late", 20);
    for stop in 0..8 {
        let mut asked = 0;
        let mut goes_on = |_| {
            asked += 1;
            asked <= stop
        };
        let error =
            loader.load_device(&gpu, &checkpoint, &tensor_requests, &mut goes_on).unwrap_err();
        assert!(error.to_string().contains("stopped"), "{error}");
        // Memory that was given is left alone when the load has returned.
        asked = 0;
        let plan = loader.plan(&checkpoint, &tensor_requests).unwrap();
        let regions = gpu.regions(&plan.regions).unwrap();
        let mut goes_on = |_| {
            asked += 1;
            asked <= stop
        };
        let stopped = loader.fill_device(&gpu, &checkpoint, &plan, &regions, None, &mut goes_on);
        assert!(stopped.unwrap_err().to_string().contains("stopped"));
        let read = fake.cuda.report().copied.get("file_to_device").copied();
        std::thread::sleep(Duration::from_millis(30));
        assert_eq!(fake.cuda.report().copied.get("file_to_device").copied(), read);
        assert!(regions.iter().all(|region| Arc::strong_count(&region.memory) <= regions.len()));
    }
}

#[test]
fn a_read_that_does_not_end_is_an_error_at_its_deadline_and_keeps_its_memory() {
    let fake = CuFile::new();
    let folder = tempfile::tempdir().unwrap();
    let (tensors, checkpoint) = two(folder.path());
    fake.set("late", 4_000);
    let error = load(&tensors, &checkpoint, timeout(Duration::from_millis(300))).unwrap_err();
    assert!(error.to_string().contains("did not come within 0.3 s"), "{error}");
    assert_eq!(error.kind(), ErrorKind::Io);
    // The reads are still under way, and so is their memory.
    assert!(fake.cuda.report().live["device_bytes"] > 0);
    fake.assert_clean();
}

#[test]
fn a_driver_that_does_not_open_in_time_is_gone_without() {
    let fake = CuFile::new();
    let folder = tempfile::tempdir().unwrap();
    let (tensors, checkpoint) = two(folder.path());
    fake.set("late_open", 4_000);
    // The time is for the reads without it as well, which have to come in time.
    let stats = device(load(&tensors, &checkpoint, timeout(Duration::from_secs(3))).unwrap());
    assert_eq!(stats.cufile_unused.unwrap(), "cuFile did not start within 3 s");
    std::thread::sleep(Duration::from_millis(4_200));
    assert_eq!(fake.report().calls("cuFileRead"), 0);
}

#[test]
fn work_of_somebody_else_in_the_memory_is_over_before_it_is_read_to() {
    let fake = CuFile::new();
    let folder = tempfile::tempdir().unwrap();
    let (tensors, checkpoint) = two(folder.path());
    let gpu = Gpu::open(0).unwrap();
    let loader = Loader::new(tune());
    let tensor_requests: Vec<TensorRequest> =
        (0..tensors.len()).map(TensorRequest::whole).collect();
    let plan = loader.plan(&checkpoint, &tensor_requests).unwrap();
    let regions = gpu.regions(&plan.regions).unwrap();
    let stream = theirs::Stream::new(&gpu);
    fake.cuda.set("delay", 3_000);
    let junk = theirs::pinned(4 << 20);
    for region in regions.iter().cycle().take(50 * regions.len()) {
        stream.copy(&junk, region);
    }
    // SAFETY: it is of this GPU and lives until it is dropped below.
    let after = unsafe { ForeignStream::from_raw(stream.handle()) };
    let progress = &mut |_| true;
    let report =
        loader.fill_device(&gpu, &checkpoint, &plan, &regions, Some(after), progress).unwrap();
    assert_eq!(device(report).copies, 0);
    check_filled(&plan, &regions, &tensors, &tensor_requests).unwrap();
    drop((stream, junk));
}

#[test]
fn loads_of_one_checkpoint_go_on_at_the_same_time() {
    let fake = CuFile::new();
    fake.set("late", 2);
    let folder = tempfile::tempdir().unwrap();
    let (tensors, checkpoint) = two(folder.path());
    let loader = Loader::new(tune());
    std::thread::scope(|scope| {
        for ordinal in [0, 1, 0, 1] {
            let (loader, checkpoint, tensors) = (&loader, &checkpoint, &tensors);
            scope.spawn(move || {
                let gpu = Gpu::open(ordinal).unwrap();
                let tensor_requests: Vec<TensorRequest> =
                    (0..tensors.len()).map(TensorRequest::whole).collect();
                let loaded =
                    loader.load_device(&gpu, checkpoint, &tensor_requests, &mut |_| true).unwrap();
                for (number, tensor_request) in tensor_requests.iter().enumerate() {
                    let bytes = loaded.bytes(number).unwrap();
                    assert!(
                        bytes == expected(&tensors[number], tensor_request),
                        "other bytes arrived"
                    );
                }
                assert_eq!(loaded.report.stats.device.as_ref().unwrap().copies, 0);
            });
        }
    });
}

#[test]
fn the_library_for_tests_tells_what_no_correct_program_does() {
    let fake = CuFile::new();
    let folder = tempfile::tempdir().unwrap();
    let (tensors, checkpoint) = two(folder.path());
    load(&tensors, &checkpoint, tune()).unwrap();
    let gpu = Gpu::open(0).unwrap();
    let memory = gpu.allocate(100).unwrap();
    let _context = theirs::Context::bind(0);
    // SAFETY: the types of the functions.
    let (read, give_back, register): (
        extern "C" fn(u64, u64, usize, i64, i64) -> isize,
        extern "C" fn(u64),
        extern "C" fn(u64, usize, i32) -> u64,
    ) = unsafe {
        (
            files::function("cuFileRead"),
            files::function("cuFileHandleDeregister"),
            files::function("cuFileBufRegister"),
        )
    };
    fake.forget();
    assert_eq!(read(7, memory.address(), 100, 0, 0), -5027);
    give_back(7);
    assert_ne!(register(memory.address(), 101, 0), 0);
    assert_eq!(fake.report().violations.len(), 3, "{:?}", fake.report());
    fake.forget();
}
