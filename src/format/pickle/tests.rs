//! Tests of archives, of pickles, and of the names and places of tensors.

use proptest::prelude::*;

use super::globals::denied;
use super::*;
use crate::dtype::Dtype;

/// A zip archive with stored entries, and the offset of the first byte of each entry's data.
fn zip(entries: &[(&str, &[u8])]) -> (Vec<u8>, Vec<usize>) {
    let (mut bytes, mut central, mut places) = (Vec::new(), Vec::new(), Vec::new());
    for (name, data) in entries {
        let offset = bytes.len() as u32;
        let mut fixed = vec![20, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        for number in [data.len() as u32, data.len() as u32] {
            fixed.extend(number.to_le_bytes());
        }
        fixed.extend((name.len() as u16).to_le_bytes());
        fixed.extend([0, 0]);
        bytes.extend(b"PK\x03\x04");
        bytes.extend(&fixed);
        bytes.extend(name.as_bytes());
        places.push(bytes.len());
        bytes.extend(*data);
        central.extend(b"PK\x01\x02\x14\0");
        central.extend(&fixed);
        central.extend([0; 10]);
        central.extend(offset.to_le_bytes());
        central.extend(name.as_bytes());
    }
    let offset = bytes.len() as u32;
    let (count, len) = (entries.len() as u16, central.len() as u32);
    bytes.extend(central);
    bytes.extend(b"PK\x05\x06\0\0\0\0");
    bytes.extend([count.to_le_bytes(), count.to_le_bytes()].concat());
    bytes.extend([len.to_le_bytes(), offset.to_le_bytes()].concat());
    bytes.extend([0, 0]);
    (bytes, places)
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.push(b'X');
    out.extend((text.len() as u32).to_le_bytes());
    out.extend(text.as_bytes());
}

/// The opcodes that make a tensor of F32 in the storage `key`, which has `numel` elements.
fn tensor(key: &str, numel: u8, offset: u8, shape: &[u8], strides: &[u8]) -> Vec<u8> {
    tensor_of((key, numel), b"", offset, [shape, strides])
}

/// The opcodes of `tensor`, with more parts in the id of the storage.
fn tensor_of(storage: (&str, u8), more: &[u8], offset: u8, layout: [&[u8]; 2]) -> Vec<u8> {
    let (key, numel) = storage;
    let mut out = b"ctorch._utils\n_rebuild_tensor_v2\n((".to_vec();
    text(&mut out, "storage");
    out.extend(b"ctorch\nFloatStorage\n");
    text(&mut out, key);
    text(&mut out, "cpu");
    out.extend([b'K', numel]);
    out.extend(more);
    out.extend([b't', b'Q', b'K', offset]);
    for numbers in layout {
        out.push(b'(');
        numbers.iter().for_each(|&number| out.extend([b'K', number]));
        out.push(b't');
    }
    out.extend(b"\x89ccollections\nOrderedDict\n)RtR");
    out
}

/// A pickle of a dict with these values. Each value is given as opcodes.
fn dict(pairs: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let mut out = b"\x80\x02".to_vec();
    out.extend(inner(pairs));
    out.push(b'.');
    out
}

fn inner(pairs: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let mut out = b"}(".to_vec();
    for (key, value) in pairs {
        text(&mut out, key);
        out.extend(value);
    }
    out.push(b'u');
    out
}

/// A file with the pickle and two storages, which have 4 and 2 elements.
fn file(pickle: &[u8]) -> Vec<u8> {
    let entries: [(&str, &[u8]); 4] = [
        ("m/data.pkl", pickle),
        ("m/byteorder", b"little"),
        ("m/data/0", &[1; 16]),
        ("m/data/1", &[2; 8]),
    ];
    zip(&entries).0
}

fn plain() -> Vec<u8> {
    let pairs = [
        ("a", tensor("0", 4, 0, &[2, 2], &[2, 1])),
        ("b", tensor("1", 2, 1, &[], &[])),
        ("c", tensor("0", 4, 2, &[2], &[1])),
    ];
    file(&dict(&pairs))
}

fn names(bytes: &[u8]) -> Vec<String> {
    let description = parse_file(bytes).unwrap();
    let mut names: Vec<String> = description.tensors().map(|t| t.name.to_owned()).collect();
    names.sort();
    names
}

fn refusal(pickle: &[u8]) -> String {
    parse_file(&file(pickle)).unwrap_err().message
}

#[test]
fn tensors_are_ranges_of_the_entries_of_their_storages() {
    let bytes = plain();
    let description = parse_file(&bytes).unwrap();
    let found: Vec<(&str, Dtype, &[u64])> =
        description.tensors().map(|t| (t.name, t.facts.dtype, t.shape)).collect();
    let shapes: [&[u64]; 3] = [&[2, 2], &[2], &[]];
    assert_eq!(
        found,
        [("a", Dtype::F32, shapes[0]), ("c", Dtype::F32, shapes[1]), ("b", Dtype::F32, shapes[2])]
    );
    let starts: Vec<usize> = description.tensors().map(|t| t.start as usize).collect();
    assert_eq!(bytes[starts[0]..starts[0] + 16], [1; 16]);
    assert_eq!(starts[1], starts[0] + 8);
    assert_eq!(bytes[starts[2]..starts[2] + 4], [2; 4]);
    // All bytes of the file except the data of the storages count as its description.
    let described: u64 = description.described.iter().map(|range| range.end - range.start).sum();
    assert_eq!(described, bytes.len() as u64 - 16 - 8);
    assert!(is_torch_zip(&bytes));
}

#[test]
fn the_only_model_of_a_file_is_shown_without_its_key_and_the_state_of_a_training_is_not_shown() {
    let weight = || tensor("0", 4, 0, &[4], &[1]);
    let model =
        inner(&[("w", weight()), ("l", [b"](".to_vec(), weight(), b"e".to_vec()].concat())]);
    let pairs = [
        ("model", model.clone()),
        ("optimizer", inner(&[("m", weight())])),
        ("rng_state", weight()),
        ("extra", inner(&[("x", weight())])),
    ];
    let bytes = file(&dict(&pairs));
    assert_eq!(names(&bytes), ["l.0", "w"]);
    let left_out = parse_file(&bytes).unwrap().left_out.unwrap();
    assert_eq!(
        left_out,
        "`optimizer`, `rng_state`, `extra` of the file are not shown; state=all shows their tensors"
    );
    let two = dict(&[("model", model.clone()), ("ema", model.clone())]);
    assert_eq!(names(&file(&two)), ["ema.l.0", "ema.w", "model.l.0", "model.w"]);
    let direct = dict(&[("model", model), ("w", weight()), ("optimizer.x", weight())]);
    assert_eq!(names(&file(&direct)), ["model.l.0", "model.w", "optimizer.x", "w"]);
}

#[test]
fn names_that_run_code_and_tensors_in_unknown_classes_are_refused_by_name() {
    let weight = || tensor("0", 4, 0, &[4], &[1]);
    for (module, name) in [("posix", "system"), ("__builtin__", "eval"), ("os.path", "join")] {
        let call = format!("c{module}\n{name}\n)R").into_bytes();
        let message = refusal(&dict(&[("a", weight()), ("b", call)]));
        assert!(message.contains("runs code when the file is loaded"), "{message}");
    }
    let boxed = [b"cpkg\nBox\n(".to_vec(), weight(), b"tR".to_vec()].concat();
    let message = refusal(&dict(&[("a", weight()), ("b", boxed)]));
    assert!(message.contains("a tensor to the class `pkg.Box`"), "{message}");
    // An unknown class is harmless if it gets no value of the model.
    let alone = b"cpkg\nConfig\n)R}X\x01\0\0\0aK\x01sb".to_vec();
    assert_eq!(names(&file(&dict(&[("a", weight()), ("b", alone)]))), ["a"]);
    // The opcodes of `defaultdict(int)` in protocol 2.
    let counts = b"ccollections\ndefaultdict\nc__builtin__\nlong\n\x85R".to_vec();
    assert_eq!(names(&file(&dict(&[("a", weight()), ("b", counts)]))), ["a"]);
    // Protocol 2 names inner classes with `getattr`. Some versions of Python name the members of enums with it.
    let found = |module: &str, class: &str, name: &str| {
        let mut call = format!("cbuiltins\ngetattr\n(c{module}\n{class}\n").into_bytes();
        text(&mut call, name);
        [call.as_slice(), b"tR"].concat()
    };
    let member = found("pkg", "Stage", "third");
    let inner_object = [found("pkg", "Config", "Inner"), b")\x81}b".to_vec()].concat();
    for harmless in [member, inner_object] {
        assert_eq!(names(&file(&dict(&[("a", weight()), ("b", harmless)]))), ["a"]);
    }
    for (module, class, name) in [
        ("pkg", "Stage", "__init__"),
        ("torch", "serialization", "os"),
        ("torch.serialization", "os", "system"),
        ("torch", "serialization", "load"),
        ("pkg", "builtins", "eval"),
    ] {
        let message = refusal(&dict(&[("a", weight()), ("b", found(module, class, name))]));
        assert!(message.contains("as only code does"), "{message}");
    }
    // The result of `getattr` must not be called or changed.
    let called = [found("pathlib", "PosixPath", "touch"), b")R".to_vec()].concat();
    let changed = [found("torch.serialization", "torch", "_utils"), b"}b".to_vec()].concat();
    for misused in [called, changed] {
        let message = refusal(&dict(&[("a", weight()), ("b", misused)]));
        assert!(message.contains("as only code does"), "{message}");
    }
    for (module, name) in [
        ("torch", "serialization.os.system"),
        ("functools", "partial.__call__"),
        ("operator", "attrgetter"),
    ] {
        assert!(denied(module, name), "{module}.{name}");
    }
    let root = b"\x80\x02cpkg\nModel\n)R.";
    assert!(refusal(root).contains("an object of the class `pkg.Model`"));
}

#[test]
fn a_part_of_the_model_that_an_unknown_class_gets_is_refused_even_if_it_is_thrown_away() {
    let mut pickle = b"\x80\x02}q\x00X\x01\0\0\0a".to_vec();
    pickle.extend(tensor("0", 4, 0, &[4], &[1]));
    // Makes `Evil(root)` and drops it from the stack.
    pickle.extend(b"scpkg\nEvil\nh\x00\x85R0.");
    let message = refusal(&pickle);
    assert!(message.contains("a part of the model to the class `pkg.Evil`"), "{message}");
}

#[test]
fn a_tensor_that_leaves_its_storage_or_has_gaps_is_refused_by_name() {
    for (call, word) in [
        (tensor("0", 4, 1, &[4], &[1]), "ends at item 5 of its storage, which has 4"),
        (tensor("0", 4, 0, &[2, 2], &[1, 1]), "by which parts of it overlap"),
        (tensor("0", 4, 0, &[2, 2], &[1]), "2 sizes and 1 strides"),
        (tensor("0", 5, 0, &[4], &[1]), "5 elements of 4 bytes, its data has 16 bytes"),
        (tensor("7", 4, 0, &[4], &[1]), "the storage `7`, is missing"),
        (tensor("../x", 4, 0, &[4], &[1]), "which is no number"),
    ] {
        let fault = parse_file(&file(&dict(&[("w", call)]))).unwrap_err();
        assert!(fault.message.contains(word), "{fault}");
        assert_eq!(fault.tensor.as_deref(), Some("w"));
    }
    // The strides of axes with one index have no meaning, and empty tensors have no bytes.
    let odd = [
        ("a", tensor("0", 4, 0, &[1, 4, 1], &[9, 1, 7])),
        ("e", tensor("0", 4, 9, &[0, 3], &[5, 5])),
    ];
    assert_eq!(names(&file(&dict(&odd))), ["a", "e"]);
}

#[test]
fn shared_values_have_many_names_but_never_more_than_the_pickle_has_bytes() {
    let mut bomb = b"\x80\x02}X\x01\0\0\0m](".to_vec();
    bomb.extend(tensor("0", 4, 0, &[4], &[1]));
    bomb.push(b'e');
    for level in 0..60_u8 {
        bomb.extend([b'q', level, b'0', b']', b'(', b'h', level, b'h', level, b'e']);
    }
    bomb.extend(b"s.");
    assert!(refusal(&bomb).contains("too many names"), "{}", refusal(&bomb));
    let mut deep = b"\x80\x02}X\x01\0\0\0m".to_vec();
    deep.extend(vec![b']'; 100_000]);
    deep.extend(vec![b'a'; 99_999]);
    deep.extend(b"s.");
    assert!(refusal(&deep).contains("in each other"));
}

#[test]
fn pickles_that_torch_does_not_write_are_refused_where_they_are_wrong() {
    let long = |opcode: u8| [b"\x80\x04".to_vec(), vec![opcode], vec![0xff; 8]].concat();
    for (pickle, word) in [
        (b"\x80\x06}.".to_vec(), "a protocol from 2 to 5"),
        (b"}.".to_vec(), "a protocol"),
        (b"\x80\x02}".to_vec(), "ends within an opcode"),
        (b"\x80\x02}}.".to_vec(), "other than one value"),
        (b"\x80\x02}.x".to_vec(), "1 bytes follow its end"),
        (b"\x80\x02s.".to_vec(), "too few values"),
        (b"\x80\x02h\x05.".to_vec(), "no value 5"),
        (b"\x80\x02u.".to_vec(), "a mark is missing"),
        (b"\x80\x02(iposix\nsystem\n.".to_vec(), "the opcode 0x69"),
        (b"\x80\x02}(Nu.".to_vec(), "without a value"),
        (long(0x8e), "bytes announced"),
        (long(0x95), "bytes announced"),
        (b"\x80\x02K\x01b.".to_vec(), "too few values"),
        (b"\x80\x02K\x01Nb.".to_vec(), "a state is given"),
        (b"\x80\x02K\x01)R.".to_vec(), "no name"),
    ] {
        let message = refusal(&pickle);
        assert!(message.contains(word), "{message}");
    }
}

#[test]
fn an_archive_that_can_be_read_in_two_ways_is_refused() {
    let pickle = dict(&[("w", tensor("0", 4, 0, &[4], &[1]))]);
    let data: &[u8] = &[1; 16];
    let refused = |entries: &[(&str, &[u8])]| parse_file(&zip(entries).0).unwrap_err().message;
    let twice: [(&str, &[u8]); 3] =
        [("m/data.pkl", &pickle), ("m/data/0", data), ("m/data/0", data)];
    assert!(refused(&twice).contains("two entries are called"));
    let two: [(&str, &[u8]); 3] =
        [("m/data.pkl", &pickle), ("m/data/0", data), ("n/data.pkl", &pickle)];
    assert!(refused(&two).contains("not in the folder of the first"));
    let script: [(&str, &[u8]); 2] = [("m/data.pkl", &pickle), ("m/constants.pkl", data)];
    assert!(refused(&script).contains("TorchScript"));
    // TorchScript compresses its programs. So the advice to write the archive again without compression would not help
    // the user.
    for (name, word) in [("m/constants.pkl", "TorchScript"), ("m/others", "compressed by method 8")]
    {
        let (mut bytes, _) = zip(&[("m/data.pkl", &pickle), ("m/code.py", data), (name, data)]);
        for (magic, method) in [(b"PK\x03\x04", 8), (b"PK\x01\x02", 10)] {
            let headers = bytes.windows(4).enumerate().filter(|(_, four)| four == magic);
            let at = headers.map(|(at, _)| at).nth(1).unwrap();
            bytes[at + method] = 8;
        }
        let message = parse_file(&bytes).unwrap_err().message;
        assert!(message.contains(word), "{message}");
    }
    let big: [(&str, &[u8]); 3] =
        [("m/data.pkl", &pickle), ("m/byteorder", b"big"), ("m/data/0", data)];
    assert!(refused(&big).contains("big-endian"));
    let (good, places) = zip(&[("m/data.pkl", &pickle), ("m/data/0", data)]);
    assert_eq!(names(&good), ["w"]);
    // Name, size and method in the header in front of the data.
    for (at, word) in [(1, "name"), (8 + 4 + 4, "size"), (8 + 22, "method")] {
        let mut changed = good.clone();
        changed[places[1] - at] ^= 1;
        let message = parse_file(&changed).unwrap_err().message;
        assert!(message.contains(&format!("has another {word}")), "{message}");
    }
    // The attributes of the last entry. They are in front of the place of its header and its name.
    let end = good.windows(4).rposition(|four| four == b"PK\x05\x06").unwrap();
    let mut folder = good.clone();
    folder[end - "m/data/0".len() - 8] |= 1 << 4;
    let message = parse_file(&folder).unwrap_err().message;
    assert!(message.contains("`m/data/0` is marked as a folder, but has 16 bytes"), "{message}");
    for changed in [[good.as_slice(), b"x"].concat(), good[..good.len() - 1].to_vec()] {
        assert_eq!(parse_file(&changed).unwrap_err().kind, ErrorKind::DataTruncated);
    }
}

/// A file with a hole from byte `at` on. The hole reads as zeros and takes no memory.
struct WithHole<'a> {
    bytes: &'a [u8],
    at: u64,
    len: u64,
}

impl RangeReader for WithHole<'_> {
    fn file_len(&self) -> u64 {
        self.bytes.len() as u64 + self.len
    }

    fn read_exact_at(&mut self, offset: u64, buf: &mut [u8]) -> std::io::Result<()> {
        for (byte, at) in buf.iter_mut().zip(offset..) {
            let is_behind = at >= self.at + self.len;
            let kept = if is_behind { at - self.len } else { at };
            *byte = if at >= self.at && !is_behind { 0 } else { self.bytes[kept as usize] };
        }
        Ok(())
    }
}

#[test]
fn a_file_with_too_many_bytes_that_are_no_data_of_tensors_is_refused() {
    let pickle = dict(&[("w", tensor("0", 4, 0, &[4], &[1]))]);
    let entries: [(&str, &[u8]); 4] =
        [("m/data.pkl", &pickle), ("m/byteorder", b"little"), ("m/data/0", &[1; 16]), ("m/x", b"")];
    let (bytes, places) = zip(&entries);
    let parsed = |len: u64| {
        let mut grown = bytes.clone();
        // The field of the end record that has the place of the central directory.
        let end = grown.len() - 6;
        let directory = u32::from_le_bytes(grown[end..end + 4].try_into().unwrap());
        grown[end..end + 4].copy_from_slice(&(directory + len as u32).to_le_bytes());
        let mut reader = WithHole { bytes: &grown, at: places[3] as u64, len };
        parse(&mut reader, TrainingState::None).unwrap()
    };
    assert!(parsed(1000).is_ok() && parsed(DESCRIBED_LEN_MAX - 4096).is_ok());
    let fault = parsed(DESCRIBED_LEN_MAX).unwrap_err();
    assert!(fault.message.contains("bytes that are not the data of tensors"), "{fault:?}");
    assert_eq!(fault.kind, ErrorKind::HeaderTooLarge);
}

/// A file of torch before 1.6. Its tensor has two elements of a storage of four.
fn legacy(little_endian: u8, numel: u64, id_end: &[u8]) -> Vec<u8> {
    let mut bytes = [b"\x80\x02".as_slice(), &legacy::MAGIC].concat();
    bytes.extend(b"\x80\x02M\xe9\x03.");
    bytes.extend(dict(&[("little_endian", vec![little_endian])]));
    bytes.extend(dict(&[("w", tensor_of(("94", 4), id_end, 1, [&[2], &[1]]))]));
    bytes.extend(b"\x80\x02](");
    text(&mut bytes, "94");
    bytes.extend(b"e.");
    bytes.extend(numel.to_le_bytes());
    bytes.extend([7; 16]);
    bytes
}

#[test]
fn files_of_torch_before_1_6_have_their_data_behind_the_pickles() {
    let good = legacy(0x88, 4, b"N");
    assert!(is_torch(&good));
    let description = parse_file(&good).unwrap();
    let starts: Vec<u64> = description.tensors().map(|tensor| tensor.start).collect();
    assert_eq!(starts, [good.len() as u64 - 12]);
    let described = [0..good.len() as u64 - 16, good.len() as u64..good.len() as u64];
    assert_eq!(description.described, described);
    // The caller of `torch.save` chooses the protocol of the pickles.
    for first in [b"\x80\x03".as_slice(), b"\x80\x04\x95\x0d\0\0\0\0\0\0\0"] {
        let other = [first, &good[2..]].concat();
        let description = parse_file(&other).unwrap();
        assert!(is_torch(&other));
        assert_eq!(description.tensors().next().unwrap().start, other.len() as u64 - 12);
    }
    let mut other_protocol = good.clone();
    other_protocol[2 + legacy::MAGIC.len() + 3] ^= 1;
    for (bytes, kind, word) in [
        (legacy(0x89, 4, b"N"), ErrorKind::HeaderDecode, "big-endian"),
        (legacy(b'N', 4, b"N"), ErrorKind::HeaderDecode, "little-endian"),
        (legacy(0x88, 3, b"N"), ErrorKind::SizeMismatch, "4 elements by its pickle and 3"),
        (legacy(0x88, 4, b""), ErrorKind::HeaderDecode, "an unknown form"),
        (legacy(0x88, 4, b"K\x01"), ErrorKind::HeaderDecode, "an unknown form"),
        (good[..good.len() - 1].to_vec(), ErrorKind::DataTruncated, "within the storage `94`"),
        ([good.as_slice(), b"x"].concat(), ErrorKind::DataTrailing, "1 bytes behind"),
        (good[..90].to_vec(), ErrorKind::HeaderDecode, "ends within an opcode"),
        (other_protocol, ErrorKind::HeaderDecode, "second pickle"),
    ] {
        let fault = parse_file(&bytes).unwrap_err();
        assert!(fault.kind == kind && fault.message.contains(word), "{fault:?}");
    }
}

#[test]
fn the_file_of_one_rank_of_a_parallel_model_is_refused() {
    let weights = || ("model", inner(&[("w", tensor("0", 4, 0, &[4], &[1]))]));
    let deepspeed = dict(&[weights(), ("mp_world_size", b"K\x02".to_vec())]);
    assert!(refusal(&deepspeed).contains("one of 2 ranks"), "{}", refusal(&deepspeed));
    assert_eq!(names(&file(&dict(&[weights(), ("mp_world_size", b"K\x01".to_vec())]))), ["w"]);
    let args = |count| {
        let state = inner(&[("pipeline_model_parallel_size", vec![b'K', count])]);
        [b"cargparse\nNamespace\n)\x81".as_slice(), &state, b"b"].concat()
    };
    assert!(refusal(&dict(&[("args", args(4)), weights()])).contains("one of 4 ranks"));
    assert_eq!(names(&file(&dict(&[("args", args(1)), weights()]))), ["w"]);
}

/// Checks that no tensor extends past the end of the file.
fn is_bounded(bytes: &[u8]) -> bool {
    let Ok(description) = parse_file(bytes) else { return true };
    description.tensors().all(|tensor| {
        let len = tensor.facts.dtype.bits_of(tensor.shape).unwrap() / 8;
        tensor.start.checked_add(len).is_some_and(|end| end <= bytes.len() as u64)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn a_file_with_any_bytes_changed_is_refused_or_its_tensors_lie_in_it(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..5),
        cut in prop::option::of(any::<prop::sample::Index>()),
        old in any::<bool>(),
    ) {
        let mut bytes = if old { legacy(0x88, 4, b"N") } else { plain() };
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        prop_assert!(is_bounded(&bytes));
    }

    #[test]
    fn any_pickle_is_refused_or_its_tensors_lie_in_the_file(
        opcodes in prop::collection::vec(
            prop::sample::select(b"]}(())NuesatlqhKRQb\x81\x85\x86\x87\x94201c\x88".to_vec()), 0..60),
        middle in any::<bool>(),
    ) {
        let mut pickle = b"\x80\x02}X\x01\0\0\0a".to_vec();
        if middle {
            pickle.extend(tensor("0", 4, 0, &[4], &[1]));
        }
        pickle.extend(opcodes);
        pickle.extend(b"s.");
        prop_assert!(is_bounded(&file(&pickle)));
    }
}

#[test]
fn flat_parameters_of_fsdp1_are_refused() {
    let path = "tests/fixtures/torch/rank_fsdp1_sharded_ws4/model_world_size_4_rank_0.pt";
    let bytes = std::fs::read(std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap();
    assert!(parse_file(&bytes).is_ok());
    let (name, flat) = (b"layers.0.weight", b"lay._flat_param");
    let at = bytes.windows(name.len()).position(|part| part == name).unwrap();
    let mut changed = bytes;
    changed[at..at + name.len()].copy_from_slice(flat);
    let fault = parse_file(&changed).unwrap_err();
    assert!(fault.message.contains("a flat parameter of FSDP1"), "{fault:?}");
}

/// A dict of DeepSpeed's model states. Its module has a tensor `w` of these sizes.
fn states(shape: &[u8], more: Vec<(&str, Vec<u8>)>) -> Vec<u8> {
    let sizes = b"ctorch\nSize\n(K\x02K\x02t\x85R".to_vec();
    let strides: Vec<u8> = shape.iter().map(|_| 1).collect();
    let module = [("w", tensor("0", 4, 0, shape, &strides))];
    let mut pairs = vec![
        ("module", inner(&module)),
        ("param_shapes", [b"](".to_vec(), inner(&[("w", sizes)]), b"e".to_vec()].concat()),
        ("dp_world_size", b"K\x02".to_vec()),
        ("ds_version", b"N".to_vec()),
    ];
    pairs.extend(more);
    dict(&pairs)
}

#[test]
fn model_states_tell_shapes_and_which_tensors_they_hold_no_elements_of() {
    let zero = |pickle: &[u8]| match parse_file(&file(pickle)).unwrap().zero.as_deref() {
        Some(ZeroPart::Model(model)) => model.clone(),
        other => panic!("{other:?}"),
    };
    let held = zero(&states(&[4], Vec::new()));
    assert_eq!((held.groups.len(), held.ranks, held.placeholders.len()), (1, Some(2), 0));
    assert_eq!((held.groups[0][0].name.as_str(), &held.groups[0][0].shape[..]), ("w", &[2, 2][..]));
    assert_eq!(zero(&states(&[0], Vec::new())).placeholders, ["w"]);
    // Versions before 0.9 do not record which weights are shared, so a tensor without elements is a placeholder.
    let more = vec![("buffer_names", b"]X\x01\0\0\0ba".to_vec())];
    let none = || tensor("0", 4, 0, &[0], &[1]);
    let mut module =
        vec![("w", none()), ("b", none()), ("x._extra_state", none()), ("tied", none())];
    let both = |module: &[(&str, Vec<u8>)]| {
        let mut pairs = vec![
            ("module", inner(module)),
            (
                "param_shapes",
                [
                    b"](".to_vec(),
                    inner(&[("w", b"ctorch\nSize\n(K\x02K\x02t\x85R".to_vec())]),
                    b"e".to_vec(),
                ]
                .concat(),
            ),
            ("ds_version", b"N".to_vec()),
        ];
        pairs.extend(more.clone());
        zero(&dict(&pairs)).placeholders
    };
    assert_eq!(both(&module), ["w", "tied"]);
    module.pop();
    assert_eq!(both(&module), ["w"]);
    // If there is no module, the tensors of another dict would be shown as the model.
    let w = tensor("0", 4, 0, &[4], &[1]);
    let pairs = [("w", w), ("param_shapes", b"]".to_vec()), ("ds_version", b"N".to_vec())];
    let fault = parse_file(&file(&dict(&pairs))).unwrap_err();
    assert!(fault.message.contains("its `module` has a form"), "{fault}");
    // Without shapes, it is unknown where the elements are.
    let pairs =
        [("module", inner(&[("w", tensor("0", 4, 0, &[0], &[1]))])), ("ds_version", b"N".to_vec())];
    let fault = parse_file(&file(&dict(&pairs))).unwrap_err();
    assert!(fault.message.contains("ZeRO-3"), "{fault}");
}

#[test]
fn optimizer_states_tell_the_ranges_of_their_rank() {
    let group = [b"](".to_vec(), tensor("0", 4, 1, &[3], &[1]), b"e".to_vec()].concat();
    let state = |stage: u8, groups: &str| {
        let pairs = [
            ("zero_stage", vec![b'K', stage]),
            ("partition_count", b"](K\x01K\x02e".to_vec()),
            (groups, group.clone()),
        ];
        file(&dict(&[("optimizer_state_dict", inner(&pairs))]))
    };
    let bytes = state(2, "single_partition_of_fp32_groups");
    let found = parse_file(&bytes).unwrap();
    let Some(ZeroPart::Partition(partition)) = found.zero.as_deref() else { panic!("{found:?}") };
    assert_eq!((partition.stage, partition.ranks, found.len()), (2, 2, 0));
    assert_eq!((partition.groups[0].dtype, partition.groups[0].numel), (Dtype::F32, 3));
    assert!(bytes[partition.groups[0].start as usize..].starts_with(&[1; 12]));
    assert!(parse_file(&state(3, "fp32_flat_groups")).is_ok());
    let fault = parse_file(&state(3, "single_partition_of_fp32_groups")).unwrap_err();
    assert!(fault.message.contains("`fp32_flat_groups`"), "{fault}");
}

#[test]
fn entries_with_a_crc_are_listed_in_the_order_of_their_bytes() {
    let mut bytes = plain();
    assert_eq!(entry_hashes(&mut bytes.as_slice()).unwrap().unwrap(), []);
    assert_eq!(entry_hashes(&mut &b"no archive"[..]).unwrap().unwrap(), []);
    // The CRC of the last entry, in the header of the entry and in the directory.
    for magic in [b"PK\x03\x04", b"PK\x01\x02"] {
        let at = bytes.windows(4).rposition(|four| four == magic).unwrap();
        let crc = at + if magic[2] == 3 { 14 } else { 16 };
        bytes[crc] = 7;
    }
    let found = entry_hashes(&mut bytes.as_slice()).unwrap().unwrap();
    let names: Vec<&str> = found.iter().map(|entry| entry.name.as_str()).collect();
    assert_eq!(
        (names, &bytes[found[0].range.start as usize..][..8]),
        (vec!["m/data/1"], &[2; 8][..])
    );
}

#[test]
fn entries_of_archives_that_follow_each_other_are_all_listed() {
    let mut one = plain();
    for magic in [b"PK\x03\x04", b"PK\x01\x02"] {
        let at = one.windows(4).rposition(|four| four == magic).unwrap();
        one[at + if magic[2] == 3 { 14 } else { 16 }] = 7;
    }
    let starts = |bytes: &[u8]| {
        let found = entry_hashes(&mut &*bytes).unwrap().unwrap();
        found.iter().map(|entry| entry.range.start).collect::<Vec<_>>()
    };
    let own = starts(&one)[0];
    let len = one.len() as u64;
    assert_eq!(starts(&one.repeat(3)), [own, own + len, own + 2 * len]);
    // Bytes that are not part of an archive have no CRC to compare, so the file is refused.
    let refused = |bytes: &[u8]| entry_hashes(&mut &*bytes).unwrap().unwrap_err().message;
    let front = [b"PK\x03\x04 is no archive", &*one.repeat(2)].concat();
    assert!(refused(&front).starts_with("its bytes 0 to 18 do not end as a zip archive"));
    let mut broken = one.repeat(3);
    broken[3 * one.len() - 22] ^= 1;
    assert!(refused(&broken).starts_with(&format!("its bytes 0 to {} do not end", 3 * len)));
    assert!(refused(&[&*one, b"tail"].concat()).contains("do not end as a zip archive"));
    let directory = one.windows(4).rposition(|four| four == b"PK\x01\x02").unwrap();
    let mut inner = one.repeat(3);
    inner[one.len() + directory] ^= 1;
    refused(&inner);
}
