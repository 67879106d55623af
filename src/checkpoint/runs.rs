//! The folder of a run of DeepSpeed. Its file `latest` names the folder of the last checkpoint.

use std::collections::BTreeSet;
use std::ffi::OsStr;

use crate::error::{Error, ErrorKind, Result, quoted};
use crate::format::deepspeed::{LATEST_LEN_MAX, latest_folder};
use crate::format::names;

use super::deepspeed::STEM;
use super::discover::SetKind;
use super::folder::{File, Folder, FolderId};
use super::set::{Proved, Set};
use super::tree::Tree;

/// The folder that the `latest` file of a run names, or the error if there is no such checkpoint.
pub(super) type Latest = Result<FolderId, Error>;

impl Tree {
    /// The last checkpoint of the run in `folder`. `None` if `folder` is not the folder of a run.
    pub(super) fn latest_of(&self, folder: &Folder) -> Option<Latest> {
        let file = folder.latest()?;
        let file_name = folder.latest_name();
        let children = || folder.children.iter().map(|(name, id)| (name, *id, self.folder(*id)));
        children().find(|(.., child)| child.state_files().is_some())?;
        let refused = |kind: ErrorKind, message: String| {
            Error::refused(&folder.path, kind.fault(message).in_file(file_name))
        };
        let text = match read_latest(file) {
            Ok(text) => text,
            Err(error) => return Some(Err(error)),
        };
        let name = match latest_folder(&text) {
            Ok(name) => name,
            Err(why) => return Some(Err(refused(ErrorKind::ShardMissing, why))),
        };
        let shown = quoted(name);
        let Some((_, id, child)) = children().find(|(own, ..)| own.as_os_str() == OsStr::new(name))
        else {
            let message = format!(
                "names the folder {shown}, which is not here; fetch or copy it too, or name the folder \
                 of another checkpoint"
            );
            return Some(Err(refused(ErrorKind::ShardMissing, message)));
        };
        if child.state_files().is_none() {
            let message =
                format!("names the folder {shown}, which has no model states of DeepSpeed");
            return Some(Err(refused(ErrorKind::ShardMissing, message)));
        }
        Some(Ok(id))
    }
}

/// Adds a refused set to the run in `folder`, whose last checkpoint was not found. `error` is the
/// reason.
pub(super) fn refuse_run(folder: &Folder, run: &mut Proved, error: &Error) {
    if run.sets.is_empty() {
        run.sets.push(Set {
            name: names::whole(STEM),
            kind: SetKind::DeepSpeed,
            files: BTreeSet::from([folder.latest_name().to_owned()]),
            outcome: Err(error.copied()),
            shown_at_parent: None,
        });
    }
}

/// The result for a checkpoint folder that is not the last one of `run`. No file of that folder is
/// read.
pub(super) fn older_checkpoint_of_run(run: &Folder, folder: &Folder) -> Proved {
    let name = folder.relative.file_name().unwrap_or_default().to_string_lossy();
    let note = format!(
        "`{}` does not name the checkpoint in {}; name its folder to read it",
        run.latest_name(),
        quoted(&name)
    );
    Proved { notes: vec![note], ..Proved::default() }
}

fn read_latest(file: &File) -> Result<Vec<u8>> {
    let source = file.store.open(&file.path)?;
    let mut text = vec![0; source.len().min(LATEST_LEN_MAX) as usize];
    source.read_exact_at(&mut text, 0)?;
    source.check()?;
    Ok(text)
}
