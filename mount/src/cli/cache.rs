//! `tensorfs cache`: lists, checks, fills and empties the disk cache of remote sources.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use indicatif::HumanDuration;
use serde_json::json;
use tensorfs::internal::error::{counted, is_url, real_name, shown, shown_path};
use tensorfs::internal::size::shown_size;
use tensorfs::internal::store::disk_cache::{self, KeptObjects, UnusableMap, VerifiedObject};

use super::args::{CacheAction, CacheArgs, SourceArgs, WarmArgs};
use super::output::{Failure, Outcome, print_json, print_text};
use super::warm;
use crate::log;
use crate::options::{DiskCacheOptions, escape};

pub(super) fn run(args: &CacheArgs) -> Outcome {
    if args.action == CacheAction::Warm {
        return warm::run(&warm_args(args)?);
    }
    if args.source.is_some() || !args.options.is_empty() {
        return Err(Failure::Usage("a URL and -o go with warm".to_owned()));
    }
    let folder = folder_of(args)?;
    let failed = |e| Failure::at(&folder, e);
    match args.action {
        CacheAction::Ls => {
            let kept = disk_cache::kept_objects(&folder).map_err(failed)?;
            list(&folder, &kept, args.json)
        }
        CacheAction::Prune => {
            let pruned =
                disk_cache::prune(&folder, args.keep.unwrap_or(u64::MAX)).map_err(failed)?;
            for path in &pruned.irregular {
                log::note(&format!("{}: not a regular file; it stays there", shown_path(path)));
            }
            if args.json {
                return print_json(&json!({
                    "folder": real_name(&folder),
                    "ok": true,
                    "removed_objects": pruned.objects,
                    "freed_bytes": pruned.freed,
                    "left_bytes": pruned.left,
                }));
            }
            print_text(&format!(
                "{}: {} removed, {} freed, {} left\n",
                shown_path(&folder),
                counted(pruned.objects as usize, "object"),
                shown_size(pruned.freed),
                shown_size(pruned.left),
            ))
        }
        CacheAction::Verify => {
            let mut objects = Vec::new();
            let unusable =
                disk_cache::verify(&folder, |object| objects.push(object)).map_err(failed)?;
            tell_verified(&folder, &objects, &unusable, args.json)
        }
        CacheAction::Warm => Ok(()),
    }
}

/// The arguments of `tensorfs warm` that do the same as `cache warm` with `args`.
fn warm_args(args: &CacheArgs) -> Result<WarmArgs, Failure> {
    let usage = |why: &str| Failure::Usage(why.to_owned());
    if args.keep.is_some() {
        return Err(usage("--keep goes with prune"));
    }
    let url = args.source.clone().ok_or_else(|| usage("warm needs the URL of a source"))?;
    if !is_url(&url) {
        let why = "is no URL: only remote sources have a disk cache";
        return Err(Failure::Usage(format!("{}: {why}", shown_path(&url))));
    }
    let mut options = args.options.clone();
    if let Some(folder) = &args.cache_dir {
        let folder = folder.to_str().ok_or_else(|| usage("--cache-dir: the path is not UTF-8"))?;
        options.push(format!("cache-dir={}", escape(folder)));
    }
    let source = SourceArgs { source: url, options, index_dir: None, json: args.json, verbose: 0 };
    Ok(WarmArgs { source, heat: None, progress: args.progress })
}

/// The folder of the disk cache: the folder that the arguments name, or the folder that a mount
/// would use.
fn folder_of(args: &CacheArgs) -> Result<PathBuf, Failure> {
    if args.keep.is_some() && args.action != CacheAction::Prune {
        return Err(Failure::Usage("--keep goes with prune".to_owned()));
    }
    if let Some(folder) = &args.cache_dir {
        return Ok(folder.clone());
    }
    let place = DiskCacheOptions::of_mounts().place().map(|place| place.folder);
    place.ok_or_else(|| {
        Failure::Failed("there is no disk cache: give --cache-dir DIR, or set HOME".to_owned())
    })
}

fn list(folder: &Path, kept: &KeptObjects, as_json: bool) -> Outcome {
    let KeptObjects { objects, of_other_versions, space_of_other_versions } = kept;
    let own: u64 = objects.iter().map(|object| object.space).sum();
    let space = own + space_of_other_versions;
    if as_json {
        let rows = objects.iter().map(|object| {
            json!({
                "url": object.url,
                "size": object.len,
                "cached_bytes": object.bytes,
                "disk_bytes": object.space,
                "unused_s": object.age.as_secs(),
            })
        });
        return print_json(&json!({
            "folder": real_name(folder),
            "ok": true,
            "disk_bytes": space,
            "objects_of_other_versions": of_other_versions,
            "disk_bytes_of_other_versions": space_of_other_versions,
            "objects": rows.collect::<Vec<_>>(),
        }));
    }
    let mut text = String::new();
    let count = counted(objects.len() + *of_other_versions as usize, "object");
    let _ = writeln!(text, "{}: {count}, {}", shown_path(folder), shown_size(space));
    for object in objects {
        let (bytes, len) = (shown_size(object.bytes), shown_size(object.len));
        let percent = object.bytes.saturating_mul(100) / object.len.max(1);
        let age = HumanDuration(object.age);
        let _ = writeln!(
            text,
            "  {}  {bytes} of {len} ({percent} %), used {age} ago",
            shown(&object.url)
        );
    }
    if *of_other_versions > 0 {
        let count = counted(*of_other_versions as usize, "object");
        let size = shown_size(*space_of_other_versions);
        let _ = writeln!(text, "  {count} of other versions of tensorfs, {size}");
    }
    print_text(&text)
}

fn tell_verified(
    folder: &Path,
    objects: &[VerifiedObject],
    unusable: &[UnusableMap],
    as_json: bool,
) -> Outcome {
    let damaged: u64 = objects.iter().map(|object| object.damaged).sum();
    let right: u64 = objects.iter().map(|object| object.right).sum();
    if as_json {
        let rows = objects.iter().map(|object| {
            json!({
                "url": object.url,
                "right_bytes": object.right,
                "damaged_blocks": object.damaged,
            })
        });
        print_json(&json!({
            "folder": real_name(folder),
            "ok": damaged == 0 && unusable.is_empty(),
            "right_bytes": right,
            "damaged_blocks": damaged,
            "unusable_maps": unusable.iter().map(|map| real_name(&map.path)).collect::<Vec<_>>(),
            "objects": rows.collect::<Vec<_>>(),
        }))?;
    } else {
        let mut text = String::new();
        for object in objects.iter().filter(|object| object.damaged > 0) {
            let blocks = counted(object.damaged as usize, "damaged block");
            let _ = writeln!(text, "  {}: {blocks}", shown(&object.url));
        }
        let count = counted(objects.len(), "object");
        let summary = format!("{}: {count}, {} right\n", shown_path(folder), shown_size(right));
        print_text(&(summary + &text))?;
    }
    for map in unusable {
        log::say(&format!("{}: cannot be used: {}", shown_path(&map.path), map.why));
    }
    if damaged > 0 {
        let blocks = counted(damaged as usize, "block");
        log::say(&format!(
            "{}: {blocks} damaged; they count no more, and are read from their servers again",
            shown_path(folder)
        ));
    }
    if damaged == 0 && unusable.is_empty() { Ok(()) } else { Err(Failure::Told) }
}
