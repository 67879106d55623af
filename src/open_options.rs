//! The options for the open of a source: how its sets are found and proved, and the view on them.

use std::path::PathBuf;
use std::sync::Arc;

use serde_json::{Value, json};

use crate::error::real_name;
use crate::format::TrainingState;
use crate::format::tensorizer::keys::Secret;
use crate::view::{NamedViews, OptionFile, ReadFile, View};

words! {
    /// The choice if a whole file and a sharded set have the same name.
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
        /// The whole file, as transformers does.
        #[default]
        File = "file",
        /// The sharded set, as diffusers does.
        Shards = "shards",
    }
}

words! {
    /// The weights that are shown of a checkpoint of DeepSpeed ZeRO-1 or ZeRO-2. A checkpoint of
    /// ZeRO-3 always shows the weights of the optimizer, because it has no others.
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
        /// The weights of the model, mostly of 16 bits.
        #[default]
        Module = "module",
        /// The weights of the optimizer in F32, joined from the files of all ranks.
        Fp32 = "fp32",
    }
}

/// Allowed targets of symbolic links of the source.
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
    /// Any file that the caller may read, and folders inside the source. A library reads with the
    /// rights of its caller, for its caller alone.
    #[default]
    Anywhere,
    /// Targets inside the source, in the blobs of the same hub folder and in `OpenOptions::follow`.
    /// A mount shows files to other users, and any user may have put a link there.
    Inside,
}

/// A folder of this machine that keeps what was read from remote sources.
///
/// ```
/// use tensorfs::{DiskCachePlace, OpenOptions};
///
/// let place = DiskCachePlace { folder: "/var/cache/tensorfs/remote".into(), size: Some(100 << 30) };
/// let options = OpenOptions { disk_cache: Some(place), ..OpenOptions::default() };
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct DiskCachePlace {
    /// The folder, an absolute path.
    pub folder: PathBuf,
    /// Bytes that it may take. If `None`, a tenth of its file system stays free, and at least 1 GiB.
    pub size: Option<u64>,
}

/// Where a remote source is, and where its credentials come from. They name files with secrets, and have
/// none. `None` stands for the environment.
///
/// ```
/// use tensorfs::{OpenOptions, RemoteSettings};
///
/// let settings = RemoteSettings { profile: Some("work".to_owned()), ..RemoteSettings::default() };
/// let options = OpenOptions { remote: Some(settings.into()), ..OpenOptions::default() };
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct RemoteSettings {
    /// The credentials file, in the format of the provider's own tools.
    pub credentials_file: Option<PathBuf>,
    /// The profile of AWS.
    pub profile: Option<String>,
    /// The server.
    pub endpoint: Option<String>,
    /// The region of AWS.
    pub region: Option<String>,
    /// Certificates to trust besides those of the machine.
    pub ca_file: Option<PathBuf>,
}

/// The layout of a hub cache, which has several checkpoints, and is no view.
#[doc(hidden)]
pub const HUB: &str = "hub";

/// How a checkpoint, or a tree of them, is opened.
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
    /// Choice between a whole file and a sharded set.
    pub prefer: Prefer,
    /// The weights of checkpoints of DeepSpeed.
    pub zero: ZeroWeights,
    /// The tensors of pickles of torch that are shown.
    pub state: TrainingState,
    /// Allowed targets of symbolic links.
    pub links: Links,
    /// Folders outside the source into which symbolic links may lead.
    pub follow: Vec<PathBuf>,
    /// Number of shard files that a set must have.
    pub expect_shards: Option<u64>,
    /// File with the names, dtypes and shapes of all tensors.
    pub reference: Option<PathBuf>,
    /// A folder whose small files are shown beside the weights of the one checkpoint, or one such
    /// file: `config.json`, those of the tokenizer and others without weights. They win over files of
    /// the same name in the source.
    pub config: Option<PathBuf>,
    /// Folder for indexes. If `None`, every start reads all headers.
    pub index: Option<PathBuf>,
    /// The place of blocks of remote sources. If `None`, no blocks are kept.
    pub disk_cache: Option<DiskCachePlace>,
    /// Where a remote source is, and its credentials. If `None`, the environment says so.
    pub remote: Option<Arc<RemoteSettings>>,
    /// How the sets are presented.
    pub view: View,
    /// Several views, each of which a mount shows as a folder. Then `view` is the default.
    pub views: Option<Arc<NamedViews>>,
    /// A tree of models is shown as a cache of the Hugging Face hub.
    pub hub: bool,
    /// Opens encrypted tensorizer files.
    pub secret: Option<Arc<Secret>>,
}

impl OpenOptions {
    /// The options that `set_word` knows.
    #[doc(hidden)]
    pub const WORDS: [&str; 2] = ["zero", "state"];

    /// Sets the option `key`, `zero` or `state`, to the one of its words that is `value`. Returns `false`
    /// if `key` is none of them.
    ///
    /// # Errors
    /// One line if it has no such word.
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

    /// The options as JSON, for programs that find the source behind a mount. The places of indexes and
    /// of the disk cache are left out, which other users may not use, and so is the reference, which they may not be
    /// allowed to read.
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

    /// If its view has no rank of a tensor-parallel group, takes the views of all ranks instead.
    ///
    /// # Errors
    /// One line if they are too many, or if it is no view.
    #[doc(hidden)]
    pub fn show_all_ranks(&mut self) -> Result<(), String> {
        if self.view.has_all_ranks() && self.views.is_none() && !self.hub {
            self.views = Some(Arc::new(NamedViews::of_ranks(&self.view)?));
            self.view = View::default();
        }
        Ok(())
    }

    /// The options that `to_json` wrote, also those of the release before; `None` if another
    /// version wrote words that are not known here, or if a file that the view names has changed.
    /// `read` gets the bytes of such files.
    #[doc(hidden)]
    pub fn from_json(json: &Value, read: ReadFile<'_>) -> Option<OpenOptions> {
        let views = match json.get("views") {
            None => None,
            Some(file) => {
                let (path, text) = read(file.as_str()?.as_ref(), OptionFile::Text).ok()?;
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

    /// The options that `to_json` wrote, as far as they decide which files of the source are read.
    /// The view has only its format. No file that a view names is read.
    #[doc(hidden)]
    pub fn of_bytes_in_json(json: &Value) -> Option<OpenOptions> {
        let format = json.get("format")?.as_str()?.parse().ok()?;
        let view = View { format, ..View::default() };
        Some(OpenOptions { view, ..OpenOptions::without_view(json)? })
    }

    /// The options that `to_json` wrote, without any view.
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
            // Files that the mount does not show are not part of its source.
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

    fn none(_: &std::path::Path, _: OptionFile) -> Result<(PathBuf, Vec<u8>), String> {
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
