//! Credentials for Azure, beside keys and signatures of the environment.

use reqsign_azure_storage::{
    AzureCliCredentialProvider, ClientCertificateCredentialProvider,
    ClientSecretCredentialProvider, Credential, ImdsCredentialProvider,
    WorkloadIdentityCredentialProvider,
};

use super::Providers;
use crate::store::remote_settings::StoreSettings;

/// The ways to credentials, with names for people. None where an option names a file, which has a key or
/// a signature.
pub(in crate::store::remote) fn providers(settings: &StoreSettings) -> Providers<Credential> {
    if settings.names_credentials_file() {
        return Vec::new();
    }
    vec![
        ("a client secret", Box::new(ClientSecretCredentialProvider::new())),
        ("a client certificate", Box::new(ClientCertificateCredentialProvider::new())),
        ("a workload identity", Box::new(WorkloadIdentityCredentialProvider::new())),
        ("the Azure CLI", Box::new(AzureCliCredentialProvider::new())),
        ("the machine", Box::new(ImdsCredentialProvider::new())),
    ]
}
