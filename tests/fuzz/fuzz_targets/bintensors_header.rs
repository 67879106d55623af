//! Parses any bytes as a bintensors file and as a header. They must be accepted exactly if the
//! reference implementation accepts them, or if they have the older layout. The tensors of an
//! accepted header must be contiguous, and must stay the same when the header is written and read
//! again.

#![no_main]

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};

use bintensors::BinTensors;
use libfuzzer_sys::fuzz_target;
use tensorfs::internal::error::{ErrorKind, Fault};
use tensorfs::internal::format::bintensors::{encode, number_of, parse, parse_file};
use tensorfs::internal::format::safetensors::{Entry, Header, PREFIX_LEN};

/// Largest file built for the reference implementation, in bytes.
const FILE_LEN_MAX: u64 = 1 << 16;

/// Longest header that the reference implementation accepts.
const LIMIT: usize = 100_000_000;

/// A header of the older layout: metadata, tensors (dtype, shape, start, end), positions.
type Older =
    (Option<HashMap<String, String>>, Vec<(u32, Vec<u64>, u64, u64)>, HashMap<String, u64>);

fuzz_target!(|data: &[u8]| {
    let whole = parse_file(data);
    if let Ok(header) = &whole {
        check(header, data.len() as u64);
    }
    compare(data, &whole);

    // A length that fits the announced tensors, which random bytes would hardly ever hit.
    let header_len = data.len() as u64;
    let Some(file_len) = announced_end(data).checked_add(PREFIX_LEN + header_len) else { return };
    let parsed = parse(data, file_len);
    if let Ok(header) = &parsed {
        check(header, file_len);
    }
    if file_len <= FILE_LEN_MAX {
        let mut file = header_len.to_le_bytes().to_vec();
        file.extend_from_slice(data);
        file.resize(file_len as usize, 0);
        compare(&file, &parsed);
    }
});

/// The end of the last tensor that a header announces, found by asking for a file without data.
fn announced_end(header: &[u8]) -> u64 {
    let config = bincode::config::standard().with_limit::<LIMIT>();
    type Current = (Option<HashMap<String, String>>, Vec<(String, u32, Vec<u64>, u64, u64)>);
    let current = bincode::decode_from_slice::<Current, _>(header, config);
    let older = bincode::decode_from_slice::<Older, _>(header, config);
    let current = current.ok().and_then(|((_, tensors), _)| tensors.last().map(|t| t.4));
    let older = older.ok().and_then(|((_, tensors, _), _)| tensors.last().map(|t| t.3));
    current.or(older).unwrap_or(0)
}

fn check(header: &Header, file_len: u64) {
    let mut end = 0;
    for entry in &header.tensors {
        assert_eq!(entry.data_offsets.start, end, "{entry:?} does not follow");
        end = entry.data_offsets.end;
        let bits =
            entry.shape.iter().try_fold(u128::from(entry.facts.dtype.bits()), |bits, dim| {
                bits.checked_mul(u128::from(*dim))
            });
        let bytes = u128::from(entry.data_offsets.end - entry.data_offsets.start);
        assert_eq!(bits, Some(bytes * 8), "{entry:?} has another size");
    }
    assert_eq!(header.data_start() + end, file_len);
    let names: BTreeSet<_> = header.tensors.iter().map(|e| &e.name).collect();
    assert_eq!(names.len(), header.tensors.len(), "a name stands twice");

    let metadata = header.metadata.clone().unwrap_or_default();
    let len = |entry: &Entry| entry.data_offsets.end - entry.data_offsets.start;
    let tensors =
        header.tensors.iter().map(|e| (e.name.as_str(), e.facts.dtype, e.shape.as_slice(), len(e)));
    let file = encode(&metadata, tensors).expect("far from the limit");
    assert_eq!(file.len() % 8, 0);
    let Some(file_len) = end.checked_add(file.len() as u64) else { return };
    let again = parse(&file[PREFIX_LEN as usize..], file_len).expect("reads back");
    assert_eq!(again.tensors, header.tensors);
    assert_eq!(again.metadata.unwrap_or_default(), metadata);
    let mut sorted: Vec<&Entry> = header.tensors.iter().collect();
    sorted.sort_by_key(|entry| (Reverse(number_of(entry.facts.dtype)), &entry.name));
    let widths: Vec<u64> = sorted.iter().map(|entry| entry.facts.dtype.bits()).collect();
    assert!(widths.is_sorted_by(|a, b| a >= b), "the order does not align: {widths:?}");
}

/// Compares the verdict, and what was read, with the reference implementation.
fn compare(file: &[u8], ours: &Result<Header, Fault>) {
    // It adds up the length of the file without looking whether that fits.
    if ours.as_ref().is_err_and(|fault| fault.kind == ErrorKind::DataTruncated) {
        return;
    }
    match (ours, BinTensors::deserialize(file)) {
        (Ok(header), Ok(tensors)) => {
            let ours: BTreeMap<_, _> = header
                .tensors
                .iter()
                .map(|e| (e.name.clone(), (e.facts.dtype.name().to_owned(), e.shape.clone())))
                .collect();
            let theirs: BTreeMap<_, _> = tensors
                .iter()
                .map(|(name, view)| {
                    let shape: Vec<u64> = view.shape().iter().map(|dim| *dim as u64).collect();
                    (name.to_owned(), (format!("{:?}", view.dtype()), shape))
                })
                .collect();
            assert_eq!(ours, theirs);
        }
        (Err(_), Err(_)) => {}
        // The one deliberate difference: metadata keys that stand twice.
        (Err(fault), Ok(_)) => assert_eq!(fault.kind, ErrorKind::DuplicateKey, "{fault}"),
        (Ok(header), Err(error)) => {
            let config = bincode::config::standard().with_limit::<LIMIT>();
            let text = &file[PREFIX_LEN as usize..];
            let older = bincode::decode_from_slice::<Older, _>(text, config);
            let Ok(((_, tensors, names), _)) = older else {
                panic!("accepted {header:?}, the reference says {error}");
            };
            assert_eq!(header.tensors.len(), tensors.len());
            for entry in &header.tensors {
                let (_, shape, start, end) = &tensors[names[&entry.name] as usize];
                assert_eq!((shape, *start..*end), (&entry.shape, entry.data_offsets.clone()));
            }
        }
    }
}
