//! Credentials for S3.

use reqsign_aws_core::{
    AssumeRoleWithWebIdentityCredentialProvider, Credential, ECSCredentialProvider,
    EnvCredentialProvider, IMDSv2CredentialProvider, ProcessCredentialProvider,
    ProfileCredentialProvider, SSOCredentialProvider,
};

use super::Providers;
use crate::store::remote_settings::StoreSettings;

/// The name of the provider that reads a profile. Messages show the name of the profile as well.
pub(in crate::store::remote) const PROFILE: &str = "a profile";

/// The providers of credentials in the order of AWS, with their names in messages. If an option names a file or
/// a profile, the profile is the only provider.
pub(in crate::store::remote) fn providers(settings: &StoreSettings) -> Providers<Credential> {
    if settings.names_credentials_file() || settings.names_profile() {
        return vec![
            (PROFILE, Box::new(ProfileCredentialProvider::default())),
            ("SSO", Box::new(SSOCredentialProvider::default())),
            ("a program of a profile", Box::new(ProcessCredentialProvider::default())),
        ];
    }
    vec![
        ("the environment", Box::new(EnvCredentialProvider::new())),
        (PROFILE, Box::new(ProfileCredentialProvider::default())),
        ("SSO", Box::new(SSOCredentialProvider::default())),
        ("a web identity", Box::new(AssumeRoleWithWebIdentityCredentialProvider::default())),
        ("a program of a profile", Box::new(ProcessCredentialProvider::default())),
        ("the container", Box::new(ECSCredentialProvider::default())),
        ("the machine", Box::new(IMDSv2CredentialProvider::default())),
    ]
}
