//! The entries of a folder with their readdir positions.

use std::ffi::OsString;
use std::sync::Arc;

use super::inodes::Nodes;
use super::node::Node;

/// The entries of `folder` after position `offset`, each with its own position.
pub(super) fn entries(
    nodes: &Nodes,
    folder: &Arc<Node>,
    offset: u64,
) -> impl Iterator<Item = (u64, OsString, Arc<Node>)> {
    let (listing, positions) = nodes.positions(folder.folder()).unwrap_or_default();
    let tree = nodes.tree();
    let above = tree.folder(folder.folder()).parent.unwrap_or_default();
    let parent = nodes.folder(above).unwrap_or_else(|| folder.clone());
    let dots = [(1, OsString::from("."), folder.clone()), (2, "..".into(), parent)]
        .into_iter()
        .filter(move |(position, ..)| *position > offset);
    let first = positions.partition_point(|(position, _)| position + 2 <= offset);
    let entries = (first..positions.len()).map(move |nth| {
        let (position, index) = positions[nth];
        let (name, node) = listing[index].clone();
        (position + 2, name, node)
    });
    dots.chain(entries)
}
