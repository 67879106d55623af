//! The message about a source without a checkpoint. It names weights of other formats that the
//! source has.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use crate::error::{counted, shown_path};
use crate::format::{InputFormat, foreign, names};
use crate::mount_origin::missing_on_mount;
use crate::store::Store;

use super::folder::File;
use super::load::Unread;
use super::small_files::CONFIG;
use super::tree::Tree;

/// Folder of a model in a hub cache that has the files of the model, including unfinished
/// downloads.
const BLOBS: &str = "blobs";

impl Tree {
    /// The message that the source holds no checkpoint. It names files of weights in other formats and unfinished
    /// downloads, and sums up the skipped names. Reads the beginning of one file.
    pub fn nothing_found(&self) -> String {
        let source = shown_path(&self.source);
        if let Some(why) = missing_on_mount(&self.source) {
            return format!("{source}: its mount shows no checkpoint here: {why}");
        }
        let formats = InputFormat::WORDS;
        let mut message = format!("{source}: no {formats} files here or below");
        let mut add = |part: String| {
            message.push_str("; ");
            message.push_str(&part);
        };
        let foreign = self.foreign_weights().or_else(|| self.config_alone());
        foreign.into_iter().for_each(&mut add);
        unfinished_blob(self.store(), &self.source).into_iter().for_each(&mut add);
        self.left_out.summary().into_iter().for_each(&mut add);
        message
    }

    /// The part of the message about a model that has a `config.json` but no weights.
    fn config_alone(&self) -> Option<String> {
        let mut folders = self.ids().into_iter().map(|id| self.folder(id));
        let folder = folders.find(|folder| folder.files.iter().any(|file| file.name == CONFIG))?;
        let config = shown_path(&folder.relative.join(CONFIG));
        Some(format!(
            "{config} is there without weights; fetch or save them too, or name the folder that has them"
        ))
    }

    /// The part of the message about weight files in other formats. It describes the content of the file that is most
    /// likely the weights, according to its name.
    fn foreign_weights(&self) -> Option<String> {
        let mut found: Option<(u32, PathBuf, File)> = None;
        let mut count = 0;
        for folder in self.ids().into_iter().map(|id| self.folder(id)) {
            for file in folder.files.iter() {
                let Some(rank) = file.name.to_str().and_then(foreign::weights_rank) else {
                    continue;
                };
                count += 1;
                if found.as_ref().is_none_or(|(best, ..)| rank < *best) {
                    found = Some((rank, folder.relative.join(&file.name), file.clone()));
                }
            }
        }
        let (_, shown, file) = found?;
        let name = shown.file_name().and_then(OsStr::to_str).unwrap_or_default();
        let what = match Unread::open(name, (&file.store, &file.path)) {
            Ok(unread) => match (unread.fault(), foreign::unfinished(name)) {
                (Some(fault), _) => fault.message.clone(),
                // The header is valid, but does not show whether the data is complete.
                (None, Some(end)) => format!(
                    "is an unfinished download by its name, `*{end}`; finish or repeat it, or take \
                     the end off its name"
                ),
                (None, None) => "can be read: name the file itself, or end its name in \
                                 `.safetensors`"
                    .to_owned(),
            },
            Err(error) => error.to_string(),
        };
        let others = match count - 1 {
            0 => String::new(),
            others => format!(" (and {})", counted(others, "other such file")),
        };
        Some(format!("{}{others} {what}", shown_path(&shown)))
    }
}

/// The part of the message about unfinished downloads, if `source` is a snapshot of a model in a
/// hub cache.
fn unfinished_blob(store: &Store, source: &Path) -> Option<String> {
    let model = source.parent()?.parent()?;
    names::is_hub_model(model.file_name()?.to_str()?).then_some(())?;
    let blobs = store.names(&model.join(BLOBS)).ok()?;
    let mut unfinished: Vec<String> =
        blobs.into_iter().filter_map(|name| name.into_string().ok()).collect();
    unfinished.retain(|name| names::UNFINISHED.iter().any(|end| name.ends_with(end)));
    let count = unfinished.len();
    let what = "of the model not finished: finish or repeat it";
    (count > 0).then(|| format!("{} {what}", counted(count, "download")))
}
