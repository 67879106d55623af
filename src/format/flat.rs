//! Fast parser for a safetensors header in the form that savers write. It reads directly into a few
//! large vectors.
//!
//! Accepts only plain valid headers: names without escapes, no unknown keys, and every tensor at
//! its place. All other headers are left to `Header::parse`, which accepts or refuses them and
//! words every error. Both parsers give the same result for all headers that are accepted here. A
//! header of a million tensors needs no allocation per tensor.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::dtype::Dtype;
use crate::format::description::ShardDescription;
use crate::format::plain::JsonCursor;
use crate::format::safetensors::{METADATA, PREFIX_LEN};
use crate::hash::Digest;

/// A tensor whose entry is being read.
struct HeaderRow<'a> {
    name: &'a str,
    shape: (u32, u32),
    dtype: Dtype,
    data: Range<u64>,
}

/// The description in the header `text` of a file of `file_len` bytes. `None` if `Header::parse`
/// has to parse the header.
pub fn parse(text: &[u8], file_len: u64) -> Option<ShardDescription> {
    let header_len = text.len() as u64;
    // Positions in the header are stored with 32 bits.
    u32::try_from(header_len).ok()?;
    let mut cursor = JsonCursor::new(std::str::from_utf8(text).ok()?);
    let mut metadata = None;
    let mut numbers = Vec::new();
    let mut rows = Vec::new();
    cursor.items(b'{', b'}', |cursor| {
        let name = cursor.string()?;
        cursor.token(b':')?;
        if name == METADATA {
            let before = metadata.replace(read_metadata(cursor)?);
            return before.is_none().then_some(());
        }
        rows.push(read_tensor(cursor, name, &mut numbers)?);
        Some(())
    })?;
    cursor.end()?;
    let key = |row: &HeaderRow<'_>| (row.data.start, row.data.end);
    if !rows.is_sorted_by(|a, b| (key(a), a.name) <= (key(b), b.name)) {
        rows.sort_by(|a, b| key(a).cmp(&key(b)).then_with(|| a.name.cmp(b.name)));
    }
    let data_start = PREFIX_LEN + header_len;
    check(&rows, &numbers, data_start, file_len)?;
    let names_len = rows.iter().map(|row| row.name.len()).sum();
    let mut description = ShardDescription::with_room(data_start, rows.len(), names_len);
    description.metadata = metadata;
    for HeaderRow { name, shape, dtype, data } in rows {
        description.push(name, dtype.into(), shape, data_start + data.start);
    }
    description.set_numbers(numbers);
    Some(description)
}

/// Checks that the tensors follow each other from the end of the header to the end of the file, and
/// that no two names are equal.
fn check(rows: &[HeaderRow<'_>], numbers: &[u64], data_start: u64, file_len: u64) -> Option<()> {
    let mut end = 0;
    for HeaderRow { dtype, shape, data, .. } in rows {
        let bits = dtype.bits_of(&numbers[shape.0 as usize..shape.1 as usize])?;
        let fits = data.start == end && bits.is_multiple_of(8);
        end = data.start.checked_add(bits / 8).filter(|&end| fits && end == data.end)?;
    }
    (end.checked_add(data_start)? == file_len).then_some(())?;
    // If two names have the same hash, the result is `None`, and the strict parser then compares
    // the names.
    let mut hashes: Vec<[u8; 16]> =
        rows.iter().map(|row| Digest::of(row.name.as_bytes()).0).collect();
    hashes.sort_unstable();
    hashes.windows(2).all(|pair| pair[0] != pair[1]).then_some(())
}

fn read_metadata(cursor: &mut JsonCursor<'_>) -> Option<BTreeMap<String, String>> {
    let mut map = BTreeMap::new();
    cursor.items(b'{', b'}', |cursor| {
        let key = cursor.string()?.to_owned();
        cursor.token(b':')?;
        map.insert(key, cursor.any_string()?).is_none().then_some(())
    })?;
    Some(map)
}

/// Reads the entry of the tensor `name`, and appends its shape to `numbers`.
fn read_tensor<'a>(
    cursor: &mut JsonCursor<'a>,
    name: &'a str,
    numbers: &mut Vec<u64>,
) -> Option<HeaderRow<'a>> {
    let (mut dtype, mut shape, mut data) = (None, None, None);
    cursor.items(b'{', b'}', |cursor| {
        let key = cursor.string()?;
        cursor.token(b':')?;
        let again = match key {
            "dtype" => dtype.replace(Dtype::from_name(cursor.string()?)?).is_some(),
            "shape" => {
                let begin = numbers.len();
                cursor.numbers(numbers)?;
                shape.replace((begin as u32, numbers.len() as u32)).is_some()
            }
            "data_offsets" => {
                cursor.token(b'[')?;
                let start = cursor.number()?;
                cursor.token(b',')?;
                let end = cursor.number()?;
                cursor.token(b']')?;
                data.replace(start..end).is_some()
            }
            _ => true,
        };
        (!again).then_some(())
    })?;
    Some(HeaderRow { name, dtype: dtype?, shape: same_before(numbers, shape?), data: data? })
}

/// Removes the shape at the end of `numbers` if the numbers before it are the same, to save memory. Returns the range
/// that has the shape then.
fn same_before(numbers: &mut Vec<u64>, shape: (u32, u32)) -> (u32, u32) {
    let (begin, end) = shape;
    let len = end - begin;
    if begin < len || numbers[(begin - len) as usize..begin as usize] != numbers[begin as usize..] {
        return (begin, end);
    }
    numbers.truncate(begin as usize);
    (begin - len, begin)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that panics has failed, as it should")]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::format::safetensors::Header;

    type Fields<'a> = Vec<(&'a str, Dtype, &'a [u64], u64)>;

    fn told(description: &ShardDescription) -> Fields<'_> {
        description.tensors().map(|t| (t.name, t.facts.dtype, t.shape, t.start)).collect()
    }

    /// Checks that both parsers give the same result for `text`, if the fast parser accepts it.
    fn agrees(text: &str, data_len: u64) -> Option<ShardDescription> {
        let file_len = PREFIX_LEN + text.len() as u64 + data_len;
        let flat = parse(text.as_bytes(), file_len)?;
        let header = Header::parse(text.as_bytes(), file_len).unwrap();
        let slow = ShardDescription::from(header);
        assert_eq!((&flat.metadata, &flat.described), (&slow.metadata, &slow.described));
        assert_eq!(told(&flat), told(&slow));
        Some(flat)
    }

    const PLAIN: &str = r#"{"__metadata__":{"format":"pt"},
        "b":{"dtype":"F32","shape":[2,1],"data_offsets":[8,16]},
        "a":{"shape":[2,1],"data_offsets":[0,8],"dtype":"F32"},
        "none":{"dtype":"U8","shape":[0],"data_offsets":[16,16]},
        "one":{"dtype":"U8","shape":[],"data_offsets":[16,17]}}  "#;

    #[test]
    fn a_plain_header_is_read_and_says_the_same_as_by_the_strict_parser() {
        let flat = agrees(PLAIN, 17).unwrap();
        let names: Vec<&str> = flat.tensors().map(|tensor| tensor.name).collect();
        assert_eq!(names, ["a", "b", "none", "one"]);
        assert_eq!(flat.len(), 4);
        assert!(agrees("{}", 0).unwrap().is_empty());
        let escaped = r#"{"__metadata__":{"a":"\"\u00e9\n\\","b":"\\\""}}"#;
        assert_eq!(agrees(escaped, 0).unwrap().metadata.unwrap()["a"], "\"\u{e9}\n\\");
    }

    #[test]
    fn whatever_is_not_plain_is_left_to_the_strict_parser() {
        for (from, to) in [
            ("\"b\"", "\"\\u0062\""),
            ("\"b\"", "\"a\""),
            ("[8,16]", "[8,16.0]"),
            ("[8,16]", "[8,016]"),
            ("[8,16]", "[8,16,]"),
            ("[8,16]", "[9,16]"),
            ("[8,16]", "[8,99999999999999999999]"),
            ("\"U8\"", "\"U7\""),
            ("\"U8\",\"shape\":[]", "\"F4\",\"shape\":[]"),
            ("{\"format\":\"pt\"}", "null"),
            ("{\"format\":\"pt\"}", "{\"a\":\"\",\"a\":\"\"}"),
            ("\"pt\"", "\"\\x\""),
            ("\"none\"", "\"__metadata__\""),
            ("\"dtype\":\"U8\"", "\"dtype\":\"U8\",\"more\":1"),
            ("\"dtype\":\"U8\"", "\"dtype\":\"U8\",\"dtype\":\"U8\""),
            ("}}", "},}"),
            ("}}", "}}x"),
        ] {
            let text = PLAIN.replacen(from, to, 1);
            assert_ne!(text, PLAIN, "{from}");
            let file_len = PREFIX_LEN + text.len() as u64 + 17;
            assert_eq!(parse(text.as_bytes(), file_len), None, "{to}");
        }
        assert_eq!(agrees(PLAIN, 18), None);
        assert_eq!(parse(b"{\"\xff\":1}", 17), None);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn a_header_with_anything_changed_is_read_as_by_the_strict_parser_or_not_at_all(
            at in 0..PLAIN.len(), len in 0_usize..4, put in "[ -~]{0,3}"
        ) {
            let end = (at + len).min(PLAIN.len());
            let text = format!("{}{put}{}", &PLAIN[..at], &PLAIN[end..]);
            agrees(&text, 17);
        }
    }
}
