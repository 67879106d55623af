//! The files and folders of the source that a node of the mount is made of, and the users who may read all of them. The
//! rules of `access=` limit these users. Behind links, the permissions of the source limit them too.
//!
//! The bytes of a node come from known inodes at known real paths. The node has the limits of
//! exactly these paths. If a file is not at its path, or if its path leads through a link, nobody
//! may see the node.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::time::Instant;

use tensorfs::internal::checkpoint::{Content, File, Folder, FolderId, Tree};
use tensorfs::internal::mount_origin::is_limited;
use tensorfs::internal::source::PathPermissions;
use tensorfs::internal::store::folder::OpenFolder;
use tensorfs::internal::version::FileId;

use super::node::Node;
use super::sharing::{Limit, NodeAccess, PASS, READ, Rights, Sharing, names, names_of_folder};

/// The kind of a file or folder that a link leads to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    File,
    /// A folder, and whether the caller wants to list it.
    Folder(bool),
    /// Another link.
    Link,
}

impl Kind {
    fn is_folder(self) -> bool {
        matches!(self, Kind::Folder(_))
    }
}

struct Survey<'a> {
    sharing: &'a Sharing,
    tree: &'a Tree,
    /// The folder that the node is, or that contains it.
    folder: &'a Folder,
    /// The last folder of the source that was opened, and its path.
    opened: Option<(PathBuf, OpenFolder)>,
    limits: Vec<Limit>,
    lists: Vec<Limit>,
    /// Whether a file or folder of the source differs from the state in the tree.
    changed: bool,
    /// Whether permissions of the source were read.
    asked: bool,
}

/// Whether the access of `node` can be found without access to the source.
pub(crate) fn is_known_without_source(tree: &Tree, node: &Node) -> bool {
    node.is_folder() && !tree.folder(node.folder()).is_linked()
}

/// The users who may see `node`. Accesses the source.
pub(crate) fn access_of(sharing: &Sharing, tree: &Tree, node: &Node) -> NodeAccess {
    let (id, is_folder) = (node.folder(), node.is_folder());
    let folder = tree.folder(id);
    let looked = Instant::now();
    let mut survey = Survey {
        sharing,
        tree,
        folder: &folder,
        opened: None,
        limits: Vec::new(),
        lists: Vec::new(),
        changed: !tree.contains(id),
        asked: false,
    };
    let own = names(tree, &folder, &node.path);
    survey.folder(id, is_folder);
    if let Some(content) = node.content() {
        survey.content(id, content, &own);
    }
    let Survey { limits, lists, changed, asked, .. } = survey;
    let limits = (!changed).then_some((limits, lists));
    let again = (asked || changed).then_some(looked);
    NodeAccess::new(sharing.rights(&own, is_folder), is_folder, limits, again)
}

impl Survey<'_> {
    /// Adds the limits of the links that lead to the folder `id` or to a folder above it.
    fn folder(&mut self, id: FolderId, lists: bool) {
        let folder = self.tree.folder(id);
        if !folder.is_linked() {
            return;
        }
        let own = names_of_folder(self.tree, &folder);
        self.target(&folder.path, Kind::Folder(lists), &own, None);
        let mut next = folder;
        while let Some(parent) = next.parent {
            let above = self.tree.folder(parent);
            let link = next.relative.file_name().map(|name| above.path.join(name));
            if let Some(link) = link.filter(|link| !above.is_made() && *link != next.path) {
                let own = names_of_folder(self.tree, &next);
                self.way(&link, &own);
                self.target(&next.path, Kind::Folder(false), &own, None);
            }
            next = above;
        }
    }

    /// Adds the limits of the source files that make up a file in folder `id`. `own` are the names
    /// of the file.
    fn content(&mut self, id: FolderId, content: &Content, own: &[PathBuf]) {
        let folder = self.tree.folder(id);
        match content {
            // The user who mounted chose the folder of this file for the users of the checkpoint.
            Content::Whole { file, .. } if self.is_of_config(file) => {
                self.changed |= !self.is_at(&file.path, file.version.file());
            }
            Content::Whole { file, proved } => {
                let version = proved.as_ref().map_or(file.version, |source| source.version());
                self.file(&folder, &file.name, &file.path, version.file(), own);
            }
            Content::Virtual(file) => {
                let checkpoint = file.checkpoint();
                let rule = self.sharing.rule_of(own);
                let member = self.member(id, &checkpoint.directory);
                let shards = checkpoint.catalog().shards.iter().zip(checkpoint.sources());
                let Some(member) = member.map(|member| self.tree.folder(member)) else { return };
                for (shard, source) in shards {
                    let name = OsStr::new(&shard.name);
                    self.file(&member, name, source.path(), source.version().file(), own);
                    let mut all = own.to_vec();
                    all.extend(names(self.tree, &member, &member.relative.join(name)));
                    let of_shard = self.sharing.rule_of(&all);
                    if of_shard != rule {
                        self.admit(Limit::of(self.sharing.rights_by(of_shard, false), READ));
                    }
                }
            }
            // A generated text reveals facts about the files beside it, so their limits count.
            Content::Text(_) => {
                for member in self.tree.family(id) {
                    self.folder(member, false);
                    let member = self.tree.folder(member);
                    let is_plain = |file: &File| {
                        !member.is_linked() && member.path.join(&file.name) == file.path
                    };
                    for file in member.files.iter().filter(|file| !is_plain(file)) {
                        self.file(&member, &file.name, &file.path, file.version.file(), own);
                    }
                }
            }
        }
    }

    /// Whether the file is from `config=`, and no link leads to it.
    fn is_of_config(&self, file: &File) -> bool {
        let config = self.tree.options.config.as_deref();
        let real = config.and_then(|config| std::fs::canonicalize(config).ok());
        let is_there = |real: PathBuf| real == file.path || real.join(&file.name) == file.path;
        real.is_some_and(is_there) && self.tree.is_config_file(file)
    }

    /// The folder of the family of `id` that has the set in `directory`. Adds the limits of that
    /// folder and of all folders between it and `id`.
    fn member(&mut self, id: FolderId, directory: &Path) -> Option<FolderId> {
        let family = self.tree.family(id);
        let found = family.into_iter().find(|member| self.tree.folder(*member).path == directory);
        self.changed |= found.is_none();
        let mut next = found;
        while let Some(member) = next.filter(|member| *member != id) {
            self.folder(member, false);
            let folder = self.tree.folder(member);
            let rights = self.sharing.rights(&names_of_folder(self.tree, &folder), true);
            self.admit(Limit::of(rights, PASS));
            next = folder.parent;
        }
        found
    }

    /// Adds the limits of the file `name` in `folder`, whose real path is `path`.
    fn file(&mut self, folder: &Folder, name: &OsStr, path: &Path, id: FileId, own: &[PathBuf]) {
        // If the file lies on another mount of tensorfs, that mount may have limited its users.
        self.changed |= !self.is_at(path, id) || is_limited(path);
        let place = folder.path.join(name);
        let link = Some(place.as_path()).filter(|place| *place != path);
        link.into_iter().for_each(|link| self.way(link, own));
        if link.is_some() || folder.is_linked() {
            self.target(path, Kind::File, own, link);
        }
    }

    /// Adds the limits of the other links through which `link` leads to its target.
    fn way(&mut self, link: &Path, own: &[PathBuf]) {
        for further in self.tree.store().links_on_the_way(link) {
            self.target(&further, Kind::Link, own, None);
        }
    }

    /// Whether the file `id` is at `path`, with no link in between.
    fn is_at(&mut self, path: &Path, id: FileId) -> bool {
        let store = self.tree.store();
        if !store.is_local() {
            return store.fresh_version(path).is_ok_and(|now| now.file() == id);
        }
        let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else { return false };
        if self.opened.as_ref().is_none_or(|(opened, _)| opened != folder) {
            let opened = OpenFolder::open(&self.tree.base_of(path), folder);
            self.opened = opened.ok().map(|opened| (folder.to_owned(), opened));
        }
        let Some((_, folder)) = &self.opened else { return false };
        folder.version_of_name(name).is_ok_and(|now| now.file() == id)
    }

    /// Adds the limits of the real path `path`, to which a node with the names `own` leads. For a
    /// file, `link` is the link to it.
    fn target(&mut self, path: &Path, kind: Kind, own: &[PathBuf], link: Option<&Path>) {
        let root = self.tree.root();
        let mut same_rule = false;
        if let Ok(inside) = path.strip_prefix(&root) {
            let rule = self.sharing.rule_of(&self.names_in_source(inside));
            same_rule = rule.is_some() && rule == self.sharing.rule_of(own);
            self.limit(self.sharing.rights_by(rule, kind.is_folder()), kind);
            self.above(
                inside.ancestors().skip(1).map(|above| self.names_in_source(above)).collect(),
            );
        }
        if self.tree.options.hub {
            self.shown_in_hub(path, kind);
        }
        // A rule that covers both the link and its target gives both to the same users, so the
        // permissions of the source do not count. They do not count either if both are files of one
        // model in a hub cache.
        let is_own = link.is_some_and(|link| self.tree.store().is_own_blob(link, path));
        if !same_rule && !is_own {
            self.in_source(path, kind, &root);
        }
    }

    /// The names of a path of the source, as the view of the node shows it.
    fn names_in_source(&self, path: &Path) -> Vec<PathBuf> {
        let view = self.tree.view_folder(self.folder).map(|view| view.join(path));
        std::iter::once(path.to_owned()).chain(view).collect()
    }

    /// Adds the limits of the paths at which `layout=hub` shows a path of the source.
    fn shown_in_hub(&mut self, path: &Path, kind: Kind) {
        let file = path.file_name().filter(|_| !kind.is_folder());
        let folder = if file.is_some() { path.parent().unwrap_or(path) } else { path };
        for shown in self.tree.shown_without_links(folder) {
            let shown: PathBuf = shown.relative.iter().chain(file).collect();
            let rights = self.sharing.rights(std::slice::from_ref(&shown), kind.is_folder());
            self.limit(rights, kind);
            self.above(shown.ancestors().skip(1).map(|above| vec![above.to_owned()]).collect());
        }
    }

    /// Lets in only users to whom `rights` give the access that `kind` requires.
    fn limit(&mut self, rights: Rights, kind: Kind) {
        match kind {
            Kind::File | Kind::Link => self.admit(Limit::of(rights, READ)),
            Kind::Folder(lists) => {
                self.admit(Limit::of(rights, PASS));
                if lists {
                    self.lists.push(Limit::of(rights, READ));
                }
            }
        }
    }

    /// Lets in only users who may pass the folders with these names.
    fn above(&mut self, folders: Vec<Vec<PathBuf>>) {
        for names in folders.into_iter().filter(|names| !names[0].as_os_str().is_empty()) {
            self.admit(Limit::of(self.sharing.rights(&names, true), PASS));
        }
    }

    fn admit(&mut self, limit: Limit) {
        if !self.limits.contains(&limit) {
            self.limits.push(limit);
        }
    }

    /// Adds the limits of the permissions of `path` and of the folders above it. The root of the
    /// source does not count, since the mount shares it. Folders of `follow=` count.
    fn in_source(&mut self, path: &Path, kind: Kind, root: &Path) {
        self.asked = true;
        let base = self.tree.base_of(path);
        let mut paths: Vec<&Path> = path.ancestors().take_while(|above| *above != base).collect();
        if base != root || paths.is_empty() {
            paths.push(&base);
        }
        for above in paths {
            if above == path && kind == Kind::Link {
                continue;
            }
            match PathPermissions::at(above) {
                Ok(found) if !found.is_link => {
                    let rights = Rights { uid: found.uid, gid: found.gid, mode: found.mode };
                    let kind = if above == path { kind } else { Kind::Folder(false) };
                    self.limit(rights, kind);
                }
                _ => self.changed = true,
            }
        }
    }
}
