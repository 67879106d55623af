//! Several views of one source with names: the file of the option `views=`, or all ranks of the option `tp=`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use toml::{Table, Value};

use super::rules::parse_toml;
use super::{ReadFile, TensorParallel, View};
use crate::error::{quoted, shown_path};
use crate::hash::Digest;

/// Several views of one source. Each view is shown as a folder, whose path is the name of the view.
///
/// ```
/// use tensorfs::NamedViews;
///
/// let text = br#"
///     [view.half]
///     dtype = "bf16"
///     [view.experts]
///     include = ["*.experts.*", "*.router.*"]
///     layout = "shards=8"
/// "#;
/// // The views name no files.
/// let mut read = |_: &std::path::Path, _| Err("no file".to_owned());
/// let views = NamedViews::parse("views.toml".as_ref(), text, &mut read)?;
/// assert_eq!(views.iter().map(|(name, _)| name).collect::<Vec<_>>(), ["experts", "half"]);
/// # Ok::<(), String>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedViews {
    origin: ViewsOrigin,
    views: BTreeMap<String, View>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum ViewsOrigin {
    /// A file, with a hash of its text and of all files that its views name.
    File(PathBuf, Digest),
    /// All ranks of this view.
    Ranks(Box<View>),
}

/// Maximum number of views in a file. It is limited because the mount shows all files of the source in each view.
const VIEWS_MAX: usize = 100;

/// Maximum number of ranks that are shown as folders.
const RANK_FOLDERS_MAX: u32 = 256;

/// Names that have another meaning in a folder of checkpoints.
const RESERVED: [&str; 2] = ["sharded", "consolidated"];

/// Options that can be given several times.
const LISTS: [&str; 3] = ["include", "exclude", "keep"];

/// Options whose values are numbers.
const NUMBERS: [&str; 2] = ["tp", "rank"];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ViewsToml {
    #[serde(default)]
    view: BTreeMap<String, Table>,
}

impl NamedViews {
    /// Parses the views in `text`, which is TOML with a table for each view. The keys are options of views.
    /// `path` is the file of the text. `read` reads the files that views name. Relative paths are relative to
    /// the folder of `path`.
    ///
    /// # Errors
    /// A message of one line with the file, the view and the option.
    pub fn parse(path: &Path, text: &[u8], read: ReadFile<'_>) -> Result<NamedViews, String> {
        let fail = |why: String| format!("{}: {why}", shown_path(path));
        let form = "expected TOML with a [view.NAME] table for each view";
        let toml: ViewsToml = parse_toml(text).map_err(|why| fail(format!("{form}; {why}")))?;
        let count = toml.view.len();
        if !(1..=VIEWS_MAX).contains(&count) {
            return Err(fail(format!("{form}, 1 to {VIEWS_MAX} of them; it has {count}")));
        }
        let folder = path.parent().unwrap_or(Path::new(""));
        let mut views = BTreeMap::new();
        let mut digests = Digest::of(text).to_string();
        for (name, table) in toml.view {
            check_name(&name)
                .map_err(|why| fail(format!("view {}: the name {why}", quoted(&name))))?;
            let view = view_of(&table, &mut |path, of| {
                let (path, bytes) = read(&folder.join(path), of)?;
                digests.push_str(&Digest::of(&bytes).to_string());
                Ok((path, bytes))
            })
            .map_err(|why| fail(format!("view {}: {why}", quoted(&name))))?;
            views.insert(name, view);
        }
        let origin = ViewsOrigin::File(path.to_owned(), Digest::of(digests.as_bytes()));
        Ok(NamedViews { origin, views })
    }

    /// One view for each rank of the tensor-parallel group in `view`. Their names are `tp-N/rank-0` to
    /// `tp-N/rank-M`, where N is the number of ranks and M is N - 1.
    ///
    /// ```
    /// use tensorfs::{NamedViews, TensorParallel, View};
    ///
    /// let shard = Some(TensorParallel { ranks: 2, rank: None, rules: None });
    /// let views = NamedViews::of_ranks(&View { shard, ..View::default() })?;
    /// let names: Vec<_> = views.iter().map(|(name, _)| name).collect();
    /// assert_eq!(names, ["tp-2/rank-0", "tp-2/rank-1"]);
    /// # Ok::<(), String>(())
    /// ```
    ///
    /// # Errors
    /// A message of one line, if there are no ranks or more than 256, or if the view is not valid.
    pub fn of_ranks(view: &View) -> Result<NamedViews, String> {
        let shard = view.shard.clone().unwrap_or_default();
        let ranks = shard.ranks;
        if ranks > RANK_FOLDERS_MAX {
            return Err(format!(
                "option tp={ranks} needs rank=: at most {RANK_FOLDERS_MAX} ranks are shown as folders"
            ));
        }
        let of_rank = |rank: Option<u32>| View {
            shard: Some(TensorParallel { rank, ..shard.clone() }),
            ..view.clone()
        };
        of_rank(Some(0)).check()?;
        let named = (0..ranks).map(|rank| (format!("tp-{ranks}/rank-{rank}"), of_rank(Some(rank))));
        Ok(NamedViews {
            origin: ViewsOrigin::Ranks(Box::new(of_rank(None))),
            views: named.collect(),
        })
    }

    /// Names and views, sorted by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &View)> {
        self.views.iter().map(|(name, view)| (name.as_str(), view))
    }

    /// The file of the views. `None` for the ranks of a view.
    pub fn path(&self) -> Option<&Path> {
        self.read_from().map(|(path, _)| path)
    }

    /// The file of the views, with a hash of its text and of all files that the views name.
    pub(crate) fn read_from(&self) -> Option<(&Path, Digest)> {
        match &self.origin {
            ViewsOrigin::File(path, digest) => Some((path, *digest)),
            ViewsOrigin::Ranks(_) => None,
        }
    }

    /// If these are the views of all ranks of one view: that view. `None` for views from a file.
    pub(crate) fn ranks_of(&self) -> Option<&View> {
        match &self.origin {
            ViewsOrigin::File(..) => None,
            ViewsOrigin::Ranks(view) => Some(view),
        }
    }
}

/// Refuses names that cannot be names of folders. The error says why.
fn check_name(name: &str) -> Result<(), String> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    if name.is_empty() || name.len() > 100 || !name.chars().all(is_plain) || name.starts_with('.') {
        let why = "has to be 1 to 100 ASCII letters, digits, `.`, `_` and `-`, without a `.` first";
        return Err(why.to_owned());
    }
    if RESERVED.contains(&name) {
        return Err("stands for the folder of another form of a checkpoint".to_owned());
    }
    Ok(())
}

fn view_of(table: &Table, read: ReadFile<'_>) -> Result<View, String> {
    let mut words: Vec<(&str, String)> = Vec::new();
    for (key, value) in table {
        let is_list = LISTS.contains(&key.as_str());
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let given: Option<Vec<String>> = match value {
            Value::String(value) => Some(vec![value.clone()]),
            Value::Integer(value) if NUMBERS.contains(&key.as_str()) => {
                Some(vec![value.to_string()])
            }
            Value::Array(values) if is_list => values.iter().map(text).collect(),
            _ => None,
        };
        let strings = given.ok_or_else(|| {
            let or_list = if is_list { " or a list of strings" } else { "" };
            format!("{key}: expected a string{or_list}, found {}", value.type_str())
        })?;
        words.extend(strings.into_iter().map(|value| (key.as_str(), value)));
    }
    View::from_words(words.iter().map(|(key, value)| (*key, value.as_str())), read)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::Files;

    fn parse(text: &str) -> Result<NamedViews, String> {
        NamedViews::parse(Path::new("/conf/v.toml"), text.as_bytes(), &mut |path, _| {
            assert!(path.starts_with("/conf") || path.starts_with("/maps"), "{path:?}");
            Ok((path.to_owned(), br#"{"a": 1, "b": 2}"#.to_vec()))
        })
    }

    #[test]
    fn each_table_is_a_view_and_its_keys_are_the_options_of_views() {
        let text = "[view.b]\nlayout = 'map=m.json'\nexclude = ['x', 'y*']\n\
                    [view.a]\n[view.'c.1']\ndtype = 'f16'\nkeep = 'norm'\nlayout = 'shards=2'";
        let views = parse(text).unwrap();
        let found: Vec<(&str, &View)> = views.iter().collect();
        assert_eq!(found.iter().map(|(name, _)| *name).collect::<Vec<_>>(), ["a", "b", "c.1"]);
        assert_eq!(*found[0].1, View::default());
        assert_eq!(found[1].1.files.to_string(), "map=/conf/m.json");
        assert_eq!(found[1].1.exclude.len(), 2);
        assert_eq!(found[2].1.files, Files::ShardCount(2));
        let of_ranks =
            parse("[view.r0]\ntp = 2\nrank = 0\n[view.r1]\ntp = '2'\nrank = '1'").unwrap();
        let ranks: Vec<_> = of_ranks.iter().filter_map(|(_, view)| view.shard.as_ref()).collect();
        assert_eq!(
            ranks.iter().map(|one| (one.ranks, one.rank)).collect::<Vec<_>>(),
            [(2, Some(0)), (2, Some(1))]
        );
        let absolute = parse("[view.b]\nlayout = 'map=/maps/m.json'").unwrap();
        assert_ne!(absolute, parse("[view.b]\nlayout = 'map=m.json'").unwrap());
    }

    #[test]
    fn the_digest_covers_the_text_and_the_files_that_it_names() {
        let text = b"[view.a]\nrename = 'x.toml'\n[view.b]\nlayout = 'map=m.json'";
        let digest = |text: &[u8], rules: &str, map: &str| {
            let views = NamedViews::parse(Path::new("/v.toml"), text, &mut |path, _| {
                let is_map = path.ends_with("m.json");
                Ok((path.to_owned(), if is_map { map } else { rules }.as_bytes().to_vec()))
            });
            views.unwrap().read_from().unwrap().1
        };
        let (rules, map) = ("[[rename]]\nregex = '^'\nto = 'x.'\n", "{\"a\": 1}");
        let first = digest(text, rules, map);
        assert_eq!(first, digest(text, rules, map));
        assert_ne!(first, digest(text, &rules.replace("x.", "y."), map));
        assert_ne!(first, digest(text, rules, "{\"b\": 1}"));
        let longer = [text, b"\n[view.c]".as_slice()].concat();
        assert_ne!(first, digest(&longer, rules, map));
    }

    #[test]
    fn a_view_of_all_ranks_is_one_view_for_each_rank() {
        let shard = |ranks, rank| Some(TensorParallel { ranks, rank, rules: None });
        let view = |ranks| View { shard: shard(ranks, None), ..View::default() };
        let views = NamedViews::of_ranks(&view(3)).unwrap();
        let found: Vec<_> = views.iter().map(|(name, view)| (name, view.shard.clone())).collect();
        let names = ["tp-3/rank-0", "tp-3/rank-1", "tp-3/rank-2"];
        let expected: Vec<_> =
            names.into_iter().zip((0..3).map(|rank| shard(3, Some(rank)))).collect();
        assert_eq!(found, expected);
        assert_eq!(views.ranks_of(), Some(&view(3)));
        assert!(NamedViews::of_ranks(&view(257)).unwrap_err().contains("at most 256 ranks"));
        assert!(NamedViews::of_ranks(&View::default()).is_err());
        let wrong = View { files: Files::Original, ..view(2) };
        assert!(NamedViews::of_ranks(&wrong).unwrap_err().contains("layout=original"));
    }

    #[test]
    fn files_that_are_no_views_are_refused_in_one_line_with_the_view() {
        for (text, said) in [
            ("", "1 to 100 of them; it has 0"),
            ("view = 1", "line 1"),
            ("[views.a]", "line 1"),
            ("[view.a]\n[view.a]", "line 2"),
            ("[view.a]\nlayout = 1", "view `a`: layout: expected a string, found integer"),
            ("[view.a]\ninclude = [1]", "expected a string or a list of strings, found array"),
            ("[view.a]\nlayout = ['single']", "layout: expected a string, found array"),
            ("[view.a]\ncolour = 'red'", "expected layout, format"),
            ("[view.a]\ndtype = 'f8'", "view `a`: dtype=`f8`: expected bf16"),
            ("[view.a]\ntp = 2.5", "tp: expected a string, found float"),
            ("[view.a]\nrank = 1", "need tp="),
            ("[view.a]\nkeep = 'x'", "keep needs dtype="),
            ("[view.a]\nlayout = 'original'\ndtype = 'f16'", "layout=original shows files"),
            ("[view.'a/b']", "view `a/b`: the name has to be"),
            ("[view.'..']", "the name has to be"),
            ("[view.'']", "the name has to be"),
            ("[view.sharded]", "view `sharded`: the name stands for"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.starts_with("/conf/v.toml: ") && error.contains(said), "{text}: {error}");
            assert_eq!(error.lines().count(), 1, "{error}");
        }
        let many: String = (0..101).map(|number| format!("[view.v{number}]\n")).collect();
        assert!(parse(&many).unwrap_err().contains("it has 101"));
    }
}
