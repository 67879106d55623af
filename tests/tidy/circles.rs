//! Files that import each other in a circle.

use std::collections::BTreeSet;

use super::scan::{below_crate_root, code_paths};
use super::{SourceFile, compiled_files};

/// The imports that close a circle of files below each of `folders`.
pub(crate) fn circle_violations(files: &[SourceFile], folders: &[&str]) -> Vec<String> {
    folders.iter().flat_map(|folder| circles_below(files, folder)).collect()
}

fn circles_below(files: &[SourceFile], folder: &str) -> Vec<String> {
    let compiled = compiled_files(files, folder);
    let modules: Vec<_> = compiled.iter().map(|(file, _)| file.module()).collect();
    // The file that holds `target` is the longest module above it. Parents and children do not count.
    let imported = |importer: &[String], target: &[String]| {
        let holders = (0..modules.len()).filter(|&index| target.starts_with(&modules[index]));
        holders.max_by_key(|&index| modules[index].len()).filter(|&index| {
            !modules[index].starts_with(importer) && !importer.starts_with(&modules[index])
        })
    };
    let imports = compiled.iter().zip(&modules).map(|((_, tokens), module)| {
        let paths = code_paths(tokens);
        let own = paths.iter().filter(|path| folder == "src/" || path.segments[0] != "tensorfs");
        let targets = own.filter_map(|path| {
            Some((imported(module, &below_crate_root(path, module)?)?, path.line))
        });
        targets.collect::<Vec<_>>()
    });
    let imports: Vec<_> = imports.collect();
    let mut violations = Vec::new();
    for (index, (file, _)) in compiled.iter().enumerate() {
        for &(next, line) in &imports[index] {
            if reaches(&imports, next, index) {
                let what = format!("closes a circle of imports with {}", compiled[next].0.path);
                violations.push(file.violation(line, &what));
            }
        }
    }
    violations
}

/// Whether file `from` imports file `to`, directly or through other files.
fn reaches(imports: &[Vec<(usize, usize)>], from: usize, to: usize) -> bool {
    let (mut seen, mut open) = (BTreeSet::from([from]), vec![from]);
    while let Some(index) = open.pop() {
        if index == to {
            return true;
        }
        open.extend(imports[index].iter().map(|(next, _)| *next).filter(|next| seen.insert(*next)));
    }
    false
}
