//! Attributes that all files of a mount share, and extended attributes that name the source of a
//! file.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tensorfs::internal::checkpoint::{Content, File, Folder, FolderId, SetKind, Tree};
use tensorfs::internal::format::{InputFormat, names};
use tensorfs::internal::mount_origin::{XATTR_LIMITED, XATTR_SOURCE};

use super::access::{Caller, may_read_file, may_read_folder};
use super::inodes::Nodes;
use super::node::Node;
use super::sharing::{Limit, PASS, READ, Sharing, is_super, names_of_folder};

/// Maximum number of `config.json` files below a folder whose hashes the source attribute of that
/// folder lists.
const CONFIGS_MAX: usize = 100;

/// Maximum number of folders in the list that another user gets.
const MODELS_MAX: usize = 10_000;

/// The reason why a checkpoint is not shown, for users who may not learn its name.
const MISSING: &str = "a checkpoint of the mount is not shown";

/// The file that decides how a view cuts tensors for its ranks.
const CONFIG: &str = "config.json";

/// Extended attribute with the version of a file's content.
pub(crate) const XATTR_VERSION: &str = "user.tensorfs.version";

/// Extended attribute of weight files: `proven` if the last pieces of their checkpoint are proved,
/// else `unproven`.
pub(crate) const XATTR_TAIL: &str = "user.tensorfs.tail";

/// The value of `XATTR_TAIL` for a weight file. `None` for other files.
pub(crate) fn tail_of(nodes: &Nodes, node: &Node) -> Option<(&'static str, String)> {
    let name = node.path.file_name()?.to_str()?;
    let weights = match node.content() {
        Some(Content::Virtual(_)) => true,
        Some(Content::Whole { proved, .. }) => proved.is_some(),
        _ => false,
    };
    let tail = weights.then(|| nodes.tails().of(node.folder(), name))??;
    Some((XATTR_TAIL, tail.as_str().to_owned()))
}

/// Facts that all files of a mount share.
#[derive(Clone, Debug)]
pub(crate) struct Common {
    /// The owner of the mount, and the rules of `access=`.
    pub sharing: Arc<Sharing>,
    /// Whether the kernel may serve whole files by passthrough.
    pub passthrough: bool,
    /// Whether reads of the source have a deadline.
    pub has_deadline: bool,
    /// Whether the mount was made by root. Passthrough requires that.
    pub is_root: bool,
    /// Path of the source.
    pub source: PathBuf,
}

/// The folders of checkpoints that user `uid` in the groups `gids` may list. A folder that a link leads
/// to counts once a request has looked at its permissions.
pub(crate) fn folders_listable_by(nodes: &Nodes, uid: u32, gids: &[u32]) -> Vec<PathBuf> {
    let tree = &nodes.tree();
    let tops = tree.families().into_iter().filter(|top| tree.contains(*top));
    let readable = tops.filter(|top| may_list(nodes, *top, uid, &mut |gid| gids.contains(&gid)));
    readable.take(MODELS_MAX).map(|top| tree.folder(top).relative.clone()).collect()
}

/// Whether user `uid` may list the folder `id` and pass all folders above it. Does not access the
/// source.
fn may_list(nodes: &Nodes, id: FolderId, uid: u32, is_in: &mut dyn FnMut(u32) -> bool) -> bool {
    let (tree, sharing) = (&nodes.tree(), nodes.sharing());
    let mut next = Some(id);
    while let Some(at) = next {
        let folder = tree.folder(at);
        let (rights, is_let_in) = match nodes.known_access(at) {
            Some(access) if at == id => (access.rights, access.allows_list(uid, is_in)),
            Some(access) => (access.rights, access.allows(uid, is_in)),
            None => {
                let is_known = !(folder.is_linked() && sharing.has_rules());
                (sharing.rights(&names_of_folder(tree, &folder), true), is_known)
            }
        };
        let wanted = if at == id { PASS | READ } else { PASS };
        if !is_let_in || !Limit::of(rights, wanted).allows(uid, is_in) {
            return false;
        }
        next = folder.parent;
    }
    true
}

/// The extended attributes of `node` that the caller may see.
pub(crate) fn of(nodes: &Nodes, node: &Node, caller: &Caller) -> Vec<(&'static str, String)> {
    let (uid, gid) = (caller.uid, caller.gid);
    let tree = &nodes.tree();
    let mut found = Vec::new();
    let access = nodes.access_of(node);
    if access.as_ref().is_some_and(|access| !caller.may_see(access)) {
        return found;
    }
    // The kernel shows attributes with this name to root only.
    if access.is_some_and(|access| access.is_limited()) {
        found.push((XATTR_LIMITED, "1".to_owned()));
    }
    let folder = tree.folder(node.folder()).path.clone();
    let may_read_files = || match node.content() {
        Some(Content::Virtual(file)) => {
            let mut sources = file.sources().iter();
            sources.all(|source| may_read_file(source.path(), uid, gid))
        }
        Some(Content::Whole { file, .. }) => may_read_file(&file.path, uid, gid),
        _ => true,
    };
    if may_read_folder(&folder, uid, gid) && may_read_files() {
        // A hash reveals the text of a config, so only users who may read the config get its hash.
        let may_read_config = |folder: &Path| {
            let real = std::fs::canonicalize(folder.join(CONFIG));
            real.is_ok_and(|config| may_read_file(&config, uid, gid))
        };
        let config = nodes.tails().config_of(node.folder()).map(|digest| digest.to_string());
        let below = if node.is_folder() {
            nodes.tails().configs_below(tree, &node.path)
        } else {
            BTreeMap::new()
        };
        let is_hidden = config.is_some() && !may_read_config(&folder)
            || below.iter().any(|(path, (id, _))| {
                !(may_list(nodes, *id, uid, &mut |group| group == gid)
                    && may_read_folder(path, uid, gid)
                    && may_read_config(path))
            });
        // Other programs read the files through the mount in two cases: the caller may not learn of a
        // model, or links lead out of the folder. In the second case, a mount of this folder alone
        // would not know the rules for the targets of the links.
        let has_rules = nodes.sharing().has_rules();
        let is_part = tree.only.is_none() && folder != tree.source_now();
        let through_mount = is_hidden || (has_rules && is_part && leads_out(tree, node.folder()));
        let hashes_below: BTreeMap<_, _> =
            below.into_iter().map(|(path, (_, hash))| (path, hash)).collect();
        let follows = is_part && !has_rules;
        let source = source_of(tree, node, config, &hashes_below, through_mount, follows);
        // The reason contains the name of the checkpoint.
        let is_told = !has_rules || is_super(uid);
        let missing = node
            .is_folder()
            .then(|| nodes.missing(&node.path))
            .flatten()
            .map(|why| if is_told { why } else { MISSING.to_owned() });
        found.extend(source.map(|source| (XATTR_SOURCE, with_missing(source, missing))));
    }
    found.extend(node.version().map(|version| (XATTR_VERSION, version)));
    found
}

/// The value of `XATTR_SOURCE`, with the reason why no checkpoint is shown.
fn with_missing(source: String, missing: Option<String>) -> String {
    let Some(missing) = missing else { return source };
    let Ok(mut json) = serde_json::from_str::<serde_json::Value>(&source) else { return source };
    json["missing"] = missing.into();
    json.to_string()
}

/// Whether a file that this folder or a folder below it shows may be a tensorizer file.
fn may_hold_tensorizer(tree: &Tree, id: FolderId) -> bool {
    if let Some(only) = &tree.only {
        // A name of no known format does not exclude tensorizer.
        return names::is_tensorizer(only) || InputFormat::of_name(only).is_none();
    }
    let folder = tree.folder(id);
    let named = |file: &File| file.name.to_str().is_some_and(names::is_tensorizer);
    folder.files.iter().any(named)
        || folder.children.iter().any(|(_, child)| may_hold_tensorizer(tree, *child))
}

/// Whether links in the folder `id`, or in a folder below it, lead out of it.
fn leads_out(tree: &Tree, id: FolderId) -> bool {
    let top = tree.folder(id).path.clone();
    let mut left = vec![id];
    while let Some(folder) = left.pop().map(|id| tree.folder(id)) {
        let is_out = |file: &File| {
            !file.path.starts_with(&top)
                && !file.store.is_own_blob(&folder.path.join(&file.name), &file.path)
        };
        if !folder.path.starts_with(&top) || folder.files.iter().any(is_out) {
            return true;
        }
        left.extend(folder.children.iter().map(|(_, child)| *child));
    }
    false
}

/// Whether `node` may have encrypted weights. The mount has a key.
fn may_be_encrypted(tree: &Tree, node: &Node) -> bool {
    match node.content() {
        Some(Content::Virtual(file)) => file.sources().iter().any(|source| source.is_encrypted()),
        Some(Content::Whole { file, .. }) => file.name.to_str().is_none_or(names::is_tensorizer),
        _ => may_hold_tensorizer(tree, node.folder()),
    }
}

/// The origin of the bytes of a node.
struct PlaceInSource {
    folder: PathBuf,
    /// Name of a weight file in that folder. For a virtual file, it is the first weight file of the
    /// checkpoint.
    member: Option<String>,
    /// Name of the virtual file, if that file has only some of the tensors of the checkpoint.
    part: Option<String>,
}

/// The origin of the bytes of `node`. `path` is the path of its folder in the source.
fn place_in_source(tree: &Tree, node: &Node, path: &Path) -> PlaceInSource {
    let mut place = PlaceInSource { folder: path.to_owned(), member: None, part: None };
    match node.content() {
        None if tree.only.is_some() => place.folder = tree.source_now(),
        Some(Content::Virtual(file)) => {
            let checkpoint = file.checkpoint();
            place.folder.clone_from(&checkpoint.directory);
            // A single file of a DeepSpeed checkpoint is another checkpoint or none, so only the
            // folder is named.
            let is_of_folder = checkpoint.kind == SetKind::DeepSpeed;
            let mut shards = checkpoint.catalog().shards.iter().filter(|_| !is_of_folder);
            place.member = shards.next().map(|shard| shard.name.clone());
            place.part = file.spec().tensors.is_some().then(|| file.spec().name.clone());
        }
        Some(Content::Whole { file, .. }) => {
            place.member = file.name.to_str().map(str::to_owned);
        }
        None | Some(Content::Text(_)) => {}
    }
    place
}

/// Whether the file comes from the subfolder that has the config of the model. `folder` shows the
/// file but does not contain it.
fn is_of_model_folder(folder: &Folder, file: &File) -> bool {
    file.name.to_str().is_some_and(|name| folder.file(name).is_none())
}

/// The value of `XATTR_SOURCE`. `config` is the hash of the `config.json` that the view read.
/// `below` has the folders below the node that have such a config, each with the hash of the text.
///
/// A program that opens the mount reads either the files of the source itself or the files of the
/// mount. It reads the files of the mount in two cases:
///
/// - The value has `"made": true`. This is so with `through_mount`, for folders between the root
///   and the folders of ranks, for generated texts, and for more than `CONFIGS_MAX` configs. The
///   value of a folder between the root and the folders of ranks names the root, and the value of a
///   generated text names its folder.
/// - The node has no value. This is so for folders that `layout=hub` makes, for files of `config=`
///   or of the folder with the config of the model, and for paths that are not UTF-8. If the mount
///   has a key, it is also so for nodes that may be encrypted.
fn source_of(
    tree: &Tree,
    node: &Node,
    config: Option<String>,
    below: &BTreeMap<PathBuf, String>,
    through_mount: bool,
    follows: bool,
) -> Option<String> {
    let found = tree.folder(node.folder());
    let is_made = found.is_made_below_root();
    let is_text = node.is_text();
    let is_given = matches!(node.content(),
        Some(Content::Whole { file, proved: None })
            if tree.is_config_file(file) || is_of_model_folder(&found, file));
    // Other processes do not have the key of an encrypted source.
    let needs_key = tree.options.secret.is_some() && may_be_encrypted(tree, node);
    if (is_made && tree.options.hub) || needs_key || is_given {
        return None;
    }
    let mut view = tree.options_of(&found).to_json();
    let PlaceInSource { folder, member, part } = place_in_source(tree, node, &found.path);
    // Links in this folder may lead elsewhere in the source of the mount, and the mount shows their
    // targets. `follow` allows these targets to a mount of this folder alone.
    if follows
        && let (Some(follow), Some(root)) =
            (view["follow"].as_array_mut(), tree.source_now().to_str())
    {
        follow.push(root.into());
    }
    // JSON cannot hold a path that is not UTF-8.
    let folder = folder.to_str()?;
    let mut json = serde_json::json!({ "source": folder, "file": member, "view": view });
    if let Some(part) = part {
        json["part"] = part.into();
    }
    if through_mount {
        json["made"] = true.into();
        return Some(json.to_string());
    }
    if let Some(config) = config {
        json["config"] = config.into();
    }
    // Beyond `CONFIGS_MAX`, configs are not compared one by one: the folder is read through the
    // mount.
    if is_made || is_text || below.len() > CONFIGS_MAX {
        json["made"] = true.into();
    } else if !below.is_empty() {
        let pairs = below.iter().map(|(path, hash)| Some((path.to_str()?, hash.as_str())));
        json["configs"] = serde_json::json!(pairs.collect::<Option<BTreeMap<_, _>>>()?);
    }
    Some(json.to_string())
}
