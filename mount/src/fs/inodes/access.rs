//! Access of users to the nodes of a mount.

use std::sync::Arc;

use tensorfs::internal::checkpoint::FolderId;

use super::super::node::Node;
use super::super::sharing::{NodeAccess, Sharing, idle_rule};
use super::super::survey;
use super::Nodes;

impl Nodes {
    /// The owner of the mount, and the rules of `access=`.
    pub(crate) fn sharing(&self) -> &Arc<Sharing> {
        &self.sharing
    }

    /// Warnings about rules that match nothing, and about unproven tails.
    pub(crate) fn warnings(&self) -> Vec<String> {
        let idle = self.sharing.idle_rules(&self.tree).into_iter().map(|glob| idle_rule(&glob));
        idle.chain(self.tails.warnings(&self.tree)).collect()
    }

    /// Logs the rules that match nothing.
    pub(super) fn log_idle_rules(&self) {
        for glob in self.sharing.idle_rules(&self.tree) {
            tracing::warn!("{}", idle_rule(&glob));
        }
    }

    /// The users who may see `node`. `None` if the mount has no rules, because then the kernel
    /// alone checks owner, group and mode. May access the source.
    pub(crate) fn access_of(&self, node: &Node) -> Option<Arc<NodeAccess>> {
        let known = node.access();
        if !self.sharing.has_rules() || known.as_ref().is_some_and(|access| !access.is_old()) {
            return known;
        }
        let access = self.look_at_access(node);
        node.set_access(access.clone());
        access
    }

    /// Whether the access of `node` is not known yet, so that `access_of` must be called before a
    /// reply about `node`.
    pub(crate) fn lacks_access(&self, node: &Node) -> bool {
        self.sharing.has_rules() && node.access().is_none()
    }

    /// The users who may list the folder `id`. `None` if they are not known yet.
    pub(crate) fn known_access(&self, id: FolderId) -> Option<Arc<NodeAccess>> {
        self.folders.read().get(&id)?.node.access()
    }

    /// Determines who may see `node`. `None` if the mount has no rules. Accesses the source.
    pub(super) fn look_at_access(&self, node: &Node) -> Option<Arc<NodeAccess>> {
        let has_rules = self.sharing.has_rules();
        has_rules.then(|| Arc::new(survey::access_of(&self.sharing, &self.tree, node)))
    }

    /// Determines who may see `node`, if that needs no access to the source.
    pub(super) fn access_without_source(&self, node: &Node) -> Option<Arc<NodeAccess>> {
        let is_known = survey::is_known_without_source(&self.tree, node);
        is_known.then(|| self.look_at_access(node)).flatten()
    }
}
