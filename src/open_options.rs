//! How a source is opened: how its sets are found and proved, and the view on them.

use std::path::PathBuf;

use serde_json::{Value, json};

use crate::format::Format;
use crate::view::{Files, MapPolicy, View};

/// Which one counts where a whole file and a sharded set stand for the same name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Prefer {
    /// The whole file, as transformers does.
    #[default]
    File,
    /// The sharded set, as diffusers does.
    Index,
}

/// Where symbolic links of the source may lead.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Links {
    /// To any file that the caller may read, and to folders inside the source: a library reads
    /// with its caller's rights, for its caller alone.
    #[default]
    Anywhere,
    /// Inside the source, into the blobs of the same hub folder and into `OpenOptions::follow`: a
    /// mount shows files to others, and anybody may have put a link there.
    Inside,
}

/// How a checkpoint, or a tree of them, is opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OpenOptions {
    /// Whole file or sharded set.
    pub prefer: Prefer,
    /// Where symbolic links may lead.
    pub links: Links,
    /// Folders outside the source into which symbolic links may lead.
    pub follow: Vec<PathBuf>,
    /// Number of shard files that a set has to have.
    pub expect_shards: Option<u64>,
    /// File that knows names, dtypes and shapes of all tensors.
    pub reference: Option<PathBuf>,
    /// Folder that indexes are kept in; without one every start reads all headers.
    pub index: Option<PathBuf>,
    /// How the sets are presented.
    pub view: View,
}

impl OpenOptions {
    /// The options as JSON, for programs that find the source behind a mount. Options that only
    /// one start needs are left out: how a set is proved, and where indexes are kept.
    pub fn to_json(&self) -> Value {
        json!({
            "layout": match self.view.files {
                Files::Single => "single",
                Files::Original => "original",
            },
            "index": match self.view.map {
                MapPolicy::Rewrite => "rewrite",
                MapPolicy::Hide => "hide",
            },
            "format": self.view.format.as_str(),
            "prefer": match self.prefer {
                Prefer::File => "file",
                Prefer::Index => "index",
            },
            "follow": self.follow,
        })
    }

    /// The options that `to_json` wrote; `None` if another version wrote words that are not known
    /// here.
    pub fn from_json(json: &Value) -> Option<OpenOptions> {
        let word = |key: &str| json.get(key)?.as_str();
        let follow = json.get("follow")?.as_array()?.iter();
        let view = View {
            files: match word("layout")? {
                "single" => Files::Single,
                "original" => Files::Original,
                _ => return None,
            },
            map: match word("index")? {
                "rewrite" => MapPolicy::Rewrite,
                "hide" => MapPolicy::Hide,
                _ => return None,
            },
            format: match word("format")? {
                "safetensors" => Format::Safetensors,
                "bintensors" => Format::Bintensors,
                _ => return None,
            },
        };
        Some(OpenOptions {
            view,
            prefer: match word("prefer")? {
                "file" => Prefer::File,
                "index" => Prefer::Index,
                _ => return None,
            },
            follow: follow
                .map(|folder| folder.as_str().map(PathBuf::from))
                .collect::<Option<_>>()?,
            // Files that the mount does not show are not part of its source.
            links: Links::Inside,
            ..OpenOptions::default()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_come_back_from_json_and_those_of_another_version_do_not() {
        let options = OpenOptions {
            view: View { files: Files::Original, map: MapPolicy::Hide, ..View::default() },
            prefer: Prefer::Index,
            follow: vec!["/a,b".into()],
            links: Links::Inside,
            ..OpenOptions::default()
        };
        let mut json = options.to_json();
        assert_eq!(OpenOptions::from_json(&json), Some(options));
        let plain = OpenOptions { links: Links::Inside, ..OpenOptions::default() };
        assert_eq!(OpenOptions::from_json(&plain.to_json()), Some(plain));
        json["layout"] = "double".into();
        assert_eq!(OpenOptions::from_json(&json), None);
    }
}
