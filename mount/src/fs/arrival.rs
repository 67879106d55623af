//! Decides whether a set in a folder that changes is whole, still arriving, or broken.
//!
//! A set is still arriving in three cases: a process has one of its files open for writing, a
//! download into the same folder goes on, or the set is not whole and its last change is recent.
//! Where the kernel does not tell whether a process writes a file, a pause without changes counts
//! as the end of the writing.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::{Duration, Instant, SystemTime};

use tensorfs::Error;
use tensorfs::internal::checkpoint::{
    Checkpoint, Content, File, Folder, FolderId, MountEntry, Set, Tail, Tree,
};
use tensorfs::internal::format::names;
use tensorfs::internal::version::Version;

use crate::serve::file_events::{Writer, writer_of};

/// Time until the next look at files that a process writes. If an event reports the end of the
/// writing, the look comes earlier.
const WRITTEN: Duration = Duration::from_secs(1);

/// Minimum time for which a file must be unreadable before its error is shown. A younger error may
/// only mean that the file was moved during the proof.
const UNSETTLED: Duration = Duration::from_secs(2);

/// Minimum time for which files must be unchanged if it is not known whether a process writes them.
const UNSURE: Duration = Duration::from_secs(1);

/// If the kernel does not tell this user about writers, files of local file systems must be
/// unchanged for the grace time divided by `REFUSED_PART`.
const REFUSED_PART: u32 = 6;

/// Minimum and maximum time for which a set with an unproven tail must be unchanged. The tail (the
/// last pieces) is unproven if the files do not say how many files the set has.
const TAIL_MIN: Duration = Duration::from_millis(1500);
const TAIL_MAX: Duration = Duration::from_secs(10);

/// The grace time of a mount that is not watched, for files whose writers are not known.
const ARRIVAL_GRACE: Duration = Duration::from_secs(30);

/// The state of a set at its last check.
#[derive(Clone, Debug)]
pub(super) struct Mark {
    name: String,
    /// Hash of the state of its files.
    state: u64,
    /// Time at which the set was first seen in this state.
    since: Instant,
    /// Whether the mount shows the set or its error.
    shown: bool,
}

/// The sets of a folder, and which of them are still arriving.
#[derive(Debug, Default)]
pub(super) struct Arrivals {
    /// The states of all sets of the folder.
    pub(super) marks: Vec<Mark>,
    /// Names of the sets that are still arriving, which the mount does not show yet.
    pub(super) held: Vec<String>,
    /// Time until the next look. `None` if nothing is arriving.
    pub(super) again: Option<Duration>,
}

impl Arrivals {
    /// Shows the held-back sets that the previous process showed. `was_shown` tells whether it
    /// showed a set.
    pub(super) fn show(&mut self, was_shown: impl Fn(&str) -> bool) {
        self.held.retain(|name| !was_shown(name));
        for mark in &mut self.marks {
            mark.shown |= !self.held.contains(&mark.name);
        }
    }

    fn hold(&mut self, time: Duration) {
        self.again = Some(self.again.map_or(time, |again| again.min(time)));
    }
}

/// Whether a process writes any of the files of a set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Writing {
    GoesOn,
    /// The writing counts as ended once the files are unchanged for this time. The time is zero if
    /// the kernel says that no process writes the files. If the time is not zero, it is not known
    /// whether a process writes the files.
    EndsAfter(Duration),
}

/// The facts that decide whether a set is held back.
#[derive(Clone, Copy, Debug)]
struct SetFacts {
    /// Whether the last pieces of the set are proved. `None` if the set is refused.
    proved: Option<Tail>,
    /// Whether a process writes one of the files.
    writing: Writing,
    /// Whether a download into the same folder goes on.
    downloading: bool,
    /// Time since the last change of the set.
    quiet: Duration,
    /// Longest time between two successive changes of its files.
    pause: Duration,
    /// Number of its files.
    files: usize,
    /// The time since the first proof of this state that failed because a file changed or could not
    /// be read. `None` if the proof did not fail for this reason.
    unsettled: Option<Duration>,
}

/// How long to hold the set back. `None` means that the set or its error is shown now. A refused
/// set counts as broken once it is unchanged for `grace`.
fn held_for(facts: &SetFacts, grace: Duration) -> Option<Duration> {
    let waits = |needed: Duration| needed.checked_sub(facts.quiet).filter(|left| !left.is_zero());
    let Writing::EndsAfter(unsure) = facts.writing else { return Some(WRITTEN) };
    if let Some(left) = facts.unsettled.and_then(|since| UNSETTLED.checked_sub(since)) {
        return Some(left.max(Duration::from_millis(1)));
    }
    let sure = match facts.proved {
        None if facts.downloading => return Some(WRITTEN),
        None => grace,
        Some(Tail::Unproven) if facts.downloading => return Some(WRITTEN),
        // The files do not say how many shards there are. If shards arrive one after the other, a
        // further shard would arrive after a pause similar to the earlier pauses.
        Some(Tail::Unproven) if facts.files > 1 => (facts.pause * 3).clamp(TAIL_MIN, TAIL_MAX),
        Some(Tail::Unproven) => TAIL_MAX,
        Some(Tail::Proven) => Duration::ZERO,
    };
    waits(sure.max(unsure))
}

/// Decides which sets of folder `id` are held back. `before` are the marks of the last look.
pub(super) fn judge(
    tree: &Tree,
    id: FolderId,
    sets: &[Set],
    before: &[Mark],
    grace: Duration,
) -> Arrivals {
    let folder = tree.folder(id);
    let mut arrivals = Arrivals::default();
    let local = !folder.store.may_block(&folder.path);
    let mut downloading = None;
    for set in sets.iter().filter(|set| set.shown_at_parent.is_none()) {
        let files: Vec<&File> = set.files.iter().filter_map(|name| folder.file(name)).collect();
        let state = state_of(set, &files);
        let known = before.iter().find(|mark| mark.name == set.name && mark.state == state);
        let since = known.map_or_else(Instant::now, |mark| mark.since);
        let mut mark = Mark { name: set.name.clone(), state, since, shown: true };
        if !known.is_some_and(|known| known.shown) {
            let proved = set.outcome.as_ref().ok().map(|checkpoint| checkpoint.tail);
            let asks = proved != Some(Tail::Proven);
            let facts = SetFacts {
                proved,
                writing: writing(&files, local, grace),
                downloading: asks
                    && *downloading.get_or_insert_with(|| is_downloading(tree, id, grace)),
                quiet: quiet(&folder, &files, proved.is_none()).max(since.elapsed()),
                pause: longest_pause(&files),
                files: files.len(),
                unsettled: is_unsettled(set).then(|| since.elapsed()),
            };
            if let Some(time) = held_for(&facts, grace) {
                mark.shown = false;
                arrivals.held.push(set.name.clone());
                arrivals.hold(time);
            }
        }
        arrivals.marks.push(mark);
    }
    arrivals
}

/// Why a set that came to an unwatched mount may not be whole yet. `None` if it may be shown.
/// `is_known` says that the mount has shown the set before, with at least as many shards as it has
/// now.
pub(super) fn why_arriving(
    folder: &Folder,
    set: &Set,
    checkpoint: &Checkpoint,
    is_known: bool,
) -> Option<&'static str> {
    let files: Vec<&File> = set.files.iter().filter_map(|name| folder.file(name)).collect();
    let local = !folder.store.may_block(&folder.path);
    let facts = SetFacts {
        proved: Some(if is_known { Tail::Proven } else { checkpoint.tail }),
        writing: writing(&files, local, ARRIVAL_GRACE),
        downloading: false,
        quiet: quiet(folder, &files, false),
        pause: longest_pause(&files),
        files: files.len(),
        unsettled: None,
    };
    held_for(&facts, Duration::ZERO)?;
    Some(match facts.writing {
        Writing::GoesOn => "is still being written; it is shown once no program writes it",
        Writing::EndsAfter(_) => {
            "has just changed, and nothing says that it is whole; it is shown once it is left alone \
             for some seconds"
        }
    })
}

/// How long a plain file that is new in its folder is held back: a process writes it, or has just
/// written it. `None` if it is shown now.
pub(super) fn plain_held_for(entry: &MountEntry, grace: Duration) -> Option<Duration> {
    let Content::Whole { file, proved: None } = &entry.content else { return None };
    let quiet = since(changed_at(&file.version));
    // The kernel is not asked about writers of old files, because a folder may have many old files.
    if quiet >= grace {
        return None;
    }
    let local = file.path.parent().is_some_and(|parent| !file.store.may_block(parent));
    match writing(&[file], local, grace) {
        Writing::GoesOn => Some(WRITTEN),
        Writing::EndsAfter(time) => time.checked_sub(quiet).filter(|left| !left.is_zero()),
    }
}

/// Whether the name marks a file as unfinished.
pub(super) fn is_unfinished(name: &std::ffi::OsStr) -> bool {
    let name = name.to_string_lossy();
    names::UNFINISHED.iter().any(|end| name.ends_with(end))
}

/// Whether a file of the set changed or could not be read during the proof.
fn is_unsettled(set: &Set) -> bool {
    matches!(&set.outcome, Err(Error::Changed { .. } | Error::Io { .. }))
}

/// Hash of the facts that distinguish the states of a set.
fn state_of(set: &Set, files: &[&File]) -> u64 {
    let mut hash = DefaultHasher::new();
    (set.outcome.is_ok(), set.kind.as_str()).hash(&mut hash);
    for file in files {
        (&file.name, &file.path, file.version.content()).hash(&mut hash);
    }
    hash.finish()
}

/// Whether a process writes one of `files`. A file with a hole is probably being filled.
fn writing(files: &[&File], local: bool, grace: Duration) -> Writing {
    let unsure = if local { (grace / REFUSED_PART).max(UNSURE) } else { UNSURE };
    let mut time = Duration::ZERO;
    for file in files {
        match writer_of_file(file, local) {
            Writer::Present => return Writing::GoesOn,
            Writer::Absent => {}
            Writer::Unknown { sparse: true } => time = time.max(grace),
            Writer::Unknown { sparse: false } => time = time.max(unsure),
        }
    }
    Writing::EndsAfter(time)
}

/// Whether a process writes the file. The kernel knows only the writers on this machine.
fn writer_of_file(file: &File, ask: bool) -> Writer {
    if !file.store.is_local() {
        return Writer::Unknown { sparse: false };
    }
    writer_of(&file.path, ask)
}

/// Time since the last change of `files`. If `names` is set, a change of the names in `folder`
/// counts too.
fn quiet(folder: &Folder, files: &[&File], names: bool) -> Duration {
    let times = files.iter().map(|file| changed_at(&file.version));
    let names = folder.version.filter(|_| names || files.is_empty());
    let last = times.chain(names.map(|version| changed_at(&version))).max();
    last.map_or(Duration::MAX, since)
}

/// Longest time between two successive changes of `files`.
fn longest_pause(files: &[&File]) -> Duration {
    let mut times: Vec<Duration> = files.iter().map(|file| changed_at(&file.version)).collect();
    times.sort();
    times.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or_default()
}

/// Time of the last change, since 1970.
fn changed_at(version: &Version) -> Duration {
    let (seconds, nanoseconds) = version.changed().unwrap_or_default();
    Duration::new(seconds.try_into().unwrap_or(0), nanoseconds.try_into().unwrap_or(0))
}

/// Time since `then`. Zero if `then` is in the future.
fn since(then: Duration) -> Duration {
    let now = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
    now.saturating_sub(then)
}

/// Whether a download goes on: into folder `id`, into the folder below it where the hub's client
/// keeps unfinished downloads, or into the blobs of its hub model.
fn is_downloading(tree: &Tree, id: FolderId, grace: Duration) -> bool {
    let child = |id: FolderId, names: &[&str]| {
        names.iter().try_fold(id, |id, name| {
            let folder = tree.folder(id);
            folder.children.iter().find(|(child, _)| child == name).map(|&(_, child)| child)
        })
    };
    let model = hub_model(tree, id);
    let folders = [
        Some(id),
        child(id, &[".cache", "huggingface", "download"]),
        model.and_then(|model| child(model, &["blobs"])),
    ];
    folders.into_iter().flatten().any(|id| {
        let folder = tree.folder(id);
        let mut files = folder.files.iter().filter(|file| is_unfinished(&file.name));
        files.any(|file| is_active(file, grace))
    })
}

/// Whether a process writes the file, or has changed it within `grace`.
fn is_active(file: &File, grace: Duration) -> bool {
    let Ok(now) = file.version_now() else { return false };
    since(changed_at(&now)) < grace || writer_of_file(file, true) == Writer::Present
}

/// The folder of the hub model that contains folder `id`.
pub(super) fn hub_model(tree: &Tree, id: FolderId) -> Option<FolderId> {
    let parents = std::iter::successors(Some(id), |&id| tree.folder(id).parent);
    parents.into_iter().find(|&id| {
        let name = tree.folder(id).path.file_name().map(|name| name.to_string_lossy().into_owned());
        name.is_some_and(|name| names::is_hub_model(&name))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRACE: Duration = Duration::from_secs(30);

    fn facts(proved: Option<Tail>) -> SetFacts {
        let (writing, quiet) = (Writing::EndsAfter(Duration::ZERO), Duration::from_millis(10));
        let (downloading, unsettled) = (false, None);
        SetFacts { proved, writing, downloading, quiet, pause: quiet, files: 4, unsettled }
    }

    #[test]
    fn a_whole_set_that_nobody_writes_is_shown_at_once() {
        assert_eq!(held_for(&facts(Some(Tail::Proven)), GRACE), None);
        // The download must be of another file, since this set is proved whole.
        let downloading = SetFacts { downloading: true, ..facts(Some(Tail::Proven)) };
        assert_eq!(held_for(&downloading, GRACE), None);
    }

    #[test]
    fn a_set_that_is_written_is_held_back_also_if_it_looks_whole() {
        for proved in [None, Some(Tail::Proven), Some(Tail::Unproven)] {
            let quiet = Duration::from_secs(1000);
            let written = SetFacts { writing: Writing::GoesOn, quiet, ..facts(proved) };
            assert_eq!(held_for(&written, GRACE), Some(WRITTEN));
        }
    }

    #[test]
    fn a_refused_set_is_broken_only_after_it_was_left_alone() {
        let fresh = facts(None);
        assert_eq!(held_for(&fresh, GRACE), Some(GRACE - fresh.quiet));
        let quiet = Duration::from_secs(31);
        assert_eq!(held_for(&SetFacts { quiet, ..fresh }, GRACE), None);
        let downloading = SetFacts { quiet, downloading: true, ..fresh };
        assert_eq!(held_for(&downloading, GRACE), Some(WRITTEN));
    }

    #[test]
    fn a_set_whose_files_cannot_be_read_for_a_moment_is_not_called_broken() {
        let quiet = Duration::from_secs(1000);
        let moved = SetFacts { quiet, unsettled: Some(Duration::ZERO), ..facts(None) };
        assert_eq!(held_for(&moved, GRACE), Some(UNSETTLED));
        let gone = SetFacts { unsettled: Some(Duration::from_secs(3)), ..moved };
        assert_eq!(held_for(&gone, GRACE), None);
    }

    #[test]
    fn a_set_without_a_proof_of_its_tail_waits_as_its_shards_came() {
        let quick = facts(Some(Tail::Unproven));
        assert_eq!(held_for(&quick, GRACE), Some(TAIL_MIN - quick.quiet));
        let quiet = Duration::from_secs(2);
        assert_eq!(held_for(&SetFacts { quiet, ..quick }, GRACE), None);
        let slow = SetFacts { quiet, pause: Duration::from_secs(1), ..quick };
        assert_eq!(held_for(&slow, GRACE), Some(Duration::from_secs(1)));
        let old = SetFacts { quiet, pause: Duration::from_secs(86400), ..quick };
        assert_eq!(held_for(&old, GRACE), Some(TAIL_MAX - quiet));
        let alone = SetFacts { quiet, files: 1, pause: Duration::ZERO, ..quick };
        assert_eq!(held_for(&alone, GRACE), Some(TAIL_MAX - quiet));
    }

    #[test]
    fn where_nobody_knows_who_writes_a_time_without_a_change_is_asked_for() {
        let unsure = SetFacts { writing: Writing::EndsAfter(UNSURE), ..facts(Some(Tail::Proven)) };
        assert_eq!(held_for(&unsure, GRACE), Some(UNSURE - unsure.quiet));
        assert_eq!(held_for(&SetFacts { quiet: UNSURE, ..unsure }, GRACE), None);
    }

    #[test]
    fn names_tell_that_a_file_is_unfinished() {
        let names = ["abc.incomplete", "model.safetensors.tmp", "x.aria2", "y.part"];
        assert!(names.iter().all(|name| is_unfinished(name.as_ref())));
        assert!(!["config.json", "tmp", "incomplete"].iter().any(|n| is_unfinished(n.as_ref())));
    }
}
