//! The rules of this repository that the compiler does not check, as tests that read the sources.
//!
//! Each rule is a function from files to violations (`file:line: what`), so `samples` can test that the rule
//! finds a violation. The tests have no dependencies: a scanner that knows comments, strings, attributes and
//! `use` trees is enough, and no new release of a parser can break it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use scan::{
    CodePath, Token, attribute, below_crate_root, code_paths, is_test_attribute, tokens,
    without_test_items,
};

#[path = "tidy/api.rs"]
mod api;
#[path = "tidy/bindings.rs"]
mod bindings;
#[path = "tidy/circles.rs"]
mod circles;
#[path = "tidy/names.rs"]
mod names;
#[path = "tidy/prose.rs"]
mod prose;
#[path = "tidy/samples.rs"]
mod samples;
#[path = "tidy/scan.rs"]
mod scan;
#[path = "tidy/seam.rs"]
mod seam;

/// The top-level modules of `src/`. A module imports modules of a lower rank only.
///
/// A row may precede its file; a file without a row is a violation.
const RANKS: &[(u32, &[&str])] = &[
    (
        0,
        &[
            "asked",
            "coalesce",
            "error",
            "dtype",
            "counters",
            "clock",
            "hash",
            "mountinfo",
            "process",
            "sync",
            "version",
            "words",
            "size",
            "system_memory",
            "mapping",
            "atomic_file",
            "zeros",
            "strides",
        ],
    ),
    (1, &["cast", "format", "parallel", "strided"]),
    (2, &["catalog"]),
    (3, &["view", "open_options", "layout", "index", "plan", "order"]),
    (4, &["source", "store", "io", "mount_origin", "prefetch"]),
    (5, &["checkpoint"]),
    (6, &["reader", "device"]),
    (7, &["sweep"]),
    (8, &["verify"]),
    (9, &["cache", "loader", "consolidate"]),
];

/// Imports allowed within one rank, as (importer, imported). Must stay free of cycles.
const SAME_RANK: &[(&str, &str)] = &[
    ("dtype", "error"),
    ("atomic_file", "error"),
    ("atomic_file", "hash"),
    ("open_options", "view"),
    ("layout", "view"),
    ("io", "source"),
    ("store", "source"),
    ("mount_origin", "source"),
];

/// The rooms of `mount/src/`. A room imports rooms of a lower rank only.
const MOUNT_RANKS: &[(u32, &[&str])] = &[
    (0, &["log", "options"]),
    (1, &["serve"]),
    (2, &["fs"]),
    (3, &["daemon"]),
    (4, &["node"]),
    (5, &["cli"]),
    (6, &["bin"]),
];

/// The modules of `python/src/`. A module imports modules of a lower rank only.
const PYTHON_RANKS: &[(u32, &[&str])] = &[
    (0, &["dlpack", "errors", "waiting"]),
    (1, &["checkpoint"]),
    (2, &["consolidate", "memory"]),
    (3, &["loading", "tensor_writer"]),
    (4, &["ahead", "slicing"]),
];

/// A package whose top-level modules have ranks.
struct Package {
    /// Folder of its sources, with a `/` at the end.
    folder: &'static str,
    ranks: &'static [(u32, &'static [&'static str])],
    /// Imports allowed within one rank, as (importer, imported).
    same_rank: &'static [(&'static str, &'static str)],
}

const PACKAGES: &[Package] = &[
    Package { folder: "src/", ranks: RANKS, same_rank: SAME_RANK },
    Package { folder: "mount/src/", ranks: MOUNT_RANKS, same_rank: &[] },
    Package { folder: "python/src/", ranks: PYTHON_RANKS, same_rank: &[] },
];

/// Folders in which no files import each other in a circle. A parent and its child may.
const ONE_WAY: &[&str] = &["src/", "mount/src/", "python/src/"];

/// The only places that may name a crate. A trailing `/` means the folder.
const CRATE_HOMES: &[(&str, &[&str])] = &[
    ("fuser", &["mount/src/fs/", "mount/src/daemon/connection.rs"]),
    ("cudarc", &["src/device/cuda.rs"]),
    ("io_uring", &["src/io/uring.rs"]),
    ("bincode", &["src/index/", "src/format/bintensors.rs"]),
    ("crypto_secretbox", &["src/format/tensorizer/secretbox.rs", "src/format/tensorizer/salsa.rs"]),
    ("salsa20", &["src/format/tensorizer/salsa.rs"]),
    ("argon2", &["src/format/tensorizer/keys.rs"]),
    ("lru", &["src/cache.rs", "python/src/loading.rs"]),
    ("bytes", &["src/store/remote/"]),
    ("quick_xml", &["src/store/remote/"]),
    ("reqsign_aws_core", &["src/store/remote/"]),
    ("reqsign_aws_v4", &["src/store/remote/"]),
    ("reqsign_azure_storage", &["src/store/remote/"]),
    ("reqsign_core", &["src/store/remote/"]),
    ("reqsign_google", &["src/store/remote/"]),
    ("reqwest", &["src/store/remote/"]),
    ("rustls", &["src/store/remote/"]),
    ("tokio", &["src/store/remote/"]),
];

/// Crates that belong to the packages around the core, never to the core itself.
const OUTSIDE_THE_CORE: &[&str] = &["fuser", "clap", "pyo3"];

/// Modules that decide and never do: the same input gives the same output on any machine.
const PURE: &[&str] = &[
    "cast",
    "coalesce",
    "format",
    "catalog",
    "view",
    "open_options",
    "layout",
    "strided",
    "strides",
    "plan",
    "order",
    "prefetch",
];

/// Paths (by their first segments) that touch the world outside the process.
const EFFECTS: &[&[&str]] = &[
    &["std", "fs"],
    &["std", "thread"],
    &["std", "net"],
    &["std", "process"],
    &["libc"],
    &["nix"],
    &["rustix"],
];

/// The only files that may contain `unsafe`: they talk to the kernel or to a device, or use
/// instructions that not every processor has.
const UNSAFE_FILES: &[&str] = &[
    "src/cast.rs",
    "src/format/tensorizer/salsa.rs",
    "src/process.rs",
    "src/io/memory/arena.rs",
    "src/mapping.rs",
    "src/io/memory/buffer.rs",
    "src/source/page_cache.rs",
    "src/io/memory/region.rs",
    "src/io/uring.rs",
    "src/device/cuda.rs",
    "src/device/cuda/pinned.rs",
    "src/device/cuda/stream.rs",
    "src/device/cufile.rs",
    "src/loader/run.rs",
    "src/source/stat.rs",
    "src/store/disk_cache/pieces.rs",
    "mount/src/daemon/allocator.rs",
    "mount/src/daemon/connection.rs",
    "mount/src/daemon/descriptors.rs",
    "mount/src/daemon/inherited.rs",
    "mount/src/daemon/place.rs",
    "mount/src/cli/bench/map.rs",
    "mount/src/fs/backing.rs",
    "mount/src/node/suspension.rs",
    "mount/src/serve/file_events.rs",
    "python/src/ahead.rs",
    "python/src/dlpack.rs",
    "python/src/loading.rs",
    "python/src/memory.rs",
    "python/src/tensor_writer.rs",
];

/// Longest source file, in lines: what does not fit has two jobs.
const LINES_MAX: usize = 700;

/// Names that say nothing about what a module owns.
const EMPTY_NAMES: &[&str] = &["util", "utils", "helper", "helpers", "manager", "common", "misc"];

/// Macros that mark unfinished work.
const UNFINISHED: &[&str] = &["todo", "unimplemented", "dbg"];

/// The only files that may name standard output or standard error: they escape what they write, or
/// ask whether there is a terminal.
const WRITERS: &[&str] = &[
    "mount/src/cli/bench.rs",
    "mount/src/cli/bench/job.rs",
    "mount/src/cli/demo.rs",
    "mount/src/cli/doctor.rs",
    "mount/src/cli/output.rs",
    "mount/src/cli/top.rs",
    "mount/src/cli/verify.rs",
    "mount/src/daemon/background.rs",
    "mount/src/log.rs",
    "mount/src/log/output.rs",
    "mount/src/daemon/stalled.rs",
];

/// Rooms whose comments are not plain English yet.
const UNPOLISHED: &[&str] = &[];

/// Where the shipped code lies.
const SHIPPED: &[&str] = &["src/", "mount/src/", "python/src/"];

/// Extensions of the files that must be ASCII.
const TEXT: &[&str] = &["rs", "py", "pyi", "toml", "md"];

// ---------------------------------------------------------------------------------------------
// The rules, as they hold for this repository.

#[test]
fn modules_import_lower_ranks_only() {
    assert_none(&rank_violations(&repository()));
}

#[test]
fn files_import_each_other_one_way() {
    assert_none(&circles::circle_violations(&repository(), ONE_WAY));
}

#[test]
fn rooms_above_the_byte_seam_ask_for_files_of_this_machine() {
    assert_none(&seam::seam_violations(&repository()));
}

#[test]
fn crates_are_named_only_where_they_belong() {
    assert_none(&crate_home_violations(&repository()));
}

#[test]
fn pure_modules_never_touch_files_threads_or_the_system() {
    assert_none(&effect_violations(&repository()));
}

#[test]
fn unsafe_stands_only_in_the_listed_files() {
    assert_none(&unsafe_violations(&repository()));
}

#[test]
fn every_source_file_starts_with_its_module_header() {
    assert_none(&header_violations(&repository()));
}

#[test]
fn every_text_file_is_ascii() {
    assert_none(&ascii_violations(&repository()));
}

#[test]
fn no_source_file_is_longer_than_the_limit() {
    assert_none(&length_violations(&repository()));
}

#[test]
fn no_unfinished_work_and_no_ignored_test_is_left_behind() {
    assert_none(&unfinished_violations(&repository()));
}

#[test]
fn names_reach_people_only_escaped() {
    assert_none(&raw_name_violations(&repository()));
}

#[test]
fn comments_docs_and_messages_are_plain_english() {
    assert_none(&prose::prose_violations(&repository(), UNPOLISHED));
}

#[test]
fn every_public_type_has_an_example() {
    assert_none(&api::missing_example_violations(&repository()));
}

#[test]
fn each_type_name_stands_once_in_a_crate() {
    assert_none(&names::doubled_name_violations(&repository()));
}

#[test]
fn a_name_has_one_value_in_a_block_and_a_parameter_is_no_tuple() {
    assert_none(&bindings::binding_violations(&repository(), bindings::UNMENDED));
}

#[test]
fn no_module_has_a_name_that_says_nothing() {
    assert_none(&name_violations(&repository()));
}

#[test]
fn parent_modules_are_glob_imported_only_in_tests() {
    assert_none(&glob_violations(&repository()));
}

#[test]
fn rank_tables_name_each_module_once_and_same_rank_pairs_have_no_cycle() {
    for package in PACKAGES {
        let mut seen = BTreeSet::new();
        for name in package.ranks.iter().flat_map(|(_, names)| *names) {
            assert!(seen.insert(*name), "`{name}` stands twice in the ranks of {}", package.folder);
        }
        for (importer, imported) in package.same_rank {
            let ranks = [importer, imported].map(|name| package.rank(name));
            assert_eq!(ranks[0], ranks[1], "{importer} -> {imported} needs no exception");
            assert!(
                !package.same_rank.iter().any(|(other, _)| other == imported),
                "{importer} -> {imported} continues: chains of exceptions may close a cycle"
            );
        }
    }
}

// ---------------------------------------------------------------------------------------------
// Files.

/// One text file of the repository; `path` is relative, with `/`.
struct SourceFile {
    path: String,
    text: String,
}

impl SourceFile {
    fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }

    fn is_under(&self, folders: &[&str]) -> bool {
        folders.iter().any(|folder| self.path.starts_with(folder))
    }

    /// The module path below the crate root: `src/io/mod.rs` is `[io]`, `src/lib.rs` is `[]`.
    fn module(&self) -> Vec<String> {
        let inside = self.path.split_once("src/").map_or(self.path.as_str(), |(_, rest)| rest);
        let mut segments: Vec<String> =
            inside.trim_end_matches(".rs").split('/').map(str::to_owned).collect();
        if segments.last().is_some_and(|last| last == "mod" || segments == ["lib"]) {
            segments.pop();
        }
        segments
    }

    fn violation(&self, line: usize, what: &str) -> String {
        format!("{}:{line}: {what}", self.path)
    }
}

fn repository() -> Vec<SourceFile> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    collect(root, "", &mut files);
    assert!(
        files.iter().any(|file| file.path == "src/lib.rs"),
        "no src/lib.rs under {}: nothing would be checked",
        root.display()
    );
    files.sort_by(|a, b| a.path.cmp(&b.path));
    files
}

/// Collects text files, leaving out hidden folders and what git ignores as built or generated.
fn collect(folder: &Path, prefix: &str, files: &mut Vec<SourceFile>) {
    const GENERATED: &[&str] = &["target", "__pycache__", "corpus", "artifacts", "node_modules"];
    for entry in fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display())) {
        let entry = entry.unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
        let name = entry.file_name().to_string_lossy().into_owned();
        let path = format!("{prefix}{name}");
        // Links are not followed: one that leads upwards would never end.
        let kind = entry.file_type().unwrap_or_else(|e| panic!("{path}: {e}"));
        if kind.is_dir() {
            if !name.starts_with('.') && !GENERATED.contains(&name.as_str()) {
                collect(&entry.path(), &format!("{path}/"), files);
            }
        } else if kind.is_file() && TEXT.iter().any(|ext| name.ends_with(&format!(".{ext}"))) {
            let bytes = fs::read(entry.path()).unwrap_or_else(|e| panic!("{path}: {e}"));
            let text = String::from_utf8_lossy(&bytes).into_owned();
            files.push(SourceFile { path, text });
        }
    }
}

fn assert_none(violations: &[String]) {
    let mut list = String::new();
    for violation in violations {
        let _ = write!(list, "\n  {violation}");
    }
    assert!(violations.is_empty(), "{} violation(s):{list}", violations.len());
}

// ---------------------------------------------------------------------------------------------
// Rules: files in, violations out.

impl Package {
    fn rank(&self, module: &str) -> Option<u32> {
        self.ranks.iter().find(|(_, names)| names.contains(&module)).map(|(rank, _)| *rank)
    }

    /// Whether `path` may lead into this package: `tensorfs` is another one to all but the library.
    fn owns(&self, path: &CodePath) -> bool {
        self.folder == "src/" || path.segments[0] != "tensorfs"
    }
}

/// The modules of a package that are compiled for tests only and lie in files of their own.
fn test_modules(core: &[&SourceFile]) -> Vec<Vec<String>> {
    let mut modules = Vec::new();
    for file in core {
        let tokens = tokens(&file.text);
        for at in 0..tokens.len() {
            let Some(range) = attribute(&tokens, at) else {
                continue;
            };
            let item = &tokens[range.end.min(tokens.len())..];
            if is_test_attribute(&tokens[range])
                && let [keyword, name, end, ..] = item
                && (keyword.text, end.text) == ("mod", ";")
            {
                let mut module = file.module();
                module.push(name.text.to_owned());
                modules.push(module);
            }
        }
    }
    modules
}

/// The Rust files under `folder` with the tokens that a normal build compiles.
fn compiled_files<'a>(
    files: &'a [SourceFile],
    folder: &str,
) -> Vec<(&'a SourceFile, Vec<Token<'a>>)> {
    let inside: Vec<_> =
        files.iter().filter(|file| file.is_rust() && file.is_under(&[folder])).collect();
    let test_only = test_modules(&inside);
    inside
        .into_iter()
        .filter(|file| !test_only.iter().any(|module| file.module().starts_with(module)))
        .map(|file| (file, without_test_items(&tokens(&file.text))))
        .collect()
}

/// Names that `lib.rs` re-exports, with the top-level module that owns each.
fn reexports(core: &[(&SourceFile, Vec<Token<'_>>)]) -> BTreeMap<String, String> {
    let mut names = BTreeMap::new();
    for (_, tokens) in core.iter().filter(|(file, _)| file.module().is_empty()) {
        for path in code_paths(tokens) {
            let Some(name) = path.imported_as else {
                continue;
            };
            let mut segments = path.segments.iter().filter(|s| *s != "crate" && *s != "self");
            if let Some(owner) = segments.next() {
                names.insert(name, owner.clone());
            }
        }
    }
    names
}

fn rank_violations(files: &[SourceFile]) -> Vec<String> {
    PACKAGES.iter().flat_map(|package| violations_of_package(files, package)).collect()
}

fn violations_of_package(files: &[SourceFile], package: &Package) -> Vec<String> {
    let compiled = compiled_files(files, package.folder);
    let reexports = reexports(&compiled);
    let mut violations = Vec::new();
    for (file, tokens) in &compiled {
        let module = file.module();
        let Some(importer) = module.first() else {
            continue;
        };
        if package.rank(importer).is_none() {
            violations
                .push(file.violation(1, &format!("module `{importer}` has no rank in RANKS")));
            continue;
        }
        for words in tokens.windows(3) {
            // Both would bring in code whose file does not say which module it is.
            let words_are = |text: &[&str]| text.iter().zip(words).all(|(a, b)| *a == b.text);
            let moved = words_are(&["#", "[", "path"]);
            let pasted = words_are(&["include", "!"]);
            if moved || pasted {
                let what = "`#[path]` and `include!` hide which module a file is";
                violations.push(file.violation(words[0].line, what));
            }
        }
        for path in code_paths(tokens).iter().filter(|path| package.owns(path)) {
            if let Some(why) = forbidden_import(package, path, &module, &reexports) {
                violations.push(file.violation(path.line, &why));
            }
        }
    }
    violations
}

/// Why the module at `module` may not name `path`, if it may not.
fn forbidden_import(
    package: &Package,
    path: &CodePath,
    module: &[String],
    reexports: &BTreeMap<String, String>,
) -> Option<String> {
    let importer = module.first()?.as_str();
    let target = below_crate_root(path, module)?;
    let written = path.segments.join("::");
    let Some(top) = target.first() else {
        // `pub(crate)` and `pub(super)` are single words too, and no import.
        return path.imported_as.is_some().then(|| format!("`{written}` imports the crate root"));
    };
    let imported = match package.rank(top) {
        Some(_) => top.as_str(),
        None => match reexports.get(top) {
            Some(owner) => owner.as_str(),
            None => return Some(format!("`{written}` names no module of RANKS: say which")),
        },
    };
    if imported == importer || package.same_rank.contains(&(importer, imported)) {
        return None;
    }
    let (from, to) = (package.rank(importer)?, package.rank(imported));
    let Some(to) = to else {
        return Some(format!("`{written}` comes from `{imported}`, which has no rank in RANKS"));
    };
    (to >= from).then(|| {
        format!("`{importer}` (rank {from}) imports `{imported}` (rank {to}) by `{written}`")
    })
}

fn lies_in(path: &str, homes: &[&str]) -> bool {
    homes.iter().any(|home| path == *home || (home.ends_with('/') && path.starts_with(home)))
}

fn crate_home_violations(files: &[SourceFile]) -> Vec<String> {
    const WATCHED: &[&str] = &["src/", "mount/", "python/", "examples/"];
    let mut violations = Vec::new();
    for file in files.iter().filter(|file| file.is_rust() && file.is_under(WATCHED)) {
        let tokens = tokens(&file.text);
        for path in code_paths(&tokens) {
            // A lone word is a field or a function; a path or an import is the crate.
            let names_a_crate = path.segments.len() > 1 || path.imported_as.is_some();
            let homes = CRATE_HOMES.iter().find(|(name, _)| *name == path.segments[0]);
            if let Some((name, homes)) = homes
                && names_a_crate
                && !lies_in(&file.path, homes)
            {
                let what = format!("`{name}` is named outside {}", homes.join(", "));
                violations.push(file.violation(path.line, &what));
            }
        }
        for token in &tokens {
            if file.is_under(&["src/"]) && OUTSIDE_THE_CORE.contains(&token.text) {
                let what = format!("the core names `{}`", token.text);
                violations.push(file.violation(token.line, &what));
            }
        }
        for pair in tokens.windows(3) {
            if (pair[0].text, pair[1].text) == ("extern", "crate") {
                let what = format!("`extern crate {}`: import it by `use`", pair[2].text);
                violations.push(file.violation(pair[0].line, &what));
            }
        }
    }
    violations
}

fn effect_violations(files: &[SourceFile]) -> Vec<String> {
    let mut violations = Vec::new();
    for (file, tokens) in compiled_files(files, "src/") {
        let module = file.module();
        let Some(top) = module.first().filter(|top| PURE.contains(&top.as_str())) else {
            continue;
        };
        for path in code_paths(&tokens) {
            let whole_crate = path.imported_as.is_some() && path.segments == ["std"];
            let effect = EFFECTS.iter().any(|effect| {
                path.segments.iter().map(String::as_str).zip(*effect).all(|(a, b)| a == *b)
                    && path.segments.len() >= effect.len()
                    && (path.segments.len() > 1 || path.imported_as.is_some())
            });
            if effect || whole_crate {
                let what = format!("`{top}` is pure but names `{}`", path.segments.join("::"));
                violations.push(file.violation(path.line, &what));
            }
        }
    }
    violations
}

fn unsafe_violations(files: &[SourceFile]) -> Vec<String> {
    let mut violations = Vec::new();
    for file in files.iter().filter(|file| file.is_rust() && file.is_under(SHIPPED)) {
        if !UNSAFE_FILES.contains(&file.path.as_str()) {
            for token in tokens(&file.text).iter().filter(|token| token.text == "unsafe") {
                let what = "`unsafe` outside the files of UNSAFE_FILES";
                violations.push(file.violation(token.line, what));
            }
        }
    }
    violations
}

fn header_violations(files: &[SourceFile]) -> Vec<String> {
    files
        .iter()
        .filter(|file| file.is_rust() && file.is_under(SHIPPED))
        // The documentation of a library may be its README.
        .filter(|file| !["//! ", "#![doc = include_str!("].iter().any(|s| file.text.starts_with(s)))
        .map(|file| file.violation(1, "does not start with a `//! ` header"))
        .collect()
}

fn ascii_violations(files: &[SourceFile]) -> Vec<String> {
    let mut violations = Vec::new();
    for file in files {
        for (at, line) in file.text.lines().enumerate() {
            if let Some(c) = line.chars().find(|c| !c.is_ascii()) {
                let what = format!("U+{:04X} is not ASCII: write it as an escape", u32::from(c));
                violations.push(file.violation(at + 1, &what));
            }
        }
    }
    violations
}

fn length_violations(files: &[SourceFile]) -> Vec<String> {
    files
        .iter()
        .filter(|file| file.is_rust() && file.is_under(SHIPPED))
        .map(|file| (file, file.text.lines().count()))
        .filter(|(_, lines)| *lines > LINES_MAX)
        .map(|(file, lines)| file.violation(lines, &format!("more than {LINES_MAX} lines")))
        .collect()
}

fn unfinished_violations(files: &[SourceFile]) -> Vec<String> {
    // Split, so that this file does not flag itself.
    let marker = concat!("FIX", "ME");
    let mut violations = Vec::new();
    for file in files {
        for (at, _) in file.text.lines().enumerate().filter(|(_, line)| line.contains(marker)) {
            violations.push(file.violation(at + 1, &format!("`{marker}`: fix it or say why not")));
        }
        if !file.is_rust() {
            continue;
        }
        let tokens = tokens(&file.text);
        for pair in tokens.windows(2) {
            if UNFINISHED.contains(&pair[0].text) && pair[1].text == "!" {
                violations.push(file.violation(pair[0].line, &format!("`{}!`", pair[0].text)));
            }
        }
        for at in 0..tokens.len() {
            let Some(range) = attribute(&tokens, at) else {
                continue;
            };
            let words: Vec<_> = tokens[range].iter().filter(|t| t.is_word()).collect();
            let conditional = words.first().is_some_and(|first| first.text == "cfg_attr");
            let ignored = words.iter().take(if conditional { words.len() } else { 1 });
            if ignored.into_iter().any(|word| word.text == "ignore") {
                let what = "an ignored test proves nothing: run it or say at run time why not";
                violations.push(file.violation(tokens[at].line, what));
            }
        }
    }
    violations
}

/// Names of files and tensors may hold anything: line ends, escapes of terminals, other directions of
/// text. Text for people goes through `error::shown`, and streams are written in few places.
fn raw_name_violations(files: &[SourceFile]) -> Vec<String> {
    let mut violations = Vec::new();
    for file in files.iter().filter(|file| file.is_rust() && file.is_under(SHIPPED)) {
        let tokens = without_test_items(&tokens(&file.text));
        for (at, token) in tokens.iter().enumerate() {
            let is = |at: usize, text: &str| tokens.get(at).is_some_and(|token| token.text == text);
            let called = is(at + 1, "(") && is(at + 2, ")");
            if token.text == "display" && called && at > 0 && is(at - 1, ".") {
                let what =
                    "`display()` shows names raw: people read `shown_path`, programs `real_name`";
                violations.push(file.violation(token.line, what));
            }
            let printed = ["println", "eprintln", "print", "eprint"].contains(&token.text);
            let stream = ["stdout", "stderr"].contains(&token.text) && called;
            let stream = stream && !WRITERS.contains(&file.path.as_str());
            if (printed && is(at + 1, "!")) || stream {
                let what = "standard streams are written by `say`, `print_text` and `print_json`";
                violations.push(file.violation(token.line, what));
            }
        }
    }
    violations
}

fn name_violations(files: &[SourceFile]) -> Vec<String> {
    let mut violations = Vec::new();
    for file in files.iter().filter(|file| file.is_rust() && file.is_under(SHIPPED)) {
        for segment in file.module() {
            if EMPTY_NAMES.contains(&segment.as_str()) {
                violations
                    .push(file.violation(1, &format!("`{segment}` says nothing: name a noun")));
            }
        }
        for pair in tokens(&file.text).windows(2) {
            if pair[0].text == "mod" && EMPTY_NAMES.contains(&pair[1].text) {
                let what = format!("`mod {}` says nothing: name a noun", pair[1].text);
                violations.push(file.violation(pair[0].line, &what));
            }
        }
    }
    violations
}

fn glob_violations(files: &[SourceFile]) -> Vec<String> {
    let mut violations = Vec::new();
    for file in files.iter().filter(|file| file.is_rust() && file.is_under(SHIPPED)) {
        if file.module().last().is_some_and(|last| last == "tests") {
            continue;
        }
        for path in code_paths(&without_test_items(&tokens(&file.text))) {
            if let [parents @ .., glob] = path.segments.as_slice()
                && glob == "*"
                && parents.iter().all(|word| word == "super" || word == "self")
            {
                let what = format!("`use {}` outside a test module", path.segments.join("::"));
                violations.push(file.violation(path.line, &what));
            }
        }
    }
    violations
}
