//! Scans a file with pickles: what kind of file it is, and which names its pickles use. Nothing is
//! imported or called. Pickles that are refused as weights are scanned too.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;

use super::archives::{BlockReader, archives_at_end};
use super::distcp::is_metadata;
use super::globals::NameRisk;
use super::machine::{PICKLE_LEN_MAX, scan_first};
use super::state_dict::reached;
use super::tensors::tensor_call;
use super::values::{Node, NodeId, Part, Values};
use super::zip::Archive;
use super::{PICKLE, ReadResult, ReadStop, TORCHSCRIPT, is_torch_zip, is_zip, legacy, told};
use crate::error::{counted, quoted};
use crate::format::range_reader::RangeReader;

/// Number of first bytes of a file that show whether it has pickles.
const SNIFF_LEN: u64 = 1024;

/// Maximum number of pickles in an archive that are scanned.
const PICKLES_MAX: usize = 64;

/// Maximum number of names that are recorded, and maximum number of keys of a dict that are
/// reported.
const NAMES_MAX: usize = 4096;
const KEYS_MAX: usize = 8;

/// Suffixes of pickles in archives.
const PICKLE_SUFFIXES: [&str; 3] = [".pkl", ".pickle", ".debug_pkl"];

words! {
    /// The kind of a file with pickles.
    pub enum PickleForm {
        /// An archive of `torch.save`.
        Zip = "torch_zip",
        /// An archive of TorchScript, which also holds a program.
        TorchScript = "torchscript",
        /// The form of `torch.save` before torch 1.6.
        Legacy = "torch_legacy",
        /// Archives of `torch.save` one after the other, as in a `.distcp` file.
        Items = "distcp",
        /// The `.metadata` of a distributed checkpoint.
        Metadata = "distcp_metadata",
        /// A zip archive of another kind.
        OtherZip = "zip",
        /// A pickle that is the whole file.
        Plain = "pickle",
    }
}

/// The result of a scan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PickleScan {
    /// The kind of the file.
    pub form: PickleForm,
    /// A short text about the value of its pickle. `None` if the value is unknown.
    pub holds: Option<String>,
    /// Number of its pickles.
    pub pickles: usize,
    /// The names that the pickles use, each with its risk.
    pub names: BTreeMap<String, NameRisk>,
    /// The reason why the scan ended early. In this case the pickles may use more names.
    pub flaw: Option<String>,
}

impl PickleScan {
    fn new(form: PickleForm) -> PickleScan {
        PickleScan { form, holds: None, pickles: 0, names: BTreeMap::new(), flaw: None }
    }

    /// The names with this risk.
    pub fn names_of(&self, risk: NameRisk) -> impl Iterator<Item = &str> {
        let of_risk = self.names.iter().filter(move |(_, own)| **own == risk);
        of_risk.map(|(name, _)| name.as_str())
    }

    fn stop(&mut self, why: String) {
        self.flaw.get_or_insert(why);
    }

    fn name(&mut self, name: String, risk: NameRisk) {
        if self.names.len() >= NAMES_MAX {
            return self.stop(format!("it asks for more than {NAMES_MAX} names"));
        }
        self.names.insert(name, risk);
    }

    /// Scans the pickle at the beginning of `bytes`. Returns its length, or `None` if the pickle
    /// has no end.
    fn pickle(&mut self, bytes: &[u8]) -> Option<usize> {
        let scanned = scan_first(bytes);
        let values = &scanned.values;
        self.pickles += 1;
        for id in values.ids().filter(|&id| matches!(values.node(id), Node::Global(..))) {
            match values.global(id) {
                // Python decodes escapes in this text, so the name may be any name.
                Some((module, name)) if module.contains('\\') || name.contains('\\') => {
                    self.name(format!("{module}.{name}, with escapes"), NameRisk::Hostile);
                }
                Some((module, name)) => {
                    self.name(format!("{module}.{name}"), NameRisk::of(module, name));
                }
                None => self.name("a name that is no text".to_owned(), NameRisk::Hostile),
            }
        }
        for (class, name) in values.ids().filter_map(|id| values.attribute_of(id)) {
            if let Some((module, outer)) = values.global(class) {
                self.name(format!("{module}.{outer}.{name}"), NameRisk::Unknown);
            }
        }
        for hidden in &scanned.hidden {
            self.name(hidden.clone(), NameRisk::Hostile);
        }
        if let Some(fault) = scanned.flaw {
            self.stop(fault.message);
            return None;
        }
        if self.form == PickleForm::Plain && self.pickles == 1 && is_metadata(values) {
            self.form = PickleForm::Metadata;
        }
        let len = values.pickle_len();
        if self.holds.is_none() || self.form == PickleForm::Legacy {
            self.holds = Some(holds(values));
        }
        Some(len)
    }
}

/// Scans a file. `None` if its first bytes show that it has no pickle. `items` are the places of its archives
/// according to `.metadata`: offset and length in bytes. Without `items`, the archives are found from the end of the
/// file.
///
/// # Errors
/// A failed read.
pub fn scan(
    reader: &mut dyn RangeReader,
    items: Option<&[(u64, u64)]>,
) -> io::Result<Option<PickleScan>> {
    let mut first = vec![0; SNIFF_LEN.min(reader.file_len()) as usize];
    reader.read_exact_at(0, &mut first)?;
    if is_zip(&first) {
        let form = if is_torch_zip(&first) { PickleForm::Zip } else { PickleForm::OtherZip };
        let mut scan = PickleScan::new(form);
        if let Err(fault) = told(scan_archives(reader, items, &mut scan))? {
            scan.stop(fault.message);
        }
        return Ok(Some(scan));
    }
    let is_legacy = legacy::is_legacy(&first);
    if !is_legacy && !may_be_pickle(&first) {
        return Ok(None);
    }
    let len = reader.file_len().min(PICKLE_LEN_MAX);
    let mut bytes = vec![0; len as usize];
    reader.read_exact_at(0, &mut bytes)?;
    let mut scan = PickleScan::new(if is_legacy { PickleForm::Legacy } else { PickleForm::Plain });
    scan_row(&bytes, &mut scan);
    // A text file may begin with the same letters as a pickle.
    let is_text = scan.form == PickleForm::Plain && scan.flaw.is_some() && scan.names.is_empty();
    if is_text && first.first() != Some(&0x80) {
        return Ok(None);
    }
    if scan.flaw.is_some() && len < reader.file_len() {
        scan.flaw = Some(format!("its pickles do not end in its first {len} bytes"));
    }
    Ok(Some(scan))
}

/// Whether a file that begins with `first` may be a pickle: it begins with a protocol, or with an opcode with which
/// pickles of protocols 0 and 1 begin.
fn may_be_pickle(first: &[u8]) -> bool {
    match first {
        [0x80, 2..=5, ..] => true,
        [begin, ..] => b"(c]})ilSVXUI".contains(begin),
        [] => false,
    }
}

/// Scans the pickles that follow each other at the beginning of a file.
fn scan_row(bytes: &[u8], scan: &mut PickleScan) {
    // In the form before torch 1.6, data follows after the fifth pickle.
    let most = if scan.form == PickleForm::Legacy { 5 } else { usize::MAX };
    let mut rest = bytes;
    for number in 0..most {
        let follows = matches!(rest, [0x80, 2..=5, ..]);
        if number > 0 && !follows {
            break;
        }
        let holds = scan.holds.take();
        match scan.pickle(rest) {
            Some(len) => rest = &rest[len..],
            None => break,
        }
        // In the form before torch 1.6 the saved object is the fourth pickle. In other files it is
        // the first pickle.
        let is_object = if scan.form == PickleForm::Legacy { number == 3 } else { number == 0 };
        if !is_object && holds.is_some() {
            scan.holds = holds;
        }
    }
}

/// Scans the archives in a file that begins with an archive.
fn scan_archives(
    reader: &mut dyn RangeReader,
    items: Option<&[(u64, u64)]>,
    scan: &mut PickleScan,
) -> ReadResult<()> {
    let mut reader = BlockReader::new(reader);
    let file_len = reader.file_len();
    let (ranges, before) = match items {
        Some(items) => {
            let ranges = items.iter().map(|&(start, len)| start..start.saturating_add(len));
            (ranges.collect(), 0)
        }
        None => archives_at_end(&mut reader)?,
    };
    if items.is_none() && ranges.len() <= 1 {
        return scan_archive(&mut reader, 0..file_len, scan);
    }
    if before > 0 {
        scan.stop(format!("its first {before} bytes are no archive of torch.save"));
    }
    let (mut at, mut has_program) = (before, false);
    for range in &ranges {
        let Range { start, end } = *range;
        if start > at {
            scan.stop(format!("the bytes {at} to {start} are in no item by `.metadata`"));
        }
        if end > file_len {
            scan.stop(format!(
                "the item at byte {start} ends at {end} by `.metadata`, past its end"
            ));
            break;
        }
        at = at.max(end);
        match scan_archive(&mut reader, range.clone(), scan) {
            Err(ReadStop::Fault(fault)) => {
                scan.stop(format!("the item at byte {start} {}", fault.message));
            }
            done => done?,
        }
        has_program |= scan.form == PickleForm::TorchScript;
    }
    if at < file_len && scan.flaw.is_none() {
        scan.stop(format!("the bytes {at} to {file_len} are in no item by `.metadata`"));
    }
    scan.form = if has_program { PickleForm::TorchScript } else { PickleForm::Items };
    scan.holds = Some(counted(ranges.len(), "item"));
    Ok(())
}

/// Scans the archive in the bytes `range` of a file.
fn scan_archive(
    reader: &mut dyn RangeReader,
    range: Range<u64>,
    scan: &mut PickleScan,
) -> ReadResult<()> {
    let archive = Archive::read(reader, range)?;
    if archive.has(TORCHSCRIPT) {
        scan.form = PickleForm::TorchScript;
    } else if archive.has(PICKLE) {
        scan.form = PickleForm::Zip;
    }
    let is_pickle = |name: &&str| PICKLE_SUFFIXES.iter().any(|suffix| name.ends_with(suffix));
    let mut names: Vec<&str> = archive.names().filter(is_pickle).collect();
    // The pickle of torch comes first.
    names.sort_unstable_by_key(|name| (*name != PICKLE, *name));
    if names.len() > PICKLES_MAX {
        scan.stop(format!("it has {} pickles, of which {PICKLES_MAX} are scanned", names.len()));
    }
    for name in names.into_iter().take(PICKLES_MAX) {
        let place = match archive.data(reader, name) {
            Ok(place) => place.unwrap_or(0..0),
            Err(ReadStop::Fault(fault)) => {
                scan.stop(fault.message);
                continue;
            }
            Err(failed) => return Err(failed),
        };
        let len = place.end - place.start;
        if len > PICKLE_LEN_MAX {
            scan.stop(format!("{} has {len} bytes, up to {PICKLE_LEN_MAX} are read", quoted(name)));
            continue;
        }
        let mut bytes = vec![0; len as usize];
        reader.read_exact_at(place.start, &mut bytes)?;
        if let Some(read) = scan.pickle(&bytes)
            && read < bytes.len()
        {
            scan.stop(format!(
                "{} bytes follow the pickle in {}",
                bytes.len() - read,
                quoted(name)
            ));
        }
    }
    Ok(())
}

/// A short text about the value of a pickle.
fn holds(values: &Values<'_>) -> String {
    let root = values.root;
    if tensor_call(values, root).is_some() {
        return "one tensor".to_owned();
    }
    let class = values.call(root).map(|(class, _)| class);
    let keys: Vec<NodeId> = values
        .parts(root)
        .filter_map(|part| match part {
            Part::Pair(key, _) => Some(key),
            _ => None,
        })
        .collect();
    let is_dict =
        class.is_none_or(|class| values.global(class).is_some_and(super::globals::is_dict));
    match (values.node(root), class) {
        (Node::Dict(_) | Node::Object(..), _) if is_dict => {
            let shown = keys.iter().take(KEYS_MAX).map(|&key| match values.node(key) {
                Node::Text(..) => values.text(key).map_or_else(|| "a text".to_owned(), quoted),
                Node::Int(number) => number.to_string(),
                _ => "another key".to_owned(),
            });
            let mut text = shown.collect::<Vec<_>>().join(", ");
            if keys.len() > KEYS_MAX {
                text.push_str(", ...");
            }
            match keys.len() {
                0 => "an empty dict".to_owned(),
                1 => format!("a dict with the key {text}"),
                count => format!("a dict with {count} keys: {text}"),
            }
        }
        (_, Some(class)) => format!("an object made by {}", values.global_name(class)),
        (Node::List(_) | Node::Tuple(_), _) => {
            format!("a list of {} values", reached(values, root).count())
        }
        _ => "one value".to_owned(),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that panics has failed, as it should")]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn scanned(bytes: &[u8]) -> PickleScan {
        scan(&mut &*bytes, None).unwrap().unwrap()
    }

    fn risk(bytes: &[u8], name: &str) -> Option<NameRisk> {
        scanned(bytes).names.get(name).copied()
    }

    #[test]
    fn names_are_sorted_by_what_loading_them_does() {
        let pickle =
            b"\x80\x02}(X\x01\0\0\0aceval_me\nNet\n)RX\x01\0\0\0bccollections\nOrderedDict\n)R\
            X\x01\0\0\0ccos\nsystem\nu.";
        let found = scanned(pickle);
        let names = |risk| found.names_of(risk).collect::<Vec<_>>();
        assert_eq!(names(NameRisk::Safe), ["collections.OrderedDict"]);
        assert_eq!(names(NameRisk::Unknown), ["eval_me.Net"]);
        assert_eq!(names(NameRisk::Hostile), ["os.system"]);
        assert_eq!((found.form, found.flaw), (PickleForm::Plain, None));
        assert_eq!(found.holds.as_deref(), Some("a dict with 3 keys: `a`, `b`, `c`"));
    }

    #[test]
    fn names_of_the_first_protocols_are_found() {
        for (pickle, name) in [
            (&b"cposix\nsystem\n(S'ls'\ntR."[..], "posix.system"),
            (b"(S'ls'\nios\nsystem\n.", "os.system"),
            (b"(cbuiltins\nexec\nS'x'\no.", "builtins.exec"),
            (b"\x80\x02Vos\np0\n0g0\nVsystem\n\x93.", "os.system"),
        ] {
            assert_eq!(risk(pickle, name), Some(NameRisk::Hostile), "{name}");
            assert_eq!(scanned(pickle).flaw, None);
        }
    }

    #[test]
    fn names_that_are_hidden_count_as_hostile() {
        for (pickle, name) in [
            // Hidden names: a name with escapes, a computed name, a name from the registry of extensions, and an
            // attribute of a value.
            (&b"\x80\x04V\\u006fs\nVsystem\n\x93."[..], "\\u006fs.system, with escapes"),
            (b"\x80\x04NN\x93.", "a name that is no text"),
            (b"\x80\x02\x82\x05.", "the extension 5 of copyreg"),
            (b"\x80\x02cbuiltins\ngetattr\nN\x85R.", "builtins.getattr"),
        ] {
            assert_eq!(risk(pickle, name), Some(NameRisk::Hostile), "{name}");
        }
    }

    #[test]
    fn names_before_the_place_where_a_scan_stops_are_told_and_that_it_stops() {
        let found = scanned(b"\x80\x02cos\nsystem\n\xff.");
        assert_eq!(found.names.get("os.system"), Some(&NameRisk::Hostile));
        assert!(found.flaw.unwrap().contains("the opcode 0xff at byte 13"));
    }

    #[test]
    fn a_pickle_behind_another_one_is_scanned_too() {
        let found = scanned(b"\x80\x02}.\x80\x02cos\nsystem\n.data");
        assert_eq!((found.pickles, found.holds.as_deref()), (2, Some("an empty dict")));
        assert_eq!(found.names_of(NameRisk::Hostile).collect::<Vec<_>>(), ["os.system"]);
    }

    #[test]
    fn each_item_of_a_file_is_scanned_where_the_metadata_or_the_archives_place_it() {
        const FILE: &[u8] = include_bytes!("../../../tests/fixtures/torch/dcp_small/__0_0.distcp");
        let len = FILE.len() as u64 / 2;
        for items in [None, Some(&[(0, len), (len, len)][..])] {
            let found = scan(&mut &*FILE, items).unwrap().unwrap();
            assert_eq!((found.form, found.pickles, found.flaw), (PickleForm::Items, 2, None));
            assert_eq!(found.holds.as_deref(), Some("2 items"));
        }
        for (items, words) in [
            (vec![(len, len)], "the bytes 0 to 1577 are in no item"),
            (vec![(0, len)], "the bytes 1577 to 3154 are in no item"),
            (vec![(0, len), (len, len + 1)], "ends at 3155 by `.metadata`, past its end"),
            (vec![(0, len - 1), (len - 1, len + 1)], "the item at byte 0 is a zip archive"),
        ] {
            let flaw = scan(&mut &*FILE, Some(&items)).unwrap().unwrap().flaw.unwrap();
            assert!(flaw.contains(words), "{flaw}");
        }
        let cut = scanned(&[b"PK\x03\x04", FILE].concat());
        assert_eq!(cut.flaw.as_deref(), Some("its first 4 bytes are no archive of torch.save"));
        let metadata =
            include_bytes!("../../../tests/fixtures/torch/dcp_small/.metadata").as_slice();
        assert_eq!(scanned(metadata).form, PickleForm::Metadata);
    }

    #[test]
    fn text_and_weights_are_no_pickles() {
        for bytes in
            [&b""[..], b"(a text\n", b"{\"a\": 1}", b"cat\n", &[8, 0, 0, 0, 0, 0, 0, 0, b'{']]
        {
            assert_eq!(scan(&mut &*bytes, None).unwrap(), None, "{bytes:?}");
        }
    }

    proptest! {
        #[test]
        fn a_scan_of_any_bytes_ends(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let pickle = [b"\x80\x02", &bytes[..]].concat();
            prop_assert!(scanned(&pickle).pickles >= 1);
        }
    }
}
