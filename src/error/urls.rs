//! Text that begins like a URL: the schemes of remote stores, the parts of a URL that are secret, and the refusal
//! of a URL where only a path of this machine is possible.

use std::path::Path;

use super::shown_path;

/// A fact about the URLs and the options of a scheme.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SchemeFact {
    /// The text after a `?` may be a signature. Without this fact, it belongs to the key.
    Signature,
    /// The options for a credentials file and for server certificates have a meaning.
    Credentials,
    /// An option can set the server.
    Endpoint,
    /// A profile and a region have a meaning.
    Profile,
}

/// Schemes of remote stores, with the facts about each.
pub const SCHEMES: [(&str, &[SchemeFact]); 9] = {
    use SchemeFact::{Credentials, Endpoint, Profile, Signature};
    [
        ("s3", &[Credentials, Endpoint, Profile]),
        ("gs", &[Credentials, Endpoint]),
        ("az", &[Signature, Credentials, Endpoint]),
        ("abfs", &[Signature, Credentials, Endpoint]),
        ("abfss", &[Signature, Credentials, Endpoint]),
        ("hf", &[Credentials, Endpoint]),
        ("http", &[Signature, Credentials]),
        ("https", &[Signature, Credentials]),
        ("redis", &[Signature]),
    ]
};

/// Whether `path` is a URL of a remote store.
pub fn is_url(path: &Path) -> bool {
    let bytes = path.as_os_str().as_encoded_bytes();
    let end = bytes.windows(3).position(|three| three == b"://");
    end.is_some_and(|end| SCHEMES.iter().any(|(name, _)| name.as_bytes() == &bytes[..end]))
}

/// The scheme, the separator and the rest of `name`, if it begins like a URL of any kind. The separator is `:/` if
/// one slash of a URL of a remote store is lost, as in a `Path` of Python.
pub(super) fn parts_of_url(name: &str) -> Option<[&str; 3]> {
    let is_letter = |c: char| c.is_ascii_alphanumeric() || "+-.".contains(c);
    let (scheme, rest) = name.split_once(":/")?;
    let parts = match rest.strip_prefix('/') {
        Some(rest) => [scheme, "://", rest],
        None => facts_of(scheme).map(|_| [scheme, ":/", rest])?,
    };
    (!scheme.is_empty() && scheme.chars().all(is_letter)).then_some(parts)
}

/// The facts about a scheme. Upper and lower case are the same.
fn facts_of(scheme: &str) -> Option<&'static [SchemeFact]> {
    let known = SCHEMES.iter().find(|(name, _)| name.eq_ignore_ascii_case(scheme));
    known.map(|(_, facts)| *facts)
}

/// Refuses a URL of any kind where only a path of this machine is possible.
///
/// # Errors
/// The refusal, in one line.
pub fn expect_local_path(path: &Path) -> Result<(), String> {
    match parts_of_url(&path.to_string_lossy()) {
        None => Ok(()),
        Some(_) => {
            let why = "is a URL, and only paths of this machine are possible here";
            Err(format!("{}: {why}", shown_path(path)))
        }
    }
}

/// The reason why `path`, which does not exist, is not used as the URL that it was meant to be. `None` if it is a
/// plain path.
pub(crate) fn unusable_url(path: &Path) -> Option<String> {
    let name = path.to_string_lossy();
    let [scheme, separator, _] = parts_of_url(&name)?;
    let lower = scheme.to_ascii_lowercase();
    Some(match (facts_of(scheme), separator) {
        (None, _) => {
            let names = SCHEMES.map(|(name, _)| name).join(", ");
            format!("{scheme}:// is none of the URLs that are read, which begin with {names}")
        }
        (_, "://") => format!("write {lower}:// in lower case"),
        _ => {
            format!("a URL begins with {lower}:// (in Python, give it as a str and not as a Path)")
        }
    })
}

/// Parameters of a signed URL, whose values are secret or belong to the secret.
const SIGNING: [&str; 9] = [
    "x-amz-signature",
    "x-amz-credential",
    "x-amz-security-token",
    "x-goog-signature",
    "x-goog-credential",
    "awsaccesskeyid",
    "signature",
    "sig",
    "token",
];

/// A URL without its possible secrets: the user before the host, the text after a `?` unless it belongs to the key,
/// and the text after a `#` of a URL of HTTP.
pub(super) fn without_secrets(parts: [&str; 3]) -> String {
    let [scheme, separator, rest] = parts;
    let facts = facts_of(scheme);
    let (login, place) = rest.split_at(login_len(scheme, rest, facts));
    let mask = if login.is_empty() { "" } else { "***@" };
    let is_web = facts.is_none() || scheme.to_ascii_lowercase().starts_with("http");
    let is_secret = |(at, c): &(usize, char)| match c {
        '?' => {
            facts.is_none_or(|facts| facts.contains(&SchemeFact::Signature))
                || has_signature(&place[*at..])
        }
        _ => *c == '#' && is_web,
    };
    match place.char_indices().find(is_secret) {
        Some((end, _)) => format!("{scheme}{separator}{mask}{}***", &place[..=end]),
        None => format!("{scheme}{separator}{mask}{place}"),
    }
}

/// The length of the user and the password at the start of `rest`, with the `@` after them. `rest` is a URL without
/// its `scheme` and `://`, and `facts` are those of a known scheme.
fn login_len(scheme: &str, rest: &str, facts: Option<&[SchemeFact]>) -> usize {
    let len_to = |at: Option<usize>| at.map_or(0, |at| at + 1);
    match facts {
        // A password may contain slashes.
        None => len_to(rest.rfind('@')),
        Some(facts) if has_password(rest, facts) => len_to(rest.rfind('@')),
        // In these URLs, the text before the `@` is the container and not a user.
        Some(_) if scheme.to_ascii_lowercase().starts_with("abfs") => 0,
        // An `@` after the host belongs to the key.
        Some(_) => len_to(authority_of(rest).rfind('@')),
    }
}

fn authority_of(rest: &str) -> &str {
    rest.split('/').next().unwrap_or_default()
}

/// Whether `rest`, a URL without its scheme and `://`, begins with a user and a password. The password may contain
/// slashes.
fn has_password(rest: &str, facts: &[SchemeFact]) -> bool {
    let authority = authority_of(rest);
    // An IPv6 address has colons too.
    let address = authority.strip_prefix('[').and_then(|rest| rest.split_once(']'));
    let is_port = |text: &str| {
        let port = text.split(['?', '#']).next().unwrap_or_default();
        // If an option can set the host, the URL has none with a port.
        let has_host = !facts.contains(&SchemeFact::Endpoint);
        has_host && !port.is_empty() && port.bytes().all(|b| b.is_ascii_digit())
    };
    let colon = address.map_or(authority, |(_, rest)| rest).split_once(':');
    rest.contains('@') && colon.is_some_and(|(_, after)| !is_port(after))
}

/// Whether `path` is a URL of a remote store that begins with a user and a password.
pub fn is_url_with_password(path: &Path) -> bool {
    let url = path.to_str().unwrap_or_default().split_once("://");
    url.is_some_and(|(scheme, rest)| {
        SCHEMES.iter().any(|(name, facts)| *name == scheme && has_password(rest, facts))
    })
}

/// Whether `query`, which begins with a `?`, has a parameter of a signed URL.
fn has_signature(query: &str) -> bool {
    let names = query.split(['?', '&']).filter_map(|part| Some(part.split_once('=')?.0));
    names.into_iter().any(|name| SIGNING.iter().any(|known| known.eq_ignore_ascii_case(name)))
}

#[cfg(test)]
mod tests {
    use super::super::{SourceUri, real_name, shown_argument};
    use super::*;

    #[test]
    fn secrets_of_a_url_are_never_shown() {
        for (url, expected) in [
            ("https://u:hunter2@h/a?sig=hunter2", "https://***@h/a?***"),
            ("http://h/a?hunter2#x", "http://h/a?***"),
            ("s3://b/a?b", "s3://b/a?b"),
            ("s3://u:hunter2@b/a/b", "s3://***@b/a/b"),
            ("s3://u:hunt/er2@b/a", "s3://***@b/a"),
            ("s3://u:1/hunter2@b/a", "s3://***@b/a"),
            ("s3://u:hunter2@b/a@b", "s3://***@b"),
            ("s3://b/a:b@c", "s3://b/a:b@c"),
            ("s3://b/a#b", "s3://b/a#b"),
            ("s3://b/a?b=c&X-Amz-Signature=hunter2", "s3://b/a?***"),
            ("hf://a/b/x?token=hunter2", "hf://a/b/x?***"),
            ("https://u:hunt/er2@h/a", "https://***@h/a"),
            ("https://h:80/a@b", "https://h:80/a@b"),
            ("http://[::1]:80/a@b", "http://[::1]:80/a@b"),
            ("http://[::1]/a@b", "http://[::1]/a@b"),
            ("https://h/a#sig=hunter2", "https://h/a#***"),
            ("HTTPS://h/a#sig=hunter2", "HTTPS://h/a#***"),
            ("redis://:hunt/er2@h", "redis://***@h"),
            ("redis://:hunt?er2@h/p", "redis://***@h/p"),
            ("redis://h:6379/a:b@c", "redis://h:6379/a:b@c"),
            ("hf://a/b@main/x?y", "hf://a/b@main/x?y"),
            (
                "abfss://c@a.dfs.core.windows.net/x?hunter2",
                "abfss://c@a.dfs.core.windows.net/x?***",
            ),
            ("abfss://u:hunter2@h/x", "abfss://***@h/x"),
            ("https://h?sig=hunter2", "https://h?***"),
            ("redis://u:hunter2@h/p?hunter2", "redis://***@h/p?***"),
            ("rediss://u:hunter2@h/p", "rediss://***@h/p"),
            ("REDIS://u:hunt/er2@h/p?hunter2", "REDIS://***@h/p?***"),
            ("s3:/u:hunt/er2@b/a", "s3:/***@b/a"),
            ("/a://u:b@c?d", "/a://u:b@c?d"),
        ] {
            let path = Path::new(url);
            assert_eq!(
                (real_name(path), shown_path(path)),
                (expected.to_owned(), expected.to_owned())
            );
            assert_eq!(SourceUri::from(path).to_string(), expected);
            assert_eq!(real_name(Path::new(expected)), expected, "it is masked twice");
            let argument = shown_argument(&format!("dtype=like:{url}"));
            assert_eq!(argument, format!("dtype=like:{expected}"));
        }
        assert_eq!(shown_argument("a=b\n"), "a=b\\n");
    }

    #[test]
    fn what_was_meant_as_a_url_is_told_from_paths() {
        for (text, hint) in [
            ("S3://b/a", "write s3:// in lower case"),
            ("s3:/b/a", "begins with s3:// (in Python,"),
            ("ftp://h/a", "ftp:// is none of the URLs"),
        ] {
            let path = Path::new(text);
            assert!(unusable_url(path).unwrap().contains(hint), "{text}");
            assert!(
                expect_local_path(path).unwrap_err().starts_with(&format!("{text}: is a URL, "))
            );
        }
        for text in ["/s3://b", "./s3:/b", "c:/b", "a b://c", "://a", "s3:", "a/b"] {
            assert_eq!(
                (unusable_url(Path::new(text)), expect_local_path(Path::new(text))),
                (None, Ok(()))
            );
        }
    }
}
