//! The journal of a run: the ranges that it has written. The next run to the same place continues where this
//! one was killed.
//!
//! The journal is a text file in the partial folder. Its first line identifies the job: the versions of all
//! sources, the resulting bytes, and this program. A line for each written range follows, with its hash. A
//! later run of the same job reads the ranges back and compares them. Bytes that did not reach the disk are
//! written again. A run of another job empties the folder and starts from the beginning. It only takes over the
//! list of complete files, which it may replace.

use std::collections::{HashMap, HashSet};
use std::fs::{File, Metadata};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use super::tensor_writer::WrittenRange;
use crate::atomic_file::PartialFolder;
use crate::hash::Digest;

/// Name of the journal in the partial folder.
const NAME: &str = "journal";

/// A file that is created to learn the permissions of a new file.
const PROBE: &str = "rights";

/// Start of the first line. The number changes with the format of the journal and of the partial folder.
const START: &str = "tensorfs consolidate 1";

/// Maximum time between two syncs, which is the work that a power failure can cost.
const SYNC_INTERVAL: Duration = Duration::from_secs(5);

/// Identifies a finished file, and changes when its bytes change. It consists of device, inode, length, and
/// time of the last change in seconds and nanoseconds.
type Stamp = [u64; 5];

/// A part that is being written, and its journal.
pub(super) struct RecordedPart<'a> {
    pub(super) partial: &'a PartialFolder,
    pub(super) journal: &'a mut Journal,
    pub(super) number: usize,
}

impl RecordedPart<'_> {
    /// The ranges that were written, from the first byte on without gaps.
    pub(super) fn written(&self) -> Vec<WrittenRange> {
        self.journal.written.get(&self.number).cloned().unwrap_or_default()
    }

    /// Opens the part at `place` if ranges of it were written. Otherwise creates it anew.
    ///
    /// # Errors
    /// The errors of the file system.
    pub(super) fn begin(&mut self, place: &Path, mode: u32) -> io::Result<File> {
        if !self.written().is_empty()
            && let Ok(file) = self.partial.open(place)
        {
            // The part gets the permissions of a new file, because the earlier run may have had another umask.
            let probe = Path::new(PROBE);
            self.partial.remove(probe)?;
            let rights = self.partial.create(probe, mode)?.metadata()?.permissions();
            self.partial.remove(probe)?;
            file.set_permissions(rights)?;
            return Ok(file);
        }
        self.journal.written.remove(&self.number);
        self.partial.remove(place)?;
        self.partial.create(place, mode)
    }

    /// Records that a range of the part, which is open as `file`, was written.
    ///
    /// # Errors
    /// If the bytes cannot be synced to the disk.
    pub(super) fn add(&mut self, file: &File, written: WrittenRange) -> io::Result<()> {
        let WrittenRange { range, digest } = &written;
        let number = self.number;
        self.journal.add_line(&format!("range {number} {} {} {digest}", range.start, range.end));
        self.journal.note(number, written);
        if self.journal.synced.elapsed() < SYNC_INTERVAL {
            return Ok(());
        }
        file.sync_data()?;
        self.journal.sync(self.partial)
    }
}

/// The journal of one job.
pub(super) struct Journal {
    /// `None` after the journal could not be written. The job continues without it.
    file: Option<File>,
    /// The written ranges of each part, from the first byte on without gaps.
    written: HashMap<usize, Vec<WrittenRange>>,
    /// The parts that were complete before they got their names.
    whole: HashMap<usize, Stamp>,
    /// Files of earlier runs that were killed while files got their names.
    earlier: HashSet<Stamp>,
    /// Whether an earlier run has left the journal.
    pub(super) is_continued: bool,
    synced: Instant,
}

impl Journal {
    /// Whether the journal in `partial` belongs to `job`.
    pub(super) fn is_of(partial: &PartialFolder, job: Digest) -> bool {
        let first = format!("{START} {job}\n");
        let mut begin = vec![0; first.len()];
        let read = partial.open(NAME.as_ref()).and_then(|mut file| file.read_exact(&mut begin));
        read.is_ok() && begin == first.as_bytes()
    }

    /// Opens the journal of `job` in `partial`. If the journal there belongs to another job, `partial` is emptied.
    ///
    /// # Errors
    /// The errors of the file system.
    pub(super) fn open(partial: &PartialFolder, job: Digest) -> io::Result<Journal> {
        let mut journal = Journal {
            file: None,
            written: HashMap::new(),
            whole: HashMap::new(),
            earlier: HashSet::new(),
            is_continued: false,
            synced: Instant::now(),
        };
        let first = format!("{START} {job}");
        if let Ok(mut file) = partial.open(NAME.as_ref()) {
            journal.is_continued = true;
            let mut bytes = Vec::new();
            file.read_to_end(&mut bytes)?;
            // A line that a power failure has cut off or filled with zeros ends the journal.
            let mut len = 0;
            let mut is_same = false;
            for line in bytes.split_inclusive(|&byte| byte == b'\n') {
                let text = line.strip_suffix(b"\n").and_then(|line| str::from_utf8(line).ok());
                let Some(text) = text else { break };
                if len == 0 {
                    is_same = text == first;
                } else if journal.read_line(text).is_none() {
                    break;
                }
                len += line.len() as u64;
            }
            if is_same {
                file.set_len(len)?;
                file.seek(SeekFrom::End(0))?;
                journal.file = Some(file);
                return Ok(journal);
            }
        }
        partial.clear()?;
        journal.written.clear();
        journal.earlier.extend(journal.whole.drain().map(|(_, stamp)| stamp));
        journal.file = Some(partial.create(NAME.as_ref(), 0o600)?);
        let earlier: Vec<Stamp> = journal.earlier.iter().copied().collect();
        journal.add_line(&first);
        earlier.iter().for_each(|stamp| journal.add_line(&format!("earlier{}", numbers(stamp))));
        journal.sync(partial)?;
        Ok(journal)
    }

    /// Reads one line. `None` if it is damaged.
    fn read_line(&mut self, line: &str) -> Option<()> {
        let mut parts = line.split(' ');
        let kind = parts.next()?;
        let words: Vec<&str> = parts.collect();
        let stamp = |words: &[&str]| -> Option<Stamp> {
            let numbers: Option<Vec<u64>> = words.iter().map(|word| word.parse().ok()).collect();
            numbers?.try_into().ok()
        };
        match (kind, words.as_slice()) {
            ("range", [part, start, end, digest]) => {
                let range = start.parse().ok()?..end.parse().ok()?;
                let digest = Digest(u128::from_str_radix(digest, 16).ok()?.to_be_bytes());
                self.note(part.parse().ok()?, WrittenRange { range, digest });
            }
            ("whole", [part, stamped @ ..]) => {
                self.note_whole(part.parse().ok()?, stamp(stamped)?);
            }
            ("earlier", stamped) => drop(self.earlier.insert(stamp(stamped)?)),
            _ => return None,
        }
        Some(())
    }

    /// Adds a range. It replaces all ranges that end after its start, because their bytes did not reach the disk.
    fn note(&mut self, part: usize, written: WrittenRange) {
        let ranges = self.written.entry(part).or_default();
        ranges.retain(|earlier| earlier.range.end <= written.range.start);
        let end = ranges.last().map_or(0, |last| last.range.end);
        if end == written.range.start && end < written.range.end {
            ranges.push(written);
        }
    }

    fn add_line(&mut self, line: &str) {
        let added = self.file.as_mut().map(|file| file.write_all(format!("{line}\n").as_bytes()));
        if matches!(added, Some(Err(_))) {
            self.file = None;
        }
    }

    /// Whether a later run would find written ranges.
    pub(super) fn has_progress(&self) -> bool {
        self.file.is_some() && self.written.values().any(|ranges| !ranges.is_empty())
    }

    /// Waits until the disk has the journal and the names of all parts.
    pub(super) fn sync(&mut self, partial: &PartialFolder) -> io::Result<()> {
        if let Some(file) = &self.file {
            file.sync_data()?;
            partial.sync()?;
        }
        self.synced = Instant::now();
        Ok(())
    }

    /// Records that `part` is complete, before it gets its name.
    pub(super) fn add_whole(&mut self, part: usize, meta: &Metadata) {
        let stamp = stamp_of(meta);
        self.add_line(&format!("whole {part}{}", numbers(&stamp)));
        self.note_whole(part, stamp);
    }

    /// Notes that `part` is complete with the stamp `stamp`. An earlier stamp of the part is kept: if the part is
    /// written again, for example to verify it, the file of a killed run may still have the name of the part.
    fn note_whole(&mut self, part: usize, stamp: Stamp) {
        let before = self.whole.insert(part, stamp).filter(|before| *before != stamp);
        self.earlier.extend(before);
    }

    /// Whether the file at `path` is `part`, which a killed run of this job has moved there.
    pub(super) fn is_named(&self, part: usize, path: &Path) -> bool {
        let there = std::fs::symlink_metadata(path);
        there.is_ok_and(|meta| self.whole.get(&part) == Some(&stamp_of(&meta)))
    }

    /// Whether a killed run has created the file, and the file is unchanged since.
    pub(super) fn is_ours(&self, meta: &Metadata) -> bool {
        let stamp = stamp_of(meta);
        self.earlier.contains(&stamp) || self.whole.values().any(|whole| *whole == stamp)
    }
}

fn stamp_of(meta: &Metadata) -> Stamp {
    [meta.dev(), meta.ino(), meta.len(), meta.mtime() as u64, meta.mtime_nsec() as u64]
}

fn numbers(stamp: &Stamp) -> String {
    stamp.iter().map(|number| format!(" {number}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::atomic_file::partial_path;

    fn range(start: u64, end: u64) -> WrittenRange {
        WrittenRange { range: start..end, digest: Digest::of(&start.to_le_bytes()) }
    }

    fn ends(journal: &Journal, part: usize) -> Vec<u64> {
        journal.written.get(&part).into_iter().flatten().map(|range| range.range.end).collect()
    }

    #[test]
    fn a_run_finds_the_ranges_of_its_own_job_alone_and_a_torn_line_ends_them() {
        let home = tempfile::tempdir().unwrap();
        let mut partial = PartialFolder::claim(&partial_path(&home.path().join("out"))).unwrap();
        partial.keep();
        let (job, other) = (Digest::of(b"job"), Digest::of(b"other"));
        let file = tempfile::tempfile().unwrap();
        let mut journal = Journal::open(&partial, job).unwrap();
        for (number, written) in
            [(0, range(0, 10)), (1, range(0, 7)), (0, range(10, 20)), (0, range(30, 40))]
        {
            let mut part = RecordedPart { partial: &partial, journal: &mut journal, number };
            part.add(&file, written).unwrap();
        }
        let meta = file.metadata().unwrap();
        journal.add_whole(1, &meta);
        drop(journal);
        let path = partial.path().join(NAME);
        let text = std::fs::read(&path).unwrap();
        for torn in
            [&b"range 0 20 25 0123"[..], &[0; 100], b"range 0 20 x 1\nrange 0 20 30 1\n", b"\xff\n"]
        {
            std::fs::write(&path, [&text[..], torn].concat()).unwrap();
            let journal = Journal::open(&partial, job).unwrap();
            assert_eq!((ends(&journal, 0), ends(&journal, 1)), (vec![10, 20], vec![7]));
            assert!(journal.is_ours(&meta) && journal.is_continued);
            assert_eq!(std::fs::read(&path).unwrap(), text);
        }
        // A range that is written again replaces those after it.
        let mut journal = Journal::open(&partial, job).unwrap();
        RecordedPart { partial: &partial, journal: &mut journal, number: 0 }
            .add(&file, range(10, 15))
            .unwrap();
        drop(journal);
        assert_eq!(ends(&Journal::open(&partial, job).unwrap(), 0), [10, 15]);
        std::fs::write(partial.path().join("part"), "of the job").unwrap();
        for _ in 0..2 {
            let journal = Journal::open(&partial, other).unwrap();
            assert!(!partial.path().join("part").exists());
            assert!(
                journal.written.is_empty() && journal.whole.is_empty() && journal.is_ours(&meta)
            );
        }
        // Only the files that the first job had completed are still known.
        assert!(ends(&Journal::open(&partial, job).unwrap(), 0).is_empty());
    }
}
