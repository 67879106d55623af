//! Extended attributes: what a file of the mount is made of.

use tensorfs::checkpoint::{Content, Tree};
use tensorfs::source::XATTR_SOURCE;

use crate::access;
use crate::nodes::{Node, NodeKind};

/// Extended attribute with the version of a file's content.
pub(crate) const XATTR_VERSION: &str = "user.tensorfs.version";

/// The extended attributes of `node` that the caller may see.
pub(crate) fn of(
    tree: &Tree,
    view: &serde_json::Value,
    node: &Node,
    (uid, gid): (u32, u32),
) -> Vec<(&'static str, String)> {
    let mut found = Vec::new();
    let folder = tree.folders[node.folder].path.clone();
    let may_read_files = || match &node.kind {
        NodeKind::File { content: Content::Virtual(checkpoint), .. } => {
            let mut sources = checkpoint.sources().iter();
            sources.all(|source| access::may_read_file(source.path(), uid, gid))
        }
        NodeKind::File { content: Content::Whole { file, .. }, .. } => {
            access::may_read_file(&file.path, uid, gid)
        }
        _ => true,
    };
    if access::may_read_folder(&folder, uid, gid) && may_read_files() {
        found.extend(source_of(tree, view, node).map(|source| (XATTR_SOURCE, source)));
    }
    if let NodeKind::File { version, .. } = &node.kind {
        found.push((XATTR_VERSION, version.clone()));
    }
    found
}

/// The value of `XATTR_SOURCE`.
fn source_of(tree: &Tree, view: &serde_json::Value, node: &Node) -> Option<String> {
    let mut folder = tree.folders[node.folder].path.clone();
    let mut member = None;
    match &node.kind {
        NodeKind::Folder => {
            if tree.only.is_some() {
                folder = tree.source.clone();
            }
        }
        NodeKind::File { content: Content::Virtual(checkpoint), .. } => {
            member = checkpoint.catalog().shards.first().map(|shard| shard.name.clone());
        }
        NodeKind::File { content: Content::Whole { file, .. }, .. } => {
            member = file.name.to_str().map(str::to_owned);
        }
        NodeKind::File { content: Content::Text(_), .. } => {}
    }
    // A path that is not UTF-8 cannot stand in JSON.
    let folder = folder.to_str()?;
    Some(serde_json::json!({ "source": folder, "file": member, "view": view }).to_string())
}
