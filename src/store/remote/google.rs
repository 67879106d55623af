//! Google Cloud Storage: the URL of a bucket.
//!
//! Requests use its XML API, which lists objects in the same way as S3. The version of an object is its
//! generation, a number that changes whenever the object is replaced.

use std::io;

use super::access::{Access, GoogleAccess};
use super::location::is_confidential;

/// The server of all buckets.
const SERVER: &str = "https://storage.googleapis.com";

/// Variables that name credentials. If the user sets a server of their own, credentials are looked for only if
/// one of these variables is set.
const NAMED: [&str; 2] = ["GOOGLE_APPLICATION_CREDENTIALS", "GCE_METADATA_HOST"];

/// The URL of a bucket and the authentication for it, from the settings that `variable` returns.
///
/// # Errors
/// If the URL of the server is not usable.
pub(super) fn access_of(
    bucket: &str,
    variable: &dyn Fn(&str) -> Option<String>,
) -> io::Result<(String, Access)> {
    let given = |name: &str| variable(name).filter(|value| !value.is_empty());
    let own = given("STORAGE_EMULATOR_HOST");
    let is_named = own.is_none() || NAMED.into_iter().any(|name| given(name).is_some());
    let server = match own {
        Some(server) => own_server(&server)?,
        None => SERVER.to_owned(),
    };
    let is_wanted = is_named && is_confidential(&server);
    Ok((format!("{server}/{bucket}"), Access::Google(GoogleAccess { is_wanted })))
}

/// The URL of the user's server. `server` may be a host without a scheme.
fn own_server(server: &str) -> io::Result<String> {
    let named = server.trim_end_matches('/');
    let url = if named.contains("://") { named.to_owned() } else { format!("http://{named}") };
    let host = url.strip_prefix("http://").or_else(|| url.strip_prefix("https://"));
    if host.is_none_or(|host| host.is_empty() || host.contains(['@', '?', '#'])) {
        let why = "STORAGE_EMULATOR_HOST is no server: expected [http(s)://]HOST[:PORT]";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    }
    Ok(url)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_server_is_googles_or_that_of_the_user() {
        assert_eq!(own_server("127.0.0.1:4443/").unwrap(), "http://127.0.0.1:4443");
        assert_eq!(own_server("https://host/gcs").unwrap(), "https://host/gcs");
        for bad in ["", "ftp://host", "http://u:hunter2@host", "host?x"] {
            let error = own_server(bad).unwrap_err().to_string();
            assert!(error.contains("STORAGE_EMULATOR_HOST") && !error.contains("hunter2"));
        }
    }
}
