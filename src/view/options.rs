//! Views as words: the options of mounts and commands, and the JSON of `user.tensorfs.source`.

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

/// The part of a file that an option needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OptionFile {
    /// All bytes of a text.
    Text,
    /// The element types of the tensors of a checkpoint, as JSON: `{"NAME": "BF16", ...}`.
    Dtypes,
}

/// Gets the absolute path and the bytes of a file that an option names, or one line that says why
/// it cannot.
pub type ReadFile<'a> = &'a mut dyn FnMut(&Path, OptionFile) -> Result<(PathBuf, Vec<u8>), String>;

/// The names of all options of views, for errors.
const OPTIONS: &str = "layout, format, weight-map, include, exclude, tp, rank, tp-rules, rename, dtype \
                       or keep";

fn word<T: FromStr<Err = UnknownWord>>(value: &str) -> Result<T, String> {
    value.parse().map_err(|known: UnknownWord| known.to_string())
}

fn number(value: &str) -> Result<u32, String> {
    let number = value.parse().ok().filter(|&number| number <= RANKS_MAX);
    number.ok_or_else(|| format!("a number up to {RANKS_MAX}"))
}

impl View {
    /// Sets the option `key` to `value`. `read` gets the bytes of files that it names. `None` if no
    /// option of views has that name.
    ///
    /// # Errors
    /// One line without the option: the values that are expected.
    pub fn set(
        &mut self,
        key: &str,
        value: &str,
        read: ReadFile<'_>,
    ) -> Option<Result<(), String>> {
        let set = match key {
            "layout" => Files::parse(value, read).map(|files| self.files = files),
            "format" => word(value).map(|format| self.format = format),
            "weight-map" => word(value).map(|map| self.map = map),
            "include" => NameGlob::new(value).map(|glob| self.include.push(glob)),
            "exclude" => NameGlob::new(value).map(|glob| self.exclude.push(glob)),
            "keep" => NameGlob::new(value).map(|glob| self.keep.push(glob)),
            "dtype" => DtypeCast::parse(value, read).map(|dtype| self.dtype = Some(dtype)),
            "tp" if value.trim_start_matches('0').is_empty() => {
                Err(format!("a number from 1 to {RANKS_MAX}"))
            }
            "tp" => number(value).map(|ranks| self.shard_mut().ranks = ranks),
            "rank" => number(value).map(|rank| self.shard_mut().rank = Some(rank)),
            "tp-rules" if value.is_empty() => Err("a file with rules".to_owned()),
            "tp-rules" => read(Path::new(value), OptionFile::Text)
                .and_then(|(path, text)| CutRules::parse(&path, &text))
                .map(|rules| self.shard_mut().rules = Some(Arc::new(rules)))
                .map_err(|why| format!("a file of rules; {why}")),
            "rename" if value.is_empty() => Err("a file with rules".to_owned()),
            "rename" => read(Path::new(value), OptionFile::Text)
                .and_then(|(path, text)| RenameRules::parse(&path, &text))
                .map(|rules| self.rename = Some(Arc::new(rules)))
                .map_err(|why| format!("a file of rules; {why}")),
            _ => return None,
        };
        Some(set)
    }

    /// The rank whose options are being set. It has 0 ranks until their number is set.
    fn shard_mut(&mut self) -> &mut TensorParallel {
        self.shard.get_or_insert_default()
    }

    /// Whether it stands for all ranks of a tensor-parallel group.
    pub(crate) fn has_all_ranks(&self) -> bool {
        self.shard.as_ref().is_some_and(|shard| shard.ranks > 0 && shard.rank.is_none())
    }

    /// The view of these options, which are pairs of name and value.
    ///
    /// # Errors
    /// One line: the first option that is none or has another value, or `check`.
    pub fn from_words<'a>(
        words: impl IntoIterator<Item = (&'a str, &'a str)>,
        read: ReadFile<'_>,
    ) -> Result<View, String> {
        let mut view = View::default();
        for (key, value) in words {
            let set = view.set(key, value, read);
            set.unwrap_or_else(|| Err(format!("{OPTIONS} as the name of an option")))
                .map_err(|why| format!("{key}={}: expected {why}", quoted(value)))?;
        }
        view.check()?;
        Ok(view)
    }

    /// Refuses options that exclude each other.
    ///
    /// # Errors
    /// One line with the options.
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

    /// A hash of all that decides which tensors and files it makes of a catalog, with the text of each
    /// file that it was read from.
    pub fn digest(&self) -> Digest {
        // Whether the weight map is shown changes no tensor and no virtual file.
        let View { files, format, map: _, include, exclude, shard, rename, dtype, keep } = self;
        let mut hasher = Hasher::new();
        let mut add = |text: &[u8]| {
            hasher.update(&(text.len() as u64).to_le_bytes());
            hasher.update(text);
        };
        add(format.as_str().as_bytes());
        add(files.to_string().as_bytes());
        add(&files.read_from().map_or([0; 16], |(_, digest)| digest.0));
        for globs in [include, exclude, keep] {
            add(&(globs.len() as u64).to_le_bytes());
            globs.iter().for_each(|glob| add(glob.to_string().as_bytes()));
        }
        add(&[u8::from(shard.is_some())]);
        if let Some(TensorParallel { ranks, rank, rules }) = shard {
            add(&ranks.to_le_bytes());
            add(&[u8::from(rank.is_some())]);
            add(&rank.unwrap_or_default().to_le_bytes());
            add(&rules.as_ref().map_or([0; 16], |rules| rules.digest().0));
        }
        add(&rename.as_ref().map_or([0; 16], |rules| rules.digest().0));
        add(&[u8::from(dtype.is_some())]);
        if let Some(dtype) = dtype {
            add(dtype.to_string().as_bytes());
            add(&dtype.read_from().map_or([0; 16], |(_, digest)| digest.0));
        }
        hasher.finish()
    }

    /// The options as JSON, for programs that find the source behind a mount.
    pub(crate) fn to_json(&self) -> Map<String, Value> {
        let mut json = Map::new();
        let mut add = |key: &str, value: Value| drop(json.insert(key.to_owned(), value));
        add("layout", self.files.to_string().into());
        add("weight-map", self.map.as_str().into());
        add("format", self.format.as_str().into());
        let globs = |globs: &[NameGlob]| globs.iter().map(ToString::to_string).collect::<Vec<_>>();
        let given = [("include", &self.include), ("exclude", &self.exclude), ("keep", &self.keep)];
        for (key, given) in given {
            if !given.is_empty() {
                add(key, globs(given).into());
            }
        }
        if let Some(TensorParallel { ranks, rank, rules }) = &self.shard {
            add("tp", ranks.to_string().into());
            if let Some(rank) = rank {
                add("rank", rank.to_string().into());
            }
            if let Some(path) = rules.as_ref().and_then(|rules| rules.path()) {
                add("tp-rules", real_name(path).into());
            }
        }
        if let Some(rules) = &self.rename {
            add("rename", real_name(rules.path()).into());
        }
        if let Some(dtype) = &self.dtype {
            add("dtype", dtype.to_string().into());
        }
        let files: Map<String, Value> = self
            .files_read()
            .map(|(path, digest)| (real_name(path), digest.to_string().into()))
            .collect();
        if !files.is_empty() {
            add("files", files.into());
        }
        json
    }

    /// The files that its options were read from, with the hashes of their texts.
    #[doc(hidden)]
    pub fn files_read(&self) -> impl Iterator<Item = (&Path, Digest)> {
        let dtypes = self.dtype.as_ref().and_then(DtypeCast::read_from);
        let rules = self.rename.iter().map(|rules| (rules.path(), rules.digest()));
        let cuts = self.shard.iter().filter_map(|shard| shard.rules.as_ref());
        let cuts = cuts.filter_map(|rules| Some((rules.path()?, rules.digest())));
        self.files.read_from().into_iter().chain(rules).chain(dtypes).chain(cuts)
    }

    /// The view that `to_json` wrote. `None` if another version wrote words that are not known
    /// here, or if a file that the view was read from has changed since.
    pub(crate) fn from_json(json: &Value, read: ReadFile<'_>) -> Option<View> {
        let mut view = View::default();
        for key in ["layout", "weight-map", "format"] {
            let former = if key == "weight-map" { json.get("index") } else { None };
            let value = json.get(key).or(former)?.as_str()?;
            view.set(key, value, read)?.ok()?;
        }
        for key in ["include", "exclude", "tp", "rank", "tp-rules", "rename", "dtype", "keep"] {
            let Some(value) = json.get(key) else { continue };
            let values = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
            for value in values {
                view.set(key, value.as_str()?, read)?.ok()?;
            }
        }
        let same = view.to_json().get("files") == json.get("files");
        same.then_some(view)
    }
}
