//! The users who may see each part of a mount. The rules of `access=` and the permissions of link
//! targets limit them.
//!
//! The kernel enforces owner, group and mode of each file. Several limits rarely fit into one mode. So the daemon
//! checks all limits whenever a user looks up, lists or opens a file or folder that has limits. The mode that the
//! kernel gets lets in at least all users whom the limits let in.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::unistd::geteuid;
use tensorfs::internal::checkpoint::{Folder, Tree};

use crate::options::{AccessRule, Options};

/// Owner, group and permission bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rights {
    pub uid: u32,
    pub gid: u32,
    pub mode: u32,
}

/// The largest modes of folders and files. The mount is read-only, but folders have the write bit,
/// so that the owner of a copy of a folder can remove the copy.
const FOLDER_BITS: u32 = 0o755;
const FILE_BITS: u32 = 0o444;

/// Permission bits of one class of users in a mode.
pub(crate) const READ: u32 = 4;
pub(crate) const PASS: u32 = 1;

/// Classes of users, as bits of `Limit::classes`.
const OWNER: u32 = 4;
const GROUP: u32 = 2;
const OTHERS: u32 = 1;

/// How long limits stay valid that were read from permissions of the source.
const LIMITS_VALID_FOR: Duration = Duration::from_secs(1);

/// The users who have a certain permission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limit {
    uid: u32,
    gid: u32,
    classes: u32,
}

impl Limit {
    /// The users who have permission `bit` by `rights`.
    pub(crate) fn of(rights: Rights, bit: u32) -> Limit {
        let has =
            |shift: u32, class: u32| if rights.mode >> shift & bit == bit { class } else { 0 };
        let classes = has(6, OWNER) | has(3, GROUP) | has(0, OTHERS);
        Limit { uid: rights.uid, gid: rights.gid, classes }
    }

    /// Only the users whom `is_super` names.
    fn nobody() -> Limit {
        Limit { uid: geteuid().as_raw(), gid: 0, classes: 0 }
    }

    fn has(&self, class: u32) -> bool {
        self.classes & class != 0
    }

    /// Whether the limit lets in user `uid`. `is_in` says whether the user is in a group.
    pub(crate) fn allows(&self, uid: u32, is_in: &mut dyn FnMut(u32) -> bool) -> bool {
        if is_super(uid) || self.classes == OWNER | GROUP | OTHERS {
            return true;
        }
        if uid == self.uid {
            return self.has(OWNER);
        }
        // The groups of a process are read from /proc, so they are looked up only if they matter.
        if self.has(GROUP) == self.has(OTHERS) {
            return self.has(OTHERS);
        }
        self.has(if is_in(self.gid) { GROUP } else { OTHERS })
    }

    /// Whether this limit certainly lets in all users whom `other` lets in.
    fn contains(&self, other: &Limit) -> bool {
        let whole_group = self.has(GROUP) && self.has(OTHERS);
        // The owner of this limit may be in any class of `other`.
        let own = self.uid == other.uid || is_super(self.uid) || self.has(OWNER);
        let owner = match self.uid == other.uid {
            true => self.has(OWNER),
            false => whole_group,
        };
        let group = own && if self.gid == other.gid { self.has(GROUP) } else { whole_group };
        let others = own && self.has(OTHERS) && (self.gid == other.gid || self.has(GROUP));
        (!other.has(OWNER) || is_super(other.uid) || owner)
            && (!other.has(GROUP) || group)
            && (!other.has(OTHERS) || others)
    }
}

/// Whether the user is never refused: root, and the user of this process, who reads the source.
pub(crate) fn is_super(uid: u32) -> bool {
    uid == 0 || uid == geteuid().as_raw()
}

/// The users who may see one file or folder.
#[derive(Clone, Debug)]
pub(crate) struct NodeAccess {
    /// Owner, group and mode, as the kernel sees them.
    pub rights: Rights,
    /// All of these limits have to let a user in.
    limits: Vec<Limit>,
    /// To list a folder, these limits have to let the user in as well.
    lists: Vec<Limit>,
    /// Time at which the permissions of the source were read, if the limits depend on them.
    looked: Option<Instant>,
}

impl NodeAccess {
    /// The access that `limits` define: first the limits for seeing the node, then the limits for
    /// listing it. If `limits` is `None`, nobody is let in. `rights` are the rights that the rules
    /// give to the path of the node itself, without the limits of other paths.
    pub(crate) fn new(
        rights: Rights,
        is_folder: bool,
        limits: Option<(Vec<Limit>, Vec<Limit>)>,
        looked: Option<Instant>,
    ) -> NodeAccess {
        let nobody = || (vec![Limit::nobody()], Vec::new());
        let (mut limits, mut lists) = limits.unwrap_or_else(nobody);
        let own = Limit::of(rights, if is_folder { PASS } else { READ });
        let readers = Limit::of(rights, READ);
        limits.retain(|limit| !limit.contains(&own));
        lists.retain(|limit| !limit.contains(&readers));
        let narrower =
            |shown: Limit, limit: &Limit| if shown.contains(limit) { *limit } else { shown };
        let shown = limits.iter().fold(own, narrower);
        let rights = if shown == own { rights } else { rights_of(shown, is_folder) };
        NodeAccess { rights, limits, lists, looked }
    }

    /// Lets in only root and the user of this process.
    pub(crate) fn closed(is_folder: bool) -> NodeAccess {
        NodeAccess::new(rights_of(Limit::nobody(), is_folder), is_folder, None, None)
    }

    /// Whether some users may not see it although its own owner, group and mode let them in.
    pub(crate) fn is_limited(&self) -> bool {
        !self.limits.is_empty()
    }

    /// Whether user `uid` may see it. For a file, this includes reading.
    pub(crate) fn allows(&self, uid: u32, is_in: &mut dyn FnMut(u32) -> bool) -> bool {
        self.limits.iter().all(|limit| limit.allows(uid, is_in))
    }

    /// Whether user `uid` may list the folder.
    pub(crate) fn allows_list(&self, uid: u32, is_in: &mut dyn FnMut(u32) -> bool) -> bool {
        self.allows(uid, is_in) && self.lists.iter().all(|limit| limit.allows(uid, is_in))
    }

    /// Whether the permissions of the source have to be read again.
    pub(crate) fn is_old(&self) -> bool {
        self.looked.is_some_and(|looked| looked.elapsed() >= LIMITS_VALID_FOR)
    }
}

fn rights_of(limit: Limit, is_folder: bool) -> Rights {
    let bits = |class: u32, shift: u32| if limit.has(class) { 0o7 << shift } else { 0 };
    let mode = bits(OWNER, 6) | bits(GROUP, 3) | bits(OTHERS, 0);
    Rights { uid: limit.uid, gid: limit.gid, mode: mode & most_bits(is_folder) }
}

fn most_bits(is_folder: bool) -> u32 {
    if is_folder { FOLDER_BITS } else { FILE_BITS }
}

/// The owner of a mount, and the rules that give parts of the mount to other users.
#[derive(Clone, Debug)]
pub(crate) struct Sharing {
    uid: u32,
    gid: u32,
    /// The permission bits that are removed from each mode.
    umask: u32,
    rules: Arc<[AccessRule]>,
}

impl Sharing {
    /// The sharing that `options` define. `uid` and `gid` are the user and the group of this process.
    pub(crate) fn new(options: &Options, uid: u32, gid: u32) -> Sharing {
        Sharing {
            uid: options.uid.unwrap_or(uid),
            gid: options.gid.unwrap_or(gid),
            umask: options.umask,
            rules: options.access.clone().into(),
        }
    }

    /// Whether the mount has rules. Without rules, all users of the mount may see the targets of
    /// links.
    pub(crate) fn has_rules(&self) -> bool {
        !self.rules.is_empty()
    }

    /// The first rule that matches any of the `names` of one file or folder.
    pub(crate) fn rule_of(&self, names: &[PathBuf]) -> Option<usize> {
        self.rules.iter().position(|rule| names.iter().any(|name| rule.matches(name)))
    }

    /// The rights that a rule gives. If `rule` is `None`, the rights of the whole mount.
    pub(crate) fn rights_by(&self, rule: Option<usize>, is_folder: bool) -> Rights {
        let rule = rule.and_then(|rule| self.rules.get(rule));
        let mode = rule.and_then(|rule| rule.mode).unwrap_or(!self.umask);
        Rights {
            uid: rule.and_then(|rule| rule.owner).unwrap_or(self.uid),
            gid: rule.and_then(|rule| rule.group).unwrap_or(self.gid),
            mode: mode & most_bits(is_folder),
        }
    }

    /// The rights of a file or folder with these names.
    pub(crate) fn rights(&self, names: &[PathBuf], is_folder: bool) -> Rights {
        self.rights_by(self.rule_of(names), is_folder)
    }

    /// The rights that the kernel gets for a node with `access`. If the mount has rules and the
    /// access is not known yet, nobody has rights.
    pub(crate) fn rights_of(&self, access: Option<&NodeAccess>, is_folder: bool) -> Rights {
        match access {
            Some(access) => access.rights,
            None if self.has_rules() => NodeAccess::closed(is_folder).rights,
            None => self.rights_by(None, is_folder),
        }
    }

    /// The globs of the rules that match nothing in the source. A rule about the merged file of a
    /// set counts as used if the folder of that file exists.
    pub(crate) fn idle_rules(&self, tree: &Tree) -> Vec<String> {
        let mut idle: Vec<&AccessRule> = self.rules.iter().collect();
        for id in tree.ids() {
            if idle.is_empty() {
                break;
            }
            let folder = tree.folder(id);
            let names = |name: &Path| names(tree, &folder, &folder.relative.join(name));
            let own = names_of_folder(tree, &folder);
            idle.retain(|rule| {
                let is_about = |names: &[PathBuf]| names.iter().any(|name| rule.matches(name));
                let merged = Path::new(rule.glob()).file_name().filter(|_| rule.is_about_weights());
                !is_about(&own)
                    && !merged.is_some_and(|name| is_about(&names(name.as_ref())))
                    && !folder.files.iter().any(|file| is_about(&names(file.name.as_ref())))
            });
        }
        idle.into_iter().map(|rule| rule.glob().to_owned()).collect()
    }
}

/// The message about a rule that matches nothing.
pub(crate) fn idle_rule(glob: &str) -> String {
    format!(
        "access={}: nothing in the source matches, so this rule keeps nobody out; paths are those in \
         the mount or in the source",
        glob.escape_debug()
    )
}

/// The names of a folder of the tree.
pub(crate) fn names_of_folder(tree: &Tree, folder: &Folder) -> Vec<PathBuf> {
    names(tree, folder, &folder.relative)
}

/// The names of the file or folder at `path` in the mount. `folder` is the folder itself or the
/// folder that contains the file. The names are the path in the mount and, where views or
/// `layout=hub` change it, the path in the source.
pub(crate) fn names(tree: &Tree, folder: &Folder, path: &Path) -> Vec<PathBuf> {
    let mut names = vec![path.to_owned()];
    let in_source = match tree.view_folder(folder) {
        Some(view) => path.strip_prefix(view).ok().map(Path::to_owned),
        None if tree.options.hub && !folder.is_made() && !folder.is_linked() => {
            let root = tree.root();
            let rest = path.strip_prefix(&folder.relative).unwrap_or(path);
            folder.path.strip_prefix(root).ok().map(|own| own.iter().chain(rest).collect())
        }
        None => None,
    };
    // A view folder is not the root of the source. The empty path would stand for the root, which
    // only the glob `.` matches.
    names.extend(in_source.filter(|name| !name.as_os_str().is_empty()));
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limit(uid: u32, gid: u32, mode: u32) -> Limit {
        Limit::of(Rights { uid, gid, mode }, READ)
    }

    /// Test users and their groups, without root.
    fn users() -> Vec<(u32, Vec<u32>)> {
        let groups: [&[u32]; 4] = [&[], &[11], &[12], &[11, 12]];
        (7..10).flat_map(|uid| groups.map(|groups| (uid, groups.to_vec()))).collect()
    }

    fn let_in(limit: &Limit) -> Vec<bool> {
        let allows =
            |(uid, groups): (u32, Vec<u32>)| limit.allows(uid, &mut |gid| groups.contains(&gid));
        users().into_iter().map(allows).collect()
    }

    fn all() -> Vec<Limit> {
        let owners = [(0, 11), (7, 11), (7, 12), (8, 11), (8, 12)];
        owners
            .iter()
            .flat_map(|&(uid, gid)| (0..8).map(move |classes| Limit { uid, gid, classes }))
            .collect()
    }

    #[test]
    fn a_limit_that_contains_another_lets_in_all_its_users() {
        let mut contained = 0;
        for (a, b) in all().iter().flat_map(|a| all().into_iter().map(move |b| (*a, b))) {
            if a.contains(&b) {
                contained += 1;
                let pairs = let_in(&a).into_iter().zip(let_in(&b));
                assert!(pairs.clone().all(|(a, b)| a || !b), "{a:?} {b:?}");
            }
        }
        assert!(contained > all().len());
        assert!(limit(7, 11, 0o444).contains(&limit(8, 12, 0o440)));
        assert!(limit(0, 11, 0o440).contains(&limit(0, 11, 0o400)));
        assert!(!limit(0, 11, 0o440).contains(&limit(0, 12, 0o440)));
    }

    #[test]
    fn the_kernel_sees_at_least_all_whom_the_limits_let_in() {
        for (a, b) in all().iter().flat_map(|a| all().into_iter().map(move |b| (*a, b))) {
            for is_folder in [false, true] {
                let own = rights_of(a, is_folder);
                let access = NodeAccess::new(own, is_folder, Some((vec![b], Vec::new())), None);
                let seen = let_in(&Limit::of(access.rights, READ));
                for (nth, (uid, groups)) in users().into_iter().enumerate() {
                    let mut is_in = |gid: u32| groups.contains(&gid);
                    let wanted = a.allows(uid, &mut is_in) && b.allows(uid, &mut is_in);
                    let found = seen[nth] && access.allows(uid, &mut is_in);
                    assert_eq!(found, wanted, "{a:?} {b:?} {uid} {groups:?}");
                }
            }
        }
    }
}
