//! Settings of remote sources that options set. They take precedence over environment variables.

use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nix::libc;

use crate::error::{SCHEMES, SchemeFact, invalid_data, invalid_input, shown_path};
use crate::open_options::RemoteSettings;
use crate::sync::RwLock;

use super::hub_cache::variable;

/// The settings for all remote sources of the process. A child made by fork(2) keeps them.
static IN_FORCE: RwLock<Option<RemoteSettings>> = RwLock::new(None);

/// Time limit of a call for which nobody sets a deadline, if the settings have no time limit.
const LIMIT: Duration = Duration::from_secs(60);

/// Maximum length of a file with credentials, in bytes.
const CREDENTIALS_LEN_MAX: u64 = 1 << 20;

/// Variables with credentials of S3, which take precedence over all files.
const AWS_KEYS: [&str; 5] = [
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_SKIP_SIGNATURE",
];

/// Variables with tokens and keys of other servers, which take precedence over all files.
const OTHER_KEYS: [&str; 11] = [
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "HF_HUB_DISABLE_IMPLICIT_TOKEN",
    "AZURE_STORAGE_KEY",
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_SAS_TOKEN",
    "AZURE_STORAGE_CONNECTION_STRING",
    "AZURE_SKIP_SIGNATURE",
    // The file also says for which account its key or signature is.
    "AZURE_STORAGE_ACCOUNT",
    "AZURE_STORAGE_ACCOUNT_NAME",
    "AZURE_STORAGE_BLOB_ENDPOINT",
];

/// Parts of the names of all variables that stores read, in upper case.
const VARIABLES: [&str; 14] = [
    "AWS_",
    "AZURE_",
    "GCE_",
    "GOOGLE_",
    "HF_",
    "HOME",
    "HUGGING",
    "IDENTITY_",
    "NETRC",
    "OFFLINE",
    "SSL_CERT",
    "STORAGE_EMULATOR_HOST",
    "XDG_CACHE",
    "_PROXY",
];

#[cfg_attr(not(feature = "remote"), allow(dead_code, reason = "only remote sources ask"))]
fn is_read(name: &OsStr) -> bool {
    let upper = name.to_string_lossy().to_uppercase();
    VARIABLES.iter().any(|part| upper.contains(part))
}

/// The settings of one store.
#[cfg_attr(not(feature = "remote"), allow(dead_code, reason = "only remote sources ask"))]
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct StoreSettings {
    /// If `None`, the settings of the process are used.
    own: Option<Arc<RemoteSettings>>,
    /// A hash of the environment variables that stores read. A program, for example a notebook, may set other variables
    /// after a failed attempt. Then it gets a new store, which reads these variables.
    environment: u64,
}

#[cfg_attr(not(feature = "remote"), allow(dead_code, reason = "only remote sources ask"))]
impl StoreSettings {
    /// The settings `own` with the present environment variables.
    pub(super) fn new(own: Option<&Arc<RemoteSettings>>) -> StoreSettings {
        let mut hasher = DefaultHasher::new();
        let read = std::env::vars_os().filter(|(name, _)| is_read(name));
        read.for_each(|variable| variable.hash(&mut hasher));
        StoreSettings { own: own.cloned(), environment: hasher.finish() }
    }

    /// The setting that replaces the variable `name`, or else the value of the variable.
    pub(super) fn variable(&self, name: &str) -> Option<String> {
        let of_process = || variable(name).and_then(|value| value.into_string().ok());
        self.ask(|settings| settings.variable(name)).or_else(of_process)
    }

    /// Whether an option names a credentials file. Then no other credentials are used.
    pub(super) fn names_credentials_file(&self) -> bool {
        self.ask(|settings| settings.credentials_file.clone()).is_some()
    }

    /// Whether an option names a profile of AWS.
    pub(super) fn names_profile(&self) -> bool {
        self.ask(|settings| settings.profile.clone()).is_some()
    }

    /// The time limit of a call for which nobody sets a deadline.
    pub(super) fn limit(&self) -> Duration {
        self.ask(|settings| settings.timeout).unwrap_or(LIMIT)
    }

    fn ask<T>(&self, question: impl FnOnce(&RemoteSettings) -> Option<T>) -> Option<T> {
        match &self.own {
            Some(own) => question(own),
            None => question(IN_FORCE.read().as_ref()?),
        }
    }
}

impl RemoteSettings {
    /// Applies these settings to all remote sources of the process that have no settings of their own and are
    /// not open yet.
    ///
    /// # Errors
    /// A message of one line, if a file cannot be read or the server is not valid.
    #[doc(hidden)]
    pub fn take_effect(&self) -> Result<(), String> {
        self.check()?;
        *IN_FORCE.write() = Some(self.clone());
        Ok(())
    }

    /// Checks that the files can be read and the URL of the server is valid.
    ///
    /// # Errors
    /// A message of one line, if a check fails.
    #[doc(hidden)]
    pub fn check(&self) -> Result<(), String> {
        if self.endpoint.as_ref().is_some_and(|url| !is_server_url(url)) {
            return Err(format!("endpoint: expected {SERVER_URL}"));
        }
        let files = [&self.credentials_file, &self.ca_file];
        for file in files.into_iter().flatten() {
            let failed = |why: String| format!("{}: {why}", shown_path(file));
            file.to_str().ok_or_else(|| failed("the path is not UTF-8".to_owned()))?;
            open_regular(file).map_err(|e| failed(e.to_string()))?;
        }
        if let Some(file) = &self.credentials_file {
            text_in(file).map_err(|e| format!("{}: {e}", shown_path(file)))?;
        }
        Ok(())
    }

    /// Refuses settings that have no meaning for any of the sources `paths`.
    ///
    /// # Errors
    /// A message of one line about the first such setting.
    #[doc(hidden)]
    pub fn check_use(&self, paths: &[PathBuf]) -> Result<(), String> {
        let given = [
            ("credentials_file", self.credentials_file.is_some(), SchemeFact::Credentials),
            ("profile", self.profile.is_some(), SchemeFact::Profile),
            ("endpoint", self.endpoint.is_some(), SchemeFact::Endpoint),
            ("region", self.region.is_some(), SchemeFact::Profile),
            ("ca_file", self.ca_file.is_some(), SchemeFact::Credentials),
        ];
        let begins = |path: &PathBuf, scheme: &str| {
            let rest = path.as_os_str().as_encoded_bytes().strip_prefix(scheme.as_bytes());
            rest.is_some_and(|rest| rest.starts_with(b"://"))
        };
        let schemes_with = |fact| {
            let having = SCHEMES.iter().filter(move |(_, facts)| facts.contains(&fact));
            having.map(|(scheme, _)| *scheme)
        };
        let is_used =
            |fact| paths.iter().any(|path| schemes_with(fact).any(|scheme| begins(path, scheme)));
        let Some(&(name, _, fact)) =
            given.iter().find(|(_, is_given, fact)| *is_given && !is_used(*fact))
        else {
            return Ok(());
        };
        let path = paths.first().map(|path| shown_path(path)).unwrap_or_default();
        let schemes = schemes_with(fact).collect::<Vec<_>>().join("://, ");
        Err(format!(
            "{path}: {name}= means nothing here: leave it out, or name a source that has it \
             ({schemes}://)"
        ))
    }

    /// The value that replaces the variable `name`. An empty value means that the variable counts as unset.
    fn variable(&self, name: &str) -> Option<String> {
        let path = |path: &Option<PathBuf>| Some(path.as_ref()?.to_str()?.to_owned());
        let file = self.credentials_file.as_deref();
        match name {
            "AWS_SHARED_CREDENTIALS_FILE"
            | "AWS_CONFIG_FILE"
            | "GOOGLE_APPLICATION_CREDENTIALS"
            | "NETRC"
            | "HF_TOKEN_PATH" => path(&self.credentials_file),
            "AZURE_STORAGE_CONNECTION_STRING" if file.is_some() => {
                // If the file has become unreadable, the value is empty, because the value of the environment variable
                // could lead to another account.
                file.map(|file| {
                    text_in(file).map(|text| text.trim().to_owned()).unwrap_or_default()
                })
            }
            "AWS_PROFILE" => self.profile.clone(),
            "AWS_ENDPOINT_URL_S3" | "STORAGE_EMULATOR_HOST" | "HF_ENDPOINT" => {
                self.endpoint.clone()
            }
            "AZURE_STORAGE_ENDPOINT" => self.endpoint.clone().or(file.map(|_| String::new())),
            "AWS_REGION" => self.region.clone(),
            "AWS_CA_BUNDLE" => path(&self.ca_file),
            name if AWS_KEYS.contains(&name) => {
                (file.is_some() || self.profile.is_some()).then(String::new)
            }
            name if OTHER_KEYS.contains(&name) => file.map(|_| String::new()),
            _ => None,
        }
    }
}

/// The form of a server's URL, for messages.
pub const SERVER_URL: &str = "http(s)://HOST[:PORT], without a user or a query";

/// Whether `url` is the URL of a server and contains no secrets.
pub fn is_server_url(url: &str) -> bool {
    let rest = url.strip_prefix("http://").or_else(|| url.strip_prefix("https://"));
    rest.is_some_and(|rest| !rest.is_empty() && !rest.contains(['@', '?', '#']))
}

/// The text of a file with credentials.
pub(super) fn text_in(file: &Path) -> io::Result<String> {
    let text = bytes_in(file, CREDENTIALS_LEN_MAX)?;
    // The error of the conversion is not passed on, because it contains the credentials.
    let not_text = |_| invalid_data("is not UTF-8");
    String::from_utf8(text).map_err(not_text)
}

/// The bytes of a settings file, at most `len_max`.
pub(super) fn bytes_in(file: &Path, len_max: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_regular(file)?.take(len_max + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > len_max {
        return Err(invalid_data(format!("has more than {len_max} bytes, which no such file has")));
    }
    Ok(bytes)
}

fn open_regular(path: &Path) -> io::Result<File> {
    // With `O_NONBLOCK` the open does not wait, even if the path is a FIFO.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(invalid_input("is not a regular file")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_that_mean_nothing_for_any_source_are_refused() {
        let none = RemoteSettings::default();
        let word = || Some("https://x".to_owned());
        let profile = RemoteSettings { profile: word(), ..none.clone() };
        let endpoint = RemoteSettings { endpoint: word(), ..none.clone() };
        let file = RemoteSettings { ca_file: Some("/x".into()), ..none.clone() };
        let refused = |settings: &RemoteSettings, paths: &[&str]| {
            let paths: Vec<PathBuf> = paths.iter().map(PathBuf::from).collect();
            settings.check_use(&paths).err().unwrap_or_default()
        };
        assert_eq!(refused(&none, &["/a"]), "");
        for (settings, used) in
            [(&profile, "s3://b/x"), (&endpoint, "hf://a/b"), (&file, "http://h/x")]
        {
            assert_eq!(refused(settings, &[used]), "");
            assert_eq!(refused(settings, &["/local", used]), "");
        }
        for (settings, path, name) in [
            (&profile, "/local", "profile"),
            (&profile, "gs://b/x", "profile"),
            (&profile, "/a/s3://b", "profile"),
            (&endpoint, "https://h/x", "endpoint"),
            (&file, "redis://h/0/", "ca_file"),
        ] {
            let begin = format!("{path}: {name}= means nothing here");
            assert!(refused(settings, &[path]).starts_with(&begin), "{path}");
        }
    }

    #[test]
    fn a_setting_stands_for_the_variables_of_its_meaning_and_hides_others() {
        let none = RemoteSettings::default();
        assert!(AWS_KEYS.iter().chain(&OTHER_KEYS).all(|name| none.variable(name).is_none()));
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("credentials");
        std::fs::write(&file, "AccountName=a;AccountKey=k\n").unwrap();
        let settings = RemoteSettings { credentials_file: Some(file.clone()), ..none.clone() };
        let name = file.to_str().map(str::to_owned);
        assert_eq!(settings.variable("AWS_SHARED_CREDENTIALS_FILE"), name);
        assert_eq!(settings.variable("NETRC"), name);
        assert_eq!(settings.variable("HF_TOKEN").as_deref(), Some(""));
        assert_eq!(settings.variable("AWS_ACCESS_KEY_ID").as_deref(), Some(""));
        let account = settings.variable("AZURE_STORAGE_CONNECTION_STRING");
        assert_eq!(account.as_deref(), Some("AccountName=a;AccountKey=k"));
        assert_eq!(settings.variable("AZURE_STORAGE_BLOB_ENDPOINT").as_deref(), Some(""));
        std::fs::write(&file, [0xff]).unwrap();
        assert_eq!(settings.variable("AZURE_STORAGE_CONNECTION_STRING").as_deref(), Some(""));
        assert!(settings.take_effect().unwrap_err().contains("credentials: is not UTF-8"));
        let fifo = folder.path().join("fifo");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let waits = RemoteSettings { credentials_file: Some(fifo), ..none.clone() };
        assert!(waits.take_effect().unwrap_err().contains("fifo: is not a regular file"));
        let profile = RemoteSettings { profile: Some("work".to_owned()), ..none.clone() };
        assert_eq!(profile.variable("AWS_SESSION_TOKEN").as_deref(), Some(""));
        assert_eq!(profile.variable("HF_TOKEN"), None);
        let absent = RemoteSettings { ca_file: Some(folder.path().join("none")), ..none };
        assert!(absent.take_effect().unwrap_err().contains("none: No such file"));
        let (own, others) =
            (StoreSettings::new(Some(&Arc::new(profile))), StoreSettings::default());
        assert_eq!(own.variable("AWS_PROFILE").as_deref(), Some("work"));
        assert!(own.names_profile() && !own.names_credentials_file() && !others.names_profile());
    }
}
