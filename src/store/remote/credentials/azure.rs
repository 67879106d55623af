//! Providers of credentials for Azure. Keys and signatures in environment variables are read elsewhere, in `azure.rs`.

use reqsign_azure_storage::{
    AzureCliCredentialProvider, ClientCertificateCredentialProvider,
    ClientSecretCredentialProvider, Credential, ImdsCredentialProvider,
    WorkloadIdentityCredentialProvider,
};

use super::Providers;
use crate::store::remote_settings::StoreSettings;

/// The providers of credentials, with their names in messages. There are none if an option names a file, since
/// that file has a key or a signature.
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
