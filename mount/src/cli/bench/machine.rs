//! Facts about the machine: kernel, cores, memory, and the file system and device of a file.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::sys::stat::{major, minor};
use serde_json::{Value, json};
use tensorfs::internal::system_memory::of_machine;

/// Kernel, cores and memory.
pub(super) fn describe() -> Value {
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    json!({
        "kernel": kernel.trim(),
        "cores": std::thread::available_parallelism().map_or(1, |n| n.get()),
        "memory_bytes": of_machine("MemTotal"),
    })
}

/// File system and device of `path`, with the readahead window of the device.
pub(super) fn below(path: &Path) -> io::Result<Value> {
    let device = fs::metadata(path)?.dev();
    let (major, minor) = (major(device), minor(device));
    let table = fs::read_to_string("/proc/self/mountinfo")?;
    let number = format!("{major}:{minor}");
    let mount = table.lines().find_map(|line| {
        let (front, back) = line.split_once(" - ")?;
        (front.split(' ').nth(2)? == number).then_some(back)
    });
    let mut words = mount.unwrap_or_default().split(' ');
    Ok(json!({
        "file_system": words.next().filter(|word| !word.is_empty()),
        "device": words.next(),
        "readahead_kib": readahead_kib(major, minor),
    }))
}

/// The kernel's readahead window for a device, in KiB.
pub(super) fn readahead_kib(major: u64, minor: u64) -> Option<u64> {
    let paths = [
        format!("/sys/class/bdi/{major}:{minor}/read_ahead_kb"),
        format!("/sys/dev/block/{major}:{minor}/queue/read_ahead_kb"),
        // A partition uses the queue of its disk.
        format!("/sys/dev/block/{major}:{minor}/../queue/read_ahead_kb"),
    ];
    let text = paths.iter().find_map(|path| fs::read_to_string(path).ok())?;
    text.trim().parse().ok()
}
