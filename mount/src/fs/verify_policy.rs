//! `verify=read`: selects the files whose tensors are compared with the checksums of `tensorfs
//! verify` before they are served.

use std::collections::HashMap;
use std::ffi::OsString;
use std::path::Path;
use std::sync::Arc;

use tensorfs::internal::cache::verify_on_read::ChecksumGate;
use tensorfs::internal::checkpoint::{Content, FolderId, MountEntry, Proved, Tree};
use tensorfs::internal::error::shown_path;
use tensorfs::internal::verify::Recorded;

/// For each file name that a folder shows, the gate that compares its bytes with checksums.
pub(crate) type ChecksumGates = HashMap<OsString, Arc<ChecksumGate>>;

/// Reads the headers of the sets of `folder`, and refuses the sets that have no checksums or whose
/// headers differ from the recorded headers. Returns the gates of the remaining sets.
pub(crate) fn admit(tree: &Tree, folder: FolderId, proved: &mut Proved) -> ChecksumGates {
    let mut directory = tree.folder(folder).path.clone();
    let mut recorded = recorded_of(tree, &directory);
    let mut gates = ChecksumGates::new();
    for set in proved.sets.iter_mut().filter(|set| set.shown_at_parent.is_none()) {
        let Ok(checkpoint) = &set.outcome else { continue };
        // A folder may show a checkpoint that lies in a folder below it.
        if checkpoint.directory != directory {
            directory.clone_from(&checkpoint.directory);
            recorded = recorded_of(tree, &directory);
        }
        if let Err(error) = recorded.admit(checkpoint) {
            set.outcome = Err(error);
            continue;
        }
        let mut add = |name: &str, gate: Option<ChecksumGate>| {
            gates.extend(gate.map(|gate| (name.into(), Arc::new(gate))));
        };
        let mut files = checkpoint.virtual_files().peekable();
        if files.peek().is_none() {
            for shard in &checkpoint.catalog().shards {
                add(&shard.name, ChecksumGate::of_shard(checkpoint, &shard.name, &recorded));
            }
        }
        files.for_each(|file| add(&file.spec().name, ChecksumGate::of_file(&file, &recorded)));
    }
    gates
}

fn recorded_of(tree: &Tree, directory: &Path) -> Recorded {
    let recorded = Recorded::load(tree.options.index.as_deref(), directory);
    if let Some(doubt) = recorded.doubt() {
        tracing::warn!("{doubt}");
    }
    recorded
}

/// Whether a file may be shown. Weights must have a gate.
pub(crate) fn may_show(shown: &MountEntry, gates: &ChecksumGates) -> bool {
    let weights = match &shown.content {
        Content::Virtual(_) => true,
        Content::Whole { proved, .. } => proved.is_some(),
        Content::Text(_) => false,
    };
    let may = !weights || gates.contains_key(&shown.name);
    if !may {
        let name = shown_path(shown.name.as_ref());
        tracing::error!("{name}: is not shown: there are no checksums for it");
    }
    may
}
