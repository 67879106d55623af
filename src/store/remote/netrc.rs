//! Logins for HTTP servers, from the file `.netrc` of the user.

use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::error::shown_path;

/// Maximum length of the file in bytes.
const LEN_MAX: u64 = 1 << 20;

/// The rights of users other than the owner.
const OF_OTHERS: u32 = 0o077;

/// A name and a password. Never printed.
pub(super) struct Login {
    pub(super) user: String,
    pub(super) password: String,
    /// Whether it is for all hosts that the file does not name.
    is_default: bool,
}

/// The login for `host`, without its port, by the variables of the environment. `is_secure` says that
/// nobody on the way to it reads what is sent: a login for all hosts goes to such ones only.
///
/// # Errors
/// If the file in the user's home has the login, and others may read it.
pub(super) fn login_for(
    host: &str,
    is_secure: bool,
    variable: &dyn Fn(&str) -> Option<String>,
) -> io::Result<Option<Login>> {
    let given = |name: &str| variable(name).filter(|value| !value.is_empty());
    let named = given("NETRC").map(PathBuf::from);
    let own = || given("HOME").map(|home| PathBuf::from(home).join(".netrc"));
    let is_named = named.is_some();
    let Some(path) = named.or_else(own) else { return Ok(None) };
    let Some((text, mode)) = text_of(&path) else { return Ok(None) };
    let login = login_in(&text, host).filter(|login| is_secure || !login.is_default);
    if login.is_some() && !is_named && mode & OF_OTHERS != 0 {
        let (path, mode) = (shown_path(&path), mode & 0o777);
        let why = format!("{path} has passwords and mode {mode:03o}: chmod 600 {path}");
        return Err(io::Error::new(ErrorKind::PermissionDenied, why));
    }
    Ok(login)
}

/// The text of the file and its mode, if there is one that can be read.
fn text_of(path: &Path) -> Option<(String, u32)> {
    let file = File::open(path).ok()?;
    let mode = file.metadata().ok().filter(|meta| meta.is_file())?.permissions().mode();
    let mut text = String::new();
    file.take(LEN_MAX).read_to_string(&mut text).ok()?;
    Some((text, mode))
}

/// The login for `host` in the text of such a file: that of the first `machine` of this name, else that
/// of `default`.
fn login_in(text: &str, host: &str) -> Option<Login> {
    let mut words = words_of(text).into_iter().peekable();
    let mut for_all = None;
    while let Some(word) = words.next() {
        let is_default = word == "default";
        let is_meant = match word.as_str() {
            "machine" => words.next()?.eq_ignore_ascii_case(host),
            "default" => for_all.is_none(),
            _ => continue,
        };
        let (mut user, mut password) = (String::new(), String::new());
        let is_of_entry = |word: &String| !["machine", "default"].contains(&word.as_str());
        while let Some(name) = words.next_if(is_of_entry) {
            match name.as_str() {
                "login" => user = words.next()?,
                "password" => password = words.next()?,
                "account" => drop(words.next()?),
                _ => {}
            }
        }
        let login = Login { user, password, is_default };
        match is_meant {
            false => {}
            true if is_default => for_all = Some(login),
            true => return Some(login),
        }
    }
    for_all
}

/// The words of the file: without comments and macros, and with quoted ones as they are.
fn words_of(text: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let mut rest = line.trim();
        if rest.starts_with("macdef") {
            // A macro ends with an empty line.
            lines.by_ref().find(|line| line.trim().is_empty());
            continue;
        }
        while !rest.is_empty() && !rest.starts_with('#') {
            let (word, after) = match rest.strip_prefix('"') {
                Some(quoted) => quoted.split_once('"').unwrap_or((quoted, "")),
                None => rest.split_once(char::is_whitespace).unwrap_or((rest, "")),
            };
            words.push(word.to_owned());
            rest = after.trim_start();
        }
    }
    words
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
        let login = |host| login_in(text, host).map(|login| (login.user, login.password));
        let of = |user: &str, password: &str| Some((user.to_owned(), password.to_owned()));
        assert_eq!(login("A.example.com"), of("me", "a b"));
        assert_eq!(login("b.example.com"), of("you", "p#w"));
        assert_eq!(login("c"), of("any", "thing"));
        assert!(login_in("machine a login", "a").is_none());
        assert!(login_in("machine a login b password c", "d").is_none());
    }
}
