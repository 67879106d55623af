//! Help texts for the options: for `mount --help`, for other commands, for shell completion and for
//! the docs.

use tensorfs::internal::open_options::HUB;

use super::row::{OptionRow, Use};
use super::table::{self, GROUPS};

/// Column at which explanations begin in the help, and maximum width of its lines.
const COLUMN: usize = 21;
const WIDTH: usize = 78;

/// The names of the options that have these uses.
pub(crate) fn names_for(uses: &[Use]) -> String {
    let name = |row: &OptionRow| {
        if row.is_for(uses, "") {
            return Some(format!("{}=", row.name));
        }
        row.is_for(uses, HUB).then(|| format!("{}={HUB}", row.name))
    };
    table::rows().filter_map(name).collect::<Vec<_>>().join(", ")
}

/// The help text for all options.
pub(crate) fn help() -> String {
    let mut text = String::new();
    for group in GROUPS {
        text.push_str(&format!("Mount options: {}\n", group.title));
        for row in group.rows {
            for (syntax, explanation) in row.help() {
                let value = if row.takes_value() { "=" } else { "" };
                let term = format!("  {}{value}{syntax}", row.name);
                write_entry(&mut text, &term, explanation);
            }
        }
        text.push('\n');
    }
    text.push_str(
        "Sizes are bytes, or a number with K, M, G or T.\n\
         Options of mount(8), systemd and SELinux (ro, nofail, _netdev, x-*, context=...)\n\
         are accepted. A comma in a value is written `\\,`.",
    );
    text
}

/// Writes a term and its explanation, wrapped at `WIDTH`.
fn write_entry(text: &mut String, term: &str, explanation: &str) {
    let mut line = format!("{term:<COLUMN$}");
    if term.len() >= COLUMN {
        text.push_str(term);
        text.push('\n');
        line = " ".repeat(COLUMN);
    }
    for word in explanation.split(' ') {
        if line.len() + word.len() > WIDTH {
            text.push_str(line.trim_end());
            text.push('\n');
            line = " ".repeat(COLUMN);
        }
        line.push_str(word);
        line.push(' ');
    }
    text.push_str(line.trim_end());
    text.push('\n');
}

/// A word that shell completion offers after `-o`.
pub(crate) struct Completion {
    /// An option with the part of its value that is fixed, such as `layout=`, `layout=single` or
    /// `views=`.
    pub text: String,
    /// Whether the path of a file or folder follows the text.
    pub is_path: bool,
    pub explanation: &'static str,
}

impl Completion {
    /// The option without its value.
    pub(crate) fn key(&self) -> &str {
        let end = self.text.find('=').map_or(self.text.len(), |sign| sign + 1);
        &self.text[..end]
    }

    /// The part of the value that is fixed.
    pub(crate) fn value(&self) -> &str {
        &self.text[self.key().len()..]
    }
}

/// All options with their values: the options of `mount`, or the options of a command with `uses`.
pub(crate) fn completions(uses: Option<&[Use]>) -> Vec<Completion> {
    let mut all = Vec::new();
    for row in table::rows().filter(|row| !row.help.is_empty()) {
        for value in row.values() {
            if uses.is_some_and(|uses| !row.is_for(uses, value.text)) {
                continue;
            }
            let sign = if row.takes_value() { "=" } else { "" };
            let text = format!("{}{sign}{}", row.name, value.text);
            // `shards=` accepts a number or a size, which have the same text here.
            if all.iter().any(|one: &Completion| one.text == text) {
                continue;
            }
            all.push(Completion {
                text,
                is_path: matches!(value.chosen, "FILE" | "DIR"),
                explanation: value.explanation,
            });
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;
    use std::path::Path;

    use super::*;
    use crate::options::{Options, WATCH_GRACE, WATCH_INTERVAL};

    #[test]
    fn help_and_parser_know_the_same_options() {
        let help = help();
        let terms = help.lines().filter_map(|line| line.strip_prefix("  ")?.split(' ').next());
        let keys = terms.filter(|term| !term.is_empty()).map(|term| term.split('=').next());
        let names: Vec<&str> = keys.flatten().collect();
        assert!(names.contains(&"weight-map"), "{help}");
        for name in names {
            let known = table::find(name, true).or_else(|| table::find(name, false));
            assert!(known.is_some(), "{name}");
        }
        assert!(help.lines().all(|line| line.len() <= 80), "{help}");
    }

    #[test]
    fn the_defaults_of_the_help_are_those_in_force() {
        for row in table::rows() {
            for (syntax, explanation) in row.help() {
                let default = match explanation.split_once("(default: ") {
                    _ if explanation.ends_with("(default)") => syntax,
                    Some((_, rest)) => rest.split([')', ';', ',']).next().unwrap(),
                    None => continue,
                };
                let mut options = Options::default();
                if default.contains(' ') || row.apply(&mut options, default).is_err() {
                    continue;
                }
                assert_eq!(options.to_json(), Options::default().to_json(), "{}", row.name);
                let (watched, grace) = (options.watch_interval, options.watch_grace);
                assert_eq!((watched, grace), (WATCH_INTERVAL, WATCH_GRACE));
            }
        }
    }

    #[test]
    fn words_and_beginnings_of_values_are_offered() {
        let texts = |uses| completions(uses).into_iter().map(|one| one.text).collect::<Vec<_>>();
        let all = texts(None);
        for text in
            ["layout=hub", "layout=shards=", "dtype=f16", "dtype=like:", "umask=", "allow_other"]
        {
            assert!(all.iter().any(|it| it == text), "{text} in {all:?}");
        }
        let of_ls = texts(Some(&[Use::Source, Use::Hub]));
        assert!(of_ls.contains(&"layout=hub".to_owned()), "{of_ls:?}");
        assert!(!of_ls.iter().any(|it| it == "layout=single" || it == "cache="), "{of_ls:?}");
    }

    /// Options for which another page has more details. Each row has the option, the title of the
    /// page, and its path in `docs/`.
    const PAGES: &[(&str, &str, &str)] = &[
        ("layout", "Views", "guides/views.md"),
        ("format", "Bintensors", "formats/checkpoints.md#bintensors"),
        ("config", "Mounting", "guides/mounting.md#config-of-another-folder"),
        ("views", "Views", "guides/views.md#several-views-in-one-mount"),
        ("exclude", "Views", "guides/views.md#some-of-the-tensors"),
        ("rename", "Views", "guides/views.md#other-names"),
        ("tp", "Views", "guides/views.md#the-slices-of-one-rank"),
        ("dtype", "Views", "guides/views.md#another-dtype"),
        ("zero", "Frameworks", "formats/frameworks.md#deepspeed"),
        ("state", "Formats", "formats/checkpoints.md#files-of-torchsave"),
        ("key-command", "Tensorizer", "formats/tensorizer.md#encryption"),
        ("index-dir", "Index", "formats/index.md"),
        ("cache-dir", "The disk cache", "guides/disk-cache.md"),
        ("credentials-file", "Object stores", "guides/object-stores.md#credentials-of-one-source"),
        ("watch", "A store that changes", "reference/semantics.md#a-store-that-changes"),
        ("access", "Tenants", "operate/security.md#tenants"),
        ("verify", "Verify", "guides/verify.md#verifyread"),
        ("assemble", "Assembled copies", "operate/performance.md#assembled-copies"),
        ("log-format", "Commands", "reference/commands.md#the-log"),
    ];

    #[test]
    fn pages_are_of_options() {
        for (name, _, _) in PAGES {
            assert!(table::rows().any(|row| row.name == *name), "{name}");
        }
    }

    /// The tables in `docs/reference/options.md`.
    fn docs() -> String {
        let mut text = String::new();
        for group in GROUPS {
            let _ = write!(text, "## {}\n\n| option | meaning |\n|---|---|\n", group.title);
            for row in group.rows {
                for (number, (syntax, explanation)) in row.help().enumerate() {
                    let sign = if row.takes_value() { "=" } else { "" };
                    let name = format!("{}{sign}{syntax}", row.name).replace('|', "`, `");
                    let (first, rest) = explanation.split_at(1);
                    let _ = write!(text, "| `{name}` | {}{rest}.", first.to_uppercase());
                    let page = PAGES.iter().find(|(name, ..)| *name == row.name);
                    if let Some((_, title, place)) =
                        page.filter(|_| number + 1 == row.help().count())
                    {
                        let _ = write!(text, " See [{title}](../{place}).");
                    }
                    text.push_str(" |\n");
                }
            }
            text.push('\n');
        }
        text
    }

    #[test]
    fn the_page_about_options_is_that_of_the_table() {
        let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference/options.md");
        let text = std::fs::read_to_string(&page).unwrap();
        let (start, end) = (text.find("## Files").unwrap(), text.find("## Values").unwrap());
        let wanted = format!("{}{}{}", &text[..start], docs(), &text[end..]);
        if text != wanted {
            let new = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/options.md");
            std::fs::write(&new, wanted).unwrap();
            panic!(
                "docs/reference/options.md is not that of the table; the right text is in {}",
                new.display()
            );
        }
    }
}
