//! The kernel's settings of a mount: the readahead window, the size of requests, and the number of
//! background requests. Each setting is changed if that is allowed, read back, and reported.
//!
//! This code accesses only the kernel's files about the mount, never the mount itself.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use nix::unistd::{SysconfVar, geteuid, sysconf};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tensorfs::internal::error::shown_path;
use tensorfs::internal::size::shown_size;

use crate::options::Options;

/// Default of `readahead=` in bytes, which is two requests of the kernel's default size. A larger
/// window would gain nothing, because the daemon reads ahead too. But it would make random page
/// faults slower.
pub(crate) const READAHEAD: u64 = 2 << 20;

/// Size in bytes of the largest read request that the daemon asks the kernel for. It is the
/// kernel's default limit.
pub(crate) const MAX_REQUEST: u32 = 1 << 20;

/// Size of the largest request in pages, for kernels whose limit cannot be changed.
const PAGES_FIXED: u64 = 256;

/// A feature of the FUSE protocol.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Feature {
    /// The daemon does not request the feature.
    Off,
    /// The feature was requested and granted.
    On,
    /// The feature was requested and not granted, for this reason.
    Refused(String),
}

/// Result of the INIT handshake.
#[derive(Clone, Debug)]
pub(crate) struct Init {
    /// The requested limit of background requests.
    pub max_background: u16,
    /// The requested number of background requests in flight at which the kernel stops reading
    /// ahead.
    pub congestion_threshold: u16,
    /// Whether the kernel requests all parts of one O_DIRECT read at the same time.
    pub async_dio: Feature,
    /// Whether each thread has its own descriptor.
    pub clone_fd: Feature,
    /// Whether the kernel serves whole files by passthrough.
    pub passthrough: Feature,
}

/// One setting: the requested and the granted value.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Knob {
    /// The name of the option for this setting, or of the setting if it has no option.
    pub name: String,
    /// The requested value: bytes, a number or a flag.
    pub wanted: Value,
    /// The value in force. It is null if it is unknown.
    pub got: Value,
    /// Why the value differs from the requested one, or why it is unknown.
    pub why_not: Option<String>,
    /// The consequence of a worse value, if there is one.
    pub cost: Option<String>,
}

/// The settings of a mount.
#[derive(Clone, Debug)]
pub(crate) struct KernelReport {
    /// One entry for each setting.
    pub knobs: Vec<Knob>,
}

/// The folders with the kernel's files for its settings.
pub(crate) struct KernelPaths {
    sys: PathBuf,
    sysctl: PathBuf,
}

impl KernelPaths {
    pub(crate) fn real() -> KernelPaths {
        KernelPaths { sys: "/sys".into(), sysctl: "/proc/sys".into() }
    }

    /// Changes the settings that are not fixed before mount(2), and reports all settings. Must be
    /// called once the mount answers, because INIT resets the readahead window. `minor` is the
    /// minor device number of the mount. `request` is the result of `before_mount`.
    pub(crate) fn after_init(
        &self,
        minor: Option<u32>,
        options: &Options,
        init: &Init,
        request: Knob,
    ) -> KernelReport {
        let flag = |name, feature: &Feature, cost| match feature {
            Feature::Off => Knob::new(name, json!(false), json!(false)),
            Feature::On => Knob::new(name, json!(true), json!(true)),
            Feature::Refused(why) => {
                Knob::new(name, json!(true), json!(false)).because(why.clone()).costs(cost)
            }
        };
        KernelReport {
            knobs: vec![
                self.set_readahead(minor, options.readahead.unwrap_or(READAHEAD)),
                request,
                self.background(minor, "max_background", init.max_background),
                self.background(minor, "congestion_threshold", init.congestion_threshold),
                flag(
                    "async_dio",
                    &init.async_dio,
                    "the parts of an O_DIRECT read wait for each other",
                ),
                flag("clone_fd", &init.clone_fd, "threads wait for each other when they reply"),
                flag("passthrough", &init.passthrough, "whole files are copied by the daemon"),
            ],
        }
    }

    /// The size of requests that the kernel allows. Must be called before mount(2), because a
    /// connection keeps the limit that was set at its creation.
    pub(crate) fn before_mount(&self) -> Knob {
        let wanted = u64::from(MAX_REQUEST);
        let path = self.sysctl.join("fs/fuse/max_pages_limit");
        let pages = wanted.div_ceil(page());
        let (limit, why) = match read(&path) {
            Ok(limit) => (limit, format!("{} is {limit} pages", shown_path(&path))),
            // Kernels before 6.13 do not have this file.
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                (PAGES_FIXED, format!("{}: there is no such limit", shown_path(&path)))
            }
            Err(e) => (PAGES_FIXED, format!("{}: {}", shown_path(&path), reason(&e))),
        };
        let got = limit.min(pages).saturating_mul(page());
        let knob = Knob::new("max_request", json!(wanted), json!(got));
        if got < wanted {
            knob.because(why).costs("a large read takes more requests")
        } else {
            knob
        }
    }

    /// Sets the readahead window of the mount with the device number `0:minor`.
    pub(crate) fn set_readahead(&self, minor: Option<u32>, wanted: u64) -> Knob {
        let knob = Knob::new("readahead", json!(wanted), Value::Null);
        let cost = "cold reads of mapped files wait more often";
        let Some(minor) = minor else {
            return knob.because("the mount is not in the mount table".to_owned()).costs(cost);
        };
        let path = self.sys.join(format!("class/bdi/0:{minor}/read_ahead_kb"));
        // The kernel rounds the window down to whole pages.
        let kib = (wanted.div_ceil(page()) * page()) >> 10;
        let written = write(&path, kib);
        let got = match read(&path) {
            Ok(got) => got << 10,
            Err(e) => {
                return knob.because(format!("{}: {}", shown_path(&path), reason(&e))).costs(cost);
            }
        };
        let known = Knob { got: json!(got), ..knob };
        if got == kib << 10 {
            return known;
        }
        let why = written.err().map_or("the kernel took another value".to_owned(), |e| reason(&e));
        let effect = if got < wanted { cost } else { "more is read than requested" };
        known.because(format!("{}: {why}", shown_path(&path))).costs(effect)
    }

    /// The value of a limit that INIT requested, read from the control file system of FUSE if that is
    /// mounted. The kernel may grant users other than root a lower limit.
    fn background(&self, minor: Option<u32>, name: &str, asked: u16) -> Knob {
        let knob = Knob::new(name, json!(asked), Value::Null);
        let Some(minor) = minor else {
            return knob.because("the mount is not in the mount table".to_owned());
        };
        let path = self.sys.join(format!("fs/fuse/connections/{minor}/{name}"));
        match read(&path) {
            Ok(got) if got < asked.into() => Knob { got: json!(got), ..knob }
                .because("the kernel allows a user no more".to_owned())
                .costs("fewer reads are under way at once"),
            Ok(got) => Knob { got: json!(got), ..knob },
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                knob.because("fusectl is not mounted, so this cannot be seen".to_owned())
            }
            Err(e) => knob.because(format!("{}: {}", shown_path(&path), reason(&e))),
        }
    }
}

impl Knob {
    fn new(name: &str, wanted: Value, got: Value) -> Knob {
        Knob { name: name.to_owned(), wanted, got, why_not: None, cost: None }
    }

    fn because(self, why: String) -> Knob {
        Knob { why_not: Some(why), ..self }
    }

    fn costs(self, cost: &str) -> Knob {
        Knob { cost: Some(cost.to_owned()), ..self }
    }

    /// A message if the value is worse than requested: the values, the reason and the cost.
    pub(crate) fn degraded(&self) -> Option<String> {
        Some(format!("{}: {}", self.shortfall()?, self.cost.as_ref()?))
    }

    /// A message if the value is worse than requested: the values and the reason.
    fn shortfall(&self) -> Option<String> {
        let (_, why) = (self.cost.as_ref()?, self.why_not.as_deref()?);
        let is = match (self.got.as_u64(), self.wanted.as_u64()) {
            (Some(got), Some(wanted)) if self.is_size() => {
                format!("is {}, not {}", shown_size(got), shown_size(wanted))
            }
            (Some(got), Some(wanted)) => format!("is {got}, not {wanted}"),
            (None, Some(_)) => "cannot be set".to_owned(),
            _ => "is off".to_owned(),
        };
        Some(format!("{} {is} ({why})", self.name))
    }

    /// Whether the value is a number of bytes.
    pub(crate) fn is_size(&self) -> bool {
        matches!(self.name.as_str(), "readahead" | "max_request")
    }
}

impl KernelReport {
    /// One line with all settings that are worse than requested.
    pub(crate) fn degraded(&self) -> Option<String> {
        let lines: Vec<_> = self.knobs.iter().filter_map(Knob::degraded).collect();
        (!lines.is_empty()).then(|| format!("slower than it could be: {}", lines.join("; ")))
    }

    /// Logs one warning with all settings that are worse than requested. Only root can change these
    /// settings, so the warning for other users leaves the costs out.
    pub(crate) fn log(&self) {
        let Some(mut line) = self.degraded() else { return };
        if !geteuid().is_root() && !tracing::enabled!(tracing::Level::INFO) {
            let short: Vec<_> = self.knobs.iter().filter_map(Knob::shortfall).collect();
            line = format!("slower than it could be without root: {}", short.join("; "));
        }
        tracing::warn!("{line}");
    }
}

/// The number in a file of the kernel.
pub(crate) fn read(path: &Path) -> io::Result<u64> {
    let text = std::fs::read_to_string(path)?;
    text.trim().parse().map_err(|_| io::Error::other(format!("not a number: {}", text.trim())))
}

/// Writes a number to a file of the kernel, which must exist.
fn write(path: &Path, number: u64) -> io::Result<()> {
    let mut file = File::options().write(true).truncate(true).open(path)?;
    file.write_all(number.to_string().as_bytes())
}

/// The operating system's message, without the error number.
pub(crate) fn reason(error: &io::Error) -> String {
    let text = error.to_string();
    text.split_once(" (os error").map_or(text.as_str(), |(text, _)| text).to_owned()
}

/// Size of a memory page in bytes.
pub(crate) fn page() -> u64 {
    let page = sysconf(SysconfVar::PAGE_SIZE).ok().flatten();
    page.and_then(|page| u64::try_from(page).ok()).unwrap_or(4096)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The settings files of a kernel whose mount has the minor device number 51.
    struct Kernel {
        folder: tempfile::TempDir,
        paths: KernelPaths,
    }

    fn kernel() -> Kernel {
        let folder = tempfile::tempdir().unwrap();
        let paths =
            KernelPaths { sys: folder.path().join("sys"), sysctl: folder.path().join("ctl") };
        let kernel = Kernel { folder, paths };
        kernel.put("sys/class/bdi/0:51/read_ahead_kb", "128\n");
        kernel.put("ctl/fs/fuse/max_pages_limit", "256\n");
        kernel
    }

    impl Kernel {
        fn put(&self, path: &str, text: &str) {
            let path = self.folder.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }

        fn get(&self, path: &str) -> String {
            std::fs::read_to_string(self.folder.path().join(path)).unwrap().trim().to_owned()
        }

        /// Replaces a file by a folder, which even root cannot read or write as a file.
        fn close(&self, path: &str) {
            let path = self.folder.path().join(path);
            std::fs::remove_file(&path).unwrap();
            std::fs::create_dir(path).unwrap();
        }

        fn report(&self, minor: Option<u32>, options: &Options) -> KernelReport {
            self.paths.after_init(minor, options, &init(), self.paths.before_mount())
        }
    }

    fn init() -> Init {
        Init {
            max_background: 128,
            congestion_threshold: 96,
            async_dio: Feature::On,
            clone_fd: Feature::On,
            passthrough: Feature::Off,
        }
    }

    fn options(text: &str) -> Options {
        Options::parse(&[text], false).unwrap()
    }

    #[test]
    fn the_window_is_written_and_read_back() {
        let kernel = kernel();
        let report = kernel.report(Some(51), &options(""));
        assert_eq!(kernel.get("sys/class/bdi/0:51/read_ahead_kb"), "2048");
        assert_eq!(report.knobs[0].got, json!(2 << 20));
        assert_eq!(report.degraded(), None);
        let knob = kernel.paths.set_readahead(Some(51), 5000);
        assert_eq!((knob.got.as_u64().unwrap() % page(), knob.cost), (0, None));
        let report = kernel.report(Some(51), &options("readahead=0"));
        assert_eq!(kernel.get("sys/class/bdi/0:51/read_ahead_kb"), "0");
        assert_eq!(report.degraded(), None);
    }

    #[test]
    fn a_window_that_cannot_be_set_is_reported_on_one_line() {
        let kernel = kernel();
        for minor in [None, Some(52)] {
            let report = kernel.report(minor, &options(""));
            assert_eq!(report.knobs[0].got, Value::Null);
            let line = report.degraded().unwrap();
            assert!(line.contains("readahead cannot be set (") && !line.contains('\n'), "{line}");
        }
        kernel.close("sys/class/bdi/0:51/read_ahead_kb");
        assert!(kernel.report(Some(51), &options("")).degraded().is_some());
    }

    #[test]
    fn a_window_that_stays_as_it_was_is_reported_with_its_size() {
        let mut knob = Knob::new("readahead", json!(4 << 20), json!(128 << 10));
        knob = knob.because("/x: Permission denied".to_owned()).costs("it waits");
        let line = knob.degraded().unwrap();
        assert_eq!(line, "readahead is 128 KiB, not 4 MiB (/x: Permission denied): it waits");
    }

    #[test]
    fn requests_are_as_large_as_the_limit_of_the_system_and_the_limit_stays() {
        let kernel = kernel();
        assert_eq!(kernel.paths.before_mount().got, json!(1 << 20));
        kernel.put("ctl/fs/fuse/max_pages_limit", "32\n");
        let knob = kernel.paths.before_mount();
        assert_eq!(knob.got, json!(32 * page()));
        assert!(knob.degraded().unwrap().contains("max_pages_limit is 32 pages"));
        assert_eq!(kernel.get("ctl/fs/fuse/max_pages_limit"), "32");
        std::fs::remove_file(kernel.paths.sysctl.join("fs/fuse/max_pages_limit")).unwrap();
        assert_eq!(kernel.paths.before_mount().degraded(), None);
    }

    #[test]
    fn what_cannot_be_seen_is_not_claimed_and_not_called_slow() {
        let kernel = kernel();
        let report = kernel.report(Some(51), &options(""));
        assert_eq!((&report.knobs[2].got, &report.knobs[2].cost), (&Value::Null, &None));
        assert!(report.knobs[2].why_not.as_deref().unwrap().contains("fusectl"));
        kernel.put("sys/fs/fuse/connections/51/max_background", "12\n");
        kernel.put("sys/fs/fuse/connections/51/congestion_threshold", "96\n");
        let report = kernel.report(Some(51), &options(""));
        assert_eq!((&report.knobs[2].got, &report.knobs[3].got), (&json!(12), &json!(96)));
        assert!(report.degraded().unwrap().contains("max_background is 12, not 128"));
    }

    #[test]
    fn a_refused_feature_is_reported_with_its_reason() {
        let kernel = kernel();
        let init = Init { passthrough: Feature::Refused("not root".into()), ..init() };
        let request = kernel.paths.before_mount();
        let report = kernel.paths.after_init(Some(51), &options(""), &init, request);
        let line = report.degraded().unwrap();
        assert!(line.contains("passthrough is off (not root): whole files"), "{line}");
        let refused = &report.knobs[6];
        assert_eq!((&refused.wanted, &refused.got), (&json!(true), &json!(false)));
        assert_eq!(refused.why_not.as_deref(), Some("not root"));
        assert_eq!(report.knobs[0].name, "readahead");
    }
}
