//! The mounts that this process sees, from `/proc/self/mountinfo`.

use std::ffi::OsString;
use std::fs::File;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Type of tensorfs mounts in the mount table.
pub const FSTYPE: &str = "fuse.tensorfs";

/// A line of the mount table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mount {
    /// Number of the mount.
    pub id: u32,
    /// Number of the parent mount.
    pub parent: u32,
    /// Minor number of the device of the mount. It also identifies the FUSE connection.
    pub minor: u32,
    /// The folder on which the file system is mounted.
    pub target: PathBuf,
    /// Type of the file system, for example `fuse.tensorfs`.
    pub fstype: String,
    /// Device name. For tensorfs mounts this is the source, or the value of `fsname=`.
    pub source: String,
    /// Owner of a FUSE mount, as a number in the user namespace of the mount.
    pub owner: Option<u32>,
}

impl Mount {
    /// Whether this is a tensorfs mount with the minor device number `minor`.
    pub fn is_ours_of(&self, minor: u32) -> bool {
        self.minor == minor && self.fstype == FSTYPE
    }

    /// Whether the attributes on the mount can be trusted: the mount belongs to root, or to `user`, the
    /// effective user of this process.
    fn is_trusted(&self, user: Option<u32>) -> bool {
        self.owner.is_some_and(|owner| owner == 0 || Some(owner) == user)
    }
}

/// All mounts that are visible to the calling thread.
///
/// # Errors
/// If the mount table cannot be read.
pub fn all() -> std::io::Result<Vec<Mount>> {
    let table = std::fs::read("/proc/thread-self/mountinfo")?;
    Ok(table.split(|&byte| byte == b'\n').filter_map(parse_line).collect())
}

/// All tensorfs mounts with this device number: those of this process, then those in the mount namespace of another
/// process, with its process number. Only mount tables that this process may read are searched.
pub fn in_all_namespaces(minor: u32) -> Vec<(Option<u32>, Mount)> {
    let table_of =
        |process: &str| std::fs::read(format!("/proc/{process}/mountinfo")).unwrap_or_default();
    let with_minor = |pid: Option<u32>, table: &[u8]| {
        let mounts = table.split(|&byte| byte == b'\n').filter_map(parse_line);
        mounts.filter(|mount| mount.is_ours_of(minor)).map(|mount| (pid, mount)).collect::<Vec<_>>()
    };
    let mut found = with_minor(None, &table_of("self"));
    let mut seen: Vec<_> = std::fs::read_link("/proc/self/ns/mnt").into_iter().collect();
    for process in std::fs::read_dir("/proc").into_iter().flatten().filter_map(Result::ok) {
        let name = process.file_name();
        let Some((name, pid)) = name.to_str().and_then(|n| Some((n, n.parse().ok()?))) else {
            continue;
        };
        let Ok(namespace) = std::fs::read_link(process.path().join("ns/mnt")) else { continue };
        if seen.contains(&namespace) {
            continue;
        }
        seen.push(namespace);
        found.extend(with_minor(Some(pid), &table_of(name)));
    }
    found
}

/// All tensorfs mounts.
///
/// # Errors
/// If the mount table cannot be read.
pub fn ours() -> std::io::Result<Vec<Mount>> {
    Ok(all()?.into_iter().filter(|mount| mount.fstype == FSTYPE).collect())
}

/// The mounts on `target`. The topmost mount comes last.
///
/// # Errors
/// If the mount table cannot be read.
pub fn at(target: &Path) -> std::io::Result<Vec<Mount>> {
    let table = std::fs::read("/proc/self/mountinfo")?;
    let mounts = table.split(|&byte| byte == b'\n').filter_map(parse_line);
    Ok(mounts.filter(|mount| mount.target == target).collect())
}

/// The topmost mount at `target`, if it is a tensorfs mount.
///
/// # Errors
/// If the mount table cannot be read.
pub fn ours_at(target: &Path) -> std::io::Result<Option<Mount>> {
    Ok(at(target)?.pop().filter(|mount| mount.fstype == FSTYPE))
}

/// The number of the mount to which the path of `ours` leads. This is `ours` itself, unless another mount
/// covers it or a folder above it. No file system is accessed.
pub fn seen_at(ours: &Mount, table: &[Mount]) -> u32 {
    let with_id = |id: u32| table.iter().find(|mount| mount.id == id);
    let root = Path::new("/");
    let mut at = ours.parent;
    // The first mount of a namespace is its own parent. If the root of the process is a plain folder, the mount of that
    // folder is not in the table of the process.
    while let Some(above) = with_id(at)
        && above.target != root
        && above.parent != above.id
    {
        at = above.parent;
    }
    let folders: Vec<&Path> = ours.target.ancestors().filter(|folder| *folder != root).collect();
    for folder in folders.into_iter().rev() {
        let is_on = |at: u32| move |mount: &&Mount| mount.parent == at && mount.target == folder;
        while let Some(mount) = table.iter().rev().find(is_on(at)) {
            at = mount.id;
        }
    }
    at
}

/// Whether `file` lies on a trusted tensorfs mount. Any user may mount a file system of this type that returns
/// any data, so the mount must belong to root or to the caller.
///
/// While `file` is open, its file system is in use, so that no other file system gets the same device number.
pub fn is_on_ours(file: &File) -> bool {
    let Ok(meta) = file.metadata() else { return false };
    let (major, minor) = (nix::sys::stat::major(meta.dev()), nix::sys::stat::minor(meta.dev()));
    // A FUSE file system has no device of its own, so its major number is 0.
    if major != 0 {
        return false;
    }
    let table = std::fs::read("/proc/self/mountinfo").unwrap_or_default();
    is_ours_in(&table, minor, trusted_user())
}

/// Whether the file system with the device number `minor` is a trusted tensorfs mount. The table has a line for
/// each of its mount points, and all of these lines must agree.
fn is_ours_in(table: &[u8], minor: u64, user: Option<u32>) -> bool {
    let mut mounts = table
        .split(|&byte| byte == b'\n')
        .filter_map(parse_line)
        .filter(|mount| u64::from(mount.minor) == minor)
        .peekable();
    mounts.peek().is_some() && mounts.all(|mount| mount.fstype == FSTYPE && mount.is_trusted(user))
}

/// The effective user of this process, if the user namespace of the process is the initial one. The user ids in the
/// mount table are those of the user namespace of the mount. In a nested namespace the same id may be another user.
fn trusted_user() -> Option<u32> {
    let map = std::fs::read_to_string("/proc/self/uid_map").ok()?;
    let first = map.split_whitespace().eq(["0", "0", "4294967295"]);
    first.then(|| nix::unistd::geteuid().as_raw())
}

/// The layers of the overlay file system with device number `dev`, from the mount table. Empty if the table
/// does not list this number.
pub(super) fn overlay_layers(dev: u64) -> Vec<PathBuf> {
    let (major, minor) = (nix::sys::stat::major(dev), nix::sys::stat::minor(dev));
    let device = format!("{major}:{minor}");
    let table = std::fs::read("/proc/self/mountinfo").unwrap_or_default();
    let of_device = |line: &&[u8]| line.split(|&b| b == b' ').nth(2) == Some(device.as_bytes());
    table.split(|&byte| byte == b'\n').find(of_device).map(layers_of_line).unwrap_or_default()
}

/// The paths of the layers of an overlay file system, from the options of its line in the mount table:
/// `lowerdir=/a:/b,upperdir=/c`, or `lowerdir+=/a` for each layer.
fn layers_of_line(line: &[u8]) -> Vec<PathBuf> {
    let options = line.rsplit(|&byte| byte == b' ').next().unwrap_or_default();
    let mut layers = Vec::new();
    for option in options.split(|&byte| byte == b',') {
        let Some(end) = option.iter().position(|&byte| byte == b'=') else { continue };
        let (key, value) = (&option[..end], unescape(&option[end + 1..]).into_vec());
        match key {
            b"lowerdir" => layers.extend(split_layers(&value)),
            b"upperdir" | b"lowerdir+" | b"datadir+" => layers.push(value),
            _ => {}
        }
    }
    layers.into_iter().map(|layer| PathBuf::from(OsString::from_vec(layer))).collect()
}

/// Splits `value` at colons, except at a colon after a backslash. A data layer has two colons in front of it.
fn split_layers(value: &[u8]) -> Vec<Vec<u8>> {
    let mut layers = vec![Vec::new()];
    let mut bytes = value.iter();
    while let Some(&byte) = bytes.next() {
        match (byte, layers.last_mut()) {
            (b':', _) => layers.push(Vec::new()),
            (b'\\', Some(layer)) => layer.extend(bytes.next()),
            (_, Some(layer)) => layer.push(byte),
            (_, None) => {}
        }
    }
    layers.retain(|layer| !layer.is_empty());
    layers
}

/// Parses a line such as `36 35 98:0 /root /target opts... - type source superopts`.
fn parse_line(line: &[u8]) -> Option<Mount> {
    let mut of_mount = line.split(|&byte| byte == b' ');
    let mut number = || std::str::from_utf8(of_mount.next()?).ok()?.parse().ok();
    let (id, parent) = (number()?, number()?);
    let device = std::str::from_utf8(of_mount.next()?).ok()?;
    let minor = device.split_once(':')?.1.parse().ok()?;
    let target = PathBuf::from(unescape(of_mount.nth(1)?));
    let mut of_file_system = of_mount.skip_while(|field| *field != b"-");
    let fstype = String::from_utf8_lossy(of_file_system.nth(1)?).into_owned();
    let source = unescape(of_file_system.next()?).to_string_lossy().into_owned();
    let mut flags = of_file_system.next().unwrap_or_default().split(|&byte| byte == b',');
    let user_id = flags.find_map(|flag| flag.strip_prefix(b"user_id="));
    let owner = user_id.and_then(|owner| std::str::from_utf8(owner).ok()?.parse().ok());
    Some(Mount { id, parent, minor, target, fstype, source, owner })
}

/// Decodes the octal escapes of the mount table, such as `\040`.
fn unescape(field: &[u8]) -> OsString {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&byte, after)) = rest.split_first() {
        rest = after;
        let octal = after
            .get(..3)
            .filter(|_| byte == b'\\')
            .and_then(|digits| std::str::from_utf8(digits).ok());
        match octal.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(escaped) => {
                bytes.push(escaped);
                rest = &after[3..];
            }
            None => bytes.push(byte),
        }
    }
    OsString::from_vec(bytes)
}

/// `path` in the form that the mount table uses: absolute, with links resolved. If the last part is a dead
/// mount, it is not resolved, because resolving it fails.
///
/// # Errors
/// The error of the system if `path` leads nowhere.
pub fn absolute_target(path: &Path) -> std::io::Result<PathBuf> {
    match std::fs::canonicalize(path) {
        Err(e) if e.raw_os_error() == Some(nix::libc::ENOTCONN) => {
            // With a trailing slash the last part would be empty.
            let path = PathBuf::from_iter(std::path::absolute(path)?.components());
            match (path.parent(), path.file_name()) {
                (Some(parent), Some(name)) => Ok(std::fs::canonicalize(parent)?.join(name)),
                _ => Ok(path),
            }
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt;

    use super::*;

    #[test]
    fn the_layers_of_an_overlay_are_read_with_their_escapes() {
        let layers = |options: &str| {
            let line = format!("43 28 0:51 / /mnt rw - overlay overlay {options}");
            layers_of_line(line.as_bytes())
        };
        let paths = |paths: &[&str]| paths.iter().map(PathBuf::from).collect::<Vec<_>>();
        let found = layers(r"rw,lowerdir=/a\134:b\040c:/d::/e,upperdir=/u\054v,workdir=/w");
        assert_eq!(found, paths(&["/a:b c", "/d", "/e", "/u,v"]));
        assert_eq!(layers("ro,lowerdir+=/a:b,datadir+=/c"), paths(&["/a:b", "/c"]));
        assert_eq!(layers("rw"), paths(&[]));
    }

    #[test]
    fn a_line_of_the_mount_table_is_read_with_its_escapes() {
        let line =
            br"43 28 0:51 / /mnt/a\040b\134c ro,nosuid - fuse.tensorfs /data/x\040y ro,user_id=0";
        let mount = parse_line(line).unwrap();
        assert_eq!((mount.id, mount.parent, mount.minor), (43, 28, 51));
        assert_eq!(mount.target.as_os_str().as_bytes(), br"/mnt/a b\c");
        assert_eq!(mount.fstype, "fuse.tensorfs");
        assert_eq!((mount.source.as_str(), mount.owner), ("/data/x y", Some(0)));
        let optional = b"43 28 0:51 / /mnt ro shared:1 master:2 - fuse.tensorfs x ro";
        assert_eq!(parse_line(optional).unwrap().fstype, "fuse.tensorfs");
        assert_eq!(parse_line(b""), None);
    }

    #[test]
    fn a_mount_is_seen_unless_another_one_lies_on_it_or_on_a_folder_above() {
        let table_of = |lines: &[(u32, u32, &str)]| -> Vec<Mount> {
            let mount = |&(id, parent, target): &(u32, u32, &str)| Mount {
                id,
                parent,
                target: target.into(),
                ..Mount::default()
            };
            lines.iter().map(mount).collect()
        };
        let plain = [(28, 1, "/"), (30, 28, "/srv"), (43, 30, "/srv/a")];
        let seen = |more: &[(u32, u32, &str)]| {
            let table = table_of(&[&plain[..], more].concat());
            seen_at(table.iter().find(|mount| mount.id == 43).unwrap(), &table)
        };
        assert_eq!(seen(&[]), 43);
        // The other mount is beside `ours`, below it, or on the root of another process.
        assert_eq!(seen(&[(50, 30, "/srv/b"), (51, 43, "/srv/a/x"), (52, 28, "/")]), 43);
        assert_eq!(seen(&[(50, 43, "/srv/a")]), 50);
        assert_eq!(seen(&[(50, 43, "/srv/a"), (51, 50, "/srv/a")]), 51);
        assert_eq!(seen(&[(50, 30, "/srv")]), 50);
        // The place of the other mount lies on the mount that covers the folder.
        assert_eq!(seen(&[(50, 30, "/srv"), (51, 50, "/srv/a")]), 51);
        // The root of the process is a plain folder, or a mount that is its own parent.
        let table = table_of(&[(30, 1, "/srv"), (43, 30, "/srv/a"), (7, 7, "/"), (8, 7, "/b")]);
        assert_eq!((seen_at(&table[1], &table), seen_at(&table[3], &table)), (43, 8));
    }

    #[test]
    fn only_mounts_of_root_and_of_the_caller_are_believed() {
        let line = |minor: u32, root: &str, fstype: &str, owner: &str| {
            format!("43 28 0:{minor} {root} /mnt ro - {fstype} /data ro,{owner}group_id=0\n")
        };
        let believed = |lines: &[String], user| is_ours_in(lines.concat().as_bytes(), 51, user);
        let of = |owner: &str| [line(51, "/", FSTYPE, owner), line(52, "/", FSTYPE, "user_id=9,")];
        assert!(believed(&of("user_id=0,"), Some(1000)));
        assert!(believed(&of("user_id=1000,"), Some(1000)));
        assert!(believed(&of("user_id=0,"), None));
        for (owner, user) in [
            ("user_id=1001,", Some(1000)),
            ("user_id=1000,", Some(0)),
            ("user_id=1000,", None),
            ("", Some(1000)),
            ("user_id=-1,", Some(1000)),
            ("user_id=00x,", Some(1000)),
        ] {
            assert!(!believed(&of(owner), user), "{owner} read by {user:?}");
        }
        // A mount that is bound to several places, and tables in which the line of one place differs.
        let own = || line(51, "/", FSTYPE, "user_id=0,");
        let sub = line(51, "/model", FSTYPE, "user_id=0,");
        assert!(believed(&[own(), sub], Some(1000)));
        assert!(!believed(&[own(), line(51, "/", FSTYPE, "user_id=7,")], Some(1000)));
        assert!(!believed(&[own(), line(51, "/", "fuse.sshfs", "user_id=0,")], Some(1000)));
        assert!(!believed(&[line(52, "/", FSTYPE, "user_id=0,")], Some(1000)));
    }
}
