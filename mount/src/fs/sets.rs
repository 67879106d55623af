//! The checkpoints that a mount shows, refuses or has lost. `status` reports them, and programs that
//! want to read the source instead of the mount check them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tensorfs::Error;
use tensorfs::internal::checkpoint::Set;
use tensorfs::internal::error::shown_path;
use tensorfs::internal::sync::Mutex;

/// Maximum number of checkpoints that `status` lists for each state.
const NAMED_MAX: usize = 20;

/// Maximum number of checkpoints that the mount remembers after they have disappeared.
const ABSENT_MAX: usize = 100;

#[derive(Clone, Debug, PartialEq, Eq)]
enum SetState {
    Shown,
    /// The reason. The flag says that the reason is the mount's history and not the files of the
    /// source.
    Refused(String, bool),
    Absent,
}

/// The outcome of the proof of a set.
pub(crate) struct SetOutcome {
    pub name: String,
    pub outcome: Result<(), Error>,
    /// Whether the set is held back because it may not be whole. Neither the set nor its error is
    /// shown then.
    pub on_its_way: bool,
}

impl SetOutcome {
    /// The outcome of `set` in the folder at `path`, which is held back because it is still
    /// arriving.
    pub(super) fn held(path: &Path, set: Set) -> SetOutcome {
        let why = "is on its way; it is shown once it is whole";
        let error = set.outcome.err().unwrap_or_else(|| Error::changed(path.join(&set.name), why));
        SetOutcome { name: set.name, outcome: Err(error), on_its_way: true }
    }
}

/// The checkpoints of the folders that requests have visited, for `status`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct SetsStatus {
    /// Number of checkpoints that are shown.
    pub shown: usize,
    pub refused: Vec<NamedSet>,
    /// Checkpoints that are gone from the source.
    pub absent: Vec<NamedSet>,
    /// The error of the last attempt to read the source, if it failed.
    pub source: Option<String>,
    /// Number of times that folders were listed again, for a source that is not watched.
    pub looks: u64,
}

/// A checkpoint that is not shown.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct NamedSet {
    pub name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// The states of the checkpoints of visited folders, by their paths in the mount.
#[derive(Default)]
pub(crate) struct SetStates {
    by_path: Mutex<BTreeMap<PathBuf, SetState>>,
    /// The error of the last attempt to read the source, if it failed.
    source_error: Mutex<Option<String>>,
}

impl SetStates {
    /// Records the states of `sets`, which are in `folder`, a path in the mount. The mount refuses
    /// the sets in `held` because of its history.
    pub(super) fn note(&self, folder: &Path, sets: &[Set], held: &BTreeSet<String>) {
        let mut states = self.by_path.lock();
        for (path, state) in states.iter_mut() {
            if path.parent() == Some(folder) {
                *state = SetState::Absent;
            }
        }
        for set in sets.iter().filter(|set| set.shown_at_parent.is_none()) {
            let state = match &set.outcome {
                Ok(_) => SetState::Shown,
                Err(error) => SetState::Refused(error.to_string(), held.contains(&set.name)),
            };
            states.insert(folder.join(&set.name), state);
        }
        forget_most(&mut states);
    }

    /// Notes that `folder`, a path in the mount, is gone.
    pub(super) fn take_out(&self, folder: &Path) {
        let mut states = self.by_path.lock();
        let below = states.iter_mut().filter(|(path, _)| path.starts_with(folder));
        below.for_each(|(_, state)| *state = SetState::Absent);
        forget_most(&mut states);
    }

    /// Records whether the source itself could be read. Returns true if it cannot be read now but
    /// could before.
    pub(super) fn note_source(&self, error: Option<&Error>) -> bool {
        let now = error.map(Error::to_string);
        let before = std::mem::replace(&mut *self.source_error.lock(), now);
        before.is_none() && error.is_some()
    }

    fn source_error(&self) -> Option<String> {
        self.source_error.lock().clone()
    }

    /// The counts and names for `tensorfs status`.
    pub(super) fn status(&self) -> SetsStatus {
        let states = self.by_path.lock();
        let named = |path: &PathBuf, why| NamedSet { name: shown_path(path), why };
        let shown = states.values().filter(|state| **state == SetState::Shown).count();
        let refused = states.iter().filter_map(|(path, state)| match state {
            SetState::Refused(why, _) => Some(named(path, Some(why.clone()))),
            _ => None,
        });
        let absent = states.iter().filter(|(_, state)| **state == SetState::Absent);
        SetsStatus {
            shown,
            refused: refused.take(NAMED_MAX).collect(),
            absent: absent.map(|(path, _)| named(path, None)).take(NAMED_MAX).collect(),
            source: self.source_error(),
            looks: 0,
        }
    }

    /// The reason why a checkpoint at or below `path` is not shown. `None` if any checkpoint there
    /// is shown, or if programs that read the source itself would find out the reason.
    pub(super) fn missing(&self, path: &Path) -> Option<String> {
        let states = self.by_path.lock();
        let mut below = states.iter().filter(|(set, _)| set.starts_with(path));
        if below.clone().any(|(_, state)| *state == SetState::Shown) {
            return None;
        }
        below.find_map(|(set, state)| match state {
            SetState::Refused(why, true) => Some(why.clone()),
            SetState::Absent => Some(format!("{} is not in the source any more", shown_path(set))),
            _ => None,
        })
    }
}

/// Forgets sets that are gone, until at most `ABSENT_MAX` of them remain.
fn forget_most(states: &mut BTreeMap<PathBuf, SetState>) {
    let absent = states.values().filter(|state| **state == SetState::Absent).count();
    let mut left = absent.saturating_sub(ABSENT_MAX);
    states.retain(|_, state| {
        let goes = left > 0 && *state == SetState::Absent;
        left -= usize::from(goes);
        !goes
    });
}
