//! Dependencies of this repository, checked against the lock file: origins, licences, bans, and the
//! packages that the core may reach.
//!
//! The tests read `cargo metadata`, so they check indirect dependencies as well as direct ones.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

use serde_json::Value;

const CRATES_IO: &str = "registry+https://github.com/rust-lang/crates.io-index";

/// Licences that ask for no more than Apache-2.0 does: keep the notice.
const LICENSES: &[&str] = &[
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "ISC",
    "MIT",
    "MIT-0",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

/// Further licences for one package each, as (package, licence, why).
const LICENSE_EXCEPTIONS: &[(&str, &str, &str)] = &[
    ("libfuzzer-sys", "NCSA", "links into the fuzz targets only, which are never shipped"),
    ("webpki-root-certs", "CDLA-Permissive-2.0", "is built for Android and Windows only"),
];

/// Packages that must not come in by any way, with the reason.
const BANNED: &[(&str, &str)] = &[
    ("openssl-sys", "needs a C library of the right version on every machine: use rustls"),
    ("native-tls", "is openssl on Linux: use rustls"),
    ("aws-lc-sys", "is a large build of C: use ring"),
];

/// Packages held at one version, as (package, version, why).
const PINNED: &[(&str, &str, &str)] = &[(
    "bincode",
    "2.0.1",
    "files are laid out by this release, and another may lay them out differently",
)];

/// Advisories that stand on packages of the tree, as (package, advisory, why it does not matter here).
const ADVISORIES: &[(&str, &str, &str)] = &[(
    "rsa",
    "RUSTSEC-2023-0071",
    "the time of an operation tells of the key, to somebody who chooses what is decrypted. Here nothing is \
     decrypted. The key of a service account of Google, or of a certificate of Azure, signs a text of our \
     own with random blinding, on this machine, once an hour. reqsign-core, reqsign-google and \
     reqsign-azure-storage need the package, and there is no release without the fault",
)];

/// Packages that the library must build without: FUSE, Python and a command line are for the
/// packages around it, CUDA and HTTP are for builds with the features for them.
const CORE_REACHES_NO: &[&str] = &["fuser", "cudarc", "pyo3", "clap", "reqwest"];

/// Features of the core that reach something of these, as (feature, package).
const CORE_REACHES_BY_FEATURE: &[(&str, &str)] = &[("cuda", "cudarc"), ("remote", "reqwest")];

/// Packages that only the fuzz targets may reach.
const FUZZ_ONLY: &[&str] = &["libfuzzer-sys"];

// ---------------------------------------------------------------------------------------------
// The rules.

#[test]
fn every_dependency_comes_from_crates_io_or_is_a_member() {
    let violations: Vec<_> = packages()
        .iter()
        .filter(|package| !package.is_member && package.source.as_deref() != Some(CRATES_IO))
        .map(|package| format!("{package}: comes from {:?}", package.source))
        .collect();
    assert_none(&violations);
}

#[test]
fn every_license_is_on_the_list() {
    assert_none(&packages().iter().filter_map(license_violation).collect::<Vec<_>>());
}

#[test]
fn every_license_exception_is_still_needed() {
    for (name, license, _) in LICENSE_EXCEPTIONS {
        let needed = packages()
            .iter()
            .filter(|package| package.name == *name)
            .any(|package| package.license.as_deref().is_some_and(|text| text.contains(license)));
        assert!(needed, "no package `{name}` with {license}: remove the exception");
    }
}

#[test]
fn no_banned_package_and_no_other_version_of_a_pinned_one_is_used() {
    let mut violations = Vec::new();
    for package in packages() {
        for (_, why) in BANNED.iter().filter(|(name, _)| package.name == *name) {
            violations.push(format!("{package}: {why}"));
        }
        for (_, version, why) in PINNED.iter().filter(|(name, ..)| package.name == *name) {
            if package.version != *version {
                violations.push(format!("{package}: only {version}: {why}"));
            }
        }
    }
    assert_none(&violations);
}

#[test]
fn every_advisory_is_on_a_package_that_is_still_used() {
    let gone = ADVISORIES.iter().filter(|(name, ..)| packages().iter().all(|p| p.name != *name));
    assert_none(&gone.map(|(name, id, _)| format!("{id}: {name} is gone")).collect::<Vec<_>>());
}

#[test]
fn core_reaches_neither_fuse_nor_cuda_nor_python_nor_a_command_line() {
    let built = packages_of_the_core(&[]);
    assert!(built.contains("serde_json"), "a package that the core needs is not seen: {built:?}");
    for name in CORE_REACHES_NO {
        assert!(
            !built.contains(*name),
            "the core reaches `{name}`: cargo tree -p tensorfs -i {name}"
        );
    }
}

#[test]
fn a_feature_of_the_core_reaches_what_it_is_for_and_nothing_else_of_these() {
    for (feature, package) in CORE_REACHES_BY_FEATURE {
        let built = packages_of_the_core(&["--features", feature]);
        let reached: Vec<_> =
            CORE_REACHES_NO.iter().filter(|name| built.contains(**name)).collect();
        assert_eq!(reached, [package], "feature `{feature}`");
    }
}

#[test]
fn shipped_packages_reach_nothing_that_is_for_fuzzing() {
    let graph = Graph::new();
    for member in packages().iter().filter(|package| package.is_member && package.is_published) {
        for name in FUZZ_ONLY {
            if let Some(chain) = graph.chain(&member.name, name) {
                panic!("`{}` reaches `{name}`: {}", member.name, chain.join(" -> "));
            }
        }
    }
}

#[test]
fn every_member_has_edition_2024_and_the_apache_license() {
    let members: Vec<_> = packages().iter().filter(|package| package.is_member).collect();
    assert!(members.iter().any(|package| package.name == "tensorfs"), "no package `tensorfs`");
    let violations: Vec<_> = members
        .iter()
        .filter(|member| {
            member.edition != "2024" || member.license.as_deref() != Some("Apache-2.0")
        })
        .map(|member| format!("{member}: edition {}, licence {:?}", member.edition, member.license))
        .collect();
    assert_none(&violations);
}

#[test]
fn there_is_one_lock_file() {
    let mut found = Vec::new();
    find_lock_files(root(), &mut found);
    assert_eq!(found, [root().join("Cargo.lock")], "one workspace has one lock file");
}

// ---------------------------------------------------------------------------------------------
// Metadata.

struct Package {
    id: String,
    name: String,
    version: String,
    license: Option<String>,
    source: Option<String>,
    edition: String,
    is_member: bool,
    is_published: bool,
}

impl std::fmt::Display for Package {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.name, self.version)
    }
}

static METADATA: LazyLock<Value> = LazyLock::new(read_metadata);
static PACKAGES: LazyLock<Vec<Package>> = LazyLock::new(read_packages);

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn packages() -> &'static [Package] {
    &PACKAGES
}

/// The output of a cargo command. It is asked without the network first: what this test was built
/// from is on disk already, but packages for other systems may not be.
fn cargo(words: &[&str]) -> Vec<u8> {
    let mut failures = String::new();
    for offline in [true, false] {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(words).arg("--locked").current_dir(root());
        if offline {
            cargo.arg("--offline");
        }
        let output = cargo.output().expect("cargo runs");
        if output.status.success() {
            return output.stdout;
        }
        failures += &format!("{cargo:?}: {}\n", String::from_utf8_lossy(&output.stderr));
    }
    panic!("cargo failed:\n{failures}");
}

fn read_metadata() -> Value {
    let metadata = cargo(&["metadata", "--format-version", "1"]);
    serde_json::from_slice(&metadata).expect("cargo prints JSON")
}

/// Names of the packages that the core is built from by itself: the metadata have the features
/// that the packages around it ask for, too.
fn packages_of_the_core(features: &[&str]) -> BTreeSet<String> {
    let tree = ["tree", "-p", "tensorfs", "--edges", "no-dev", "--prefix", "none"];
    let format = ["--format", "{p}", "--target", "all"];
    let tree = cargo(&[&tree[..], &format[..], features].concat());
    let lines = String::from_utf8(tree).expect("cargo prints text");
    lines.lines().filter_map(|line| line.split(' ').next()).map(str::to_owned).collect()
}

fn read_packages() -> Vec<Package> {
    let members: BTreeSet<&str> =
        array(&METADATA["workspace_members"]).iter().filter_map(Value::as_str).collect();
    let packages: Vec<_> = array(&METADATA["packages"])
        .iter()
        .map(|package| Package {
            id: text(&package["id"]),
            name: text(&package["name"]),
            version: text(&package["version"]),
            license: package["license"].as_str().map(str::to_owned),
            source: package["source"].as_str().map(str::to_owned),
            edition: text(&package["edition"]),
            is_member: members.contains(text(&package["id"]).as_str()),
            // `publish = false` reads as an empty list of registries.
            is_published: package["publish"] != Value::Array(Vec::new()),
        })
        .collect();
    assert!(packages.len() > members.len(), "only members: the dependencies were not resolved");
    packages
}

fn array(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).expect("cargo metadata has this list")
}

fn text(value: &Value) -> String {
    value.as_str().expect("cargo metadata has this string").to_owned()
}

/// Dependencies between packages when the workspace is built: normal and build dependencies, none
/// of tests.
struct Graph {
    names: BTreeMap<String, String>,
    edges: BTreeMap<String, Vec<String>>,
}

impl Graph {
    fn new() -> Self {
        let names = packages().iter().map(|p| (p.id.clone(), p.name.clone())).collect();
        let edges = array(&METADATA["resolve"]["nodes"])
            .iter()
            .map(|node| {
                let targets = array(&node["deps"])
                    .iter()
                    .filter(|dep| array(&dep["dep_kinds"]).iter().any(|k| k["kind"] != "dev"))
                    .map(|dep| text(&dep["pkg"]));
                (text(&node["id"]), targets.collect())
            })
            .collect();
        Graph { names, edges }
    }

    /// A shortest chain of package names from one package to another.
    fn chain(&self, from: &str, to: &str) -> Option<Vec<String>> {
        let starts: Vec<_> = self.names.iter().filter(|(_, name)| *name == from).collect();
        assert!(!starts.is_empty(), "no package `{from}` in the workspace");
        let mut seen: BTreeSet<&str> = starts.iter().map(|(id, _)| id.as_str()).collect();
        let mut queue: Vec<Vec<&str>> = starts.iter().map(|(id, _)| vec![id.as_str()]).collect();
        let mut next = 0;
        while let Some(chain) = queue.get(next).cloned() {
            next += 1;
            let last = chain[chain.len() - 1];
            if self.names.get(last).is_some_and(|name| name == to) {
                return Some(chain.iter().map(|id| self.names[*id].clone()).collect());
            }
            for target in self.edges.get(last).into_iter().flatten() {
                if seen.insert(target) {
                    queue.push(chain.iter().copied().chain([target.as_str()]).collect());
                }
            }
        }
        None
    }
}

fn find_lock_files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("readable folder") {
        let entry = entry.expect("readable folder");
        let (name, kind) = (entry.file_name(), entry.file_type().expect("known file type"));
        let skipped = name == "target" || name.to_string_lossy().starts_with('.');
        if kind.is_dir() && !skipped {
            find_lock_files(&entry.path(), found);
        } else if name == "Cargo.lock" {
            found.push(entry.path());
        }
    }
}

fn assert_none(violations: &[String]) {
    let list = violations.join("\n  ");
    assert!(violations.is_empty(), "{} violation(s):\n  {list}", violations.len());
}

// ---------------------------------------------------------------------------------------------
// Licence expressions (SPDX).

fn license_violation(package: &Package) -> Option<String> {
    let Some(expression) = &package.license else {
        return Some(format!("{package}: names no licence"));
    };
    let allowed = |license: &str| {
        LICENSES.contains(&license)
            || LICENSE_EXCEPTIONS
                .iter()
                .any(|(name, exception, _)| package.name == *name && license == *exception)
    };
    match satisfiable(expression, &allowed) {
        Ok(true) => None,
        Ok(false) => Some(format!("{package}: `{expression}` is not on the list")),
        Err(why) => Some(format!("{package}: `{expression}`: {why}")),
    }
}

/// Whether the allowed licences satisfy an expression of `OR`, `AND`, `WITH` and parentheses.
/// The old form `MIT/Apache-2.0` means `OR`.
fn satisfiable(expression: &str, allowed: &dyn Fn(&str) -> bool) -> Result<bool, String> {
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let words: Vec<_> = spaced.split_whitespace().collect();
    let mut at = 0;
    let result = any_of(&words, &mut at, allowed)?;
    match words.get(at) {
        None => Ok(result),
        Some(word) => Err(format!("`{word}` is out of place")),
    }
}

fn any_of(words: &[&str], at: &mut usize, allowed: &dyn Fn(&str) -> bool) -> Result<bool, String> {
    let mut result = all_of(words, at, allowed)?;
    while words.get(*at) == Some(&"OR") {
        *at += 1;
        result |= all_of(words, at, allowed)?;
    }
    Ok(result)
}

fn all_of(words: &[&str], at: &mut usize, allowed: &dyn Fn(&str) -> bool) -> Result<bool, String> {
    let mut result = one(words, at, allowed)?;
    while words.get(*at) == Some(&"AND") {
        *at += 1;
        result &= one(words, at, allowed)?;
    }
    Ok(result)
}

fn one(words: &[&str], at: &mut usize, allowed: &dyn Fn(&str) -> bool) -> Result<bool, String> {
    let word = *words.get(*at).ok_or("ends too early")?;
    *at += 1;
    if word == "(" {
        let result = any_of(words, at, allowed)?;
        if words.get(*at) != Some(&")") {
            return Err("a parenthesis stays open".to_owned());
        }
        *at += 1;
        return Ok(result);
    }
    if matches!(word, ")" | "OR" | "AND" | "WITH") {
        return Err(format!("`{word}` is out of place"));
    }
    if words.get(*at) != Some(&"WITH") {
        return Ok(allowed(word));
    }
    let exception = *words.get(*at + 1).ok_or("ends too early")?;
    *at += 2;
    // An exception only gives more rights than the licence it stands with.
    Ok(allowed(word) || allowed(&format!("{word} WITH {exception}")))
}

#[test]
fn license_expressions_are_evaluated_as_spdx_says() {
    let allowed = |license: &str| LICENSES.contains(&license);
    for (expression, expected) in [
        ("MIT", true),
        ("GPL-3.0-only", false),
        ("MIT OR GPL-3.0-only", true),
        ("MIT/GPL-3.0", true),
        ("MIT AND GPL-3.0-only", false),
        ("GPL-2.0-only OR MIT AND Apache-2.0", true),
        ("MIT OR Apache-2.0 AND GPL-2.0-only", true),
        ("(MIT OR Apache-2.0) AND NCSA", false),
        ("(MIT OR Apache-2.0) AND Unicode-3.0", true),
        ("Apache-2.0 WITH LLVM-exception", true),
        ("GPL-2.0-only WITH Classpath-exception-2.0", false),
        ("((MIT))", true),
    ] {
        assert_eq!(satisfiable(expression, &allowed), Ok(expected), "{expression}");
    }
    for expression in ["", "MIT OR", "(MIT", "MIT)", "MIT Apache-2.0", "AND MIT", "MIT WITH"] {
        assert!(satisfiable(expression, &allowed).is_err(), "accepted: {expression:?}");
    }
}

#[test]
fn license_outside_the_list_is_flagged_unless_excepted_for_that_package() {
    let package = |name: &str, license: Option<&str>| Package {
        id: String::new(),
        name: name.to_owned(),
        version: "1.0.0".to_owned(),
        license: license.map(str::to_owned),
        source: None,
        edition: "2021".to_owned(),
        is_member: false,
        is_published: true,
    };
    let expression = Some("(MIT OR Apache-2.0) AND NCSA");
    assert_eq!(license_violation(&package("libfuzzer-sys", expression)), None);
    assert!(license_violation(&package("other", expression)).is_some());
    assert!(license_violation(&package("other", None)).is_some());
}
