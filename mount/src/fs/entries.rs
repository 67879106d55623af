//! The entries of a folder with their positions, as readdir wants them.

use std::ffi::OsString;
use std::sync::Arc;

use super::inodes::Nodes;
use super::node::Node;

/// The entries of `folder` from position `offset` on, each with the position after it.
pub(super) fn entries(
    nodes: &Nodes,
    folder: &Arc<Node>,
    offset: u64,
) -> impl Iterator<Item = (u64, OsString, Arc<Node>)> {
    let listing = nodes.listing(folder.folder()).unwrap_or_default();
    let tree = nodes.tree();
    let parent = tree.folder(folder.folder()).parent.unwrap_or_default();
    let parent = nodes.folder(parent).unwrap_or_else(|| folder.clone());
    let dots = [(OsString::from("."), folder.clone()), ("..".into(), parent)];
    (offset..).map_while(move |index| {
        let (name, node) = match dots.get(index as usize) {
            Some(dot) => dot.clone(),
            None => listing.get(index as usize - dots.len())?.clone(),
        };
        Some((index + 1, name, node))
    })
}
