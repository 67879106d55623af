//! Attributes that all files of a mount share, and extended attributes that name the source of a
//! file.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use tensorfs::internal::checkpoint::{Content, File, FolderId, Tree};
use tensorfs::internal::format::{InputFormat, names};
use tensorfs::internal::mount_origin::XATTR_SOURCE;

use super::access;
use super::inodes::Nodes;
use super::node::{Node, NodeKind};
use crate::options::AccessRule;

/// Most folders whose `config.json` the attribute of a folder above them names.
const CONFIGS_MAX: usize = 100;

/// Most folders that another user is told of.
const MODELS_MAX: usize = 10_000;

/// Extended attribute with the version of a file's content.
pub(crate) const XATTR_VERSION: &str = "user.tensorfs.version";

/// Extended attribute of weights: whether the last pieces of their checkpoint are proved, as
/// `proven` or `unproven`.
pub(crate) const XATTR_TAIL: &str = "user.tensorfs.tail";

/// The value of `XATTR_TAIL`, for weights.
pub(crate) fn tail_of(nodes: &Nodes, node: &Node) -> Option<(&'static str, String)> {
    let name = node.path.file_name()?.to_str()?;
    let weights = match &node.kind {
        NodeKind::File { content: Content::Virtual(_), .. } => true,
        NodeKind::File { content: Content::Whole { proved, .. }, .. } => proved.is_some(),
        _ => false,
    };
    let tail = weights.then(|| nodes.tails().of(node.folder(), name))??;
    Some((XATTR_TAIL, tail.as_str().to_owned()))
}

/// Attributes that all files of a mount share.
#[derive(Clone, Debug)]
pub(crate) struct Common {
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Permission bits taken away.
    pub umask: u32,
    /// Rules that give parts of the mount to users and groups.
    pub access: Vec<AccessRule>,
    /// Whether the kernel may serve whole files by passthrough.
    pub passthrough: bool,
    /// Whether it was mounted as root, which passthrough requires.
    pub is_root: bool,
    /// Largest request in bytes.
    pub max_request: u32,
    /// The source.
    pub source: PathBuf,
}

/// Owner, group and permission bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rights {
    pub uid: u32,
    pub gid: u32,
    pub mode: u32,
}

impl Common {
    /// The rights of the file or folder at `path` in the mount.
    pub(crate) fn rights(&self, path: &Path, is_folder: bool) -> Rights {
        // Nothing can be written.
        let bits = if is_folder { 0o555 } else { 0o444 };
        let rule = self.access.iter().find(|rule| rule.matches(path));
        let mode = rule.and_then(|rule| rule.mode).unwrap_or(!self.umask);
        Rights {
            uid: rule.and_then(|rule| rule.owner).unwrap_or(self.uid),
            gid: rule.and_then(|rule| rule.group).unwrap_or(self.gid),
            mode: mode & bits,
        }
    }

    /// The folders of checkpoints that a user of these groups may list.
    pub(crate) fn models_of(&self, tree: &Tree, uid: u32, gids: &[u32]) -> Vec<PathBuf> {
        let may = |path: &Path, wanted: u32| {
            let rights = self.rights(path, true);
            let shift = match () {
                () if rights.uid == uid => 6,
                () if gids.contains(&rights.gid) => 3,
                () => 0,
            };
            rights.mode >> shift & wanted == wanted
        };
        let heads = tree.families().into_iter().filter(|head| tree.contains(*head));
        let folders = heads.map(|head| tree.folder(head).relative.clone());
        let readable = folders
            .filter(|path| may(path, 0o5) && path.ancestors().skip(1).all(|above| may(above, 0o1)));
        readable.take(MODELS_MAX).collect()
    }
}

/// The extended attributes of `node` that the caller may see.
pub(crate) fn of(
    nodes: &Nodes,
    node: &Node,
    (uid, gid): (u32, u32),
) -> Vec<(&'static str, String)> {
    let tree = &nodes.tree();
    let mut found = Vec::new();
    let folder = tree.folder(node.folder()).path.clone();
    let may_read_files = || match &node.kind {
        NodeKind::File { content: Content::Virtual(file), .. } => {
            let mut sources = file.sources().iter();
            sources.all(|source| access::may_read_file(source.path(), uid, gid))
        }
        NodeKind::File { content: Content::Whole { file, .. }, .. } => {
            access::may_read_file(&file.path, uid, gid)
        }
        _ => true,
    };
    if access::may_read_folder(&folder, uid, gid) && may_read_files() {
        let config = nodes.tails().config_of(node.folder()).map(|digest| digest.to_string());
        let below = match &node.kind {
            NodeKind::Folder => nodes.tails().configs_below(tree, &node.path),
            _ => BTreeMap::new(),
        };
        let source = source_of(tree, node, config, &below);
        found.extend(source.map(|source| (XATTR_SOURCE, source)));
    }
    found.extend(node.version().map(|version| (XATTR_VERSION, version)));
    found
}

/// Whether a file that is shown in a folder or below it may be a tensorizer file.
fn may_hold_tensorizer(tree: &Tree, id: FolderId) -> bool {
    if let Some(only) = &tree.only {
        // Names of no format say nothing.
        return names::is_tensorizer(only) || InputFormat::of_name(only).is_none();
    }
    let folder = tree.folder(id);
    let named = |file: &File| file.name.to_str().is_some_and(names::is_tensorizer);
    folder.files.iter().any(named)
        || folder.children.iter().any(|(_, child)| may_hold_tensorizer(tree, *child))
}

/// The value of `XATTR_SOURCE`. `config` is the hash of the `config.json` that the view read,
/// `below` the folders below it with such a text.
///
/// The folders between the root and the folders of ranks have the source of the root, marked as
/// made. Folders of a hub cache that stand for none of the source have none. Both are read through
/// the mount. So are texts that the mount has made, which have the source of their folder, marked as
/// made; and encrypted weights, and in a mount that has a key all that may hold some, which have none.
fn source_of(
    tree: &Tree,
    node: &Node,
    config: Option<String>,
    below: &BTreeMap<PathBuf, String>,
) -> Option<String> {
    let found = tree.folder(node.folder());
    let is_made = found.is_made_below_root();
    // Other processes do not have the key of an encrypted source.
    let may_be_encrypted = tree.options.secret.is_some()
        && match &node.kind {
            NodeKind::File { content: Content::Virtual(file), .. } => {
                file.sources().iter().any(|source| source.is_encrypted())
            }
            NodeKind::File { content: Content::Whole { file, .. }, .. } => {
                file.name.to_str().is_none_or(names::is_tensorizer)
            }
            _ => may_hold_tensorizer(tree, node.folder()),
        };
    let is_text = matches!(&node.kind, NodeKind::File { content: Content::Text(_), .. });
    if (is_made && tree.options.hub) || may_be_encrypted {
        return None;
    }
    let (mut view, mut folder) = (tree.options_of(&found).to_json(), found.path.clone());
    let (mut member, mut part) = (None, None);
    match &node.kind {
        NodeKind::Folder => {
            if tree.only.is_some() {
                folder = tree.source.clone();
            }
        }
        NodeKind::File { content: Content::Virtual(file), .. } => {
            folder.clone_from(&file.checkpoint().directory);
            member = file.checkpoint().catalog().shards.first().map(|shard| shard.name.clone());
            part = file.spec().tensors.is_some().then(|| file.spec().name.clone());
        }
        NodeKind::File { content: Content::Whole { file, .. }, .. } => {
            member = file.name.to_str().map(str::to_owned);
        }
        NodeKind::File { content: Content::Text(_), .. } => {}
    }
    // The mount shows what links in the folder lead to elsewhere in its source.
    if tree.only.is_none()
        && folder != tree.source
        && let (Some(follow), Some(root)) = (view["follow"].as_array_mut(), tree.source.to_str())
    {
        follow.push(root.into());
    }
    // JSON cannot hold a path that is not UTF-8.
    let folder = folder.to_str()?;
    let mut json = serde_json::json!({ "source": folder, "file": member, "view": view });
    if let Some(part) = part {
        json["part"] = part.into();
    }
    if let Some(config) = config {
        json["config"] = config.into();
    }
    // More are not compared one by one: the folder is read through the mount.
    if is_made || is_text || below.len() > CONFIGS_MAX {
        json["made"] = true.into();
    } else if !below.is_empty() {
        let pairs = below.iter().map(|(path, hash)| Some((path.to_str()?, hash.as_str())));
        json["configs"] = serde_json::json!(pairs.collect::<Option<BTreeMap<_, _>>>()?);
    }
    Some(json.to_string())
}
