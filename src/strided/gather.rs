//! Runs of a target that have another order in the source, or that share bytes of the source. Examples are the runs of
//! a transposed tensor and those of an expanded tensor.
//!
//! Any range of the target consists of a few boxes of whole runs and at most two cut runs. The runs of each box
//! are visited in the order of the source. So runs that are near each other become one read, and no list of all runs is
//! needed.

use std::ops::Range;
use std::sync::Arc;

use super::{RunRange, Stride, StridedCopy};

/// The cost of a separate read, as the number of bytes of the source that could be read in the same time.
const READ_COST: u64 = 8 << 10;

/// Maximum gap in bytes between runs that are read together, if the gaps have far more bytes than the runs.
const SMALL_GAP: u64 = 4 << 10;

/// The runs that are needed for a byte range of the target.
#[derive(Debug)]
pub struct Gather {
    /// The runs that the range cuts. There are at most two.
    cut: Vec<RunRange>,
    /// The other runs, as boxes of runs. The runs of each box have the order of the source.
    boxes: Vec<Arc<StridedCopy>>,
    /// Maximum number of bytes between runs that are read together.
    gap: u64,
    /// Number of reads.
    pub reads: u64,
    /// Approximate number of bytes that these reads return.
    pub read_len: u64,
}

/// Groups of runs of a copy, in the order of the source. A group consists of `steps` steps of one dimension,
/// with all of its inner dimensions.
struct RunGroups {
    /// Number of runs per step. `count` is the number of steps of the dimension, and `steps` the number of
    /// steps per group.
    unit: u64,
    count: u64,
    steps: u64,
}

impl RunGroups {
    /// Number of groups that `runs` runs form.
    fn number(&self, runs: u64) -> u64 {
        runs / (self.unit * self.count) * self.count.div_ceil(self.steps)
    }
}

impl StridedCopy {
    /// The parts of the runs that lie in bytes `range` of the target. A read has at most `max` bytes, or one
    /// run if that is longer.
    pub fn gather(&self, range: &Range<u64>, max: u64) -> Gather {
        let mut whole = self.first_run(|start| start + self.run_len > range.start)
            ..self.first_run(|start| start >= range.end);
        let mut gather =
            Gather { cut: Vec::new(), boxes: Vec::new(), gap: 0, reads: 0, read_len: 0 };
        if whole.start < whole.end && gather.cut_run(self, whole.start, range) {
            whole.start += 1;
        }
        if whole.start < whole.end && gather.cut_run(self, whole.end - 1, range) {
            whole.end -= 1;
        }
        self.each_box(whole, &mut |one| gather.boxes.push(Arc::new(one)));
        gather.settle(max);
        gather
    }

    /// Divides the range `runs` into boxes, and calls `visit` with each box. Each box is in the order of the source.
    pub(super) fn each_box(&self, mut runs: Range<u64>, visit: &mut dyn FnMut(StridedCopy)) {
        let innermost = self.strides.len().saturating_sub(1);
        if self.strides.is_empty() && !runs.is_empty() {
            return visit(self.clone());
        }
        while runs.start < runs.end {
            // Finds the outermost dimension in which the next runs are whole steps, and the number of runs per step.
            let (mut dim, mut unit) = (innermost, 1);
            while dim > 0 {
                let longer = unit * self.strides[dim].count;
                if !runs.start.is_multiple_of(longer) || runs.start + longer > runs.end {
                    break;
                }
                (dim, unit) = (dim - 1, longer);
            }
            let outer = self.strides[dim];
            let left = outer.count - runs.start / unit % outer.count;
            let count = left.min((runs.end - runs.start) / unit);
            let (from, to) = self.run(runs.start);
            let inner = self.strides[dim + 1..].iter().copied();
            let all = std::iter::once(Stride { count, ..outer }).chain(inner);
            let strides: Vec<Stride> = all.filter(|stride| stride.count > 1).collect();
            visit(StridedCopy { from, to, strides, ..*self }.in_source_order());
            runs.start += count * unit;
        }
    }

    /// Determines how runs in the order of the source are grouped. Runs of a group have at most `gap` bytes
    /// between them, and a group covers at most `max` bytes.
    fn groups(&self, gap: u64, max: u64) -> RunGroups {
        let (mut unit, mut len) = (1, self.run_len);
        for stride in self.strides.iter().rev() {
            if stride.from.saturating_sub(len) > gap {
                break;
            }
            let whole = (stride.count - 1) * stride.from + len;
            if whole > max {
                let more = max.saturating_sub(len).checked_div(stride.from).unwrap_or(0);
                return RunGroups {
                    unit,
                    count: stride.count,
                    steps: (more + 1).min(stride.count),
                };
            }
            (unit, len) = (unit * stride.count, whole.max(len));
        }
        RunGroups { unit, count: 1, steps: 1 }
    }

    /// Calls `visit` for groups of all runs, which must be in the order of the source. Consecutive runs of a group
    /// have at most `gap` bytes between them. A group covers at most `max` bytes, or one run if that is longer.
    pub fn each_group(&self, gap: u64, max: u64, visit: &mut dyn FnMut(RunRange)) {
        let RunGroups { unit, count, steps } = self.groups(gap, max);
        for row in 0..self.count() / (unit * count) {
            let mut step = 0;
            while step < count {
                let start = (row * count + step) * unit;
                let end = start + steps.min(count - step) * unit;
                let ((from, target), (last, _)) = (self.run(start), self.run(end - 1));
                visit(RunRange { runs: start..end, bytes: from..last + self.run_len, target });
                step += steps;
            }
        }
    }
}

impl Gather {
    /// Adds run `k` to `cut` if only a part of it lies in the range. Returns whether this is the case.
    fn cut_run(&mut self, copy: &StridedCopy, k: u64, range: &Range<u64>) -> bool {
        let (from, to) = copy.run(k);
        let target = to.max(range.start);
        let skipped = target - to;
        let cut = (to + copy.run_len).saturating_sub(range.end);
        if skipped + cut == 0 {
            return false;
        }
        let bytes = from + skipped..from + copy.run_len - cut;
        self.cut.push(RunRange { runs: k..k + 1, bytes, target });
        true
    }

    /// Chooses `gap` by the cost of the reads.
    fn settle(&mut self, max: u64) {
        let spans = self.boxes.iter().map(|one| one.source_span());
        let span_len = spans.fold(0_u64, |sum, span| sum.saturating_add(span.end - span.start));
        let number = |one: &Arc<StridedCopy>| one.groups(SMALL_GAP, max).number(one.count());
        let small: u64 = self.boxes.iter().map(number).sum();
        self.gap = if small.saturating_mul(READ_COST) <= span_len { SMALL_GAP } else { max };
        self.reads = self.cut.len() as u64;
        for one in &self.boxes {
            let groups = one.groups(self.gap, max);
            let (reads, last) = (groups.number(one.count()), groups.steps * groups.unit - 1);
            let len = one.run(last).0 + one.run_len - one.from;
            self.reads += reads;
            self.read_len = self.read_len.saturating_add(reads.saturating_mul(len));
        }
    }

    /// Calls `visit` for the runs of each read. If the part is not contiguous, the copy to which its runs
    /// belong is passed too.
    pub fn each_read(&self, max: u64, visit: &mut dyn FnMut(Option<&Arc<StridedCopy>>, RunRange)) {
        self.cut.iter().for_each(|part| visit(None, part.clone()));
        for one in &self.boxes {
            one.each_group(self.gap, max, &mut |part| visit(Some(one), part));
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::super::OuterBox;
    use super::*;
    use crate::strides::{are_nested, reach};

    /// The shape of a tensor, and its strides in items. No two elements share a place, except that some
    /// dimensions repeat the elements.
    pub(in crate::strided) fn tensor() -> impl Strategy<Value = (Vec<u64>, Vec<u64>)> {
        let dim = (1_u64..6, 1_u64..3, 0_u64..3, 0..4_u8);
        prop::collection::vec((dim, any::<u16>()), 0..5).prop_map(|mut dims| {
            let count = dims.len();
            let mut order: Vec<usize> = (0..count).collect();
            order.sort_by_key(|&dim| dims[dim].1);
            let mut strides = vec![0; count];
            let mut free = 1;
            for dim in order {
                let (size, factor, more, repeated) = dims[dim].0;
                if repeated > 0 {
                    strides[dim] = free * factor + more;
                    free += (size - 1) * strides[dim];
                }
            }
            let shape = dims.drain(..).map(|((size, ..), _)| size).collect();
            (shape, strides)
        })
    }

    /// The item at which each element is stored.
    pub(in crate::strided) fn items(shape: &[u64], strides: &[u64]) -> Vec<u64> {
        let mut all = vec![0];
        for (&size, &stride) in shape.iter().zip(strides) {
            let step = |item: u64| (0..size).map(move |index| item + index * stride);
            all = all.into_iter().flat_map(step).collect();
        }
        all
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1000))]

        #[test]
        fn the_reads_of_any_range_gather_each_byte_of_a_tensor_of_any_strides_once(
            (shape, strides) in tensor(),
            width in prop::sample::select(vec![1_u64, 2, 4]),
            (start, len) in (0_u64..60, 1_u64..3000),
            max in prop::sample::select(vec![1_u64, 7, 40, 1000, 1 << 20]),
        ) {
            prop_assert!(are_nested(&shape, &strides));
            let items = items(&shape, &strides);
            prop_assert_eq!(reach(&shape, &strides), items.iter().max().map(|last| last + 1));
            let zeros = vec![0; shape.len()];
            let to = OuterBox { shape: &shape, offset: &zeros };
            let copy = StridedCopy::of_piece(Some(&strides), to, &shape, 8 * width).unwrap();
            let wanted = start..(start + len).min(items.len() as u64 * width);
            let right: Vec<u64> = wanted
                .clone()
                .map(|byte| items[(byte / width) as usize] * width + byte % width)
                .collect();
            let mut found: Vec<Option<u64>> = vec![None; right.len()];
            let mut put = |from: u64, to: u64, len: u64| {
                for byte in 0..len {
                    let place = &mut found[(to + byte - wanted.start) as usize];
                    assert_eq!(place.replace(from + byte), None);
                }
            };
            if wanted.is_empty() {
                return Ok(());
            }
            let gather = copy.gather(&wanted, max);
            let mut reads = 0;
            gather.each_read(max, &mut |runs, part| {
                reads += 1;
                let len = part.bytes.end - part.bytes.start;
                assert!(len <= max || part.is_contiguous());
                let Some(runs) = runs.filter(|_| !part.is_contiguous()) else {
                    return put(part.bytes.start, part.target, len);
                };
                runs.each_run(&part, |run, place| {
                    put(part.bytes.start + run.start, place, run.end - run.start);
                });
            });
            prop_assert_eq!(reads, gather.reads);
            prop_assert_eq!(found.into_iter().collect::<Option<Vec<u64>>>(), Some(right));
        }
    }

    #[test]
    fn a_row_of_a_large_transposed_tensor_is_few_boxes_whose_reads_are_chosen_by_their_cost() {
        let gathered = |rows: u64, columns: u64, range: Range<u64>| {
            let to = OuterBox { shape: &[rows, columns], offset: &[0, 0] };
            let copy = StridedCopy::of_piece(Some(&[1, rows]), to, &[rows, columns], 32).unwrap();
            assert!(!copy.is_ascending());
            copy.gather(&range, 8 << 20)
        };
        // A small part is read as one range of the source.
        let small = gathered(512, 512, 0..1 << 19);
        assert!(small.reads == 1 && small.read_len <= 1 << 20, "{small:?}");
        // In a larger part, each column is a read.
        let large = gathered(1 << 14, 1 << 10, 0..1 << 20);
        assert_eq!((large.reads, large.read_len), (1 << 10, 1 << 20));
        // Here, one read for each element would cost more than reading all bytes.
        let tall = gathered(1 << 10, 1 << 20, 3 << 20..5 << 20);
        assert!(tall.reads < 1 << 10 && tall.read_len > 1 << 30, "{tall:?}");
        assert!(tall.boxes.len() <= 3);
    }
}
