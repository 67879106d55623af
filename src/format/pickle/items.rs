//! The items of a `.distcp` file. Each item is an archive of `torch.save` with one tensor, which is a chunk of a
//! larger tensor.

use std::collections::HashMap;
use std::io;
use std::ops::Range;

use super::distcp::StoredChunk;
use super::tensors::{StorageData, Storages, TensorPlace, tensor_call};
use super::zip::{LOCAL_MAGIC, archive_start};
use super::{
    PICKLE, ReadResult, ReadStop, check_byte_order, check_described, described, description_of,
    is_zip, machine, open, told,
};
use crate::coalesce::coalesce;
use crate::error::{ErrorKind, Fault};
use crate::format::dcp;
use crate::format::description::{PiecePlace, ShardDescription, TensorDescription};
use crate::format::range_reader::RangeReader;
use crate::format::safetensors::{Header, PREFIX_LEN, SNIFF_LEN, header_len};

/// Number of bytes that are read ahead at the beginning and at the end of an item. torch writes 640 bytes in front of
/// the data and 940 bytes behind it.
const HEAD_LEN: u64 = 1024;
const TAIL_LEN: u64 = 1280;

/// Advice if a file differs from its `.metadata`: the cause and the remedy.
const OF_ONE_SAVE: &str = "the two are of different saves, the file was exchanged with another one, or it \
                           is damaged: take both from one save";

/// Maximum number of bytes between two ranges at the ends of items that are read together, and maximum length of the
/// read that joins them, in bytes.
const GAP_LEN: u64 = 16 << 10;
const READ_LEN_MAX: u64 = 256 << 10;

/// Parses the items of `chunks`, which lie in one file, in the order of their bytes. The file has `items` items in
/// all. Items that are not in `chunks` are not read.
///
/// # Errors
/// The outer error is a failed read, the inner error is the fault of the file.
pub fn parse_items(
    reader: &mut dyn RangeReader,
    chunks: &[StoredChunk],
    items: usize,
) -> io::Result<Result<ShardDescription, Fault>> {
    told(parse(reader, chunks, items))
}

fn parse(
    reader: &mut dyn RangeReader,
    chunks: &[StoredChunk],
    items: usize,
) -> ReadResult<ShardDescription> {
    if let Some(header) = safetensors_header(reader, chunks)? {
        let held = header.tensors.len();
        if held > items {
            return Err(ErrorKind::DcpInfo.stop(format!(
                "holds {held} tensors, and `.metadata` places {items} in it; {OF_ONE_SAVE}"
            )));
        }
        return described_by_header(header, chunks).map_err(ReadStop::from);
    }
    let ranges = item_ranges(reader.file_len(), chunks)?;
    let mut window = WindowReader::new(reader, &ranges);
    let names_len = chunks.iter().map(|chunk| chunk.tensor.name.len()).sum();
    let mut description = description_of(0, chunks.len(), names_len);
    description.described.clear();
    let mut places = Vec::with_capacity(chunks.len());
    for (chunk, range) in chunks.iter().zip(ranges) {
        let name = &chunk.tensor.name;
        let item = parse_item(&mut window, chunk, &range).map_err(|stop| stop.tensor(name))?;
        let TensorPlace { dtype, shape, start, strides, .. } = item.tensor;
        description.add(name, dtype.into(), &shape, start);
        description.set_strides(strides);
        places.push(place_of(chunk));
        for part in described(&range, item.data) {
            match description.described.last_mut() {
                Some(last) if last.end == part.start => last.end = part.end,
                _ => description.described.push(part),
            }
        }
    }
    check_described(&description.described, chunks.len() as u64)?;
    description.places = Some(places);
    Ok(description)
}

/// The header of a file whose items torch saved as safetensors. Such a file is a safetensors file, and `.metadata`
/// places every item at byte 0. `None` if the file is no safetensors file.
fn safetensors_header(
    reader: &mut dyn RangeReader,
    chunks: &[StoredChunk],
) -> ReadResult<Option<Header>> {
    let mut sniff = [0; SNIFF_LEN + 1];
    if chunks.iter().any(|chunk| chunk.item.0 > 0) || reader.file_len() < sniff.len() as u64 {
        return Ok(None);
    }
    reader.read_exact_at(0, &mut sniff)?;
    if is_zip(&sniff) || sniff[SNIFF_LEN] != b'{' {
        return Ok(None);
    }
    let file_len = reader.file_len();
    let mut text = vec![0; header_len(&sniff, file_len)? as usize];
    reader.read_exact_at(PREFIX_LEN, &mut text)?;
    Ok(Some(Header::parse(&text, file_len)?))
}

/// The description of a file with this header. The header has to have a tensor for each of
/// `chunks`.
fn described_by_header(header: Header, chunks: &[StoredChunk]) -> Result<ShardDescription, Fault> {
    let data_start = header.data_start();
    let held = ShardDescription::from(header);
    let placed = dcp::placements(&held)?;
    let mut by_name: HashMap<&str, (TensorDescription<'_>, &PiecePlace)> =
        held.tensors().zip(&placed).map(|(tensor, place)| (tensor.name, (tensor, place))).collect();
    let mut found = Vec::with_capacity(chunks.len());
    for chunk in chunks {
        let tensor = &chunk.tensor;
        let fault = |kind: ErrorKind, message| Err(kind.fault(message).tensor(&tensor.name));
        let Some((held, place)) = by_name.remove(tensor.fqn.as_str()) else {
            let message = "`.metadata` places a chunk of it in this file, which does not hold it: torch \
                           keeps one chunk of a tensor in such a file; save without \
                           `serialization_format`";
            return fault(ErrorKind::TensorMissing, message.to_owned());
        };
        let PiecePlace { logical_name, offset, whole_shape } = place;
        let is_same = held.shape == chunk.shape
            && *offset == chunk.offset
            && logical_name.is_none()
            && whole_shape.as_ref().is_none_or(|whole| *whole == tensor.shape);
        if held.facts.dtype != tensor.dtype || !is_same {
            let message = format!(
                "its chunk at {:?} is {} of shape {:?} by `.metadata`, and {} of shape {:?} at \
                 {offset:?} in this file; save the checkpoint again",
                chunk.offset, tensor.dtype, chunk.shape, held.facts, held.shape
            );
            return fault(ErrorKind::DcpOffsets, message);
        }
        found.push((held.start, chunk));
    }
    found.sort_by_key(|(start, _)| *start);
    let mut description = description_of(data_start, chunks.len(), 0);
    for (start, chunk) in &found {
        let tensor = &chunk.tensor;
        description.add(&tensor.name, tensor.dtype.into(), &chunk.shape, *start);
    }
    description.places = Some(found.into_iter().map(|(_, chunk)| place_of(chunk)).collect());
    Ok(description)
}

fn place_of(chunk: &StoredChunk) -> PiecePlace {
    let (offset, whole_shape) = (chunk.offset.clone(), Some(chunk.tensor.shape.clone()));
    PiecePlace { logical_name: None, offset, whole_shape }
}

/// The byte ranges of the items. They follow each other in the file.
fn item_ranges(file_len: u64, chunks: &[StoredChunk]) -> Result<Vec<Range<u64>>, Fault> {
    let mut ranges: Vec<Range<u64>> = Vec::with_capacity(chunks.len());
    for chunk in chunks {
        let (start, len) = chunk.item;
        let fault = |kind: ErrorKind, message| Err(kind.fault(message).tensor(&chunk.tensor.name));
        let Some(end) = start.checked_add(len).filter(|&end| end <= file_len) else {
            let message = format!(
                "its item of {len} bytes at byte {start} passes the end of the file, which has \
                 {file_len} bytes: it was cut off, or is of another save; fetch or copy the file again"
            );
            return fault(ErrorKind::DataTruncated, message);
        };
        if let Some(before) = ranges.last().filter(|before| before.end > start) {
            let message = format!(
                "its item at byte {start} begins within the one before, which ends at byte {}; save \
                 the checkpoint again",
                before.end
            );
            return fault(ErrorKind::OffsetOverlap, message);
        }
        ranges.push(start..end);
    }
    Ok(ranges)
}

/// The tensor of an item, and the bytes of its data in the file.
struct ParsedItem {
    tensor: TensorPlace,
    data: Vec<Range<u64>>,
}

fn parse_item(
    window: &mut WindowReader<'_>,
    chunk: &StoredChunk,
    range: &Range<u64>,
) -> ReadResult<ParsedItem> {
    window.begin(range)?;
    check_place(window, range)?;
    let (archive, len) = open(window, range.clone())?;
    check_byte_order(window, &archive)?;
    let place = archive.data(window, PICKLE)?.unwrap_or(0..0);
    let mut pickle = vec![0; len as usize];
    window.read_exact_at(place.start, &mut pickle)?;
    let values = machine::run(&pickle)?;
    let Some(call) = tensor_call(&values, values.root) else {
        let message = "its item holds no tensor; save the checkpoint again";
        return Err(ErrorKind::TensorMissing.stop(message));
    };
    let mut storages =
        Storages::new(&values, StorageData::Entries { reader: window, archive: &archive });
    let mut tensor = call.place(&mut storages)?;
    if tensor.dtype != chunk.tensor.dtype {
        return Err(ErrorKind::DcpDtype.stop(format!(
            "has the dtype {} by `.metadata`, and {} in this file, in its item at byte {}; {OF_ONE_SAVE}",
            chunk.tensor.dtype, tensor.dtype, range.start
        )));
    }
    tensor.take_empty_shape(&chunk.shape);
    if tensor.shape != chunk.shape {
        let is_whole = chunk.shape == chunk.tensor.shape;
        let or_mesh = "; or torch has cut it wrongly by a mesh of more than one axis: save it as a whole \
                       tensor (`full_tensor()`), or on another mesh";
        return Err(ErrorKind::DcpOffsets.stop(format!(
            "its chunk at {:?} has the shape {:?} by `.metadata`, and {:?} in this file, in its item at \
             byte {}; {OF_ONE_SAVE}{}",
            chunk.offset,
            chunk.shape,
            tensor.shape,
            range.start,
            if is_whole { "" } else { or_mesh }
        )));
    }
    Ok(ParsedItem { tensor, data: storages.undescribed() })
}

/// Refuses an item whose bytes are not one archive.
fn check_place(window: &mut WindowReader<'_>, range: &Range<u64>) -> ReadResult<()> {
    let mut first = [0; LOCAL_MAGIC.len()];
    let is_long = range.end - range.start >= first.len() as u64;
    if is_long {
        window.read_exact_at(range.start, &mut first)?;
    }
    let begin = archive_start(window, range.end)?.filter(|_| is_zip(&first));
    if begin == Some(range.start) {
        return Ok(());
    }
    Err(ErrorKind::DataTruncated.stop(format!(
        "its item is not where `.metadata` places it: the bytes {} to {} of this file are not one archive \
         of torch.save; {OF_ONE_SAVE}",
        range.start, range.end
    )))
}

/// Reads the ends of all items with few reads. The end of an item and the beginning of the next
/// item are read together.
struct WindowReader<'r> {
    reader: &'r mut dyn RangeReader,
    /// The ranges that are read ahead, ascending, and the index of the first range that is not read
    /// yet.
    reads: Vec<Range<u64>>,
    next: usize,
    /// The last two ranges that were read: offset and bytes.
    windows: [(u64, Vec<u8>); 2],
}

impl<'r> WindowReader<'r> {
    fn new(reader: &'r mut dyn RangeReader, items: &[Range<u64>]) -> WindowReader<'r> {
        let mut ends: Vec<Range<u64>> = Vec::with_capacity(2 * items.len());
        for item in items {
            if item.end - item.start <= HEAD_LEN + TAIL_LEN + GAP_LEN {
                ends.push(item.clone());
            } else {
                ends.push(item.start..item.start + HEAD_LEN);
                ends.push(item.end - TAIL_LEN..item.end);
            }
        }
        let groups = coalesce(&ends, |range| range, |_, _| true, GAP_LEN, READ_LEN_MAX);
        let reads = groups.map(|(range, _)| range).collect();
        WindowReader { reader, reads, next: 0, windows: Default::default() }
    }

    /// Reads ahead for the item `range`. Items must be passed in the order of their bytes.
    fn begin(&mut self, range: &Range<u64>) -> io::Result<()> {
        while let Some(read) = self.reads.get(self.next).filter(|read| read.start < range.end) {
            self.windows.swap(0, 1);
            let (start, bytes) = &mut self.windows[1];
            *start = read.start;
            bytes.resize((read.end - read.start) as usize, 0);
            self.reader.read_exact_at(read.start, bytes)?;
            self.next += 1;
        }
        Ok(())
    }
}

impl RangeReader for WindowReader<'_> {
    fn file_len(&self) -> u64 {
        self.reader.file_len()
    }

    fn read_exact_at(&mut self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        for (start, bytes) in &self.windows {
            let begin = offset.checked_sub(*start).and_then(|begin| usize::try_from(begin).ok());
            let end = begin.and_then(|begin| begin.checked_add(buf.len()));
            if let (Some(begin), Some(end)) = (begin, end)
                && let Some(found) = bytes.get(begin..end)
            {
                buf.copy_from_slice(found);
                return Ok(());
            }
        }
        self.reader.read_exact_at(offset, buf)
    }
}
