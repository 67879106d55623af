//! Models of the local hub cache, named `ORG/NAME`. Such a name is used only if no path of this name exists.
//! Nothing is downloaded.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result, shown, shown_path};
use crate::format::names::{HubId, hub_model};

/// The variable that sets the folder of the cache, for messages.
const CACHE_VARIABLE: &str = "HF_HUB_CACHE";

/// The revision that is used if the name has none.
const MAIN: &str = "main";

/// Maximum number of revisions that a message names.
const NAMED_MAX: usize = 6;

/// Maximum depth of the files of references. An example is `refs/pr/1`.
const REFS_DEPTH: usize = 4;

/// Whether `source` has the form `ORG/NAME` or `ORG/NAME@REVISION` of a model of the hub. Accesses no file system.
pub fn has_form(source: &Path) -> bool {
    source.to_str().and_then(HubId::parse).is_some()
}

/// The path that `source` stands for. If `source` has the form of a model name and no path of this name exists, the
/// result is the snapshot of the model in the hub cache of this user. Otherwise `source` is returned unchanged, without
/// a check.
///
/// # Errors
/// If neither such a path nor such a model exists, or if the model does not have the revision.
pub fn resolve(source: &Path) -> Result<PathBuf> {
    let Some(id) = source.to_str().and_then(HubId::parse) else { return Ok(source.to_owned()) };
    match fs::symlink_metadata(source) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        _ => return Ok(source.to_owned()),
    }
    in_cache(source, id, &cache_of(&|name| variable(name).map(PathBuf::from)))
}

/// The value of the environment variable `name`. If `HOME` is not set, its value is the home folder in the passwd
/// database, because systemd sets `HOME` only for units with `User=`.
pub(super) fn variable(name: &str) -> Option<OsString> {
    let of_passwd = || if name == "HOME" { std::env::home_dir() } else { None };
    std::env::var_os(name).or_else(|| of_passwd().map(PathBuf::into_os_string))
}

/// The folder of the hub cache. It follows from the environment variables by the rules of the Python package
/// huggingface_hub.
pub(super) fn cache_of(variable: &dyn Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    let variable = |name| variable(name).filter(|value| !value.as_os_str().is_empty());
    let home = || variable("HOME");
    let expanded = |path: PathBuf| match path.strip_prefix("~") {
        Ok(rest) => home().map_or_else(|| path.clone(), |home| home.join(rest)),
        Err(_) => path,
    };
    let given = [CACHE_VARIABLE, "HUGGINGFACE_HUB_CACHE"].into_iter().find_map(variable);
    let of_home = || variable("HF_HOME").map(|folder| folder.join("hub"));
    let of_xdg = || variable("XDG_CACHE_HOME").map(|folder| folder.join("huggingface/hub"));
    let of_user = || home().map(|home| home.join(".cache/huggingface/hub"));
    given.or_else(of_home).or_else(of_xdg).map(expanded).or_else(of_user)
}

/// The snapshot of the model `id` in `cache`. `source` is the name as the user wrote it, for messages.
fn in_cache(source: &Path, id: HubId<'_>, cache: &Option<PathBuf>) -> Result<PathBuf> {
    let missing =
        |why: String| Err(Error::io(source, "open", io::Error::new(io::ErrorKind::NotFound, why)));
    let Some(cache) = cache else {
        return missing(format!(
            "No such file or directory, and no hub cache: set HOME or {CACHE_VARIABLE}"
        ));
    };
    let model = cache.join(hub_model(&id.id));
    if !model.is_dir() {
        return missing(format!(
            "No such file or directory, and no such model in the hub cache {} ({CACHE_VARIABLE})",
            shown_path(cache)
        ));
    }
    let revision = id.revision.unwrap_or(MAIN);
    let snapshots = model.join("snapshots");
    let commit = read_ref(&model.join("refs").join(revision));
    let snapshot = match &commit {
        Some(commit) => Some(snapshots.join(commit)),
        // The folder of a snapshot has the name of its commit, which contains no slash.
        None if !revision.contains('/') => Some(snapshots.join(revision)),
        None => None,
    };
    if let Some(snapshot) = snapshot.filter(|snapshot| snapshot.is_dir()) {
        return Ok(snapshot);
    }
    let (model, revision) = (shown_path(&model), shown(revision));
    let revisions = revisions(&cache.join(hub_model(&id.id)));
    let others = match revisions.as_slice() {
        [] => "it has none".to_owned(),
        [..] => {
            let more = if revisions.len() > NAMED_MAX { ", ..." } else { "" };
            let first = &revisions[..revisions.len().min(NAMED_MAX)];
            format!("it has {}{more}: add one as @REVISION", shown(&first.join(", ")))
        }
    };
    missing(match commit {
        Some(commit) => format!(
            "the revision {revision} is the commit {}, of which {model} has no snapshot; {others}",
            shown(&commit)
        ),
        None => format!("{model} has no revision {revision}; {others}"),
    })
}

/// The commit in a reference file of the hub cache.
pub(super) fn read_ref(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let commit = text.trim();
    let is_name = !commit.is_empty() && !commit.contains(['/', '\0']) && !commit.starts_with('.');
    is_name.then(|| commit.to_owned())
}

/// The revisions of `model` that have a snapshot. First the names of references, then the commits that no
/// reference names.
fn revisions(model: &Path) -> Vec<String> {
    let names_in = |folder: &Path| -> Vec<String> {
        let entries = fs::read_dir(folder).into_iter().flatten().filter_map(io::Result::ok);
        let mut names: Vec<String> =
            entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort();
        names
    };
    let mut commits = names_in(&model.join("snapshots"));
    let (mut found, mut named) = (Vec::new(), Vec::new());
    let mut folders = vec![(String::new(), 0)];
    while let Some((prefix, depth)) = folders.pop() {
        for name in names_in(&model.join("refs").join(&prefix)) {
            let name = if prefix.is_empty() { name } else { format!("{prefix}/{name}") };
            match read_ref(&model.join("refs").join(&name)) {
                Some(commit) if commits.contains(&commit) => {
                    found.push(name);
                    named.push(commit);
                }
                Some(_) => {}
                None if depth < REFS_DEPTH => folders.push((name, depth + 1)),
                None => {}
            }
        }
    }
    commits.retain(|commit| !named.contains(commit));
    found.extend(commits);
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_is_where_huggingface_hub_has_it() {
        let all = [
            (CACHE_VARIABLE, "/c"),
            ("HUGGINGFACE_HUB_CACHE", "~/l"),
            ("HF_HOME", "/h"),
            ("XDG_CACHE_HOME", "/x"),
            ("HOME", "/u"),
        ];
        let expected = ["/c", "/u/l", "/h/hub", "/x/huggingface/hub", "/u/.cache/huggingface/hub"];
        for (first, expected) in expected.into_iter().enumerate() {
            let variable = |name: &str| {
                let position = all.iter().position(|(other, _)| *other == name)?;
                // The variables before `first` are set to the empty text, which counts as unset.
                Some(PathBuf::from(if position < first { "" } else { all[position].1 }))
            };
            assert_eq!(cache_of(&variable), Some(expected.into()));
        }
        assert_eq!(cache_of(&|_| None), None);
    }

    #[test]
    fn a_model_is_its_snapshot_and_an_error_says_where_was_looked_and_what_there_is() {
        let cache = tempfile::tempdir().unwrap();
        let model = cache.path().join("models--a--b");
        let (one, two) = ("1".repeat(40), "2".repeat(40));
        for folder in ["refs/refs/pr", &format!("snapshots/{one}"), &format!("snapshots/{two}")] {
            fs::create_dir_all(model.join(folder)).unwrap();
        }
        fs::write(model.join("refs/main"), format!("{one}\n")).unwrap();
        fs::write(model.join("refs/refs/pr/7"), &two).unwrap();
        fs::write(model.join("refs/gone"), "3".repeat(40)).unwrap();
        fs::write(model.join("refs/bad"), "../../..").unwrap();
        let folder = Some(cache.path().to_owned());
        let find = |text: &str| {
            let found = in_cache(Path::new(text), HubId::parse(text).unwrap(), &folder);
            found.map_err(|error| error.to_string())
        };
        let snapshot = |commit: &str| Ok(model.join("snapshots").join(commit));
        assert_eq!(find("a/b"), snapshot(&one));
        assert_eq!(find("a/b@main"), snapshot(&one));
        assert_eq!(find("a/b@refs/pr/7"), snapshot(&two));
        assert_eq!(find(&format!("a/b@{two}")), snapshot(&two));
        let error = find("a/b@v2").unwrap_err();
        let words = ["a/b@v2: ", "no revision v2", "main, refs/pr/7: add one as @REVISION"];
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
        assert!(find("a/b@gone").unwrap_err().contains(&format!("commit {}", "3".repeat(40))));
        for text in ["a/b@bad", "a/b@snapshots/x", "a/b@2222"] {
            assert!(find(text).unwrap_err().contains("has no revision"), "{text}");
        }
        let error = find("a/c").unwrap_err();
        let path = cache.path().to_str().unwrap();
        assert!(error.contains("No such file or directory") && error.contains(path), "{error}");
        let error = in_cache(Path::new("a/b"), HubId::parse("a/b").unwrap(), &None).unwrap_err();
        assert!(error.to_string().contains("set HOME or HF_HUB_CACHE"), "{error}");
    }

    #[test]
    fn a_path_wins_and_other_forms_are_not_looked_at() {
        for path in ["tests/fixtures", "/x/y", "./a/b", "nowhere", "a/b/c"] {
            assert_eq!(resolve(Path::new(path)).unwrap(), Path::new(path));
        }
        assert!(has_form(Path::new("a/b")) && !has_form(Path::new("a/b/")));
    }
}
