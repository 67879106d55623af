//! The generator for systemd. It orders each service of tensorfs after the file systems that
//! contain the sources and targets of its mounts, and after the network if a source is a URL. systemd
//! runs it at boot and at each `daemon-reload`, before any unit starts.
//!
//! The generator reads only config files. Accessing a source could wait for a server that does not
//! answer, and systemd would wait too.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use tensorfs::internal::error::{is_url, shown_path};
use toml::de::{DeTable, DeValue};

use crate::log;

/// The name by which systemd calls the program: a link with this name leads to the program.
pub(crate) const NAME: &str = "tensorfs-generator";

/// Folder with the config files.
const CONFIG_FOLDER: &str = "/etc/tensorfs";

/// Maximum length of the name of a unit, in bytes.
const UNIT_NAME_MAX: usize = 255;

/// The target that is reached when the machine has its addresses.
const NETWORK: &str = "network-online.target";

/// Runs the generator. systemd passes folders for generated units as arguments. The first of them
/// is used.
pub(crate) fn main(mut args: impl Iterator<Item = OsString>) -> ExitCode {
    let Some(units) = args.next() else {
        log::say_as(NAME, "usage: tensorfs-generator UNITS; systemd calls it with its folder");
        return ExitCode::from(2);
    };
    // Tests pass a fourth folder, which replaces the folder of configs.
    let configs = args.nth(2).map_or_else(|| PathBuf::from(CONFIG_FOLDER), PathBuf::from);
    let failures = run(&configs, Path::new(&units));
    for failure in &failures {
        log::say_as(NAME, failure);
    }
    if failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Writes a drop-in file for each unit that has a config in `configs`. Returns the errors.
fn run(configs: &Path, units: &Path) -> Vec<String> {
    let files = match config_files(configs) {
        Ok(files) => files,
        Err(e) if e.kind() == ErrorKind::NotFound => return Vec::new(),
        Err(e) => return vec![format!("{}: {e}", shown_path(configs))],
    };
    let failure = |(unit, file): (String, PathBuf)| write_order(&unit, &file, units).err();
    files.into_iter().filter_map(failure).collect()
}

/// The names of the units with a config in `folder`, each with the path of its config.
fn config_files(folder: &Path) -> io::Result<Vec<(String, PathBuf)>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder)? {
        let file = entry?.path();
        // Reading a file of another type could block.
        if !fs::metadata(&file).is_ok_and(|metadata| metadata.is_file()) {
            continue;
        }
        let Some(name) = file.file_name().and_then(|name| name.to_str()) else { continue };
        let unit = match name.strip_suffix(".conf") {
            Some(instance) => format!("tensorfs@{instance}.service"),
            None if name == "config.toml" => "tensorfs.service".to_owned(),
            None => continue,
        };
        files.push((unit, file));
    }
    files.sort();
    Ok(files)
}

/// Writes the drop-in file of `unit`. `file` is the config of the unit.
fn write_order(unit: &str, file: &Path, units: &Path) -> Result<(), String> {
    let failed = |path: &Path, e: io::Error| format!("{}: {e}", shown_path(path));
    let text = fs::read_to_string(file).map_err(|e| failed(file, e))?;
    let mounts = if unit == "tensorfs.service" {
        paths_of_toml(&text).map_err(|why| format!("{}: not TOML: {why}", shown_path(file)))?
    } else {
        paths_of_instance(&text)
    };
    let Some(drop_in) = drop_in(file, &mounts) else { return Ok(()) };
    let folder = units.join(format!("{unit}.d"));
    fs::create_dir_all(&folder).map_err(|e| failed(&folder, e))?;
    let written = folder.join("50-tensorfs-order.conf");
    fs::write(&written, drop_in).map_err(|e| failed(&written, e))
}

/// Source and target of a mount. `None` if the config does not have them.
#[derive(Debug, Default, PartialEq, Eq)]
struct MountPaths {
    source: Option<String>,
    target: Option<String>,
}

/// The paths of each `[[mount]]`. Faults in the config are ignored here, because the service
/// reports them.
fn paths_of_toml(text: &str) -> Result<Vec<MountPaths>, String> {
    let table = DeTable::parse(text).map_err(|e| e.message().replace('\n', " "))?;
    let Some(DeValue::Array(mounts)) = table.get_ref().get("mount").map(|value| value.get_ref())
    else {
        return Ok(Vec::new());
    };
    let paths = mounts.iter().filter_map(|mount| {
        let DeValue::Table(mount) = mount.get_ref() else { return None };
        let path = |key: &str| mount.get(key)?.get_ref().as_str().map(str::to_owned);
        Some(MountPaths { source: path("source"), target: path("target") })
    });
    Ok(paths.collect())
}

/// The paths in an environment file of systemd. Values that contain a backslash are ignored.
fn paths_of_instance(text: &str) -> Vec<MountPaths> {
    let mut paths = MountPaths::default();
    for line in text.lines() {
        let Some((key, value)) = line.split_once('=') else { continue };
        let trimmed = value.trim();
        let unquoted = ['"', '\''].iter().find_map(|&quote| {
            trimmed.strip_prefix(quote).and_then(|text| text.strip_suffix(quote))
        });
        let value = Some(unquoted.unwrap_or(trimmed).to_owned()).filter(|v| !v.contains('\\'));
        match key.trim() {
            "SOURCE" => paths.source = value,
            "TARGET" => paths.target = value,
            _ => {}
        }
    }
    vec![paths]
}

/// The text of the drop-in file. `None` if the mounts need no order.
fn drop_in(file: &Path, mounts: &[MountPaths]) -> Option<String> {
    let is_remote =
        |mount: &MountPaths| mount.source.as_deref().is_some_and(|s| is_url(s.as_ref()));
    let needs_network = mounts.iter().any(is_remote);
    let mut units = Vec::new();
    for mount in mounts {
        let source = mount.source.as_deref().map(Path::new).into_iter().flat_map(Path::ancestors);
        // The target itself is left out, because its mount unit stands for the mount that the
        // service makes.
        let target = mount.target.as_deref().map(Path::new).into_iter().flat_map(Path::ancestors);
        units.extend(source.chain(target.skip(1)).filter_map(mount_unit));
    }
    units.sort();
    units.dedup();
    if needs_network {
        units.push(NETWORK.to_owned());
    }
    if units.is_empty() {
        return None;
    }
    let mut text = format!(
        "# Made by {NAME} from {}.\n#\n\
         # Only an order: file systems of sources and targets are mounted before, but are not required.\n\
         [Unit]\n",
        shown_path(file)
    );
    for unit in units {
        let _ = writeln!(text, "After={unit}");
    }
    if needs_network {
        let _ = writeln!(
            text,
            "# This target is part of a boot only if a unit wants it. A server may be reached later than that, so the start\n\
             # is tried again without an end.\n\
             Wants={NETWORK}\nAfter=nss-lookup.target\nStartLimitIntervalSec=0\n\n[Service]\nRestartSec=10s"
        );
    }
    Some(text)
}

/// The mount unit for a file system that is mounted on `folder`. The unit has the name that
/// `systemd-escape --path` prints. `None` for the root, which is always mounted, and for paths that
/// cannot be in the name of a unit.
fn mount_unit(folder: &Path) -> Option<String> {
    if folder.is_relative() || folder.components().any(|part| part.as_os_str() == "..") {
        return None;
    }
    let mut name = String::new();
    for part in folder.components().skip(1) {
        if !name.is_empty() {
            name.push('-');
        }
        for &byte in part.as_os_str().as_bytes() {
            match byte {
                b'.' if name.is_empty() => name.push_str("\\x2e"),
                b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b':' | b'_' | b'.' => {
                    name.push(char::from(byte));
                }
                _ => {
                    let _ = write!(name, "\\x{byte:02x}");
                }
            }
        }
    }
    name.push_str(".mount");
    (name != ".mount" && name.len() <= UNIT_NAME_MAX).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(text: &str) -> Vec<String> {
        let paths = paths_of_toml(text).unwrap();
        let text = drop_in(Path::new("/c.toml"), &paths).unwrap_or_default();
        text.lines().filter_map(|line| line.strip_prefix("After=").map(str::to_owned)).collect()
    }

    #[test]
    fn the_service_starts_after_each_file_system_that_may_hold_a_source_or_the_folder_of_a_target()
    {
        let one = "[[mount]]\nsource = '/data/models'\ntarget = '/srv/models'\n";
        assert_eq!(order(one), ["data-models.mount", "data.mount", "srv.mount"]);
        let two = format!("{one}[[mount]]\nsource = '/data/more/'\ntarget = '/m'\n");
        let expected = ["data-models.mount", "data-more.mount", "data.mount", "srv.mount"];
        assert_eq!(order(&two), expected);
    }

    #[test]
    fn a_service_with_a_url_waits_for_the_network_and_wants_it() {
        let text = "[[mount]]\nsource = 's3://bucket/data'\ntarget = '/srv/models'\n";
        let expected = ["srv.mount", "network-online.target", "nss-lookup.target"];
        assert_eq!(order(text), expected);
        let drop_in =
            drop_in(Path::new("/c"), &paths_of_instance("SOURCE=https://host/x\n")).unwrap();
        assert!(drop_in.contains("\nWants=network-online.target\n"), "{drop_in}");
        assert!(drop_in.contains("\nStartLimitIntervalSec=0\n\n[Service]\n"), "{drop_in}");
        assert!(!order("[[mount]]\nsource = '/s3:/data'").contains(&NETWORK.to_owned()));
    }

    #[test]
    fn a_config_with_errors_still_gives_the_order_of_what_it_names() {
        assert_eq!(order("mount = 3"), [""; 0]);
        assert_eq!(order("[[mount]]\nsource = 'data'\ntarget = '../a/b'"), [""; 0]);
        assert_eq!(order("unknown = 1\n[[mount]]\nsource = '/data'"), ["data.mount"]);
        assert!(paths_of_toml("[[mount]\n").is_err());
    }

    #[test]
    fn the_paths_of_an_instance_may_be_quoted() {
        let found = paths_of_instance("# SOURCE=/x\n SOURCE = \"/data/a b\"\nTARGET='/srv/a'\nX=1");
        let path = |path: &str| Some(path.to_owned());
        assert_eq!(found, [MountPaths { source: path("/data/a b"), target: path("/srv/a") }]);
        assert_eq!(paths_of_instance("SOURCE=/data/a\\\n"), [MountPaths::default()]);
    }

    #[test]
    fn units_have_the_names_that_systemd_gives_them() {
        for (folder, unit) in [
            ("/", None),
            ("data", None),
            ("/a/../b", None),
            ("/data/model-7", Some("data-model\\x2d7.mount")),
            ("//data/./models//", Some("data-models.mount")),
            ("/.hidden/.a", Some("\\x2ehidden-.a.mount")),
            ("/srv/50% \u{fc}", Some("srv-50\\x25\\x20\\xc3\\xbc.mount")),
        ] {
            assert_eq!(mount_unit(Path::new(folder)).as_deref(), unit, "{folder}");
        }
        assert_eq!(mount_unit(Path::new(&format!("/{}", "a".repeat(250)))), None);
    }
}
