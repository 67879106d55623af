//! The mounts that this process sees, from `/proc/self/mountinfo`.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Type of our mounts in the mount table.
pub const FSTYPE: &str = "fuse.tensorfs";

/// One line of the mount table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mount {
    /// Minor number of its device, which also names the FUSE connection.
    pub minor: u32,
    /// Where it is mounted.
    pub target: PathBuf,
    /// Type, for example `fuse.tensorfs`.
    pub fstype: String,
    /// Device name: of our mounts the source, or what `fsname=` says.
    pub source: String,
    /// User that a FUSE mount belongs to.
    pub owner: Option<u32>,
}

/// All mounts of ours.
///
/// # Errors
/// Where the table cannot be read.
pub fn ours() -> std::io::Result<Vec<Mount>> {
    let table = std::fs::read("/proc/self/mountinfo")?;
    let mounts = table.split(|&byte| byte == b'\n').filter_map(parse_line);
    Ok(mounts.filter(|mount| mount.fstype == FSTYPE).collect())
}

/// The mounts on `target`, the one on top last.
///
/// # Errors
/// Where the table cannot be read.
pub fn at(target: &Path) -> std::io::Result<Vec<Mount>> {
    let table = std::fs::read("/proc/self/mountinfo")?;
    let mounts = table.split(|&byte| byte == b'\n').filter_map(parse_line);
    Ok(mounts.filter(|mount| mount.target == target).collect())
}

/// The mount of ours that is on top at `target`.
///
/// # Errors
/// Where the table cannot be read.
pub fn ours_at(target: &Path) -> std::io::Result<Option<Mount>> {
    Ok(at(target)?.pop().filter(|mount| mount.fstype == FSTYPE))
}

/// Whether `path` lies on a mount of ours, and not on a file system where anybody can write what
/// only we should say.
pub fn is_on_ours(path: &Path) -> bool {
    let Ok(meta) = std::fs::metadata(path) else { return false };
    let (major, minor) = (nix::sys::stat::major(meta.dev()), nix::sys::stat::minor(meta.dev()));
    let table = std::fs::read("/proc/self/mountinfo").unwrap_or_default();
    let mut mounts = table.split(|&byte| byte == b'\n').filter_map(parse_line);
    // FUSE has no devices of its own, so its major number is 0.
    major == 0 && mounts.any(|m| u64::from(m.minor) == minor && m.fstype == FSTYPE)
}

/// `36 35 98:0 /root /target opts... - type source superopts`
fn parse_line(line: &[u8]) -> Option<Mount> {
    let mut fields = line.split(|&byte| byte == b' ');
    let device = std::str::from_utf8(fields.nth(2)?).ok()?;
    let minor = device.split_once(':')?.1.parse().ok()?;
    let target = PathBuf::from(unescape(fields.nth(1)?));
    let mut fields = fields.skip_while(|field| *field != b"-");
    let fstype = String::from_utf8_lossy(fields.nth(1)?).into_owned();
    let source = unescape(fields.next()?).to_string_lossy().into_owned();
    let mut flags = fields.next().unwrap_or_default().split(|&byte| byte == b',');
    let owner = flags.find_map(|flag| flag.strip_prefix(b"user_id="));
    let owner = owner.and_then(|owner| std::str::from_utf8(owner).ok()?.parse().ok());
    Some(Mount { minor, target, fstype, source, owner })
}

/// Undoes the octal escapes (`\040`) of the mount table.
fn unescape(field: &[u8]) -> OsString {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&byte, after)) = rest.split_first() {
        rest = after;
        let octal = after.get(..3).filter(|_| byte == b'\\');
        let octal = octal.and_then(|digits| std::str::from_utf8(digits).ok());
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

/// `path` as the mount table spells it: absolute, links resolved, except that the last part is
/// not looked at, since looking at a dead mount fails.
///
/// # Errors
/// Where `path` leads nowhere.
pub fn absolute_target(path: &Path) -> std::io::Result<PathBuf> {
    match std::fs::canonicalize(path) {
        Err(e) if e.raw_os_error() == Some(nix::libc::ENOTCONN) => {
            let path = std::path::absolute(path)?;
            // A trailing slash would make the last part empty.
            let path = PathBuf::from_iter(path.components());
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
    fn a_line_of_the_mount_table_is_read_with_its_escapes() {
        let line =
            br"43 28 0:51 / /mnt/a\040b\134c ro,nosuid - fuse.tensorfs /data/x\040y ro,user_id=0";
        let mount = parse_line(line).unwrap();
        assert_eq!(mount.minor, 51);
        assert_eq!(mount.target.as_os_str().as_bytes(), br"/mnt/a b\c");
        assert_eq!(mount.fstype, "fuse.tensorfs");
        assert_eq!((mount.source.as_str(), mount.owner), ("/data/x y", Some(0)));
        let optional = b"43 28 0:51 / /mnt ro shared:1 master:2 - fuse.tensorfs x ro";
        assert_eq!(parse_line(optional).unwrap().fstype, "fuse.tensorfs");
        assert_eq!(parse_line(b""), None);
    }
}
