//! Slices of ranks, and joined tensors, on a device. These are rows of larger boxes. The device copies and casts the
//! rows.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use proptest::prelude::*;
use tensorfs::internal::checkpoint::Checkpoint;
use tensorfs::internal::device::Gpu;
use tensorfs::internal::loader::Loader;
use tensorfs::internal::plan::{Plan, PlanLimits, TensorRequest};
use tensorfs::{CutRules, Dtype, OpenOptions, RenameRules, TensorParallel, View};

use super::common::dense::Dense;
use super::common::requests::limits;
use super::common::{Cut, write_dcp, write_hf};
use super::fake::Fake;
use super::{columns, loader};

const RULES: &str = "
    [[rule]]
    from = 'a'
    cut = 1
    [[rule]]
    from = 'b'
    cut = 0
    parts = 2
    [[rule]]
    from = 'c'
    cut = 1
";

/// Opens the tensors of a rank: `a` and `c` are joined, and `b` has a slice of each half.
fn open(folder: &Path, ranks: u32, rank: u32) -> Arc<Checkpoint> {
    let rules = CutRules::parse("tp.toml".as_ref(), RULES.as_bytes()).unwrap();
    let join = b"[[fuse]]\nfrom = ['a', 'c']\nto = 'ac'\n";
    let view = View {
        shard: Some(TensorParallel { ranks, rank: Some(rank), rules: Some(Arc::new(rules)) }),
        rename: Some(Arc::new(RenameRules::parse("r.toml".as_ref(), join).unwrap())),
        ..View::default()
    };
    Checkpoint::open_with(folder, &OpenOptions { view, ..OpenOptions::default() }).unwrap()
}

fn expected(tensors: &[Cut], ranks: u64, rank: u64) -> [Dense; 2] {
    let own = |size: u64| size / ranks * rank..size / ranks * (rank + 1);
    let [a, b, c] = [0, 1, 2].map(|number| Dense::of(&tensors[number]));
    let ac = Dense::join(&[a.part(1, own(a.shape[1])), c.part(1, own(c.shape[1]))], 0);
    let half = b.shape[0] / 2;
    let second = |range: Range<u64>| range.start + half..range.end + half;
    let b = Dense::join(&[b.part(0, own(half)), b.part(0, second(own(half)))], 0);
    [ac, b]
}

fn check(
    loader: &Loader,
    checkpoint: &Checkpoint,
    right: &[Dense; 2],
    limits: &PlanLimits,
) -> Result<(), TestCaseError> {
    let cast = |tensor, cast| TensorRequest { cast, ..TensorRequest::whole(tensor) };
    let requests =
        [cast(0, None), cast(0, Some(Dtype::Bf16)), cast(1, None), cast(1, Some(Dtype::F32))];
    let gpu = Gpu::open(0).unwrap();
    let plan = Plan::new(checkpoint.catalog(), &requests, limits).unwrap();
    let regions = gpu.regions(&plan.regions).unwrap();
    loader.fill_device(&gpu, checkpoint, &plan, &regions, None, &mut |_| true).unwrap();
    for (request, placement) in requests.iter().zip(&plan.placements) {
        let region = &regions[placement.region as usize];
        let mut bytes = vec![0; placement.len as usize];
        region.memory.read(region.offset + placement.offset, &mut bytes).unwrap();
        let tensor = &right[request.tensor];
        let wanted = request.cast.map_or_else(|| tensor.clone(), |to| tensor.cast(to));
        prop_assert!(bytes == wanted.bytes(), "other bytes arrived for {request:?}");
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn slices_and_joined_tensors_arrive_as_they_are(
        limits in limits(),
        parts in prop::sample::select(vec![1_u64, 2]),
        (ranks, rank) in prop::sample::select(vec![(1, 0), (2, 1), (4, 2), (8, 7)]),
        whole in any::<bool>(),
        direct in any::<bool>(),
        depth in 0usize..9,
        seed in any::<u64>(),
    ) {
        let fake = Fake::new();
        let folder = tempfile::tempdir().unwrap();
        let tensors = [
            columns("a", Dtype::F32, [24, 64], parts),
            columns("b", Dtype::Bf16, [64, 64], parts),
            columns("c", Dtype::F32, [40, 64], parts),
        ];
        if whole { write_hf(folder.path(), &tensors) } else { write_dcp(folder.path(), &tensors) };
        fake.set("seed", seed);
        let limits = PlanLimits { in_place: false, align: limits.align.max(16), ..limits };
        let loader = loader(depth, direct);
        let checkpoint = open(folder.path(), ranks, rank);
        check(&loader, &checkpoint, &expected(&tensors, ranks.into(), rank.into()), &limits)?;
        drop(loader);
        fake.assert_clean();
    }
}
