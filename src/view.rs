//! What of a checkpoint is shown, and how: the choices a user has.

use std::path::PathBuf;

use serde_json::{Value, json};

use crate::format::Format;

/// How shards become files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Arrangement {
    /// One virtual file per set.
    #[default]
    Single,
    /// Shards and weight map as they are.
    Original,
}

/// What becomes of the weight map.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MapPolicy {
    /// Every tensor is sent to the virtual file.
    #[default]
    Rewrite,
    /// It is not shown.
    Hide,
}

/// Which one is shown where a whole file and a sharded set stand for the same name.
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
    /// Inside the source, into the blobs of the same hub folder and into `View::follow`: what a
    /// mount shows to others must not depend on links that anybody may have put there.
    Inside,
}

/// How a checkpoint, or a tree of them, is opened and shown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// How shards become files.
    pub arrangement: Arrangement,
    /// What the one file of a set is.
    pub format: Format,
    /// What becomes of the weight map.
    pub map: MapPolicy,
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
}

impl View {
    /// As JSON, for those who find the source behind a mount. What only one start needs is left
    /// out: how a set is proved, and where indexes are kept.
    pub fn to_json(&self) -> Value {
        json!({
            "layout": match self.arrangement {
                Arrangement::Single => "single",
                Arrangement::Original => "original",
            },
            "index": match self.map {
                MapPolicy::Rewrite => "rewrite",
                MapPolicy::Hide => "hide",
            },
            "format": self.format.as_str(),
            "prefer": match self.prefer {
                Prefer::File => "file",
                Prefer::Index => "index",
            },
            "follow": self.follow,
        })
    }

    /// What `to_json` gave; none where it came from another version and cannot be understood.
    pub fn from_json(json: &Value) -> Option<View> {
        let word = |key: &str| json.get(key)?.as_str();
        let follow = json.get("follow")?.as_array()?.iter();
        Some(View {
            arrangement: match word("layout")? {
                "single" => Arrangement::Single,
                "original" => Arrangement::Original,
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
            prefer: match word("prefer")? {
                "file" => Prefer::File,
                "index" => Prefer::Index,
                _ => return None,
            },
            follow: follow
                .map(|folder| folder.as_str().map(PathBuf::from))
                .collect::<Option<_>>()?,
            // What the mount does not show is no part of what lies behind it.
            links: Links::Inside,
            ..View::default()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_view_comes_back_from_json_and_one_of_another_version_does_not() {
        let view = View {
            arrangement: Arrangement::Original,
            map: MapPolicy::Hide,
            prefer: Prefer::Index,
            follow: vec!["/a,b".into()],
            links: Links::Inside,
            ..View::default()
        };
        let mut json = view.to_json();
        assert_eq!(View::from_json(&json), Some(view));
        let plain = View { links: Links::Inside, ..View::default() };
        assert_eq!(View::from_json(&plain.to_json()), Some(plain));
        json["layout"] = "double".into();
        assert_eq!(View::from_json(&json), None);
    }
}
