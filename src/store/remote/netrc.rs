//! Logins for HTTP servers, from the file `.netrc` of the user.

use std::fs::OpenOptions;
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use nix::libc;

use super::credentials::Variable;
use crate::error::{invalid_input, shown_path};

/// Maximum length of the file in bytes.
const LEN_MAX: u64 = 1 << 20;

/// The permission bits of users other than the owner.
const OF_OTHERS: u32 = 0o077;

/// A user name and a password. Never printed.
pub(super) struct Login {
    pub(super) user: String,
    pub(super) password: String,
}

/// The login for `host`, which has no port, from the file that the environment variables name. `is_secure` says that
/// others cannot read the traffic to the host. The `default` entry, which is for all hosts, is used only then.
///
/// # Errors
/// If the entry for the host lacks a value, or if the file in the user's home directory has permissions for others.
pub(super) fn login_for(
    host: &str,
    is_secure: bool,
    variable: Variable<'_>,
) -> io::Result<Option<Login>> {
    let given = |name: &str| variable(name).filter(|value| !value.is_empty());
    let named = given("NETRC").map(PathBuf::from);
    let own = || given("HOME").map(|home| PathBuf::from(home).join(".netrc"));
    let is_named = named.is_some();
    let Some(path) = named.or_else(own) else { return Ok(None) };
    let Some((text, mode)) = text_of(&path) else { return Ok(None) };
    let entry = entry_for(&text, host).filter(|entry| is_secure || entry.host.is_some());
    let Some(entry) = entry else { return Ok(None) };
    let path = shown_path(&path);
    if !is_named && mode & OF_OTHERS != 0 {
        let mode = mode & 0o777;
        let why = format!("{path} has passwords and mode {mode:03o}: chmod 600 {path}");
        return Err(io::Error::new(ErrorKind::PermissionDenied, why));
    }
    match entry.fault {
        Some(fault) => Err(invalid_input(format!(
            "{path}: {fault}: write each value behind its keyword, or in quotes"
        ))),
        None => Ok(Some(Login { user: entry.user, password: entry.password })),
    }
}

/// The text of the file and its mode. `None` if the file cannot be read.
fn text_of(path: &Path) -> Option<(String, u32)> {
    // With `O_NONBLOCK` the open does not wait, even if the path is a FIFO.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).ok()?;
    let mode = file.metadata().ok().filter(|meta| meta.is_file())?.permissions().mode();
    let mut text = String::new();
    file.take(LEN_MAX).read_to_string(&mut text).ok()?;
    Some((text, mode))
}

/// One entry of the file.
#[derive(Default)]
struct NetrcEntry {
    /// `None` for a `default` entry, which is for all hosts without an entry of their own. An empty text means
    /// that the host is missing.
    host: Option<String>,
    user: String,
    password: String,
    /// Why the entry is refused. The text contains no word of the file except keywords.
    fault: Option<String>,
}

/// A word of the file.
struct NetrcWord {
    text: String,
    is_quoted: bool,
    /// Whether the closing quote is there.
    is_whole: bool,
}

/// The entry for `host` in the text of the file: the first `machine` entry with this name, or else the `default` entry.
/// An entry without a host name matches every host, because it may be meant for `host`.
fn entry_for(text: &str, host: &str) -> Option<NetrcEntry> {
    let (own, for_all): (Vec<NetrcEntry>, Vec<NetrcEntry>) =
        entries_of(text).into_iter().partition(|entry| entry.host.is_some());
    let is_meant = |entry: &NetrcEntry| {
        let named = entry.host.as_deref().unwrap_or_default();
        named.is_empty() || named.eq_ignore_ascii_case(host)
    };
    own.into_iter().find(is_meant).or_else(|| for_all.into_iter().next())
}

/// The entries of the file. A value has to be on the same line as its keyword.
fn entries_of(text: &str) -> Vec<NetrcEntry> {
    let mut entries: Vec<NetrcEntry> = Vec::new();
    let mut lines = text.lines().zip(1_usize..);
    while let Some((line, number)) = lines.next() {
        let mut rest = line;
        while let Some(word) = next_word(&mut rest) {
            let keyword = if word.is_quoted { "" } else { word.text.as_str() };
            if keyword.starts_with('#') {
                break;
            }
            match keyword {
                "macdef" => {
                    // The definition of a macro ends with an empty line.
                    lines.by_ref().find(|(line, _)| line.is_empty());
                    break;
                }
                "default" => entries.push(NetrcEntry::default()),
                "machine" => {
                    entries.push(NetrcEntry { host: Some(String::new()), ..NetrcEntry::default() })
                }
                "login" | "password" | "account" => {}
                _ => continue,
            }
            if keyword == "default" {
                continue;
            }
            let value = value_at(&mut rest);
            let Some(entry) = entries.last_mut() else { continue };
            match (keyword, value) {
                ("machine", Some(value)) => entry.host = Some(value),
                ("login", Some(value)) => entry.user = value,
                ("password", Some(value)) => entry.password = value,
                (_, Some(_)) => {}
                (_, None) => {
                    let fault = format!("line {number}: `{keyword}` has no value on its line");
                    entry.fault.get_or_insert(fault);
                }
            }
        }
    }
    entries
}

/// The value at the start of `rest`. `None` if the line ends there, or the next word begins another entry.
fn value_at(rest: &mut &str) -> Option<String> {
    let before = *rest;
    let word = next_word(rest)?;
    let is_last = rest.trim_ascii().is_empty();
    match word.text.as_str() {
        "machine" if !word.is_quoted => {
            *rest = before;
            None
        }
        // At the end of a line, the word may also begin the entry for all hosts, whose values are on the next line.
        "default" if !word.is_quoted && is_last => None,
        "" => None,
        _ => word.is_whole.then_some(word.text),
    }
}

/// Takes the first word from `rest`, which then begins after that word.
fn next_word(rest: &mut &str) -> Option<NetrcWord> {
    let start = rest.trim_ascii_start();
    let Some(quoted) = start.strip_prefix('"') else {
        let end = start.find(|c: char| c.is_ascii_whitespace()).unwrap_or(start.len());
        let (text, after) = start.split_at(end);
        *rest = after;
        let word = NetrcWord { text: text.to_owned(), is_quoted: false, is_whole: true };
        return (!text.is_empty()).then_some(word);
    };
    let mut text = String::new();
    let mut chars = quoted.chars();
    let is_whole = loop {
        match chars.next() {
            None => break false,
            Some('"') => break true,
            Some('\\') => text.extend(chars.next()),
            Some(c) => text.push(c),
        }
    };
    *rest = chars.as_str();
    Some(NetrcWord { text, is_quoted: true, is_whole })
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::fs::{self, Permissions};

    #[test]
    fn a_file_in_the_home_is_for_its_owner_and_a_login_for_all_needs_a_secure_server() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join(".netrc");
        let at = |variable: &'static str, value: String| {
            move |name: &str| (name == variable).then(|| value.clone())
        };
        let of_home = at("HOME", home.path().display().to_string());
        let user = |found: io::Result<Option<Login>>| found.unwrap().map(|login| login.user);
        assert_eq!(user(login_for("a", true, &of_home)), None);
        fs::write(&path, "machine a login me password hunter2\ndefault login all password x")
            .unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
        let why = login_for("a", true, &of_home).err().unwrap().to_string();
        assert!(why.contains("mode 640: chmod 600") && !why.contains("hunter2"), "{why}");
        let by_name = at("NETRC", path.display().to_string());
        assert_eq!(user(login_for("a", true, &by_name)).as_deref(), Some("me"));
        fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        assert_eq!(user(login_for("a", false, &of_home)).as_deref(), Some("me"));
        assert_eq!(user(login_for("b", true, &of_home)).as_deref(), Some("all"));
        assert_eq!(user(login_for("b", false, &of_home)), None);
    }

    #[test]
    fn the_login_is_that_of_the_host_else_that_of_all() {
        let text = "# machine none\nmachine a.example.com login me password \"a b\"\n\
                    macdef init\nmachine c login x password y\n\n\
                    machine b.example.com\n  login you\n  account x\n  password p#w\ndefault login any password thing\n";
        let login = |host| entry_for(text, host).map(|entry| (entry.user, entry.password));
        let of = |user: &str, password: &str| Some((user.to_owned(), password.to_owned()));
        assert_eq!(login("A.example.com"), of("me", "a b"));
        assert_eq!(login("b.example.com"), of("you", "p#w"));
        assert_eq!(login("c"), of("any", "thing"));
        assert!(entry_for("machine a login b password c", "d").is_none());
    }

    #[test]
    fn a_value_is_on_the_line_of_its_keyword_or_the_entry_is_refused() {
        let hash = "machine a login me password #secret\nmachine b login you password other # x\n";
        let of = |text: &str, host: &str| {
            let entry = entry_for(text, host).unwrap();
            (entry.user, entry.password, entry.fault.is_some())
        };
        let fine = |user: &str, password: &str| (user.to_owned(), password.to_owned(), false);
        assert_eq!(of(hash, "a"), fine("me", "#secret"));
        assert_eq!(of(hash, "b"), fine("you", "other"));
        let quoted = r#"machine a login "machine" password "a \"b\\ #c" # "x"#;
        assert_eq!(of(quoted, "a"), fine("machine", r#"a "b\ #c"#));
        for bad in [
            "machine a login",
            "machine a login me password\nmachine b login you password other",
            "machine a login me password\n secret",
            "machine a password machine b login you password other",
            "machine a\n login default\n password x",
            "machine a password \"x",
            "machine\na login me password x",
        ] {
            assert!(of(bad, "a").2, "{bad}");
            assert!(entry_for(bad, "c").is_none_or(|entry| entry.fault.is_some()), "{bad}");
        }
        assert_eq!(
            of("machine a password machine b login you password other", "b"),
            fine("you", "other")
        );
    }
}
