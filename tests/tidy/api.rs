//! The public API: the names that `lib.rs` exports at its root.

use super::SourceFile;
use super::scan::{code_paths, tokens, without_test_items};

/// Types of the public API whose documentation has no example.
pub(crate) fn missing_example_violations(files: &[SourceFile]) -> Vec<String> {
    let Some(lib) = files.iter().find(|file| file.path == "src/lib.rs") else {
        return Vec::new();
    };
    let tokens = without_test_items(&tokens(&lib.text));
    let paths = code_paths(&tokens);
    let exported = paths.iter().filter_map(|path| {
        let name = path.imported_as.as_ref()?;
        let module = path.segments.first().filter(|first| *first != "crate" && *first != "std")?;
        Some((module, name, path.line))
    });
    let mut violations = Vec::new();
    for (module, name, line) in exported {
        let own = |file: &&SourceFile| file.path.starts_with(&format!("src/{module}"));
        let docs: Vec<bool> =
            files.iter().filter(own).flat_map(|file| documented(&file.text, name)).collect();
        if docs.is_empty() || docs.contains(&false) {
            violations.push(lib.violation(line, &format!("`{name}` has no example in its docs")));
        }
    }
    violations
}

/// For each public type `name` in `text` whether the comment above it has an example.
fn documented(text: &str, name: &str) -> Vec<bool> {
    let mut example = false;
    let mut found = Vec::new();
    for line in text.lines().map(str::trim_start) {
        if let Some(comment) = line.strip_prefix("///") {
            example |= comment.trim_start().starts_with("```");
            continue;
        }
        let mut words = line.split(|c: char| !c.is_alphanumeric() && c != '_');
        let keyword = (words.next(), words.next());
        if matches!(keyword, (Some("pub"), Some("struct" | "enum" | "type" | "trait")))
            && words.next() == Some(name)
        {
            found.push(example);
        }
        if !line.starts_with('#') {
            example = false;
        }
    }
    found
}
