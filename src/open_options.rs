//! The options for opening a source. They tell how its sets are found and proved, and which view is applied.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};

use crate::error::real_name;
use crate::format::TrainingState;
use crate::format::tensorizer::keys::Secret;
use crate::view::{NamedViews, OptionFileContent, ReadFile, View};

words! {
    /// Chooses between a whole file and a sharded set of the same name.
    ///
    /// ```
    /// use tensorfs::{Checkpoint, OpenOptions, Prefer};
    ///
    /// let folder = "tests/fixtures/hf/single_and_index".as_ref();
    /// let options = OpenOptions { prefer: Prefer::Shards, ..OpenOptions::default() };
    /// assert_eq!(Checkpoint::open_with(folder, &options)?.kind, tensorfs::SetKind::WeightMap);
    /// # Ok::<(), tensorfs::Error>(())
    /// ```
    #[derive(Default)]
    pub enum Prefer {
        /// The whole file, which transformers prefers.
        #[default]
        File = "file",
        /// The sharded set, which diffusers prefers.
        Shards = "shards",
    }
}

words! {
    /// Chooses which weights of a DeepSpeed checkpoint of ZeRO-1 or ZeRO-2 are shown. A ZeRO-3 checkpoint has only the
    /// weights of the optimizer, which are always shown.
    ///
    /// ```
    /// use tensorfs::{Checkpoint, Dtype, OpenOptions, ZeroWeights};
    ///
    /// let folder = "tests/fixtures/torch/deepspeed_zero2".as_ref();
    /// let options = OpenOptions { zero: ZeroWeights::Fp32, ..OpenOptions::default() };
    /// let checkpoint = Checkpoint::open_with(folder, &options)?;
    /// assert_eq!(checkpoint.catalog().tensor("a.weight").map(|t| t.dtype), Some(Dtype::F32));
    /// # Ok::<(), tensorfs::Error>(())
    /// ```
    #[derive(Default)]
    pub enum ZeroWeights {
        /// The weights of the model, which mostly have 16 bits.
        #[default]
        Module = "module",
        /// The F32 weights of the optimizer, joined from the files of all ranks.
        Fp32 = "fp32",
    }
}

/// The allowed targets of symbolic links in the source.
///
/// ```
/// use tensorfs::{Checkpoint, Links, OpenOptions};
///
/// // Links that lead out of the folder are refused.
/// let options = OpenOptions { links: Links::Inside, ..OpenOptions::default() };
/// let checkpoint = Checkpoint::open_with("tests/fixtures/hf/gpt2_tiny".as_ref(), &options)?;
/// # Ok::<(), tensorfs::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Links {
    /// Any file that the caller may read, and folders inside the source. This is safe in a library, because it reads
    /// with the rights of its caller, and only for this caller.
    #[default]
    Anywhere,
    /// Targets inside the source, in the blobs of the same hub folder and in `OpenOptions::follow`. A mount needs this
    /// restriction, because it shows files to other users, and any user may have created a link in the source.
    Inside,
}

/// A folder on this machine that stores bytes of remote sources.
///
/// ```
/// use tensorfs::{DiskCachePlace, OpenOptions};
///
/// let place = DiskCachePlace::new("/var/cache/tensorfs/remote".into(), Some(100 << 30));
/// let options = OpenOptions { disk_cache: Some(place), ..OpenOptions::default() };
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct DiskCachePlace {
    /// The folder, an absolute path.
    pub folder: PathBuf,
    /// Maximum number of bytes in the folder. If `None`, the cache leaves a tenth of the file system free, and at least
    /// 1 GiB.
    pub size: Option<u64>,
}

impl DiskCachePlace {
    /// The place with this folder and this size, and the defaults of any other fields.
    pub fn new(folder: PathBuf, size: Option<u64>) -> DiskCachePlace {
        DiskCachePlace { folder, size }
    }
}

/// The location of a remote source and the origin of its credentials. The settings name files that contain
/// secrets, but contain no secrets themselves. For a setting that is `None`, the environment is used.
///
/// ```
/// use tensorfs::{OpenOptions, RemoteSettings};
///
/// let settings = RemoteSettings { profile: Some("work".to_owned()), ..RemoteSettings::default() };
/// let options = OpenOptions { remote: Some(settings.into()), ..OpenOptions::default() };
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct RemoteSettings {
    /// The credentials file, in the format of the tools of the provider.
    pub credentials_file: Option<PathBuf>,
    /// The AWS profile.
    pub profile: Option<String>,
    /// The server.
    pub endpoint: Option<String>,
    /// The AWS region.
    pub region: Option<String>,
    /// Certificates that are trusted in addition to those of the machine.
    pub ca_file: Option<PathBuf>,
    /// Time limit of a listing, of opening a file, and of a read for which nothing else sets a deadline. If
    /// `None`, it is 60 seconds.
    pub timeout: Option<Duration>,
}

/// The layout of a hub cache. It is not a view, because it contains several checkpoints.
#[doc(hidden)]
pub const HUB: &str = "hub";

/// The options with which a checkpoint, or a tree of checkpoints, is opened.
///
/// ```
/// use tensorfs::{Checkpoint, OpenOptions};
///
/// let options = OpenOptions { expect_shards: Some(3), ..OpenOptions::default() };
/// let checkpoint = Checkpoint::open_with("tests/fixtures/hf/gpt2_tiny".as_ref(), &options)?;
/// # Ok::<(), tensorfs::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OpenOptions {
    /// Chooses between a whole file and a sharded set of the same name.
    pub prefer: Prefer,
    /// Chooses which weights of DeepSpeed checkpoints are shown.
    pub zero: ZeroWeights,
    /// Chooses which tensors of torch pickles are shown.
    pub state: TrainingState,
    /// Allowed targets of symbolic links.
    pub links: Links,
    /// Folders outside the source to which symbolic links may lead.
    pub follow: Vec<PathBuf>,
    /// Number of shard files that a set must have, if it is known.
    pub expect_shards: Option<u64>,
    /// A file with the names, dtypes and shapes of all tensors.
    pub reference: Option<PathBuf>,
    /// A folder whose small files are shown beside the weights of the only checkpoint, or one such file:
    /// `config.json`, the files of the tokenizer and other files without weights. They replace files of the
    /// same name in the source.
    pub config: Option<PathBuf>,
    /// The folder for indexes. If `None`, all headers are read at every start.
    pub index: Option<PathBuf>,
    /// The folder that stores blocks of remote sources. If `None`, no blocks are stored.
    pub disk_cache: Option<DiskCachePlace>,
    /// The location of a remote source and the origin of its credentials. If `None`, the environment is used.
    pub remote: Option<Arc<RemoteSettings>>,
    /// How the sets are presented.
    pub view: View,
    /// Several views. A mount shows each view as a folder, and `view` is the default.
    pub views: Option<Arc<NamedViews>>,
    /// Whether a tree of models is shown in the layout of a Hugging Face hub cache.
    pub hub: bool,
    /// The secret that opens encrypted tensorizer files.
    pub secret: Option<Arc<Secret>>,
}

impl OpenOptions {
    /// The options that `set_word` accepts.
    #[doc(hidden)]
    pub const WORDS: [&str; 2] = ["zero", "state"];

    /// Sets the option `key`, which is `zero` or `state`, to the word `value`. Returns `false` if `key` is any
    /// other option.
    ///
    /// # Errors
    /// A message of one line if the option has no such word.
    #[doc(hidden)]
    pub fn set_word(&mut self, key: &str, value: &str) -> Result<bool, String> {
        let unknown = |words| format!("{key}={value}: expected {words}");
        match key {
            "zero" => self.zero = value.parse().map_err(unknown)?,
            "state" => self.state = value.parse().map_err(unknown)?,
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// The options as JSON, for programs that find the source of a mount. The folders of the index and of the
    /// disk cache are left out, because other users may not use them. The reference is left out, because other
    /// users may not be allowed to read it. The remote settings and the secret are left out too.
    #[doc(hidden)]
    pub fn to_json(&self) -> Value {
        let all_ranks = self.views.as_ref().and_then(|views| views.ranks_of());
        let mut json = all_ranks.unwrap_or(&self.view).to_json();
        json.insert("prefer".to_owned(), self.prefer.as_str().into());
        if self.zero != ZeroWeights::default() {
            json.insert("zero".to_owned(), self.zero.as_str().into());
        }
        if self.state != TrainingState::default() {
            json.insert("state".to_owned(), self.state.as_str().into());
        }
        json.insert("follow".to_owned(), json!(self.follow));
        if let Some(config) = &self.config {
            json.insert("config".to_owned(), json!(config));
        }
        if self.hub {
            json.insert("layout".to_owned(), HUB.into());
        }
        if let Some(shards) = self.expect_shards {
            json.insert("expect-shards".to_owned(), shards.into());
        }
        if let Some((path, digest)) = self.views.as_ref().and_then(|views| views.read_from()) {
            json.insert("views".to_owned(), real_name(path).into());
            json.insert("views-digest".to_owned(), digest.to_string().into());
        }
        json.into()
    }

    /// If the view has the option for a tensor-parallel group but no rank, replaces the view by the views of all ranks.
    ///
    /// # Errors
    /// A message of one line if there are too many ranks, or if the view is not valid.
    #[doc(hidden)]
    pub fn show_all_ranks(&mut self) -> Result<(), String> {
        if self.view.has_all_ranks() && self.views.is_none() && !self.hub {
            self.views = Some(Arc::new(NamedViews::of_ranks(&self.view)?));
            self.view = View::default();
        }
        Ok(())
    }

    /// The options that `to_json` wrote, in this release or in the one before. `None` if another version wrote words
    /// that are not known here. Also `None` if a file that the view names has changed. `read` returns the bytes of the
    /// files that the view names.
    #[doc(hidden)]
    pub fn from_json(json: &Value, read: ReadFile<'_>) -> Option<OpenOptions> {
        let views = match json.get("views") {
            None => None,
            Some(file) => {
                let (path, text) = read(file.as_str()?.as_ref(), OptionFileContent::Text).ok()?;
                let views = NamedViews::parse(&path, &text, read).ok()?;
                let (_, digest) = views.read_from()?;
                (json.get("views-digest")?.as_str()? == digest.to_string()).then_some(())?;
                Some(Arc::new(views))
            }
        };
        let hub = json.get("layout").is_some_and(|layout| layout == HUB);
        let mut of_view = json.clone();
        if hub {
            of_view["layout"] = View::default().to_json().remove("layout")?;
        }
        let mut options = OpenOptions {
            view: View::from_json(&of_view, read)?,
            views,
            config: match json.get("config") {
                Some(config) => Some(config.as_str()?.into()),
                None => None,
            },
            hub,
            ..OpenOptions::without_view(json)?
        };
        options.show_all_ranks().ok()?;
        Some(options)
    }

    /// Reads from the output of `to_json` only the options that decide which files of the source are read. The view has
    /// only its format. No file that a view names is read.
    #[doc(hidden)]
    pub fn of_bytes_in_json(json: &Value) -> Option<OpenOptions> {
        let format = json.get("format")?.as_str()?.parse().ok()?;
        let view = View { format, ..View::default() };
        Some(OpenOptions { view, ..OpenOptions::without_view(json)? })
    }

    /// `zero` and `state` of these options. If one of them has its default, the value in `mounted` is returned in its
    /// place.
    #[doc(hidden)]
    pub fn zero_and_state_or(&self, mounted: &OpenOptions) -> (ZeroWeights, TrainingState) {
        let zero = if self.zero == ZeroWeights::default() { mounted.zero } else { self.zero };
        let is_default = self.state == TrainingState::default();
        (zero, if is_default { mounted.state } else { self.state })
    }

    /// The options that `to_json` wrote, without the view.
    fn without_view(json: &Value) -> Option<OpenOptions> {
        let follow = json.get("follow")?.as_array()?.iter();
        Some(OpenOptions {
            prefer: json.get("prefer")?.as_str()?.parse().ok()?,
            zero: match json.get("zero") {
                Some(word) => word.as_str()?.parse().ok()?,
                None => ZeroWeights::default(),
            },
            state: match json.get("state") {
                Some(word) => word.as_str()?.parse().ok()?,
                None => TrainingState::default(),
            },
            follow: follow
                .map(|folder| folder.as_str().map(PathBuf::from))
                .collect::<Option<_>>()?,
            expect_shards: json.get("expect-shards").and_then(Value::as_u64),
            // A mount follows only the links that `Links::Inside` allows, so no other files belong to its source.
            links: Links::Inside,
            ..OpenOptions::default()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::OutputFormat;
    use crate::view::{Files, MapPolicy, TensorParallel};

    fn none(_: &std::path::Path, _: OptionFileContent) -> Result<(PathBuf, Vec<u8>), String> {
        Err("no file is read".to_owned())
    }

    #[test]
    fn options_come_back_from_json_and_those_of_another_version_do_not() {
        let options = OpenOptions {
            view: View { files: Files::Original, map: MapPolicy::Hide, ..View::default() },
            prefer: Prefer::Shards,
            zero: ZeroWeights::Fp32,
            state: TrainingState::All,
            follow: vec!["/a,b".into()],
            links: Links::Inside,
            expect_shards: Some(3),
            ..OpenOptions::default()
        };
        let mut json = options.to_json();
        assert_eq!(OpenOptions::from_json(&json, &mut none), Some(options));
        let plain = OpenOptions { links: Links::Inside, ..OpenOptions::default() };
        assert_eq!(OpenOptions::from_json(&plain.to_json(), &mut none), Some(plain));
        let view = View { format: OutputFormat::Bintensors, ..View::default() };
        let hub = OpenOptions { view, hub: true, links: Links::Inside, ..OpenOptions::default() };
        assert_eq!(OpenOptions::from_json(&hub.to_json(), &mut none), Some(hub));
        json["layout"] = "double".into();
        assert_eq!(OpenOptions::from_json(&json, &mut none), None);
    }

    #[test]
    fn the_views_of_all_ranks_come_back_from_json() {
        let shard = Some(TensorParallel { ranks: 3, rank: None, rules: None });
        let view = View { shard, ..View::default() };
        let mut options = OpenOptions { view, links: Links::Inside, ..OpenOptions::default() };
        options.show_all_ranks().unwrap();
        assert_eq!(options.views.as_ref().map(|views| views.iter().count()), Some(3));
        assert_eq!(options.view, View::default());
        let json = options.to_json();
        assert_eq!((json["tp"].as_str(), json.get("rank")), (Some("3"), None));
        assert_eq!(OpenOptions::from_json(&json, &mut none), Some(options));
    }

    #[test]
    fn a_view_comes_back_from_json_with_its_files_unless_their_text_has_changed() {
        let text = br#"{"a": 1, "b": 2}"#;
        let files = Files::map("/maps/m.json".as_ref(), text).unwrap();
        for files in [files, Files::ShardCount(3), Files::ShardSize(1 << 30)] {
            let view = View { files, ..View::default() };
            let options = OpenOptions { view, links: Links::Inside, ..OpenOptions::default() };
            let json = options.to_json();
            let mut same = |path: &std::path::Path, _| Ok((path.to_owned(), text.to_vec()));
            assert_eq!(OpenOptions::from_json(&json, &mut same), Some(options.clone()));
            let mut other =
                |path: &std::path::Path, _| Ok((path.to_owned(), br#"{"a": 1}"#.to_vec()));
            let back = OpenOptions::from_json(&json, &mut other);
            assert_eq!(back.is_none(), matches!(options.view.files, Files::Map(_)));
        }
    }
}
