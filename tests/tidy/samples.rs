//! Tests of the rules: each rule flags the samples that break it, and passes the samples that do not.

use super::*;

fn sample(path: &str, text: &str) -> SourceFile {
    SourceFile { path: path.to_owned(), text: text.to_owned() }
}

fn ranks_of(path: &str, text: &str) -> Vec<String> {
    let lib = "//! x\npub use error::{Error, Result as Outcome};\npub use verify::verify;\n";
    rank_violations(&[sample("src/lib.rs", lib), sample(path, text)])
}

#[test]
fn import_of_a_higher_rank_is_flagged_in_every_spelling() {
    for text in [
        "use crate::checkpoint::Checkpoint;",
        "use crate::{error::Error, checkpoint::{self, Checkpoint}};",
        "use crate::checkpoint as c;",
        "fn f() -> crate::checkpoint::Checkpoint { x }",
        "use super::super::checkpoint::Checkpoint;",
        "use self::super::super::checkpoint;",
        "fn f() { super::super::checkpoint::open() }",
        "mod inner { use super::super::super::checkpoint::Checkpoint; }",
        "macro_rules! m { () => { $crate::checkpoint::open() } }",
        "use tensorfs::checkpoint::Checkpoint;",
        "#[cfg(not(test))] use crate::checkpoint::Checkpoint;",
        "#[cfg(test)] mod tests { use super::*; }\nuse crate::checkpoint::Checkpoint;",
    ] {
        let found = ranks_of("src/format/dcp.rs", text);
        assert_eq!(found.len().min(1), 1, "not flagged: {text}");
        assert!(found[0].starts_with("src/format/dcp.rs:"), "{found:?}");
        assert!(found[0].contains("`format` (rank 1) imports `checkpoint` (rank 5)"), "{found:?}");
    }
}

#[test]
fn violation_names_file_and_line() {
    let found = ranks_of("src/format/dcp.rs", "//! x\n/* a\nb */\nuse\n    crate::io::Engine;\n");
    assert!(found[0].starts_with("src/format/dcp.rs:5: "), "{found:?}");
}

#[test]
fn imports_of_lower_ranks_siblings_and_allowed_pairs_pass() {
    for (path, text) in [
        ("src/format/dcp.rs", "use crate::{Error, Outcome, dtype::Dtype};"),
        ("src/format/dcp.rs", "use super::safetensors::Header; use crate::format::manifest;"),
        ("src/format/mod.rs", "mod a { use super::dcp; } use self::dcp::X; use super::error;"),
        ("src/layout.rs", "use crate::strided::StridedCopy; use crate::catalog::Catalog;"),
        ("src/io/mod.rs", "pub(crate) mod x; use crate::source::Source; pub(super) fn f() {}"),
        (
            "src/error.rs",
            "// use crate::io::Engine;\n/* crate::io */ const A: &str = \"crate::io\";",
        ),
        ("src/error.rs", "const A: &str = r#\"\" crate::io::x \"#; const B: char = '\"';"),
        ("src/error.rs", "#[cfg(test)]\nmod tests { use crate::io::Engine; }"),
        ("src/error.rs", "#[cfg(test)] use crate::{io::Engine, loader};"),
        ("src/verify/mod.rs", "fn f<'a>(x: &'a str) -> impl Iterator<Item = u8> + use<'a> { x }"),
    ] {
        assert_none(&ranks_of(path, text));
    }
}

#[test]
fn imports_within_a_rank_are_flagged_unless_the_pair_is_listed() {
    for (path, text) in [
        ("src/strided.rs", "use crate::layout::Layout;"),
        ("src/source/mod.rs", "use crate::io::Engine;"),
        ("src/loader.rs", "use crate::consolidate;"),
        ("src/error.rs", "use crate::dtype::Dtype;"),
        ("src/plan.rs", "use crate::prefetch::Window;"),
    ] {
        assert_eq!(ranks_of(path, text).len(), 1, "{path}: {text}");
    }
}

#[test]
fn imports_that_hide_their_module_are_flagged() {
    for text in [
        "use crate::*;",
        "use crate as root;",
        "use super as root;",
        "use crate::Unknown;",
        "#[path = \"../io/mod.rs\"] mod io;",
        "include!(\"io.rs\");",
    ] {
        assert_eq!(ranks_of("src/dtype.rs", text).len(), 1, "not flagged: {text}");
    }
    let found = ranks_of("src/catalog.rs", "use crate::verify;");
    assert!(found[0].contains("imports `verify` (rank 8)"), "{found:?}");
}

#[test]
fn module_without_a_rank_is_flagged() {
    let found = ranks_of("src/network/mod.rs", "//! x");
    assert_eq!(found, ["src/network/mod.rs:1: module `network` has no rank in RANKS"]);
}

#[test]
fn rooms_of_the_mount_import_lower_ranks_only() {
    let found = |path: &str, text: &str| rank_violations(&[sample(path, text)]);
    for (path, text) in [
        ("mount/src/serve/service.rs", "use crate::fs::node::Node;"),
        ("mount/src/fs/adapter.rs", "use crate::daemon::control;"),
        ("mount/src/daemon/session.rs", "fn f() { crate::cli::status::run() }"),
        ("mount/src/log.rs", "use crate::options::Options;"),
        ("mount/src/attic.rs", "//! x"),
    ] {
        assert_eq!(found(path, text).len(), 1, "not flagged: {path}: {text}");
    }
    let text =
        "use crate::log; use super::kernel; use tensorfs::cache::verify_on_read::ChecksumGate;";
    assert_none(&found("mount/src/serve/service.rs", text));
    assert_none(&found("mount/src/cli/status.rs", "use crate::fs::tails::REMEDY;"));
}

#[test]
fn modules_of_the_python_package_import_lower_ranks_only() {
    let found = |path: &str, text: &str| rank_violations(&[sample(path, text)]);
    for (path, text) in [
        ("python/src/checkpoint.rs", "use crate::loading::Loader;"),
        ("python/src/memory.rs", "fn f(loader: &crate::loading::Loader) {}"),
        ("python/src/slicing.rs", "use crate::ahead::Ahead;"),
        ("python/src/attic.rs", "//! x"),
    ] {
        assert_eq!(found(path, text).len(), 1, "not flagged: {path}: {text}");
    }
    let text = "use crate::memory::Area; use tensorfs::loader::Loader;";
    assert_none(&found("python/src/loading.rs", text));
}

#[test]
fn circle_of_sibling_files_is_flagged() {
    let circle = |texts: [&str; 3]| {
        let found = ["mount/src/", "src/"].map(|folder| {
            let paths = ["fs/a.rs", "fs/b.rs", "fs/c/mod.rs"].map(|path| format!("{folder}{path}"));
            let files = [0, 1, 2].map(|index| sample(&paths[index], texts[index]));
            circles::circle_violations(&files, ONE_WAY)
        });
        assert_eq!(found[0].len(), found[1].len());
        found.concat().split_off(found[0].len())
    };
    assert_eq!(circle(["use super::b::B;", "use crate::fs::a::A;", ""]).len(), 2);
    assert_eq!(circle(["use super::{b};", "fn f() { super::c::C }", "use super::a;"]).len(), 3);
    assert_none(&circle(["use super::b::B;", "use super::c;", ""]));
    assert_none(&circle(["use super::b;", "#[cfg(test)] mod tests { use crate::fs::a; }", ""]));
    assert_none(&circle(["", "", "use super::super::fs; mod d { use super::super::c; }"]));
}

#[test]
fn files_of_this_machine_above_the_byte_seam_are_flagged() {
    let found = |path: &str, text: &str| seam::seam_violations(&[sample(path, text)]).len();
    for text in [
        "use std::fs;",
        "fn f() { std::fs::metadata(path) }",
        "use std::os::unix::fs::MetadataExt;",
        "use nix::sys::stat::stat;",
        "use crate::source::{LocalFile, Source};",
        "fn f() { tensorfs::internal::source::FileSystem::at(path) }",
    ] {
        assert_eq!(found("src/checkpoint/tree.rs", text), 1, "{text}");
        assert_eq!(found("mount/src/fs/live.rs", text), 1, "{text}");
        assert_eq!(found("src/source/mod.rs", text), 0, "{text}");
        assert_eq!(found("src/loader/cufile.rs", text), 0, "{text}");
    }
    let tested = "#[cfg(test)] mod tests { use std::fs; }";
    assert_eq!(found("src/checkpoint/tree.rs", tested), 0);
    assert_eq!(found("src/checkpoint/tree.rs", "use crate::source::Source; use crate::fs;"), 0);
    assert_eq!(found("src/loader/cufile.rs", "//! x"), 1, "no exception any more");
}

#[test]
fn test_module_in_a_file_of_its_own_is_left_out_of_the_ranks() {
    let files = [
        sample("src/catalog/mod.rs", "//! x\n#[cfg(test)]\nmod tests;"),
        sample("src/catalog/tests.rs", "//! x\nuse crate::verify::verify;"),
    ];
    assert_none(&rank_violations(&files));
    let files =
        [sample("src/catalog/mod.rs", "mod tests;"), sample(&files[1].path, &files[1].text)];
    assert_eq!(rank_violations(&files).len(), 1);
}

#[test]
fn crate_outside_its_home_is_flagged() {
    for (path, text) in [
        ("mount/src/main.rs", "use fuser::MountOption;"),
        ("mount/src/main.rs", "fn f() { ::fuser::mount2() }"),
        ("src/loader.rs", "use cudarc;"),
        ("src/io/pread.rs", "use {std::io, io_uring::IoUring};"),
        ("src/catalog.rs", "#[derive(bincode::Encode)] struct A;"),
        ("src/reader.rs", "fn f(c: Option<lru::LruCache<u8, u8>>) {}"),
        ("src/layout.rs", "use clap::Parser;"),
        ("src/layout.rs", "#[pyo3] fn f() {}"),
        ("src/layout.rs", "extern crate libc;"),
    ] {
        assert_eq!(crate_home_violations(&[sample(path, text)]).len(), 1, "{path}: {text}");
    }
}

#[test]
fn crate_in_its_home_and_words_spelled_like_a_crate_pass() {
    for (path, text) in [
        ("mount/src/fs/adapter.rs", "use fuser::Filesystem;"),
        ("src/index/mod.rs", "use bincode::config;"),
        ("src/index/encode.rs", "use bincode::config;"),
        ("src/io/mod.rs", "fn io_uring(lru: u8) { self.lru; /* fuser::x */ \"clap\"; }"),
        ("src/reader.rs", "fn f() { Vec::<u8>::new(); <A as B>::lru(); crate::cache::lru(); }"),
        ("mount/src/cli/args.rs", "use clap::Parser;"),
    ] {
        assert_none(&crate_home_violations(&[sample(path, text)]));
    }
}

#[test]
fn effects_in_a_pure_module_are_flagged() {
    for (path, text) in [
        ("src/format/dcp.rs", "use std::{collections::BTreeMap, fs::File};"),
        ("src/catalog.rs", "fn f() { std::thread::spawn(g); }"),
        ("src/plan/mod.rs", "use std::fs;"),
        ("src/prefetch.rs", "use std as world;"),
        ("src/view.rs", "fn f() { libc::getpid(); }"),
    ] {
        assert_eq!(effect_violations(&[sample(path, text)]).len(), 1, "{path}: {text}");
    }
    for (path, text) in [
        ("src/catalog.rs", "#[cfg(test)] mod tests { use std::fs; }"),
        ("src/catalog.rs", "use std::io::Read; fn f(fs: u8) { fs::read(); }"),
        ("src/source/mod.rs", "use std::fs;"),
    ] {
        assert_none(&effect_violations(&[sample(path, text)]));
    }
}

#[test]
fn unsafe_elsewhere_is_flagged_and_the_word_in_text_is_not() {
    let text = "#![deny(unsafe_op_in_unsafe_fn)] // unsafe\nconst A: &str = \"unsafe\";";
    assert_none(&unsafe_violations(&[sample("src/layout.rs", text)]));
    let block = "fn f() {\n unsafe { g() } }";
    assert_none(&unsafe_violations(&[sample("src/io/uring.rs", block)]));
    let found = unsafe_violations(&[sample("src/io/pread.rs", block)]);
    assert!(found[0].starts_with("src/io/pread.rs:2: "), "{found:?}");
}

#[test]
fn missing_header_foreign_character_and_long_file_are_flagged() {
    let long = "//! x\n".repeat(LINES_MAX + 1);
    assert_eq!(length_violations(&[sample("src/a.rs", &long)]).len(), 1);
    assert_none(&length_violations(&[sample("src/a.rs", &long[6..])]));
    assert_eq!(header_violations(&[sample("mount/src/a.rs", "use std::io;\n//! x")]).len(), 1);
    let found = ascii_violations(&[sample("README.md", "a\nb \u{2014} c")]);
    assert_eq!(found, ["README.md:2: U+2014 is not ASCII: write it as an escape"]);
}

#[test]
fn unfinished_work_is_flagged_and_its_mention_in_text_is_not() {
    let comment = format!("// {}: later", concat!("FIX", "ME"));
    for text in [
        "fn f() { todo!() }",
        "fn f() { unimplemented!(\"x\") }",
        "fn f() { dbg!(x); }",
        "#[test]\n#[ignore]\nfn f() {}",
        "#[ignore = \"slow\"] fn f() {}",
        "#[cfg_attr(miri, ignore)] fn f() {}",
        comment.as_str(),
    ] {
        assert_eq!(unfinished_violations(&[sample("tests/a.rs", text)]).len(), 1, "{text}");
    }
    let text = "// todo!() and #[ignore] are refused\nfn ignore(todo: u8) { todo(1); \"dbg!(\"; }";
    assert_none(&unfinished_violations(&[sample("tests/a.rs", text)]));
}

#[test]
fn names_shown_raw_and_streams_written_by_anybody_are_flagged() {
    for text in [
        "fn f(p: &Path) { format!(\"{}\", p.display()); }",
        "fn f() { println!(\"x\"); }",
        "fn f() { eprintln!(\"x\"); }",
        "fn f() { writeln!(io::stderr(), \"x\"); }",
        "fn f() { io::stdout().lock(); }",
    ] {
        assert_eq!(
            raw_name_violations(&[sample("mount/src/fs/inodes.rs", text)]).len(),
            1,
            "{text}"
        );
    }
    for text in [
        "#[cfg(test)]\nmod tests { fn f(p: &Path) { p.display(); println!(\"x\"); } }",
        "fn display() { command.stdout(Stdio::null()).stderr(log); display(); }",
    ] {
        assert_none(&raw_name_violations(&[sample("src/a.rs", text)]));
    }
    assert_none(&raw_name_violations(&[sample("mount/src/log.rs", "fn f() { io::stderr(); }")]));
}

#[test]
fn empty_names_are_flagged_as_file_folder_and_inline_module() {
    for (path, text) in [
        ("src/io/util.rs", "//! x"),
        ("mount/src/common/mod.rs", "//! x"),
        ("src/io/mod.rs", "mod helpers { }"),
    ] {
        assert_eq!(name_violations(&[sample(path, text)]).len(), 1, "{path}");
    }
    assert_none(&name_violations(&[sample("mount/src/cli/mount_helper.rs", "mod utilisation;")]));
}

#[test]
fn glob_of_the_parent_is_flagged_outside_tests() {
    for text in ["use super::*;", "mod a { use super::super::*; }", "use super::{self, *};"] {
        assert_eq!(glob_violations(&[sample("src/layout.rs", text)]).len(), 1, "{text}");
    }
    for text in ["#[cfg(test)]\nmod tests { use super::*; }", "use super::dcp::*;"] {
        assert_none(&glob_violations(&[sample("src/format/mod.rs", text)]));
    }
}

#[test]
fn scanner_steps_over_comments_strings_chars_and_lifetimes() {
    let text = "a /* /* b */ c */ d // e\n'f' 'g '\\'' b'h' b\"i\\\"\" r#\"j\"# br\"k\" r#l m'\"'n";
    let words: Vec<_> = tokens(text).iter().filter(|t| t.is_word()).map(|t| t.text).collect();
    assert_eq!(words, ["a", "d", "l", "m", "n"]);
}

#[test]
fn sentences_that_are_riddles_are_flagged_and_plain_ones_pass() {
    let faults = [
        ("src/io/mod.rs", "/// The same; that it is unavailable is said louder."),
        ("src/io/mod.rs", "// Reads go on.\n// What is asked for comes first."),
        ("src/io/mod.rs", "/// Tried again\n/// for want of memory."),
        ("src/io/mod.rs", "fn f() -> &'static str { \"io_uring is not to be had\" }"),
        ("src/io/mod.rs", "/// By device.\nqueues: u8,"),
        ("src/io/mod.rs", "// SAFETY: like the one above."),
        ("python/x.py", "def f():\n    \"\"\"Whoever asks waits.\"\"\"\n"),
        ("python/x.py", "# Likewise for two.\n"),
        ("docs/x.md", "First.\n\n- Of two, one.\n"),
    ];
    for (path, text) in faults {
        assert_eq!(prose::prose_violations(&[sample(path, text)], &[]).len(), 1, "{text}");
        assert!(
            prose::prose_violations(&[sample(path, text)], &["src/", "python/", "docs/"])
                .is_empty()
        );
    }
    let plain = [
        (
            "src/io/mod.rs",
            "/// Queues, by device.\n/// Retries of a submission that failed with ENOMEM.",
        ),
        (
            "src/io/mod.rs",
            "/// ```\n/// let what = 1; // What it is.\n/// ```\n/// Number of reads.",
        ),
        ("src/io/mod.rs", "// SAFETY: the pointer lies within `region`, which outlives the call."),
        ("docs/x.md", "## What is it?\n\n```sh\n# Likewise\n```\n\n| Of | a table |\n"),
        ("python/x.py", "x = 'What is it. Likewise'\n"),
    ];
    for (path, text) in plain {
        let found = prose::prose_violations(&[sample(path, text)], &[]);
        assert!(found.is_empty(), "{text}: {found:?}");
    }
}

#[test]
fn type_names_that_stand_twice_in_a_crate_are_flagged() {
    let twice = |a: &str, b: &str| {
        let files = [sample("src/io/mod.rs", a), sample("src/cache.rs", b)];
        names::doubled_name_violations(&files).len()
    };
    assert_eq!(twice("struct Job;", "pub(crate) enum Job { A }"), 1);
    assert_eq!(twice("mod x { pub struct Job; }", "type Job = u8;"), 1);
    assert_eq!(twice("pub struct State;", "pub(crate) struct State;"), 1);
    assert_eq!(twice("struct State;", "struct State { a: u8 }"), 0);
    assert_eq!(twice("impl A { type Job = u8; }", "impl B { type Job = u8; }"), 0);
    assert_eq!(twice("struct Job;", "#[cfg(test)] mod tests { struct Job; }"), 0);
    assert_eq!(twice("struct Job;", "#[cfg(not(feature = \"x\"))]\npub enum Job {}"), 0);
    assert_eq!(twice("struct Job;", "#[derive(Debug)]\npub enum Job {}"), 1);
    let crates = [sample("src/io/mod.rs", "struct Job;"), sample("mount/src/fs.rs", "struct Job;")];
    assert!(names::doubled_name_violations(&crates).is_empty());
}

#[test]
fn public_types_without_an_example_are_flagged() {
    let missing = |text: &str| {
        let lib = sample("src/lib.rs", "mod io;\npub use io::{Fetch, Read};\n");
        let fetch = sample(
            "src/io/a.rs",
            "/// One.\n///\n/// ```\n/// x();\n/// ```\n#[derive(Debug)]\npub enum Fetch {}",
        );
        api::missing_example_violations(&[lib, fetch, sample("src/io/mod.rs", text)]).len()
    };
    assert_eq!(missing("/// ```\n/// y();\n/// ```\npub struct Read<'a>(&'a u8);"), 0);
    assert_eq!(missing("/// Two.\npub struct Read;"), 1);
    assert_eq!(missing("/// ```\n/// y();\n/// ```\nfn f() {}\npub struct Read;"), 1);
    assert_eq!(missing(""), 1);
}

#[test]
fn names_that_are_bound_anew_from_their_own_value_are_flagged() {
    let faults = |text: &str| {
        let file = sample("src/io/mod.rs", &format!("fn f() {{ {text} }}"));
        bindings::binding_violations(&[file], &[]).len()
    };
    for text in [
        "let x = a(); let x = x?;",
        "let mut x = a();\nx.push(1);\nlet x: Vec<_> = b(|y| {\n y + x.len() });",
        "let x = a(); let x = x?; let y = 1;",
        "let x: [u8; 2] = a(); if b { c() } let x = 0..x;",
        "let x = A { b }; let x = A { b, ..x };",
        "let a = || { let x = 1; let x = x + 1; x };",
        "let x = a(); let x = if b { x } else { c };",
    ] {
        assert_eq!(faults(text), 1, "not flagged: {text}");
    }
    assert_eq!(faults("let x = a(); let x = b(x); let x = c(x);"), 2);
    for text in [
        "let x = a(); let x = b();",
        "let x = a(); let x = b.x; let x = c.x(); let x = x::d(); let x = A { x: 1 };",
        "let x = a(); { let x = x.clone(); b(move || x) }",
        "let a = { let x = 1; x }; let b = { let x = 2; x };",
        "if a { let x = 1; } let x = b(x);",
        "let x = a(); let Some(x) = x else { return }; let (x, y) = (x.b, x.c);",
        "let x = a(); // let x = x?;\nb(\"let x = x;\");",
    ] {
        assert_eq!(faults(text), 0, "flagged: {text}");
    }
}

#[test]
fn tuples_as_parameters_of_functions_are_flagged() {
    let faults = |path: &str, text: &str| {
        bindings::binding_violations(&[sample(path, text)], &["src/io/"]).len()
    };
    for text in [
        "fn f((a, b): (u8, u8)) {}",
        "impl A { fn f(&self, a: u8, (b, c): &(u8, u8)) -> u8 { b } }",
        "fn f<T, F: Fn(T) -> (u8, u8)>(a: T,\n    (b, c): Pair,\n) {}",
        "fn f(&(a, b): &(u8, u8)) {}",
    ] {
        assert_eq!(faults("src/cache.rs", text), 1, "not flagged: {text}");
        assert_eq!(faults("src/io/mod.rs", text), 0, "the file is listed");
    }
    for text in [
        "fn f(a: (u8, u8), b: fn((u8, u8)) -> u8, c: HashMap<u8, (u8, u8)>) {}",
        "fn f(a: &[(u8, u8)]) { let g = |(b, c): (u8, u8)| b + c; }",
        "proptest! { fn f((a, b) in pairs(), c in 0..2) {} }",
        "fn f(Range { start, end }: Range<u64>) {}",
    ] {
        assert_eq!(faults("src/cache.rs", text), 0, "flagged: {text}");
    }
}
