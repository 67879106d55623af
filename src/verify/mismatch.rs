//! Reports bytes that differ from their recorded checksum.

use std::ops::Range;

use crate::catalog::Shard;
use crate::error::{ErrorKind, Fault};
use crate::hash::Digest;
use crate::index::{FileRecord, ShardSums};
use crate::version::Version;

use super::stored::{Named, ShardPlace};

/// Bytes of a shard that differ from their recorded checksum.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// Name of the shard.
    pub shard: String,
    /// The part of the shard to which the bytes belong.
    pub place: ShardPlace,
    /// The byte range in the shard.
    pub range: Range<u64>,
    /// The recorded checksum and the found checksum. `None` if the file has another length.
    pub digests: Option<(Digest, Digest)>,
    /// The recorded length of the file, and the found length.
    pub lens: (u64, u64),
    /// Time at which the checksum was recorded, in seconds since 1970.
    pub recorded: i64,
    /// Whether the modification time equals the recorded one.
    pub same_mtime: bool,
    /// Number of other headers and stored pieces that differ.
    pub others: u64,
    /// Number of bytes behind `range` that the checksum also covers.
    more_bytes: u64,
}

impl Mismatch {
    /// The mismatch of the bytes `range` of a shard. `known` is the record of the shard, and `now`
    /// is its current version.
    pub(crate) fn new(
        known: &ShardSums,
        now: &Version,
        place: ShardPlace,
        range: Range<u64>,
        digests: Option<(Digest, Digest)>,
    ) -> Mismatch {
        Mismatch {
            shard: known.name.clone(),
            place,
            range,
            digests,
            lens: (known.version.len, now.len),
            recorded: known.recorded,
            same_mtime: known.version.modified() == now.modified(),
            others: 0,
            more_bytes: 0,
        }
    }

    /// The first mismatch of a shard. `digests` are the current digests of its recorded chunks.
    pub(super) fn find(
        named: &Named<'_>,
        known: &ShardSums,
        now: &Version,
        digests: &[Digest],
    ) -> Option<Mismatch> {
        if known.version.len != now.len {
            return Some(Mismatch::new(known, now, ShardPlace::Header, 0..now.len, None));
        }
        let chunks = 0..known.digests.len();
        let mut differing = chunks.filter(|&n| digests.get(n) != Some(&known.digests[n]));
        let first = differing.next()?;
        let mut last_part = known.boundaries.part_of_chunk(first);
        let (part, mut others) = (known.boundaries.part(last_part), 0);
        for number in differing {
            let part = known.boundaries.part_of_chunk(number);
            others += u64::from(part != last_part);
            last_part = part;
        }
        let chunk = known.boundaries.chunks_of(part).find(|chunk| chunk.number == first)?;
        let digests = digests.get(first).map(|&found| (known.digests[first], found));
        let place = named.place(&chunk.range);
        Some(Mismatch { others, ..Mismatch::new(known, now, place, chunk.range, digests) })
    }

    /// Compares the hash of a header with `record`, which is from an index that was made at `made`.
    pub(super) fn find_in_header(
        shard: &Shard,
        record: &FileRecord,
        made: i64,
        found: Digest,
    ) -> Option<Mismatch> {
        let differs = record.described == shard.described && record.hash != found;
        let (first, rest) = shard.described.split_first().filter(|_| differs)?;
        Some(Mismatch {
            shard: shard.name.clone(),
            place: ShardPlace::Header,
            range: first.clone(),
            digests: Some((record.hash, found)),
            lens: (shard.file_len, shard.file_len),
            recorded: made,
            same_mtime: true,
            others: 0,
            more_bytes: rest.iter().map(|range| range.end - range.start).sum(),
        })
    }

    /// The name of the tensor to which the bytes belong, if there is one.
    pub fn tensor(&self) -> Option<&str> {
        match &self.place {
            ShardPlace::Tensor(name) => Some(name),
            ShardPlace::Header | ShardPlace::Unused => None,
        }
    }

    /// The fault that refuses the checkpoint because of this mismatch.
    pub fn fault(&self) -> Fault {
        let more = match self.others {
            0 => String::new(),
            1 => "; one more header or tensor differs".to_owned(),
            others => format!("; {others} more headers and tensors differ"),
        };
        let message = format!(
            "{}{more}; restore the file from a good copy or, if it was saved anew on purpose, run \
             `tensorfs verify --record`",
            self.what()
        );
        let fault = ErrorKind::HashMismatch.fault(message).in_file(&self.shard);
        match self.tensor() {
            Some(name) => fault.tensor(name),
            None => fault,
        }
    }

    /// The mismatch as one line with the names of the shard and the tensor.
    pub(super) fn line(&self) -> String {
        let name = self.tensor().map(|name| format!("tensor {}: ", crate::error::quoted(name)));
        format!("{}: {}{}", self.shard, name.unwrap_or_default(), self.what())
    }

    fn what(&self) -> String {
        let (start, end) = (self.range.start, self.range.end);
        let bytes = match &self.place {
            ShardPlace::Header if self.more_bytes > 0 => {
                format!("bytes {start}..{end} and {} more, its headers,", self.more_bytes)
            }
            ShardPlace::Header => format!("bytes {start}..{end}, its header,"),
            ShardPlace::Tensor(_) => format!("bytes {start}..{end} of the file"),
            ShardPlace::Unused => format!("bytes {start}..{end}, which no tensor uses,"),
        };
        let differs = match self.digests {
            Some((expected, found)) => {
                format!("{bytes} have the checksum {found}, {expected} was recorded")
            }
            None => format!("it has {} bytes, {} were recorded", self.lens.1, self.lens.0),
        };
        let time = if self.same_mtime { "is unchanged" } else { "has changed" };
        let recorded = shown_time(self.recorded);
        format!("{differs} on {recorded}, and its modification time {time} since then")
    }
}

/// Formats seconds since 1970 as a date and a time.
pub(super) fn shown_time(seconds: i64) -> String {
    let (days_since_1970, time) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    // If a year begins in March, the leap day is at its end. 400 years have 146,097 days.
    let days = days_since_1970 + 719_468;
    let (era, era_day) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let era_year = (era_day - era_day / 1460 + era_day / 36_524 - era_day / 146_096) / 365;
    let year_day = era_day - (365 * era_year + era_year / 4 - era_year / 100);
    let march_month = (5 * year_day + 2) / 153;
    let day = year_day - (153 * march_month + 2) / 5 + 1;
    let (month, next) = if march_month < 10 { (march_month + 3, 0) } else { (march_month - 9, 1) };
    let year = era_year + era * 400 + next;
    let (hour, minute, second) = (time / 3600, time / 60 % 60, time % 60);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02} UTC")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::version::tests::version;

    fn described(end: u64) -> Vec<Range<u64>> {
        std::iter::once(0..end).collect()
    }

    #[test]
    fn a_header_that_is_not_what_an_index_was_made_of_is_named() {
        let shard = Shard { name: "a".to_owned(), file_len: 90, described: described(40) };
        let version = version(1, 90, 5, 5);
        let (hash, name) = (Digest([7; 16]), "a".to_owned());
        let record = FileRecord { name, version, described: described(40), hash };
        assert_eq!(Mismatch::find_in_header(&shard, &record, 0, hash), None);
        let mismatch = Mismatch::find_in_header(&shard, &record, 0, Digest([8; 16])).unwrap();
        assert_eq!((mismatch.tensor(), mismatch.range.clone()), (None, 0..40));
        let message = mismatch.fault().to_string();
        assert!(
            message.starts_with("bytes 0..40, its header, have the checksum 0808"),
            "{message}"
        );
        let apart = vec![0..40, 60..70, 88..90];
        let shard_apart = Shard { described: apart.clone(), ..shard.clone() };
        let record_apart = FileRecord { described: apart, ..record.clone() };
        let mismatch = Mismatch::find_in_header(&shard_apart, &record_apart, 0, Digest([8; 16]));
        let message = mismatch.unwrap().fault().to_string();
        assert!(message.starts_with("bytes 0..40 and 12 more, its headers, have"), "{message}");
        let longer = FileRecord { described: described(41), ..record };
        assert_eq!(Mismatch::find_in_header(&shard, &longer, 0, Digest([8; 16])), None);
    }

    #[test]
    fn times_are_those_of_the_calendar() {
        for (seconds, text) in [
            (0, "1970-01-01 00:00:00 UTC"),
            (-1, "1969-12-31 23:59:59 UTC"),
            (951_782_399, "2000-02-28 23:59:59 UTC"),
            (951_782_400, "2000-02-29 00:00:00 UTC"),
            (1_735_689_599, "2024-12-31 23:59:59 UTC"),
            (4_107_542_400, "2100-03-01 00:00:00 UTC"),
        ] {
            assert_eq!(shown_time(seconds), text);
        }
    }
}
