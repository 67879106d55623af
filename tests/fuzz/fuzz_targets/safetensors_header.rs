//! Parses any bytes as a safetensors file and as a header text. They must be accepted exactly if
//! the reference implementation accepts them. The tensors of an accepted header must be contiguous,
//! and must stay the same when the header is written and read again.

#![no_main]

use std::collections::BTreeMap;
use std::io::Read;

use libfuzzer_sys::fuzz_target;
use safetensors::SafeTensors;
use serde_json::Value;
use tensorfs::internal::error::{ErrorKind, Fault};
use tensorfs::internal::format::safetensors::{Header, PREFIX_LEN, encode};

/// Largest file built for the reference implementation, in bytes.
const FILE_LEN_MAX: u64 = 1 << 16;

fuzz_target!(|data: &[u8]| {
    let whole = Header::of_file(data);
    if let Ok(header) = &whole {
        check(header, data.len() as u64);
    }
    compare(data, &whole);

    // A length that fits the announced tensors, which random bytes would hardly ever hit.
    let text_len = data.len() as u64;
    let Some(file_len) = announced_end(data).checked_add(PREFIX_LEN + text_len) else { return };
    let parsed = Header::parse(data, file_len);
    let streamed = Header::parse_stream(Trickle(data), text_len, file_len);
    let streamed = streamed.expect("reading from memory does not fail");
    assert_eq!(parsed.as_ref().ok(), streamed.as_ref().ok(), "whole and streamed disagree");
    if let Ok(header) = &parsed {
        check(header, file_len);
    }
    if file_len <= FILE_LEN_MAX {
        let mut file = text_len.to_le_bytes().to_vec();
        file.extend_from_slice(data);
        file.resize(file_len as usize, 0);
        compare(&file, &parsed);
    }
});

/// The largest end of `data_offsets` in a header text, 0 where there is none.
fn announced_end(text: &[u8]) -> u64 {
    let Ok(Value::Object(entries)) = serde_json::from_slice(text) else { return 0 };
    let ends = entries
        .values()
        .filter_map(|entry| entry.get("data_offsets").or_else(|| entry.get(2))?.get(1)?.as_u64());
    ends.max().unwrap_or(0)
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
    assert_eq!(header.data_len(), end);
    assert_eq!(header.data_start() + end, file_len);
    let names: std::collections::BTreeSet<_> = header.tensors.iter().map(|e| &e.name).collect();
    assert_eq!(names.len(), header.tensors.len(), "a name stands twice");

    for align in [8, 4096] {
        let metadata = header.metadata.clone().unwrap_or_default();
        let tensors = header.tensors.iter().map(|entry| {
            let len = entry.data_offsets.end - entry.data_offsets.start;
            (entry.name.as_str(), entry.facts.dtype, entry.shape.as_slice(), len)
        });
        let file = encode(&metadata, tensors, align).expect("far from the limit");
        assert_eq!(file.len() as u64 % align, 0);
        let Some(file_len) = end.checked_add(file.len() as u64) else { continue };
        let again = Header::parse(&file[PREFIX_LEN as usize..], file_len).expect("reads back");
        assert_eq!(again.tensors, header.tensors);
        assert_eq!(again.metadata.unwrap_or_default(), metadata);
    }
}

/// Compares the verdict, and what was read, with the reference implementation.
fn compare(file: &[u8], ours: &Result<Header, Fault>) {
    let theirs = SafeTensors::deserialize(file);
    match (ours, &theirs) {
        (Ok(header), Ok(tensors)) => {
            let ours: BTreeMap<_, _> =
                header.tensors.iter().map(|e| (e.name.as_str(), e.shape.as_slice())).collect();
            let theirs: BTreeMap<_, _> = tensors
                .iter()
                .map(|(name, view)| {
                    let shape: Vec<_> = view.shape().iter().map(|dim| *dim as u64).collect();
                    (name, shape)
                })
                .collect();
            let theirs: BTreeMap<_, _> =
                theirs.iter().map(|(name, shape)| (*name, shape.as_slice())).collect();
            assert_eq!(ours, theirs);
        }
        (Err(_), Err(_)) => {}
        // The one deliberate difference.
        (Err(fault), Ok(_)) => assert_eq!(fault.kind, ErrorKind::DuplicateKey, "{fault}"),
        (Ok(header), Err(error)) => panic!("accepted {header:?}, the reference says {error}"),
    }
}

/// Yields a few bytes at a time, so that characters are cut.
struct Trickle<'a>(&'a [u8]);

impl Read for Trickle<'_> {
    fn read(&mut self, buf: &mut [u8]) -> std::io::Result<usize> {
        let len = buf.len().min(self.0.len()).min(3);
        let (now, later) = self.0.split_at(len);
        buf[..len].copy_from_slice(now);
        self.0 = later;
        Ok(len)
    }
}
