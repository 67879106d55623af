//! Handles the paths in the options.

use std::path::PathBuf;

use tensorfs::internal::source::SecretOrigin;

use super::{IndexDir, Options};

impl Options {
    /// Makes all paths in the options absolute. The daemon leaves the working directory, and it closes
    /// the descriptors of its caller, which a path in `/dev/fd` may name.
    ///
    /// # Errors
    /// If the working directory is gone.
    pub fn make_absolute(&mut self) -> std::io::Result<()> {
        for path in self.paths() {
            *path = std::path::absolute(&*path)?;
            let of_descriptor = ["/dev/fd", "/proc/self/fd"].iter().any(|p| path.starts_with(p));
            // For a pipe, this path cannot be resolved, so it stays.
            if of_descriptor && let Ok(real) = std::fs::canonicalize(&*path) {
                *path = real;
            }
        }
        Ok(())
    }

    /// All paths in the options.
    pub(crate) fn paths(&mut self) -> impl Iterator<Item = &mut PathBuf> {
        let index_dir = match &mut self.index_dir {
            IndexDir::At(folder) => Some(folder),
            IndexDir::OfUser | IndexDir::Nowhere => None,
        };
        let secret = match &mut self.secret {
            Some(SecretOrigin::KeyFile(path) | SecretOrigin::PassphraseFile(path)) => Some(path),
            Some(SecretOrigin::KeyCommand(_)) | None => None,
        };
        let remote = &mut self.remote;
        let of_remote = remote.credentials_file.iter_mut().chain(remote.ca_file.as_mut());
        let opened = self.open.follow.iter_mut().chain(self.open.reference.as_mut());
        let own = self.log.iter_mut().chain(self.assemble.as_mut()).chain(self.disk_cache.path());
        let all = opened.chain(self.open.config.as_mut()).chain(own).chain(index_dir);
        all.chain(secret).chain(of_remote)
    }
}
