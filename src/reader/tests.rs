//! Tests of the memory that reads of narrow columns take according to their plans.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::*;
use crate::dtype::Dtype;
use crate::format::safetensors;
use crate::source::MeasuredStore;
use crate::{Checkpoint, OpenOptions, RenameRules, View};

/// Columns of a tensor of bytes in a sparse file. Each row of the file has a mark.
struct Columns {
    folder: tempfile::TempDir,
    rows: u64,
    width: u64,
    reader: Reader,
}

impl Columns {
    /// The first `wanted` columns of a tensor of `rows` rows and `width` columns.
    fn new(rows: u64, width: u64, wanted: u64) -> Columns {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let shape = [rows, width];
        let entries = [("w", Dtype::U8, shape.as_slice(), rows * width)];
        let header = safetensors::encode(&BTreeMap::new(), entries.into_iter(), 8).unwrap();
        let mut file = File::create(&path).unwrap();
        file.write_all(&header).unwrap();
        file.set_len(header.len() as u64 + rows * width).unwrap();
        for row in 0..rows {
            for column in 0..wanted {
                let at = header.len() as u64 + row * width + column;
                file.write_all_at(&[Columns::byte(row, column)], at).unwrap();
            }
        }
        let rules = format!(
            "[[split]]\nfrom = 'w'\nto = ['a', 'b']\ndim = 1\nsizes = [{wanted}, {}]\n",
            width - wanted
        );
        let rename = RenameRules::parse(Path::new("rules.toml"), rules.as_bytes()).unwrap();
        let view = View { rename: Some(Arc::new(rename)), ..View::default() };
        let options = OpenOptions { view, ..OpenOptions::default() };
        let checkpoint = Checkpoint::open_with(folder.path(), &options).unwrap();
        let reader = Reader::open(&checkpoint.single_file()).unwrap();
        Columns { folder, rows, width: wanted, reader }
    }

    fn byte(row: u64, column: u64) -> u8 {
        (row ^ (row >> 8)) as u8 | 1 << (column % 8)
    }

    /// The range of the columns in the file.
    fn range(&self) -> Range<u64> {
        let start = self.reader.layout.as_ref().unwrap().header().len() as u64;
        start..start + self.rows * self.width
    }

    /// Reads the columns in steps of `step` bytes, and checks them.
    fn assert_right(&self, step: usize) {
        assert!(self.folder.path().is_dir());
        let range = self.range();
        let mut bytes = vec![0; (range.end - range.start) as usize];
        for (at, part) in bytes.chunks_mut(step).enumerate() {
            let len = self.reader.read_at(range.start + (at * step) as u64, part).unwrap();
            assert_eq!(len, part.len());
        }
        let width = self.width;
        let right = (0..self.rows).flat_map(|row| (0..width).map(move |c| Columns::byte(row, c)));
        assert!(bytes.into_iter().eq(right));
    }
}

// An earlier version had a bug: a read of 4 KiB took 256 MiB of memory.
#[test]
fn rows_of_one_byte_that_are_read_with_long_gaps_take_little_memory_at_a_time() {
    let columns = Columns::new(4096, 65_000, 1);
    let mut range = columns.range();
    let mut windows = 0;
    while !range.is_empty() {
        let plan = columns.reader.plan_window(range.clone());
        assert!(plan.len() > 0 && plan.spread_len() <= SPREAD_LEN_MAX, "{}", plan.spread_len());
        range.start += plan.len();
        windows += 1;
    }
    assert!(windows <= 64, "{windows} windows");
    columns.assert_right(4096);
    columns.assert_right(100);
}

// An earlier version had a bug: a block with rows of two bytes took a page of memory for each row, and more for
// the plan.
#[test]
fn rows_of_two_bytes_that_lie_far_from_each_other_are_read_a_few_at_a_time() {
    let columns = Columns::new(20_000, 70_000, 2);
    let range = columns.range();
    assert!(columns.reader.is_scattered(&range));
    let plan = columns.reader.plan_window(range.clone());
    assert!(plan.sources().count() as u64 <= PARTS_MAX);
    let block = columns.reader.plan_first_block(range, 96 << 20);
    assert!(block.memory() <= 2 * SPREAD_LEN_MAX + block.len(), "{}", block.memory());
    columns.assert_right(64 << 10);
}

#[test]
fn columns_of_kib_are_read_in_large_windows_and_blocks() {
    let columns = Columns::new(1024, 8 << 10, 4 << 10);
    let range = columns.range();
    assert!(!columns.reader.is_scattered(&range));
    let plan = columns.reader.plan_window(range.clone());
    assert_eq!(plan.len(), range.end - range.start);
    let block = columns.reader.plan_first_block(range, 96 << 20);
    assert_eq!(block.len(), BLOCK_LEN);
}

#[test]
fn blocks_of_a_store_are_longer_where_more_bytes_have_to_be_in_flight() {
    const MIB: u64 = 1 << 20;
    let block_len = |wanted: Option<u64>, most: u64| {
        Reader::whole(MeasuredStore::file(wanted)).plan_first_block(5..1 << 30, most).len()
    };
    let wanted = [None, Some(0), Some(47 * MIB), Some(48 * MIB), Some(75 * MIB), Some(1 << 40)];
    let found = wanted.map(|wanted| block_len(wanted, 96 * MIB));
    assert_eq!(found, [1, 1, 1, 2, 3, 4].map(|n| n * MIB));
    // Many blocks fit into little memory.
    let in_little = [6, 40, 96].map(|most| block_len(Some(1 << 40), most * MIB));
    assert_eq!(in_little, [1, 2, 4].map(|n| n * MIB));
}
