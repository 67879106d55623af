//! Tests of views that split and join tensors. Random boxes over random shards are read through
//! layout and reader, loaded, and compared with checksums. The expected values come from a loop
//! over the elements.

#![allow(clippy::unwrap_used, reason = "a test that panics has failed, as it should")]

mod common;

use std::collections::BTreeMap;
use std::fmt::Write;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use common::boxes::checkpoint;
use common::dense::Dense;
use common::requests::limits;
use common::{Cut, read_naively, write_dcp, write_dense_dcp, write_hf};
use proptest::prelude::*;
use tensorfs::internal::cache::verify_on_read::{Checker, ChecksumGate};
use tensorfs::internal::checkpoint::Checkpoint;
use tensorfs::internal::counters::Counters;
use tensorfs::internal::io::{Engine, Settings};
use tensorfs::internal::loader::{Loader, LoaderConfig};
use tensorfs::internal::plan::TensorRequest;
use tensorfs::internal::reader::Reader;
use tensorfs::internal::verify::{Recorded, Task, verify};
use tensorfs::{
    CutRules, Dtype, DtypeCast, ErrorKind, Links, OpenOptions, RenameRules, TensorParallel, View,
};

type Tensors = BTreeMap<String, Dense>;

/// How a tensor is split, and how the parts are joined.
#[derive(Clone, Debug)]
struct Choice {
    dim: usize,
    cuts: Vec<u16>,
    /// The order in which parts are joined; those that are left keep their names.
    order: Vec<u16>,
}

fn choice() -> impl Strategy<Value = Choice> {
    let numbers = || prop::collection::vec(any::<u16>(), 1..4);
    (0usize..4, numbers(), numbers()).prop_map(|(dim, cuts, order)| Choice { dim, cuts, order })
}

/// The sizes of parts of a dimension, multiples of 4 in the last one: whole bytes for every dtype.
fn sizes(size: u64, is_last: bool, cuts: &[u16]) -> Vec<u64> {
    let step = if is_last { 4 } else { 1 };
    let mut ends: Vec<u64> = cuts.iter().map(|&cut| u64::from(cut) * step % size.max(1)).collect();
    ends.extend([0, size]);
    ends.sort_unstable();
    ends.dedup();
    ends.windows(2).map(|pair| pair[1] - pair[0]).collect()
}

/// Rules for `tensors`, and the tensors that they give.
fn rules_for(tensors: &[Cut], choices: &[Choice]) -> (String, Tensors) {
    let (mut text, mut expected) = (String::new(), Tensors::new());
    for (number, (tensor, choice)) in tensors.iter().zip(choices).enumerate() {
        let whole = Dense::of(tensor);
        let dim = choice.dim % tensor.shape.len();
        let sizes = sizes(tensor.shape[dim], dim + 1 == tensor.shape.len(), &choice.cuts);
        if sizes.len() < 2 {
            expected.insert(tensor.name.clone(), whole);
            continue;
        }
        let names: Vec<String> =
            (0..sizes.len()).map(|part| format!("part{number}{part}")).collect();
        let negative = dim as i64 - tensor.shape.len() as i64;
        writeln!(text, "[[split]]\nfrom = '{}'\nto = {names:?}\nsizes = {sizes:?}", tensor.name)
            .unwrap();
        writeln!(text, "dim = {}", if number == 1 { negative } else { dim as i64 }).unwrap();
        let ends = sizes.iter().scan(0, |end, size| {
            *end += size;
            Some(*end)
        });
        let parts: Vec<Dense> =
            ends.zip(&sizes).map(|(end, size)| whole.part(dim, end - size..end)).collect();
        let mut order: Vec<usize> =
            choice.order.iter().map(|&at| usize::from(at) % parts.len()).collect();
        order.sort_unstable_by_key(|&at| (choice.cuts[0].wrapping_mul(31 * at as u16), at));
        order.dedup();
        if order.len() > 1 {
            let from: Vec<&String> = order.iter().map(|&at| &names[at]).collect();
            writeln!(text, "[[fuse]]\nfrom = {from:?}\nto = 'joined{number}'\ndim = {dim}")
                .unwrap();
            let joined: Vec<Dense> = order.iter().map(|&at| parts[at].clone()).collect();
            expected.insert(format!("joined{number}"), Dense::join(&joined, dim));
        } else {
            order.clear();
        }
        let left = (0..parts.len()).filter(|at| !order.contains(at));
        expected.extend(left.map(|at| (names[at].clone(), parts[at].clone())));
    }
    (text, expected)
}

fn view(rules: &str, dtype: Option<Dtype>) -> OpenOptions {
    let rename = (!rules.is_empty())
        .then(|| Arc::new(RenameRules::parse(Path::new("rules.toml"), rules.as_bytes()).unwrap()));
    let view = View { rename, dtype: dtype.map(DtypeCast::To), ..View::default() };
    OpenOptions { view, ..OpenOptions::default() }
}

fn read_all(checkpoint: &Arc<Checkpoint>) -> (Reader, Vec<u8>) {
    let reader = Reader::open(&checkpoint.single_file()).unwrap();
    let mut file = vec![0; reader.len() as usize];
    assert_eq!(reader.read_at(0, &mut file).unwrap(), file.len());
    (reader, file)
}

/// The options for a rank, whose tensors are cut by these rules.
fn rank_of(rules: &str, ranks: u32, rank: u32) -> OpenOptions {
    let rules = CutRules::parse(Path::new("tp.toml"), rules.as_bytes()).unwrap();
    let shard = Some(TensorParallel { ranks, rank: Some(rank), rules: Some(Arc::new(rules)) });
    OpenOptions { view: View { shard, ..View::default() }, ..OpenOptions::default() }
}

fn is_wide_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::Bf16)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn split_and_joined_tensors_read_and_load_as_a_loop_over_their_elements_makes_them(
        tensors in checkpoint(),
        choices in prop::collection::vec(choice(), 3),
        form in 0usize..3,
        dtype in prop::option::of(prop::sample::select(vec![Dtype::F32, Dtype::Bf16])),
        ranges in prop::collection::vec((any::<u64>(), 0usize..9000), 10),
        parts in prop::collection::vec(prop::collection::vec((any::<u16>(), any::<u16>()), 4), 12),
        limits in limits(),
        depth in 0usize..4,
    ) {
        let folder = tempfile::tempdir().unwrap();
        [write_hf, write_dcp, write_dense_dcp][form](folder.path(), &tensors);
        let (rules, mut expected) = rules_for(&tensors, &choices);
        for tensor in expected.values_mut() {
            if let Some(to) = dtype.filter(|_| is_wide_float(tensor.dtype)) {
                *tensor = tensor.cast(to);
            }
        }
        let store = tempfile::tempdir().unwrap();
        let options = OpenOptions { index: Some(store.path().into()), ..view(&rules, dtype) };
        let first = Checkpoint::open_with(folder.path(), &options).unwrap();
        // The record of the view beside the index gives the same.
        let checkpoint = Checkpoint::open_with(folder.path(), &options).unwrap();
        prop_assert_eq!(first.catalog(), checkpoint.catalog());
        let (reader, file) = read_all(&checkpoint);
        let read = read_naively(&file);
        prop_assert_eq!(read.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
        for (name, tensor) in &expected {
            let found = (read[name].0.as_str(), &read[name].1, &read[name].2);
            prop_assert_eq!(found, (tensor.dtype.name(), &tensor.shape, &tensor.bytes()), "{}", name);
        }
        for (offset, len) in ranges {
            let offset = offset % (file.len() as u64 + 10);
            let mut part = vec![0xaa; len];
            let count = reader.read_at(offset, &mut part).unwrap();
            let from = file.get(offset as usize..).unwrap_or_default();
            prop_assert_eq!(&part[..count], &from[..len.min(from.len())]);
        }
        let mut requests = Vec::new();
        for (number, choices) in parts.iter().enumerate() {
            let tensor = checkpoint.catalog().tensor_at(number % expected.len());
            // The last dimension at multiples of 4, as above.
            let range = |(dim, &size): (usize, &u64)| {
                let step = if dim + 1 == tensor.shape.len() { 4 } else { 1 };
                let (a, b) = choices.get(dim).map_or((0, u16::MAX), |&pair| pair);
                let (a, b) = (u64::from(a) % (size / step + 1), u64::from(b) % (size / step + 1));
                a.min(b) * step..a.max(b) * step
            };
            let part = (number % 3 > 0).then(|| tensor.shape.iter().enumerate().map(range).collect());
            requests.push(TensorRequest { part, ..TensorRequest::whole(tensor.position()) });
        }
        let loader = Loader::new(LoaderConfig { depth, limits, ..LoaderConfig::default() });
        let loaded = loader.load(&checkpoint, &requests, &mut |_| true).unwrap();
        for (number, request) in requests.iter().enumerate() {
            let name = checkpoint.catalog().tensor_at(request.tensor).name;
            let all: Vec<Range<u64>> = expected[name].shape.iter().map(|&size| 0..size).collect();
            let part = request.part.as_ref().unwrap_or(&all);
            let right = expected[name].box_of(part).bytes();
            prop_assert_eq!(loaded.bytes(number), &right[..], "{} {:?}", name, part);
            let mut copy = vec![0; right.len()];
            let part = request.part.as_deref();
            if loader.copy_from_page_cache(&checkpoint, request.tensor, part, &mut copy).unwrap() {
                prop_assert_eq!(copy, right);
            }
        }
    }

    #[test]
    fn every_rank_has_the_slices_that_torch_chunk_gives_it_and_together_they_are_the_tensors(
        tensors in checkpoint(),
        dims in prop::collection::vec(0usize..4, 3),
        halves in any::<[bool; 3]>(),
        ranks in 1u32..9,
        form in 0usize..3,
        limits in limits(),
    ) {
        let folder = tempfile::tempdir().unwrap();
        [write_hf, write_dcp, write_dense_dcp][form](folder.path(), &tensors);
        let mut rules = String::new();
        let mut dim_of = BTreeMap::new();
        for (number, tensor) in tensors.iter().enumerate() {
            let dim = dims[number] % tensor.shape.len();
            let is_last = dim + 1 == tensor.shape.len();
            // Elements of fewer than 8 bits would be cut inside a byte.
            if tensor.dtype.bits() % 8 != 0 && is_last {
                continue;
            }
            let parts = if halves[number] && tensor.shape[dim].is_multiple_of(2) { 2 } else { 1 };
            writeln!(rules, "[[rule]]\nfrom = '{}'\ncut = {dim}\nparts = {parts}", tensor.name).unwrap();
            dim_of.insert(tensor.name.clone(), (dim, parts));
        }
        prop_assume!(!rules.is_empty());
        let store = tempfile::tempdir().unwrap();
        for rank in 0..ranks {
            let index = Some(store.path().into());
            let options = OpenOptions { index, ..rank_of(&rules, ranks, rank) };
            let first = Checkpoint::open_with(folder.path(), &options).unwrap();
            let checkpoint = Checkpoint::open_with(folder.path(), &options).unwrap();
            prop_assert_eq!(first.catalog(), checkpoint.catalog());
            let read = read_naively(&read_all(&checkpoint).1);
            let loader = Loader::new(LoaderConfig { limits, ..LoaderConfig::default() });
            for (number, tensor) in tensors.iter().enumerate() {
                let whole = Dense::of(tensor);
                let right = match dim_of.get(&tensor.name) {
                    None => whole,
                    Some(&(dim, parts)) => {
                        let part_len = tensor.shape[dim] / parts;
                        let chunk = part_len.div_ceil(u64::from(ranks));
                        let own = |part: u64| {
                            let at = |rank: u32| part * part_len + (chunk * u64::from(rank)).min(part_len);
                            whole.part(dim, at(rank)..at(rank + 1))
                        };
                        Dense::join(&(0..parts).map(own).collect::<Vec<_>>(), dim)
                    }
                };
                let found = &read[&tensor.name];
                prop_assert_eq!((&found.1, &found.2), (&right.shape, &right.bytes()), "rank {} of {}", rank, ranks);
                let request = TensorRequest::whole(number);
                let loaded = loader.load(&checkpoint, &[request], &mut |_| true).unwrap();
                prop_assert_eq!(loaded.bytes(0), &right.bytes()[..]);
            }
        }
    }

    #[test]
    fn a_flipped_bit_closes_every_tensor_that_has_bytes_of_the_damaged_one(
        tensors in checkpoint(),
        choices in prop::collection::vec(choice(), 3),
        which in any::<prop::sample::Index>(),
        place in any::<prop::sample::Index>(),
    ) {
        let folder = tempfile::tempdir().unwrap();
        write_dcp(folder.path(), &tensors);
        let store = folder.path().join("store");
        let recorded = || Recorded::load(Some(&store), folder.path());
        let (rules, _) = rules_for(&tensors, &choices);
        let options = view(&rules, None);
        let source = Checkpoint::open(folder.path()).unwrap();
        let task_record = recorded();
        let task = Task { recorded: Some(&task_record), ..Task::default() };
        let verified = verify(&source, &task, &mut |_| {}).unwrap();
        task_record.keep(verified.fresh.clone()).unwrap();

        let pieces: Vec<_> = source.catalog().tensors().flat_map(|tensor| tensor.pieces()).collect();
        let piece = &pieces[which.index(pieces.len())];
        let at = piece.range.start + place.index(piece.len() as usize) as u64;
        let path = folder.path().join(&source.catalog().shard(piece.shard).name);
        let shard = std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
        let mut byte = [0];
        shard.read_exact_at(&mut byte, at).unwrap();
        shard.write_all_at(&[byte[0] ^ 1], at).unwrap();

        let checkpoint = Checkpoint::open_with(folder.path(), &options).unwrap();
        let file = checkpoint.single_file();
        let gate = Arc::new(ChecksumGate::of_file(&file, &recorded()).unwrap());
        let counters = Arc::new(Counters::default());
        let engine = Engine::start(Settings::default(), counters.clone());
        let checker = Checker::start(engine, counters, None).unwrap();
        let layout = file.layout().unwrap();
        let (send, receive) = std::sync::mpsc::channel();
        let mut bad = Vec::new();
        for (position, start) in layout.tensors() {
            let tensor = checkpoint.catalog().tensor_at(position);
            let is_bad = tensor.pieces().any(|own| own.shard == piece.shard && own.range.contains(&at));
            let is_close = tensor.pieces().any(|own| {
                own.shard == piece.shard && own.range.start < piece.range.end && piece.range.start < own.range.end
            });
            prop_assert!(is_close || !is_bad);
            bad.push(is_close);
            let (send, number) = (send.clone(), bad.len() - 1);
            let answer = move |outcome: Result<(), &tensorfs::Error>| send.send((number, outcome.is_ok())).unwrap();
            gate.when_checked(&checker, start..start + tensor.len.max(1), Box::new(answer));
        }
        drop(send);
        for (number, ok) in receive.iter() {
            // An empty range at the end of a tensor belongs to the next one.
            prop_assert_eq!(ok, !bad[number], "tensor {}", number);
        }
    }
}

/// A reader of one file of `tensors` by these rules, or why there is none.
fn open(tensors: &[(&str, Dtype, &[u64])], rules: &str) -> tensorfs::Result<Arc<Checkpoint>> {
    let folder = tempfile::tempdir().unwrap();
    let content = |len: u64| vec![7; len as usize];
    let tensors: Vec<_> = tensors
        .iter()
        .map(|&(name, dtype, shape)| {
            let len = shape.iter().product::<u64>() * dtype.bits() / 8;
            (name, dtype, shape, content(len))
        })
        .collect();
    common::write_shard(&folder.path().join("model.safetensors"), &BTreeMap::new(), &tensors);
    Checkpoint::open_with(folder.path(), &view(rules, None))
}

#[test]
fn rules_that_do_not_fit_are_refused_in_one_line_with_file_rule_and_tensor() {
    let own: &[(&str, Dtype, &[u64])] = &[
        ("a", Dtype::F32, &[6, 4]),
        ("b", Dtype::F32, &[6, 2]),
        ("c", Dtype::F16, &[6, 4]),
        ("d", Dtype::F32, &[6]),
        ("half", Dtype::F4, &[2, 10]),
        ("x.1", Dtype::U8, &[2]),
        ("y.1", Dtype::U8, &[2]),
        ("x.2", Dtype::U8, &[2]),
    ];
    for (rules, said) in [
        (
            "[[split]]\nfrom = 'a'\nto = ['p', 'q']\nsizes = [1, 2]",
            ["split rule 1, from = `a`", "do not add up to 6"],
        ),
        ("[[split]]\nfrom = 'a'\nto = ['p', 'q', 'r', 's']", ["tensor `a`", "4 equal parts"]),
        ("[[split]]\nfrom = 'a'\nto = ['p', 'q']\ndim = 2", ["tensor `a`", "no dimension 2"]),
        ("[[split]]\nfrom = 'a'\nto = ['p', 'q']\ndim = -3", ["tensor `a`", "no dimension -3"]),
        ("[[split]]\nregex = 'a(z?)'\nto = ['p', '$1']", ["tensor `a`", "leaves no name"]),
        ("[[split]]\nregex = 'none'\nto = ['p', 'q']", ["split rule 1", "splits none of the 8"]),
        ("[[split]]\nfrom = 'a'\nto = ['p', 'b']", ["tensor `b`", "by no rule"]),
        ("[[split]]\nfrom = 'a'\nto = ['p', 'p']", ["tensor `p`", "by split rule 1"]),
        (
            "[[split]]\nfrom = 'half'\nto = ['p', 'q']\ndim = 1",
            ["split rule 1, from = `half`", "bytes"],
        ),
        ("[[fuse]]\nfrom = ['a', 'b']\nto = 'ab'", ["fuse rule 1, from = `a`, `b`", "F32 [6, 2]"]),
        ("[[fuse]]\nfrom = ['a', 'c']\nto = 'ab'", ["tensor `ab`", "`c` is F16"]),
        ("[[fuse]]\nfrom = ['a', 'd']\nto = 'ab'", ["tensor `ab`", "F32 [6]"]),
        (
            "[[fuse]]\nfrom = ['a', 'gone']\nto = 'ab'",
            ["tensor `ab`", "2 of 2 is missing; found `a`"],
        ),
        ("[[fuse]]\nfrom = ['none', 'gone']\nto = 'ab'", ["fuse rule 1", "joins none of the 8"]),
        ("[[fuse]]\nfrom = ['a', 'b']\nto = 'c'\ndim = 1", ["tensor `c`", "by no rule"]),
        ("[[fuse]]\nfrom = ['a', 'b']\nto = 'z'\ndim = 2", ["tensor `z`", "no dimension 2"]),
        (
            "[[fuse]]\nregex = ['^x', '^y']\nto = 'z'",
            ["tensor `z.2`", "2 of 2 is missing; found `x.2`"],
        ),
        (
            "[[fuse]]\nregex = ['^x..', '^y..']\nto = 'z'",
            ["tensor `x.2`", "`x.1` and `x.2` in the same place"],
        ),
    ] {
        let error = open(own, rules).map(drop).unwrap_err();
        let message = error.to_string();
        assert!(matches!(error.kind(), ErrorKind::View | ErrorKind::Misaligned), "{message}");
        let words = ["rules.toml"].into_iter().chain(said);
        let words: Vec<&str> = words.filter(|word| !message.contains(word)).collect();
        assert!(words.is_empty() && !message.contains('\n'), "{rules}\n{message}\nlacks {words:?}");
    }
    assert!(open(own, "[[fuse]]\nfrom = ['a', 'b']\nto = 'a'\ndim = -1").is_ok());
}

#[test]
fn a_part_along_the_first_dimension_reads_its_own_bytes_and_no_others() {
    let folder = tempfile::tempdir().unwrap();
    let data: Vec<u8> = (0..1_u32 << 18).flat_map(u32::to_le_bytes).collect();
    let path = folder.path().join("model.safetensors");
    let tensor = ("w", Dtype::U32, &[1 << 10, 1 << 8][..], data.clone());
    common::write_shard(&path, &BTreeMap::new(), &[tensor]);
    let rules = "[[split]]\nfrom = 'w'\nto = ['p0', 'p1', 'p2', 'p3', 'p4', 'p5', 'p6', 'p7']";
    let checkpoint = Checkpoint::open_with(folder.path(), &view(rules, None)).unwrap();
    let loader = Loader::new(LoaderConfig::default());
    for number in 0..8 {
        let request = TensorRequest::whole(number);
        let loaded = loader.load(&checkpoint, &[request], &mut |_| true).unwrap();
        assert_eq!(loaded.bytes(0), &data[number << 17..(number + 1) << 17]);
        assert_eq!(loaded.report.stats.read, 1 << 17);
    }
}

#[test]
fn a_rank_of_eight_moves_its_own_bytes_where_tensors_are_cut_in_the_first_dimension() {
    let folder = tempfile::tempdir().unwrap();
    let names: Vec<String> = (0..8).map(|number| format!("w{number}")).collect();
    let tensors: Vec<_> = names
        .iter()
        .map(|name| {
            (
                name.as_str(),
                Dtype::Bf16,
                &[2048, 256][..],
                common::bytes(name, Dtype::Bf16, &[2048, 256]),
            )
        })
        .collect();
    common::write_shard(&folder.path().join("model.safetensors"), &BTreeMap::new(), &tensors);
    for rank in 0..8 {
        let options = rank_of("[[rule]]\nregex = 'w'\ncut = 0", 8, rank);
        let checkpoint = Checkpoint::open_with(folder.path(), &options).unwrap();
        let requests: Vec<_> = (0..8).map(TensorRequest::whole).collect();
        let loader = Loader::new(LoaderConfig::default());
        let loaded = loader.load(&checkpoint, &requests, &mut |_| true).unwrap();
        let own: u64 = checkpoint.catalog().data_len();
        assert_eq!(own, 8 * 2048 * 256 * 2 / 8);
        let read = loaded.report.stats.read;
        assert!(read <= own + own / 10, "{read} bytes read for {own}");
    }
}

#[test]
fn ranks_that_the_units_do_not_fit_are_refused_and_a_rule_may_repeat_units() {
    let folder = tempfile::tempdir().unwrap();
    let content = common::bytes("k", Dtype::U8, &[8, 3]);
    let tensors = [("k", Dtype::U8, &[8, 3][..], content.clone())];
    common::write_shard(&folder.path().join("model.safetensors"), &BTreeMap::new(), &tensors);
    let open = |rules: &str, ranks, rank| {
        Checkpoint::open_with(folder.path(), &rank_of(rules, ranks, rank))
            .map_err(|e| e.to_string())
    };
    let rule = "[[rule]]\nfrom = 'k'\ncut = 0\nunits = 4\n";
    for (rules, ranks, said) in [
        (
            rule,
            8,
            [
                "rule 1, from = `k`",
                "4 units cannot be given to 8 ranks evenly; a rule with replicate",
            ],
        ),
        (rule, 3, ["tensor `k`", "to 3 ranks evenly; choose another number"]),
        ("[[rule]]\nfrom = 'k'\ncut = 0\nunits = 3\n", 1, ["8 indices of dimension 0", "3 units"]),
        ("[[rule]]\nfrom = 'k'\ncut = 0\nunits = 'heads'\n", 2, ["config.json", "tp.toml"]),
        ("[[rule]]\nfrom = 'k'\ncut = 2\n", 2, ["tensor `k`", "no dimension 2"]),
        ("[[rule]]\nfrom = 'k'\ncut = 0\nparts = 3\n", 2, ["3 equal parts", "8 in dimension 0"]),
        ("[[rule]]\nfrom = 'k'\ncut = 0\nparts = [1, 2]\n", 2, ["[1, 2]", "8 in dimension 0"]),
        ("[[rule]]\nfrom = 'k'\nrefuse = 'not this one'\n", 2, ["tensor `k`", "not this one"]),
        ("[[rule]]\nregex = 'v'\ncut = 0\n", 2, ["tp=2", "matches none of the 1 tensors"]),
    ] {
        let error = open(rules, ranks, 0).map(drop).unwrap_err();
        assert!(said.iter().all(|word| error.contains(word)) && !error.contains('\n'), "{error}");
    }
    let replicated = format!("{rule}replicate = true\n");
    for rank in 0..8 {
        let checkpoint = open(&replicated, 8, rank).unwrap();
        let read = read_naively(&read_all(&checkpoint).1);
        let first = rank as usize / 2 * 2 * 3;
        assert_eq!(read["k"].2, &content[first..first + 6]);
    }
}

/// The view of rank 0 of 2 by the rules of the family that `config.json` names.
fn of_family() -> View {
    View { shard: Some(TensorParallel { ranks: 2, rank: Some(0), rules: None }), ..View::default() }
}

/// A small Llama in two shards, without a `config.json`, in the new folder `folder`.
fn write_llama(folder: &Path) {
    std::fs::create_dir_all(folder).unwrap();
    for (number, names) in [
        ["model.embed_tokens.weight", "model.norm.weight"],
        ["a.mlp.up_proj.weight", "b.mlp.up_proj.weight"],
    ]
    .iter()
    .enumerate()
    {
        let tensor = |name: &&'static str| (*name, Dtype::U8, &[4, 2][..], vec![7; 8]);
        let tensors: Vec<_> = names.iter().map(tensor).collect();
        let name = format!("model-{:05}-of-00002.safetensors", number + 1);
        common::write_shard(&folder.join(name), &BTreeMap::new(), &tensors);
    }
}

#[test]
fn the_config_of_a_hub_cache_is_found_through_its_link() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("models--a--b");
    let (blobs, snapshot) = (model.join("blobs"), model.join("snapshots/1"));
    write_llama(&blobs);
    std::fs::create_dir_all(&snapshot).unwrap();
    std::fs::write(blobs.join("config.json"), r#"{"model_type": "llama"}"#).unwrap();
    for entry in std::fs::read_dir(&blobs).unwrap() {
        let name = entry.unwrap().file_name();
        let target = Path::new("../../blobs").join(&name);
        std::os::unix::fs::symlink(target, snapshot.join(name)).unwrap();
    }
    let shape = |checkpoint: Arc<Checkpoint>| {
        checkpoint.catalog().tensor("model.embed_tokens.weight").unwrap().shape.to_vec()
    };
    let shard = snapshot.join("model-00001-of-00002.safetensors");
    let opened = Checkpoint::open(&snapshot).unwrap().viewed(&of_family()).unwrap();
    assert_eq!(shape(opened), [2, 2]);
    let opened = Checkpoint::of_files(std::slice::from_ref(&shard)).unwrap();
    assert_eq!(shape(opened.viewed(&of_family()).unwrap()), [2, 2]);
    let inside = OpenOptions { view: of_family(), links: Links::Inside, ..OpenOptions::default() };
    for source in [&snapshot, &shard] {
        assert_eq!(shape(Checkpoint::open_with(source, &inside).unwrap()), [2, 2]);
    }
}

#[test]
fn a_config_that_is_no_file_or_lies_outside_is_refused_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model");
    write_llama(&model);
    let (shard, config) =
        (model.join("model-00001-of-00002.safetensors"), model.join("config.json"));
    let files = std::slice::from_ref(&shard);
    let opened = || Checkpoint::of_files(files).unwrap().viewed(&of_family());
    let refused = |said: &str| {
        let message = opened().map(drop).unwrap_err().to_string();
        assert!(message.contains(said) && !message.contains('\n'), "{message}");
    };
    refused("there is no config.json");
    std::fs::create_dir(&config).unwrap();
    refused("config.json is a folder");
    std::fs::remove_dir(&config).unwrap();
    let socket = std::os::unix::net::UnixListener::bind(&config).unwrap();
    refused("config.json is neither a file nor a folder");
    drop(socket);
    std::fs::remove_file(&config).unwrap();
    let target = folder.path().join("elsewhere.json");
    std::os::unix::fs::symlink(&target, &config).unwrap();
    refused("config.json is a link that leads nowhere");
    std::fs::write(&target, r#"{"model_type": "llama"}"#).unwrap();
    opened().unwrap();
    let options = OpenOptions { view: of_family(), links: Links::Inside, ..OpenOptions::default() };
    for source in [&model, &shard] {
        let message = Checkpoint::open_with(source, &options).map(drop).unwrap_err().to_string();
        assert!(
            message.contains("config.json is a link that leads out of the source"),
            "{message}"
        );
    }
    let options = OpenOptions { follow: vec![folder.path().to_owned()], ..options };
    for source in [&model, &shard] {
        Checkpoint::open_with(source, &options).unwrap();
    }
}

#[test]
fn the_rules_of_a_family_apply_to_one_shard_and_to_lists_of_shards() {
    let folder = tempfile::tempdir().unwrap();
    write_llama(folder.path());
    std::fs::write(folder.path().join("config.json"), r#"{"model_type": "llama"}"#).unwrap();
    let shards: Vec<_> = [1, 2]
        .iter()
        .map(|n| folder.path().join(format!("model-{n:05}-of-00002.safetensors")))
        .collect();
    for (files, cut) in [(&shards[..1], 1), (&shards[1..], 2), (&shards[..], 3)] {
        let checkpoint = Checkpoint::of_files(files).unwrap().viewed(&of_family()).unwrap();
        let halves = checkpoint.catalog().tensors().filter(|tensor| tensor.shape == [2, 2]);
        assert_eq!(halves.count(), cut);
    }
    let norms = folder.path().join("other.safetensors");
    common::write_shard(&norms, &BTreeMap::new(), &[("norm", Dtype::U8, &[4, 2], vec![7; 8])]);
    let refused = Checkpoint::of_files(&[norms]).unwrap().viewed(&of_family());
    let message = refused.map(drop).unwrap_err().to_string();
    assert!(message.contains("the rules for llama: they match none of the 1 tensors"), "{message}");
}

#[test]
fn a_dimension_of_nearly_all_64_bits_is_cut_without_overflow() {
    let folder = tempfile::tempdir().unwrap();
    let size = u64::MAX;
    let tensors = [("k", Dtype::U8, &[size, 0][..], Vec::new())];
    common::write_shard(&folder.path().join("model.safetensors"), &BTreeMap::new(), &tensors);
    for (ranks, own) in [(1, size), (2, size / 2), (7, size - 6 * size.div_ceil(7))] {
        let options = rank_of("[[rule]]\nfrom = 'k'\ncut = 0", ranks, ranks - 1);
        let checkpoint = Checkpoint::open_with(folder.path(), &options).unwrap();
        assert_eq!(checkpoint.catalog().tensor("k").unwrap().shape, [own, 0]);
    }
}

#[test]
fn a_narrow_column_of_a_wide_tensor_reads_in_bounded_memory() {
    let folder = tempfile::tempdir().unwrap();
    let (rows, columns) = (3000_u64, 20_000_u64);
    let value = |at: u64| ((at * 7919) >> 5) as u8;
    let data: Vec<u8> = (0..rows * columns).map(value).collect();
    let path = folder.path().join("model.safetensors");
    common::write_shard(&path, &BTreeMap::new(), &[("w", Dtype::U8, &[rows, columns][..], data)]);
    let rules = "[[split]]\nfrom = 'w'\nto = ['narrow', 'wide']\ndim = 1\nsizes = [8, 19992]";
    let checkpoint = Checkpoint::open_with(folder.path(), &view(rules, None)).unwrap();
    let (_, file) = read_all(&checkpoint);
    let read = read_naively(&file);
    let right: Vec<u8> =
        (0..rows).flat_map(|row| (0..8).map(move |at| value(row * columns + at))).collect();
    assert!(read["narrow"].2 == right);
    let right = (0..rows).flat_map(|row| (8..columns).map(move |at| value(row * columns + at)));
    assert!(read["wide"].2 == right.collect::<Vec<u8>>());
}
