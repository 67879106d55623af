//! The destination of one read, which is memory in several places. The middle place is the memory of the
//! reader. The first and the last place get the bytes of the first and the last block that the reader did not
//! request.

use std::ops::Range;

/// Memory in up to three places, for consecutive bytes.
#[derive(Debug)]
pub struct MemoryParts<'a>([&'a mut [u8]; 3]);

impl<'a> MemoryParts<'a> {
    /// The memory `first`, `middle` and `last`, each of which may be empty.
    pub fn new(first: &'a mut [u8], middle: &'a mut [u8], last: &'a mut [u8]) -> MemoryParts<'a> {
        MemoryParts([first, middle, last])
    }

    /// The memory `buf` alone.
    pub fn one(buf: &'a mut [u8]) -> MemoryParts<'a> {
        MemoryParts([buf, &mut [], &mut []])
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.0.iter().map(|part| part.len()).sum()
    }

    /// Whether the total length is zero.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The places in order.
    pub fn all(&self) -> impl Iterator<Item = &[u8]> {
        self.0.iter().map(|part| &**part)
    }

    /// The places in order, for writing.
    pub fn all_mut(&mut self) -> impl Iterator<Item = &mut [u8]> {
        self.0.iter_mut().map(|part| &mut **part)
    }

    /// The bytes `range`, as slices of the places.
    pub fn slices(&self, range: Range<u64>) -> impl Iterator<Item = &[u8]> {
        let mut before = 0;
        self.0.iter().filter_map(move |part| {
            let (first, end) = (before, before + part.len() as u64);
            before = end;
            let (from, to) = (range.start.max(first), range.end.min(end));
            (from < to).then(|| &part[(from - first) as usize..(to - first) as usize])
        })
    }

    /// Writes `bytes` from byte `at` on. Returns whether there was enough room. If not, nothing is written.
    #[must_use]
    pub fn write(&mut self, at: usize, bytes: &[u8]) -> bool {
        if bytes.len() > self.len().saturating_sub(at) {
            return false;
        }
        let (mut at, mut rest) = (at, bytes);
        for part in &mut self.0 {
            if at >= part.len() {
                at -= part.len();
                continue;
            }
            let (now, later) = rest.split_at(rest.len().min(part.len() - at));
            part[at..at + now.len()].copy_from_slice(now);
            (at, rest) = (0, later);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_go_to_their_places_whatever_pieces_they_come_in() {
        let bytes: Vec<u8> = (1..=10).collect();
        for step in 1..=10 {
            let (mut first, mut middle, mut last) = ([0; 3], [0; 5], [0; 2]);
            let mut parts = MemoryParts::new(&mut first, &mut middle, &mut last);
            for (number, piece) in bytes.chunks(step).enumerate() {
                assert!(parts.write(number * step, piece));
            }
            assert!(!parts.write(10, &[0]) && !parts.write(9, &[0, 0]));
            assert_eq!(parts.all().collect::<Vec<_>>().concat(), bytes);
            for start in 0..10 {
                for end in start..10 {
                    let found = parts.slices(start..end).collect::<Vec<_>>().concat();
                    assert_eq!(found, bytes[start as usize..end as usize]);
                }
            }
        }
    }
}
