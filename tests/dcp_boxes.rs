//! Random boxes over random shards, read back through layout, gather and reader.

#![allow(clippy::unwrap_used, reason = "a test that panics has failed, as it should")]

mod common;

use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use common::boxes::checkpoint;
use common::{Box_, Cut, Notes, bytes, dcp_name, read_naively, write_dcp, write_dcp_with};
use proptest::prelude::*;
use tensorfs::internal::cache::verify_on_read::{Checker, ChecksumGate};
use tensorfs::internal::checkpoint::{Checkpoint, Tail};
use tensorfs::internal::counters::Counters;
use tensorfs::internal::io::{Engine, Settings};
use tensorfs::internal::reader::Reader;
use tensorfs::internal::verify::{Recorded, Task, verify};
use tensorfs::{Dtype, ErrorKind};

fn open(tensors: &[Cut]) -> (tempfile::TempDir, tensorfs::Result<Arc<Checkpoint>>) {
    let folder = tempfile::tempdir().unwrap();
    write_dcp(folder.path(), tensors);
    let checkpoint = Checkpoint::open(folder.path());
    (folder, checkpoint)
}

fn flip(path: &Path, at: u64) {
    let file = std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 16], at).unwrap();
}

fn read_all(checkpoint: &Arc<Checkpoint>) -> (Reader, Vec<u8>) {
    let reader = Reader::open(&checkpoint.single_file()).unwrap();
    let mut file = vec![0; reader.len() as usize];
    assert_eq!(reader.read_at(0, &mut file).unwrap(), file.len());
    (reader, file)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn any_boxes_over_any_shards_read_as_the_whole_tensors(tensors in checkpoint()) {
        let (_folder, checkpoint) = open(&tensors);
        let (_, file) = read_all(&checkpoint.unwrap());
        let read = read_naively(&file);
        prop_assert_eq!(read.len(), tensors.len());
        for tensor in &tensors {
            let (dtype, shape, data) = &read[&tensor.name];
            prop_assert_eq!(dtype.as_str(), tensor.dtype.name());
            prop_assert_eq!(shape, &tensor.shape);
            prop_assert_eq!(data, &bytes(&tensor.name, tensor.dtype, &tensor.shape));
        }
    }

    #[test]
    fn any_byte_range_reads_as_that_part_of_the_whole_file(
        tensors in checkpoint(),
        ranges in prop::collection::vec((any::<u64>(), 0usize..9000), 20),
    ) {
        let (_folder, checkpoint) = open(&tensors);
        let (reader, file) = read_all(&checkpoint.unwrap());
        for (offset, len) in ranges {
            let offset = offset % (file.len() as u64 + 10);
            let mut part = vec![0xaa; len];
            let read = reader.read_at(offset, &mut part).unwrap();
            let from = file.get(offset as usize..).unwrap_or_default();
            prop_assert_eq!(read, len.min(from.len()), "a short read inside the file");
            prop_assert_eq!(&part[..read], &from[..read]);
        }
    }

    #[test]
    fn a_box_less_is_a_hole_or_a_smaller_tensor_but_never_other_bytes(
        tensors in checkpoint(), which in any::<prop::sample::Index>(),
    ) {
        let mut tensors = tensors;
        let lost = which.index(tensors[0].boxes.len());
        tensors[0].boxes.remove(lost);
        let (_folder, checkpoint) = open(&tensors);
        match checkpoint {
            Err(error) => prop_assert_eq!(error.kind(), ErrorKind::DcpHole, "{}", error),
            Ok(checkpoint) => {
                // Only a lost end can go unseen: every other tensor is whole, and this one
                // smaller in one dimension or gone.
                let (_, file) = read_all(&checkpoint);
                let read = read_naively(&file);
                if let Some((_, shape, _)) = read.get(&tensors[0].name) {
                    prop_assert!(shape != &tensors[0].shape);
                }
                prop_assert_eq!(checkpoint.tail, Tail::Unproven);
            }
        }
    }

    #[test]
    fn any_number_of_boxes_of_a_tensor_in_one_shard_read_as_the_whole_tensor(
        tensors in checkpoint(), shards in 1usize..4, shapes in any::<bool>(),
    ) {
        let mut tensors = tensors;
        for (shard, _) in tensors.iter_mut().flat_map(|tensor| &mut tensor.boxes) {
            *shard %= shards;
        }
        let folder = tempfile::tempdir().unwrap();
        let notes = if shapes { Notes::WholeShapes } else { Notes::LogicalNames };
        write_dcp_with(folder.path(), &tensors, notes);
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        prop_assert_eq!(checkpoint.tail, if shapes { Tail::Proven } else { Tail::Unproven });
        let (_, file) = read_all(&checkpoint);
        let read = read_naively(&file);
        prop_assert_eq!(read.len(), tensors.len());
        for tensor in &tensors {
            let (_, shape, data) = &read[&tensor.name];
            prop_assert_eq!(shape, &tensor.shape);
            prop_assert_eq!(data, &bytes(&tensor.name, tensor.dtype, &tensor.shape));
        }
    }

    #[test]
    fn a_box_less_is_always_a_hole_where_the_shards_record_the_shape(
        tensors in checkpoint(), which in any::<prop::sample::Index>(),
    ) {
        let mut tensors = tensors;
        let lost = which.index(tensors[0].boxes.len());
        prop_assume!(tensors[0].boxes.len() > 1);
        tensors[0].boxes.remove(lost);
        let folder = tempfile::tempdir().unwrap();
        write_dcp_with(folder.path(), &tensors, Notes::WholeShapes);
        let error = Checkpoint::open(folder.path()).unwrap_err();
        prop_assert_eq!(error.kind(), ErrorKind::DcpHole, "{}", error);
        prop_assert!(error.to_string().contains(&format!("{:?}", tensors[0].shape)), "{}", error);
    }

    #[test]
    fn a_box_that_reaches_into_another_is_an_overlap(tensors in checkpoint()) {
        let mut tensors = tensors;
        let (_, first) = tensors[0].boxes[0].clone();
        // The same corner but smaller, so that it is no replica.
        let dim = first.shape.iter().enumerate().position(|(dim, &size)| {
            size > if dim + 1 == first.shape.len() { 4 } else { 1 }
        });
        prop_assume!(dim.is_some());
        let mut inner = first.clone();
        let dim = dim.unwrap();
        inner.shape[dim] = if dim + 1 == inner.shape.len() { 4 } else { 1 };
        tensors[0].boxes.push((40, inner));
        let (_folder, checkpoint) = open(&tensors);
        prop_assert_eq!(checkpoint.unwrap_err().kind(), ErrorKind::DcpOverlap);
    }

    #[test]
    fn a_replica_changes_nothing(tensors in checkpoint()) {
        let (_folder, checkpoint) = open(&tensors);
        let (_, file) = read_all(&checkpoint.unwrap());
        let mut again = tensors.clone();
        for tensor in &mut again {
            let (_, first) = tensor.boxes[0].clone();
            tensor.boxes.push((50, first));
        }
        let (_folder, checkpoint) = open(&again);
        let checkpoint = checkpoint.unwrap();
        prop_assert_eq!(read_all(&checkpoint).1, file);
        let verified = verify(&checkpoint, &Task::default(), &mut |_| {}).unwrap();
        prop_assert_eq!(verified.replicas, 3);
    }

    #[test]
    fn a_flipped_bit_is_named_and_keeps_its_tensor_alone_behind_the_gate(
        tensors in checkpoint(),
        which in any::<prop::sample::Index>(),
        place in any::<prop::sample::Index>(),
        ranges in prop::collection::vec((any::<u64>(), 1u64..9000), 30),
    ) {
        let (folder, checkpoint) = open(&tensors);
        let store = folder.path().join("store");
        let recorded = || Recorded::load(Some(&store), folder.path());
        let check = |checkpoint: &Arc<Checkpoint>| {
            let recorded = recorded();
            let task = Task { recorded: Some(&recorded), ..Task::default() };
            let verified = verify(checkpoint, &task, &mut |_| {}).unwrap();
            recorded.keep(verified.fresh.clone()).unwrap();
            verified
        };
        let checkpoint = checkpoint.unwrap();
        prop_assert!(check(&checkpoint).unknown > 0);
        prop_assert!(check(&checkpoint).mismatch.is_none());
        let pieces: Vec<(String, usize, Range<u64>)> = checkpoint
            .catalog()
            .tensors()
            .flat_map(|t| t.pieces().map(move |p| (t.name.to_owned(), p.shard.0 as usize, p.range)))
            .collect();
        let (damaged, shard, range) = &pieces[which.index(pieces.len())];
        let at = range.start + place.index((range.end - range.start) as usize) as u64;
        flip(&folder.path().join(&checkpoint.catalog().shards[*shard].name), at);
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let mismatch = check(&checkpoint).mismatch.unwrap();
        prop_assert_eq!(mismatch.tensor(), Some(damaged.as_str()));
        prop_assert_eq!(&mismatch.range, range);
        prop_assert_eq!(mismatch.others, 0);

        let gate = Arc::new(ChecksumGate::of_file(&checkpoint.single_file(), &recorded()).unwrap());
        let counters = Arc::new(Counters::default());
        let engine = Engine::start(Settings::default(), counters.clone());
        let checker = Checker::start(engine, counters, None).unwrap();
        let layout = checkpoint.single_file().layout().unwrap();
        let position = checkpoint.catalog().tensor(damaged).unwrap().position();
        let (send, receive) = std::sync::mpsc::channel();
        let mut asked = Vec::new();
        for (start, len) in ranges {
            let start = start % layout.len();
            let range = start..start + len;
            let (send, number) = (send.clone(), asked.len());
            let answer = move |outcome: Result<(), &tensorfs::Error>| {
                send.send((number, outcome.is_ok())).unwrap();
            };
            gate.when_checked(&checker, range.clone(), Box::new(answer));
            asked.push(range);
        }
        drop(send);
        let answers: Vec<(usize, bool)> = receive.iter().collect();
        prop_assert_eq!(answers.len(), asked.len());
        for (number, ok) in answers {
            let range = asked[number].clone();
            let touches = layout.tensors_in(range.clone()).any(|tensor| tensor == position);
            prop_assert_eq!(ok, !touches, "{:?}", range);
            prop_assert_eq!(gate.is_good(range), ok);
        }
    }
}

#[test]
fn a_pinwheel_of_boxes_in_no_grid_is_proved_and_read() {
    let part =
        |offset: [u64; 2], shape: [u64; 2]| Box_ { offset: offset.into(), shape: shape.into() };
    let boxes = vec![
        (0, part([0, 0], [2, 4])),
        (1, part([0, 4], [4, 2])),
        (2, part([4, 2], [2, 4])),
        (3, part([2, 0], [4, 2])),
        (4, part([2, 2], [2, 2])),
    ];
    let tensor = Cut { name: "w".into(), dtype: Dtype::F32, shape: vec![6, 6], boxes };
    let (_folder, checkpoint) = open(std::slice::from_ref(&tensor));
    let (_, file) = read_all(&checkpoint.unwrap());
    assert_eq!(read_naively(&file)["w"].2, bytes("w", Dtype::F32, &[6, 6]));

    let mut torn = tensor;
    torn.boxes.remove(4);
    let (_folder, checkpoint) = open(&[torn]);
    let message = checkpoint.unwrap_err().to_string();
    assert!(message.contains("tensor `w`: elements [2:4, 2:4] lie in no shard"), "{message}");
    assert!(message.contains(&dcp_name(0)), "{message}");
}

#[test]
fn rows_of_sub_byte_elements_that_end_inside_a_byte_are_refused() {
    let part = |offset: u64, size: u64| Box_ { offset: vec![0, offset], shape: vec![2, size] };
    // Two rows of 3 elements of 6 bits fill no whole bytes, though each piece does.
    let boxes = vec![(0, part(0, 2)), (1, part(2, 2))];
    let tensor = Cut { name: "w".into(), dtype: Dtype::F6E2M3, shape: vec![2, 4], boxes };
    let (_folder, checkpoint) = open(&[tensor]);
    assert_eq!(checkpoint.unwrap_err().kind(), ErrorKind::Misaligned);
}

#[test]
fn a_tensor_in_four_thousand_pieces_is_proved_at_once() {
    const SIDE: u64 = 64;
    let boxes = (0..SIDE * SIDE)
        .map(|n| {
            let offset = vec![n / SIDE * 2, n % SIDE * 2];
            (n as usize, Box_ { offset, shape: vec![2, 2] })
        })
        .collect();
    let shape = vec![2 * SIDE, 2 * SIDE];
    let tensor = Cut { name: "w".into(), dtype: Dtype::U8, shape: shape.clone(), boxes };
    let (_folder, checkpoint) = open(std::slice::from_ref(&tensor));
    let (_, file) = read_all(&checkpoint.unwrap());
    assert_eq!(read_naively(&file)["w"].2, bytes("w", Dtype::U8, &shape));
}

// A reader that had got an error, and then asked the mount, was told of no mismatch.
#[test]
fn a_mismatch_is_counted_before_those_who_wait_for_it_are_answered() {
    let boxes = vec![(0, Box_ { offset: vec![0], shape: vec![8] })];
    let tensor = Cut { name: "w".into(), dtype: Dtype::U8, shape: vec![8], boxes };
    let (folder, checkpoint) = open(&[tensor]);
    let store = folder.path().join("store");
    let recorded = || Recorded::load(Some(&store), folder.path());
    let known = recorded();
    let task = Task { recorded: Some(&known), ..Task::default() };
    let verified = verify(&checkpoint.unwrap(), &task, &mut |_| {}).unwrap();
    known.keep(verified.fresh.clone()).unwrap();
    let shard = folder.path().join(dcp_name(0));
    flip(&shard, std::fs::metadata(&shard).unwrap().len() - 1);

    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let gate = Arc::new(ChecksumGate::of_file(&checkpoint.single_file(), &recorded()).unwrap());
    let counters = Arc::new(Counters::default());
    let engine = Engine::start(Settings::default(), counters.clone());
    let checker = Checker::start(engine, counters.clone(), None).unwrap();
    let (send, receive) = std::sync::mpsc::channel();
    let answer = move |outcome: Result<(), &tensorfs::Error>| {
        send.send((outcome.is_ok(), counters.checksum_mismatches.get())).unwrap();
    };
    let len = checkpoint.single_file().layout().unwrap().len();
    gate.when_checked(&checker, len - 1..len, Box::new(answer));
    assert_eq!(receive.recv_timeout(Duration::from_secs(30)).unwrap(), (false, 1));
}
