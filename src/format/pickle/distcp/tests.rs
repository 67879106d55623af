//! Tests of `.metadata`, and of the items that it lists.

use super::*;
use crate::format::pickle::chosen::ShownTensor;
use crate::format::pickle::parse_items;

const SMALL: &[u8] = include_bytes!("../../../../tests/fixtures/torch/dcp_small/.metadata");
const FILE: &[u8] = include_bytes!("../../../../tests/fixtures/torch/dcp_small/__0_0.distcp");

fn parsed(bytes: &[u8]) -> Result<DistcpMetadata, Fault> {
    DistcpMetadata::parse(bytes, TrainingState::None)
}

/// Parses `SMALL` after each `from` in it is replaced by `to`, which has the same length.
fn changed(from: &[u8], to: &[u8]) -> Result<DistcpMetadata, Fault> {
    assert_eq!(from.len(), to.len());
    let mut bytes = SMALL.to_vec();
    let mut count = 0;
    for at in 0..=bytes.len() - from.len() {
        if bytes[at..].starts_with(from) {
            bytes[at..at + from.len()].copy_from_slice(to);
            count += 1;
        }
    }
    assert!(count > 0, "{from:?}");
    parsed(&bytes)
}

#[test]
fn the_chunks_of_a_checkpoint_are_found_by_file_in_the_order_of_their_bytes() {
    let metadata = parsed(SMALL).unwrap();
    let names: Vec<&str> = metadata.files.keys().map(String::as_str).collect();
    assert_eq!(names, ["__0_0.distcp", "__1_0.distcp", "__2_0.distcp"]);
    assert_eq!(metadata.named.len(), 3);
    assert_eq!(metadata.left_out, None);
    let chunks = &metadata.files["__1_0.distcp"];
    let found: Vec<_> = chunks
        .iter()
        .map(|chunk| (chunk.tensor.name.as_str(), chunk.offset.clone(), chunk.shape.clone()))
        .collect();
    assert_eq!(found[0], ("layers.0.weight", vec![3, 0], vec![3, 5]));
    assert_eq!(
        (chunks[0].tensor.dtype, chunks[0].tensor.shape.as_slice()),
        (Dtype::F32, &[7, 5][..])
    );
    assert!(chunks.windows(2).all(|pair| pair[0].item.0 + pair[0].item.1 <= pair[1].item.0));
}

#[test]
fn the_items_of_a_file_fill_it_with_those_that_are_not_shown() {
    let bytes = include_bytes!("../../../../tests/fixtures/torch/dcp_torch22/.metadata");
    let file = include_bytes!("../../../../tests/fixtures/torch/dcp_torch22/__0_0.distcp");
    let metadata = parsed(bytes).unwrap();
    let items = &metadata.named["__0_0.distcp"];
    let end = items.iter().try_fold(0, |at, (start, len)| (at == *start).then_some(at + len));
    assert_eq!(end, Some(file.len() as u64));
    assert!(metadata.files["__0_0.distcp"].len() < items.len());
}

#[test]
fn a_value_of_another_form_is_refused_with_what_it_is() {
    for (from, to, kind, word) in [
        (&b"1.0.0"[..], &b"2.0.0"[..], ErrorKind::HeaderDecode, "the version `2.0.0`"),
        (b"Metadata\x94", b"Metadatb\x94", ErrorKind::HeaderDecode, "in place of a `Metadata`"),
        (b"float32", b"float33", ErrorKind::UnknownDtype, "`torch.float33`"),
        (b"torch.strided", b"torch.sparse_", ErrorKind::HeaderDecode, "`torch.sparse_`"),
        (b"_get_layout", b"_gut_layout", ErrorKind::HeaderDecode, "`TensorProperties`"),
        (b"__1_0.distcp", b"../0.distcp_", ErrorKind::UnsafePath, "`../0.distcp_`"),
        (b"__1_0.distcp", b"__1_0.distcx", ErrorKind::UnsafePath, "`__1_0.distcx`"),
        (b"storage_data", b"storage_dato", ErrorKind::HeaderDecode, "`storage_data`"),
        (b"relative_path", b"relative_pat_", ErrorKind::HeaderDecode, "its place"),
    ] {
        let fault = changed(from, to).unwrap_err();
        assert_eq!(fault.kind, kind, "{fault}");
        assert!(fault.message.contains(word), "{fault}");
    }
}

#[test]
fn paths_that_do_not_make_the_names_leave_the_names_as_they_are() {
    let metadata = changed(b"planner_data", b"planner_dato").unwrap();
    let names: BTreeSet<&str> =
        metadata.files.values().flatten().map(|chunk| chunk.tensor.name.as_str()).collect();
    assert_eq!(names, BTreeSet::from(["model.layers.0.bias", "model.layers.0.weight"]));
}

#[test]
fn the_beginnings_of_a_metadata_and_changed_bytes_are_judged_without_a_panic() {
    for len in 0..SMALL.len() {
        assert!(parsed(&SMALL[..len]).is_err(), "{len}");
    }
    for at in 0..SMALL.len() {
        for byte in [0, b'.', b'(', 0x80, 0xff] {
            let mut bytes = SMALL.to_vec();
            bytes[at] = byte;
            let _ = parsed(&bytes);
        }
    }
}

#[test]
fn an_item_is_compared_with_its_chunk_and_no_item_shares_bytes_with_another() {
    let metadata = parsed(SMALL).unwrap();
    let chunks = &metadata.files["__0_0.distcp"];
    let parse = |chunks: &[StoredChunk]| parse_items(&mut &*FILE, chunks, 2).unwrap();
    let description = parse(chunks).unwrap();
    assert_eq!(description.len(), chunks.len());
    let places = description.places.as_ref().unwrap();
    assert_eq!(places[0].whole_shape.as_deref(), Some(&[7, 5][..]));
    // All bytes except the data are described.
    let data: u64 =
        description.tensors().map(|tensor| tensor.shape.iter().product::<u64>() * 4).sum();
    let described: u64 = description.described.iter().map(|range| range.end - range.start).sum();
    assert_eq!(described + data, FILE.len() as u64);
    let refused = |change: &dyn Fn(&mut Vec<StoredChunk>)| {
        let mut chunks = chunks.clone();
        change(&mut chunks);
        parse(&chunks).unwrap_err()
    };
    let fault = refused(&|chunks| chunks[0].shape = vec![5, 3]);
    assert!(
        fault.message.contains("of different saves") && fault.message.contains("on another mesh")
    );
    let whole = refused(&|chunks| {
        let tensor = ChunkedTensor { shape: vec![5, 3], ..(*chunks[0].tensor).clone() };
        (chunks[0].tensor, chunks[0].shape) = (Arc::new(tensor), vec![5, 3]);
    });
    assert!(whole.message.contains("of different saves") && !whole.message.contains("mesh"));
    assert_eq!(
        (fault.kind, fault.tensor.as_deref()),
        (ErrorKind::DcpOffsets, Some("layers.0.weight"))
    );
    let fault = refused(&|chunks| {
        let tensor = ChunkedTensor { dtype: Dtype::I32, ..(*chunks[0].tensor).clone() };
        chunks[0].tensor = Arc::new(tensor);
    });
    assert_eq!(fault.kind, ErrorKind::DcpDtype);
    let fault = refused(&|chunks| chunks[1].item = chunks[0].item);
    assert_eq!(fault.kind, ErrorKind::OffsetOverlap);
    for item in [(u64::MAX, 1), (0, u64::MAX), (FILE.len() as u64, 1)] {
        let fault = refused(&|chunks| chunks[0].item = item);
        assert_eq!(fault.kind, ErrorKind::DataTruncated);
    }
    for item in [(0, 0), (0, 21), (0, 1576), (1, 1576)] {
        let fault = refused(&|chunks| chunks[0].item = item);
        assert!(
            fault.kind == ErrorKind::DataTruncated && fault.message.contains("of different saves"),
            "{fault}"
        );
    }
}

#[test]
fn a_file_of_safetensors_has_the_chunks_that_the_metadata_places_in_it() {
    let metadata = include_bytes!("../../../../tests/fixtures/torch/dcp_safetensors/.metadata");
    let file: &[u8] =
        include_bytes!("../../../../tests/fixtures/torch/dcp_safetensors/__0_0.distcp");
    let chunks = &parsed(metadata).unwrap().files["__0_0.distcp"];
    let parse = |chunks: &[StoredChunk]| parse_items(&mut &*file, chunks, 2).unwrap();
    let names = |chunks: &[StoredChunk]| -> Vec<String> {
        parse(chunks).unwrap().tensors().map(|tensor| tensor.name.to_owned()).collect()
    };
    assert_eq!(names(chunks), ["a", "b"]);
    assert_eq!(names(&chunks[1..]).len(), 1);
    // The file has a tensor that `.metadata` does not place in it.
    let fault = parse_items(&mut &*file, &chunks[1..], 1).unwrap().unwrap_err();
    assert!(fault.message.contains("holds 2 tensors, and `.metadata` places 1"), "{fault}");
    let refused = |change: &dyn Fn(&mut StoredChunk)| {
        let mut chunks = chunks.clone();
        change(&mut chunks[1]);
        parse(&chunks).unwrap_err().kind
    };
    assert_eq!(refused(&|chunk| chunk.shape[0] += 1), ErrorKind::DcpOffsets);
    assert_eq!(refused(&|chunk| chunk.offset[0] += 1), ErrorKind::DcpOffsets);
    // Both chunks are of the same tensor, which the file has only once.
    let first = chunks[0].clone();
    assert_eq!(refused(&|chunk| *chunk = first.clone()), ErrorKind::TensorMissing);
}

/// The names under which tensors with these paths are shown, and the note about the other values. In a path, slashes
/// separate the containers. A path that begins with `=` has no planner data.
fn shown(paths: &[&str]) -> (Vec<String>, Option<String>) {
    let names: Vec<String> =
        paths.iter().map(|path| path.trim_start_matches('=').replace('/', ".")).collect();
    let mut chosen = Chosen::default();
    for (name, path) in names.iter().zip(paths) {
        let mut parts = KeyPath::new(name);
        path.split('/').for_each(|part| match part.parse() {
            Ok(number) => parts.push(None, Some(number)),
            Err(_) => parts.push(Some(part), None),
        });
        let key_path = Some(parts).filter(|parts| parts.is_whole());
        assert_eq!(key_path.is_none(), path.starts_with('='), "{path}");
        assert!(chosen.add(name, key_path, Some(0)));
    }
    chosen.settle(TrainingState::None);
    let shown = chosen.shown.iter().map(|ShownTensor { name, .. }| (*name).to_owned());
    (shown.collect(), chosen.left_out)
}

#[test]
fn the_names_are_those_of_the_model_in_the_layouts_of_frameworks() {
    for (paths, names, note) in [
        // Names that accelerate and Lightning save.
        (&["model/a.w", "optimizer_0/a.w.exp_avg"][..], &["a.w"][..], "`optimizer_0`"),
        (&["state_dict/a.w"], &["a.w"], ""),
        (&["model/a.w", "model/b/c", "list/0"], &["a.w", "b.c"], "`list`"),
        // Names from the guides of torch.
        (&["app/model/a.w", "app/optim/state/a.w"], &["a.w"], "`app.optim`"),
        (&["app/other/a.w", "app/optim/state/a.w"], &["app.other.a.w"], "`app.optim`"),
        // Names that torchtitan saves.
        (
            &["a.w", "scaler.w", "optimizer/x", "train_state/step"],
            &["a.w", "scaler.w"],
            "`train_state`",
        ),
        (&["model.a.w", "head.w"], &["model.a.w", "head.w"], ""),
        // Names that Megatron saves.
        (
            &["=decoder.w", "=optimizer.state.w", "=chained_0.optimizer.w"],
            &["decoder.w"],
            "`chained_0`",
        ),
        (&["=model.a.w", "=lm_head.w"], &["model.a.w", "lm_head.w"], ""),
        // A step lies beside the model.
        (&["model/a.w", "step"], &["a.w"], "`step`"),
        (&["=model.a.w", "step"], &["model.a.w", "step"], ""),
        (&["model_state_dict/a.w", "loss", "best/0"], &["a.w"], "`loss`, `best`"),
        (&["app/model/a.w", "app/loss"], &["a.w"], "`app.loss`"),
        (&["a.w", "logit_scale"], &["a.w", "logit_scale"], ""),
        // Weights lie beside a container.
        (&["model/a.w", "head.w"], &["model.a.w", "head.w"], ""),
        // Neither of two models is chosen. A checkpoint without a model shows all its tensors.
        (&["model/a.w", "ema/a.w"], &["model.a.w", "ema.a.w"], ""),
        (&["optimizer/state/a.w"], &["optimizer.state.a.w"], ""),
    ] {
        let (found, left_out) = shown(paths);
        assert_eq!(found, names, "{paths:?}");
        assert!(left_out.clone().unwrap_or_default().contains(note), "{left_out:?}");
        assert_eq!(left_out.is_none(), note.is_empty(), "{paths:?}");
    }
}
