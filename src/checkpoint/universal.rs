//! Universal checkpoints of DeepSpeed: the folder of such a checkpoint has a subfolder for each
//! tensor.
//!
//! All files of tensors form one set of the folder of the checkpoint. In that set, the file of a
//! tensor has the name `zero/NAME/fp32.pt`.

use std::path::Path;
use std::sync::Arc;

use crate::format::TrainingState;
use crate::format::deepspeed::{MASTER, UNIVERSAL, UniversalFile};

use super::folder::{File, Folder, FolderId};
use super::set::{Proved, Set};
use super::tree::Tree;

impl Folder {
    /// If this is the folder of a tensor and has the weights of the tensor: the path of `zero`, the folder above it.
    pub(super) fn zero_folder_of_tensor(&self) -> Option<&Path> {
        let zero =
            self.relative.parent().filter(|zero| zero.file_name() == Some(UNIVERSAL.as_ref()));
        zero.filter(|_| self.file(MASTER).is_some())
    }
}

impl Tree {
    /// The folder `zero`, if `folder` is the folder of a universal checkpoint.
    fn tensor_folders(&self, folder: &Folder) -> Option<Arc<Folder>> {
        let (_, id) = folder.children.iter().find(|(name, _)| name == UNIVERSAL)?;
        let found = self.folder(*id);
        self.has_masters(&found).then_some(found)
    }

    /// Whether `folder` is a folder `zero` that has folders of tensors. This is called for each folder of a tree, so
    /// it must not look at all entries of a folder.
    fn has_masters(&self, folder: &Folder) -> bool {
        self.folders.read().has_masters(&folder.relative)
    }

    /// The folder of the universal checkpoint, if `folder` is its folder `zero` or a folder of a tensor in it.
    pub(super) fn universal_of(&self, folder: &Folder) -> Option<FolderId> {
        let parent = folder.parent?;
        if self.has_masters(folder) {
            return Some(parent);
        }
        let above = self.folder(parent);
        above.parent.filter(|_| self.has_masters(&above))
    }

    /// The folders to examine if `folder` may have changed, parents before children. In general these are all folders
    /// of its family. A universal checkpoint may have thousands of folders of tensors. For such a folder, the result is
    /// only this folder and the folders above it, up to the top of the family. To examine the whole family, call this
    /// for the top.
    pub fn folders_to_check(&self, folder: FolderId) -> Vec<FolderId> {
        let top = self.family_of(folder);
        if folder == top || self.universal_of(&self.folder(folder)).is_none() {
            return self.family(top);
        }
        let parent = |id: &FolderId| self.folder(*id).parent.filter(|_| *id != top);
        let mut found: Vec<FolderId> = std::iter::successors(Some(folder), parent).collect();
        found.reverse();
        found
    }

    /// The folder `id`. If it is the folder of a universal checkpoint, the files of its tensors are
    /// added.
    pub(super) fn with_tensor_files(&self, id: FolderId) -> Arc<Folder> {
        let folder = self.folder(id);
        let Some(tensors) = self.tensor_folders(&folder) else { return folder };
        let mut files = folder.files.to_vec();
        for (name, child) in &tensors.children {
            let Some(param) = name.to_str() else { continue };
            for file in self.folder(*child).files.iter() {
                let Some(own) = file.name.to_str() else { continue };
                let path = format!("{UNIVERSAL}/{param}/{own}");
                let is_shown = |file: UniversalFile<'_>| {
                    file.is_master() || self.options.state == TrainingState::All
                };
                if UniversalFile::of(&path).is_some_and(is_shown) {
                    files.push(File { name: path.into(), ..file.clone() });
                }
            }
        }
        files.sort_by(|a, b| a.name.cmp(&b.name));
        Arc::new(Folder { files: files.into(), ..Folder::clone(&folder) })
    }
}

/// The result for `folder`, which has files of a tensor. The files that the universal checkpoint
/// `top` uses count as weights. The other files stay visible.
pub(super) fn part_of(top: Option<&Proved>, folder: &Folder) -> Proved {
    let name = folder.relative.file_name().unwrap_or_default().to_string_lossy();
    let sets = top.into_iter().flat_map(|top| &top.sets);
    let shown: Vec<&Set> = sets.filter(|set| set.outcome.is_ok()).collect();
    let is_shown = |file: &&str| {
        let path = format!("{UNIVERSAL}/{name}/{file}");
        shown.iter().any(|set| set.files.contains(&path))
    };
    let files = folder.files.iter().filter_map(|file| file.name.to_str());
    let weights = files.filter(is_shown).map(str::to_owned).collect();
    Proved { weights, ..Proved::default() }
}
