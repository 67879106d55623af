//! Credentials for Azure, beside keys and signatures of the environment.

use reqsign_azure_storage::{
    AzureCliCredentialProvider, ClientCertificateCredentialProvider,
    ClientSecretCredentialProvider, Credential, ImdsCredentialProvider,
    WorkloadIdentityCredentialProvider,
};

use super::Providers;

/// The ways to credentials, with names for people.
pub(in crate::store::remote) fn providers() -> Providers<Credential> {
    vec![
        ("a client secret", Box::new(ClientSecretCredentialProvider::new())),
        ("a client certificate", Box::new(ClientCertificateCredentialProvider::new())),
        ("a workload identity", Box::new(WorkloadIdentityCredentialProvider::new())),
        ("the Azure CLI", Box::new(AzureCliCredentialProvider::new())),
        ("the machine", Box::new(ImdsCredentialProvider::new())),
    ]
}
