//! Views in text form: the options of mounts and commands, and the JSON of the attribute
//! `user.tensorfs.source`.

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use serde_json::{Map, Value};

use super::parallel::RANKS_MAX;
use super::{CutRules, DtypeCast, Files, MapPolicy, NameGlob, RenameRules, TensorParallel, View};
use crate::error::{quoted, real_name};
use crate::format::OutputFormat;
use crate::hash::{Digest, Hasher};
use crate::words::UnknownWord;

/// The content of a file that an option needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OptionFileContent {
    /// The whole text of the file.
    Text,
    /// The element types of the tensors of a checkpoint, as JSON: `{"NAME": "BF16", ...}`.
    Dtypes,
}

/// A function that reads a file named by an option. It returns the absolute path and the content. Its error is
/// a message of one line.
pub type ReadFile<'a> =
    &'a mut dyn FnMut(&Path, OptionFileContent) -> Result<(PathBuf, Vec<u8>), String>;

/// All options of views.
const OPTIONS: [&str; 11] = [
    "layout", "format", WEIGHT_MAP, INCLUDE, EXCLUDE, "tp", "rank", "tp-rules", "rename", "dtype",
    KEEP,
];

/// The option that affects neither tensors nor virtual files.
const WEIGHT_MAP: &str = "weight-map";

/// Options that can be given several times.
const INCLUDE: &str = "include";
const EXCLUDE: &str = "exclude";
const KEEP: &str = "keep";

fn word<T: FromStr<Err = UnknownWord>>(value: &str) -> Result<T, String> {
    value.parse().map_err(|known: UnknownWord| known.to_string())
}

fn number(value: &str) -> Result<u32, String> {
    let number = value.parse().ok().filter(|&number| number <= RANKS_MAX);
    number.ok_or_else(|| format!("a number up to {RANKS_MAX}"))
}

/// The rules in the file at `path`.
fn rules<T>(
    path: &str,
    read: ReadFile<'_>,
    parse: fn(&Path, &[u8]) -> Result<T, String>,
) -> Result<Arc<T>, String> {
    if path.is_empty() {
        return Err("a file with rules".to_owned());
    }
    let text = read(Path::new(path), OptionFileContent::Text);
    let rules = text.and_then(|(path, text)| parse(&path, &text));
    rules.map(Arc::new).map_err(|why| format!("a file of rules; {why}"))
}

impl View {
    /// Sets the option `key` to `value`. `read` reads the file that the value names. `None` if views have no
    /// option of this name.
    ///
    /// # Errors
    /// A message of one line with the expected values, without the name of the option.
    pub fn set(
        &mut self,
        key: &str,
        value: &str,
        read: ReadFile<'_>,
    ) -> Option<Result<(), String>> {
        let set = match key {
            "layout" => Files::parse(value, read).map(|files| self.files = files),
            "format" => word(value).map(|format| self.format = format),
            WEIGHT_MAP => word(value).map(|map| self.map = map),
            INCLUDE => NameGlob::new(value).map(|glob| self.include.push(glob)),
            EXCLUDE => NameGlob::new(value).map(|glob| self.exclude.push(glob)),
            KEEP => NameGlob::new(value).map(|glob| self.keep.push(glob)),
            "dtype" => DtypeCast::parse(value, read).map(|dtype| self.dtype = Some(dtype)),
            "tp" if value.trim_start_matches('0').is_empty() => {
                Err(format!("a number from 1 to {RANKS_MAX}"))
            }
            "tp" => number(value).map(|ranks| self.shard_mut().ranks = ranks),
            "rank" => number(value).map(|rank| self.shard_mut().rank = Some(rank)),
            "tp-rules" => rules(value, read, CutRules::parse)
                .map(|rules| self.shard_mut().rules = Some(rules)),
            "rename" => {
                rules(value, read, RenameRules::parse).map(|rules| self.rename = Some(rules))
            }
            _ => return None,
        };
        Some(set)
    }

    /// The present value of the option `key`, in the form that `set` accepts. There is one element for each
    /// value. Empty if the option is not set.
    fn get(&self, key: &str) -> Vec<String> {
        let globs = |globs: &[NameGlob]| globs.iter().map(ToString::to_string).collect();
        let shard = self.shard.as_ref();
        let value = match key {
            "layout" => Some(self.files.to_string()),
            "format" => Some(self.format.to_string()),
            WEIGHT_MAP => Some(self.map.to_string()),
            INCLUDE => return globs(&self.include),
            EXCLUDE => return globs(&self.exclude),
            KEEP => return globs(&self.keep),
            "tp" => shard.map(|shard| shard.ranks.to_string()),
            "rank" => shard.and_then(|shard| Some(shard.rank?.to_string())),
            "tp-rules" => shard.and_then(|shard| Some(real_name(shard.rules.as_ref()?.path()?))),
            "rename" => self.rename.as_ref().map(|rules| real_name(rules.path())),
            _ => self.dtype.as_ref().map(ToString::to_string),
        };
        value.into_iter().collect()
    }

    /// The settings of tensor parallelism that options change. The number of ranks is 0 until the option `tp` is set.
    fn shard_mut(&mut self) -> &mut TensorParallel {
        self.shard.get_or_insert_default()
    }

    /// Whether the view stands for all ranks of a tensor-parallel group.
    pub(crate) fn has_all_ranks(&self) -> bool {
        self.shard.as_ref().is_some_and(|shard| shard.ranks > 0 && shard.rank.is_none())
    }

    /// The view with these options, which are pairs of name and value.
    ///
    /// # Errors
    /// A message of one line, if an option or its value is not valid, or if `check` fails.
    pub fn from_words<'a>(
        words: impl IntoIterator<Item = (&'a str, &'a str)>,
        read: ReadFile<'_>,
    ) -> Result<View, String> {
        let mut view = View::default();
        for (key, value) in words {
            let set = view.set(key, value, read);
            set.unwrap_or_else(|| {
                Err(format!("{} as the name of an option", UnknownWord(&OPTIONS)))
            })
            .map_err(|why| format!("{key}={}: expected {why}", quoted(value)))?;
        }
        view.check()?;
        Ok(view)
    }

    /// Refuses options that cannot be combined.
    ///
    /// # Errors
    /// A message of one line with the options.
    pub fn check(&self) -> Result<(), String> {
        let is_original = self.files == Files::Original;
        if is_original && !self.keeps_tensors() {
            let why = "layout=original shows files as they are: give no include=, exclude=, tp=, \
                       rename= or dtype= with it";
            return Err(why.to_owned());
        }
        if is_original && self.format == OutputFormat::Bintensors {
            let why = "option format=bintensors: layout=original shows files as they are";
            return Err(why.to_owned());
        }
        let is_one = matches!(self.files, Files::Single | Files::ShardCount(1));
        if self.format == OutputFormat::Bintensors && !is_original && !is_one {
            let files = &self.files;
            return Err(format!(
                "option format=bintensors: layout={files} makes numbered files, which are no checkpoint \
                 in this format; give only one of the two"
            ));
        }
        if let Some(gap) = self.files.lowest_gap().filter(|_| self.map == MapPolicy::Hide) {
            let files = &self.files;
            return Err(format!(
                "option weight-map=hide: layout={files} has no file {gap}, and without a weight map \
                 the other files are no checkpoint; number them from 1 without gaps, or leave out \
                 weight-map=hide"
            ));
        }
        if let Some(shard) = &self.shard {
            if shard.ranks == 0 {
                return Err("options rank= and tp-rules= need tp=, a number of ranks".to_owned());
            }
            shard.one_rank()?;
        }
        if self.dtype.is_none() && !self.keep.is_empty() {
            return Err("option keep needs dtype=".to_owned());
        }
        Ok(())
    }

    /// A hash of everything that decides which tensors and files the view makes of a catalog. It includes the
    /// texts of the files that options name.
    pub fn digest(&self) -> Digest {
        let mut hasher = Hasher::new();
        let mut add = |text: &[u8]| {
            hasher.update(&(text.len() as u64).to_le_bytes());
            hasher.update(text);
        };
        for key in OPTIONS.iter().filter(|key| **key != WEIGHT_MAP) {
            let values = self.get(key);
            add(&(values.len() as u64).to_le_bytes());
            values.iter().for_each(|value| add(value.as_bytes()));
        }
        self.files_read().for_each(|(_, digest)| add(&digest.0));
        // The rules of a family of models come from no file, so they are added here.
        let cuts = self.shard.iter().filter_map(|shard| shard.rules.as_ref());
        cuts.for_each(|rules| add(&rules.digest().0));
        hasher.finish()
    }

    /// The options as JSON, for programs that look for the source of a mount.
    pub(crate) fn to_json(&self) -> Map<String, Value> {
        let mut json = Map::new();
        for key in OPTIONS {
            let mut values = self.get(key);
            if [INCLUDE, EXCLUDE, KEEP].contains(&key) && !values.is_empty() {
                json.insert(key.to_owned(), values.into());
            } else if let Some(value) = values.pop() {
                json.insert(key.to_owned(), value.into());
            }
        }
        let files: Map<String, Value> = self
            .files_read()
            .map(|(path, digest)| (real_name(path), digest.to_string().into()))
            .collect();
        if !files.is_empty() {
            json.insert("files".to_owned(), files.into());
        }
        json
    }

    /// The files that options name, with the hashes of their contents.
    #[doc(hidden)]
    pub fn files_read(&self) -> impl Iterator<Item = (&Path, Digest)> {
        let dtypes = self.dtype.as_ref().and_then(DtypeCast::read_from);
        let rules = self.rename.iter().map(|rules| (rules.path(), rules.digest()));
        let cuts = self
            .shard
            .iter()
            .filter_map(|shard| shard.rules.as_ref())
            .filter_map(|rules| Some((rules.path()?, rules.digest())));
        self.files.read_from().into_iter().chain(rules).chain(dtypes).chain(cuts)
    }

    /// The view from the result of `to_json`. `None` if another version of tensorfs wrote options that are not
    /// known here, or if the content of a named file has changed since.
    pub(crate) fn from_json(json: &Value, read: ReadFile<'_>) -> Option<View> {
        let mut view = View::default();
        for key in OPTIONS {
            let Some(value) = json.get(key) else {
                // `to_json` of this version always writes an option that has a default value. If such an option is
                // missing, another version wrote the JSON.
                view.get(key).is_empty().then_some(())?;
                continue;
            };
            for value in value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice) {
                view.set(key, value.as_str()?, read)?.ok()?;
            }
        }
        let same = view.to_json().get("files") == json.get("files");
        same.then_some(view)
    }
}
