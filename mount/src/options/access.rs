//! Rules that give parts of a mount to users and groups: `access=GLOB:OWNER:GROUP:MODE`.

use std::path::Path;

use glob::{MatchOptions, Pattern};
use nix::unistd::{Group, User};
use tensorfs::internal::format::names;

/// The format of the option's value, for errors.
const EXPECTED: &str = "GLOB:OWNER:GROUP:MODE, as in team-a/**:root:team-a:0750";

/// A `*` matches a part of a single path component.
const MATCH: MatchOptions = MatchOptions {
    case_sensitive: true,
    require_literal_separator: true,
    require_literal_leading_dot: false,
};

/// A rule: the paths that it applies to, and their owner, group and permission bits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AccessRule {
    pattern: Pattern,
    /// For the glob `DIR/**`: the folder DIR, to which the rule applies as well.
    folder: Option<Pattern>,
    /// Owner. `None` means the owner of the mount.
    pub owner: Option<u32>,
    /// Group. `None` means the group of the mount.
    pub group: Option<u32>,
    /// Permission bits of folders. `None` means the permission bits of the mount. Files get the
    /// same bits without `x`.
    pub mode: Option<u32>,
}

impl AccessRule {
    /// Parses the value of the option. All parts except the first may be empty.
    ///
    /// # Errors
    /// The expected format.
    pub(crate) fn parse(text: &str) -> Result<AccessRule, String> {
        let parts: Vec<&str> = text.rsplitn(4, ':').collect();
        let [mode, group, owner, glob] = parts.as_slice() else { return Err(EXPECTED.to_owned()) };
        let mode = Some(*mode).filter(|mode| !mode.is_empty()).map(mode_of).transpose()?;
        let owner =
            id_of(owner, "a user", |name| Ok(User::from_name(name)?.map(|u| u.uid.as_raw())));
        let group =
            id_of(group, "a group", |name| Ok(Group::from_name(name)?.map(|g| g.gid.as_raw())));
        let folder = glob.strip_suffix("/**").and_then(|folder| Pattern::new(folder).ok());
        Ok(AccessRule { pattern: pattern_of(glob)?, folder, owner: owner?, group: group?, mode })
    }

    /// Whether the rule applies to `path` in the mount. `DIR/**` also applies to DIR. Only the glob
    /// `.` applies to the root of the mount.
    pub(crate) fn matches(&self, path: &Path) -> bool {
        let pattern = self.pattern.as_str();
        if path.as_os_str().is_empty() || pattern == "." {
            return path.as_os_str().is_empty() && pattern == ".";
        }
        // Bytes of a name that are not UTF-8 become a placeholder character, so the other
        // characters of the path still match.
        let text = path.to_string_lossy();
        let patterns = [Some(&self.pattern), self.folder.as_ref()];
        patterns.into_iter().flatten().any(|pattern| pattern.matches_with(&text, MATCH))
    }

    /// Whether the glob names weight files, which a mount may merge into other files.
    pub(crate) fn is_about_weights(&self) -> bool {
        let name = self.glob().rsplit('/').next().unwrap_or_default();
        names::is_weights(name) || names::weight_map_output(name).is_some()
    }

    /// The glob of the rule.
    pub(crate) fn glob(&self) -> &str {
        self.pattern.as_str()
    }
}

fn pattern_of(glob: &str) -> Result<Pattern, String> {
    let is_plain = |part: &str| !part.is_empty() && part != "..";
    if glob.starts_with('/') || !glob.split('/').all(is_plain) {
        return Err(format!("{EXPECTED}; GLOB is a path in the mount, without `/` at its ends"));
    }
    Pattern::new(glob).map_err(|e| format!("{EXPECTED}; GLOB: {}", e.msg))
}

fn mode_of(text: &str) -> Result<u32, String> {
    let is_octal = text.bytes().all(|byte| matches!(byte, b'0'..=b'7'));
    let mode = u32::from_str_radix(text, 8).ok().filter(|mode| is_octal && *mode <= 0o777);
    mode.ok_or_else(|| format!("{EXPECTED}; MODE is an octal number up to 777"))
}

fn id_of(
    text: &str,
    kind: &str,
    find: impl FnOnce(&str) -> nix::Result<Option<u32>>,
) -> Result<Option<u32>, String> {
    if text.is_empty() {
        return Ok(None);
    }
    // The largest number means "no one" to the kernel.
    if let Ok(number) = text.parse::<u32>()
        && number < u32::MAX
    {
        return Ok(Some(number));
    }
    let unknown = || format!("{kind} that exists here, not `{}`", text.escape_debug());
    find(text).ok().flatten().map(Some).ok_or_else(unknown)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matches(glob: &str, path: &str) -> bool {
        AccessRule::parse(&format!("{glob}:::0700")).unwrap().matches(Path::new(path))
    }

    #[test]
    fn a_folder_with_two_stars_is_itself_and_all_below_it() {
        for path in ["team-a", "team-a/x", "team-a/x/y.safetensors"] {
            assert!(matches("team-a/**", path), "{path}");
        }
        for path in ["team-ab", "x/team-a", "", "team"] {
            assert!(!matches("team-a/**", path), "{path}");
        }
        assert!(matches("*/private/**", "a/private") && matches("*/private/**", "a/private/b"));
        assert!(!matches("*/private/**", "a/b/private"));
        assert!(matches("**", "a/b") && !matches("**", ""));
        assert!(matches(".", "") && !matches(".", "a"));
        assert!(matches("team-?", "team-b") && !matches("team-*", "team-b/c"));
    }

    #[test]
    fn owners_groups_and_modes_are_names_or_numbers_and_may_be_left_out() {
        let rule = AccessRule::parse("a:b/**:root:7:0750").unwrap();
        assert_eq!((rule.owner, rule.group, rule.mode), (Some(0), Some(7), Some(0o750)));
        assert!(rule.matches(Path::new("a:b/c")));
        let rule = AccessRule::parse("a:::").unwrap();
        assert_eq!((rule.owner, rule.group, rule.mode), (None, None, None));
    }

    #[test]
    fn a_bad_rule_is_refused_with_what_it_should_be() {
        for (text, part) in [
            ("a", "GLOB:OWNER"),
            ("/a:::", "without `/`"),
            ("a/../b:::", "a path in the mount"),
            (":::", "a path in the mount"),
            ("a[:::", "GLOB: "),
            ("a:::0800", "octal"),
            ("a:::1777", "octal"),
            ("a:::+77", "octal"),
            ("a:no-such-user::", "a user that exists"),
            ("a::no-such-group:", "a group that exists"),
            ("a:4294967295::", "a user that exists"),
        ] {
            let error = AccessRule::parse(text).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
