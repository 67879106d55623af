//! Selection of the tensors of a view by globs.

use std::fmt;

use globset::{GlobBuilder, GlobMatcher};

use crate::catalog::{Catalog, named_some};
use crate::error::{ErrorKind, Fault, quoted};

/// A glob for whole names of tensors. `*` and `?` match dots too.
///
/// ```
/// use tensorfs::NameGlob;
///
/// let glob = NameGlob::new("model.layers.[01].*")?;
/// assert!(glob.matches("model.layers.0.mlp.up_proj.weight"));
/// assert!(!glob.matches("model.layers.10.mlp.up_proj.weight"));
/// assert!(NameGlob::new("model.layers.[0").is_err());
/// # Ok::<(), String>(())
/// ```
#[derive(Clone, Debug)]
pub struct NameGlob {
    text: String,
    matcher: GlobMatcher,
}

/// Maximum length of a glob in bytes.
const GLOB_LEN_MAX: usize = 4096;

impl NameGlob {
    /// Parses the glob `text`.
    ///
    /// # Errors
    /// A message of one line with the mistake.
    pub fn new(text: &str) -> Result<NameGlob, String> {
        if text.is_empty() || text.len() > GLOB_LEN_MAX {
            return Err(format!("a glob of 1 to {GLOB_LEN_MAX} bytes, like model.layers.0.*"));
        }
        let built = GlobBuilder::new(text).literal_separator(false).build();
        let glob = built.map_err(|e| format!("a glob; {}", e.kind()))?;
        Ok(NameGlob { text: text.to_owned(), matcher: glob.compile_matcher() })
    }

    /// Whether the glob matches the whole of `name`.
    pub fn matches(&self, name: &str) -> bool {
        self.matcher.is_match(name)
    }
}

impl PartialEq for NameGlob {
    fn eq(&self, other: &NameGlob) -> bool {
        self.text == other.text
    }
}

impl Eq for NameGlob {}

impl fmt::Display for NameGlob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// The positions of the selected tensors of `catalog`. A tensor is selected if no glob of `exclude` matches it, and
/// either `include` is empty or a glob of `include` matches it.
pub(super) fn select(
    catalog: &Catalog,
    include: &[NameGlob],
    exclude: &[NameGlob],
) -> Result<Vec<u32>, Fault> {
    if include.is_empty() && exclude.is_empty() {
        return Ok((0..catalog.len() as u32).collect());
    }
    let mut used = vec![false; include.len() + exclude.len()];
    let mut selected = Vec::new();
    let (used_to_include, used_to_exclude) = used.split_at_mut(include.len());
    for tensor in catalog.tensors() {
        // Every glob is tried, to find out which of them match no tensor.
        let any = |globs: &[NameGlob], used: &mut [bool]| {
            let mut matched = false;
            for (glob, used) in globs.iter().zip(used) {
                let matches = glob.matches(tensor.name);
                *used |= matches;
                matched |= matches;
            }
            matched
        };
        let included = any(include, used_to_include) || include.is_empty();
        if included & !any(exclude, used_to_exclude) {
            selected.push(tensor.position() as u32);
        }
    }
    let mut words = include
        .iter()
        .map(|glob| ("include", glob))
        .chain(exclude.iter().map(|glob| ("exclude", glob)));
    if let Some(unused) = used.iter().position(|used| !used)
        && let Some((word, glob)) = words.nth(unused)
    {
        return Err(ErrorKind::View.fault(format!(
            "{word}={} matches none of the {} tensors: {}",
            quoted(&glob.text),
            catalog.len(),
            named_some(catalog.tensors().map(|tensor| tensor.name))
        )));
    }
    if selected.is_empty() && !catalog.is_empty() {
        let message = format!("include= and exclude= leave none of the {} tensors", catalog.len());
        return Err(ErrorKind::View.fault(message));
    }
    Ok(selected)
}
