//! Parts of URLs: the name of a bucket, escaped keys, and whether others can read the traffic.

/// The name of the bucket that `rest` begins with, which is a URL without its `scheme` and `://`.
///
/// # Errors
/// If the URL names no bucket, the message says why.
pub(super) fn bucket_of(scheme: &str, rest: &str) -> Result<String, String> {
    let bucket = authority_of(rest, "names no bucket")?;
    if !bucket.chars().all(|c| c.is_ascii_alphanumeric() || "-._".contains(c)) {
        return Err(format!("is no name of a bucket: expected {scheme}://BUCKET/PREFIX"));
    }
    Ok(bucket)
}

/// The part of `rest` before the first slash. `rest` is a URL without its scheme and `://`.
///
/// # Errors
/// If it names a user, or is empty. `none` is the message for an empty one.
pub(super) fn authority_of(rest: &str, none: &str) -> Result<String, String> {
    let authority = rest.split('/').next().unwrap_or_default();
    if authority.contains('@') {
        let why = "user names and passwords do not belong into a URL, where others see them";
        return Err(why.to_owned());
    }
    if authority.is_empty() { Err(none.to_owned()) } else { Ok(authority.to_owned()) }
}

/// Whether others cannot read the traffic to `server`, which is a URL. Tokens are sent to such servers only.
pub(super) fn is_confidential(server: &str) -> bool {
    let rest = server.strip_prefix("http://").unwrap_or_default();
    let host = rest.split('/').next().unwrap_or_default();
    let is_here = |name: &str| {
        host.strip_prefix(name).is_some_and(|port| port.is_empty() || port.starts_with(':'))
    };
    server.starts_with("https://") || ["127.0.0.1", "localhost", "[::1]"].into_iter().any(is_here)
}

/// `key`, escaped for the path of a URL. Every byte is escaped except those that never need it.
pub(super) fn escaped_key(key: &str) -> String {
    escaped_bytes(key.as_bytes(), "/")
}

/// `value`, escaped for the query of a URL.
pub(super) fn escaped_value(value: &str) -> String {
    escaped_bytes(value.as_bytes(), "")
}

/// `name`, which may be escaped in any way, escaped in the one way that all URLs here use.
pub(super) fn normalize_escapes(name: &str) -> String {
    let mut bytes = Vec::with_capacity(name.len());
    let mut rest = name.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let digits = after.get(..2).filter(|_| *first == b'%');
        let code =
            digits.and_then(|text| u8::from_str_radix(std::str::from_utf8(text).ok()?, 16).ok());
        bytes.push(code.unwrap_or(*first));
        rest = if code.is_some() { &after[2..] } else { after };
    }
    escaped_bytes(&bytes, "")
}

fn escaped_bytes(bytes: &[u8], plain: &str) -> String {
    use std::fmt::Write as _;
    let mut escaped = String::with_capacity(bytes.len());
    for byte in bytes {
        let c = char::from(*byte);
        if c.is_ascii_alphanumeric() || "-._~".contains(c) || plain.contains(c) {
            escaped.push(c);
        } else {
            let _ = write!(escaped, "%{byte:02X}");
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_go_to_secure_servers_and_to_this_machine() {
        for server in
            ["https://host/x", "http://127.0.0.1:80/x", "http://localhost", "http://[::1]:1"]
        {
            assert!(is_confidential(server), "{server}");
        }
        for server in ["http://host", "http://127.0.0.1.example.com", "ftp://127.0.0.1"] {
            assert!(!is_confidential(server), "{server}");
        }
    }

    #[test]
    fn keys_are_escaped_byte_by_byte() {
        assert_eq!(escaped_key("a/b c+%\u{e9}~"), "a/b%20c%2B%25%C3%A9~");
        assert_eq!(escaped_value("a/b="), "a%2Fb%3D");
        assert_eq!(normalize_escapes("a%20b c%c3%a9%zz"), "a%20b%20c%C3%A9%25zz");
    }
}
