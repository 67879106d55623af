//! `tensorfs warm URL` and `tensorfs cache warm URL`: reads shards of a remote source into the disk cache.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use indicatif::ProgressBar;
use serde_json::json;
use tensorfs::DiskCachePlace;
use tensorfs::internal::error::{counted, real_name, shown_path};
use tensorfs::internal::size::shown_size;
use tensorfs::internal::source::Source;
use tensorfs::internal::store::disk_cache::kept_bytes;

use super::super::args;
use super::super::output::{Failure, Outcome, print_json, print_text, speed, tell_refusals};
use super::super::sources::{FoundSet, open_source, prove_all};
use super::super::verify::bar;
use super::{HeatFile, WarmFile, in_threads, len_of, parts_of, ranges_of_set};
use crate::log;
use crate::options::Options;

/// Number of threads that read.
const THREADS: usize = 16;

/// Shards, each with the ranges of its bytes to read.
type WantedBytes = Vec<(Arc<Source>, Vec<Range<u64>>)>;

/// Reads the shards of the remote source of `args` into its disk cache. With `heat`, reads only the
/// tensors that `heat` lists.
pub(super) fn run(args: &args::WarmArgs, mut options: Options, heat: Option<&HeatFile>) -> Outcome {
    options.disk_cache.is_default = true;
    let all_bytes = options.open.view.keeps_tensors();
    let path = shown_path(&args.source.source);
    let no_place = "there is no disk cache to fill: give -o cache-dir=DIR, or set HOME";
    let named = options.disk_cache.place();
    let place = named.ok_or_else(|| Failure::Failed(format!("{path}: {no_place}")))?;
    let (found, _) = prove_all(&open_source(&args.source, options)?)?;
    let (wanted, missing) = wanted_of(&found, all_bytes, heat)?;
    let sets = found.len();
    let refused: Vec<_> = found.into_iter().filter_map(|found| found.set.outcome.err()).collect();
    if refused.len() == sets && !args.source.json {
        return tell_refusals(refused.iter());
    }
    if missing > 0 {
        log::note(&format!("not in {path}: {} of the heat", counted(missing, "tensor")));
    }
    let total: u64 = wanted.iter().flat_map(|(_, ranges)| ranges).map(len_of).sum();
    if let Some(size) = place.size.filter(|size| total > *size) {
        let (total, size) = (shown_size(total), shown_size(size));
        let why = format!("{total} to keep, more than cache-dir-size={size}");
        return Err(Failure::Failed(format!("{path}: {why}")));
    }
    let progress = bar(args.progress, total);
    let started = Instant::now();
    let outcome = read_all(&wanted, &progress);
    progress.finish_and_clear();
    outcome?;
    let seconds = started.elapsed().as_secs_f64();
    check_kept(&place, &wanted)?;
    if args.source.json {
        print_json(&json!({
            "ok": refused.is_empty(),
            "class": refused.first().map(|error| error.kind().as_str()),
            "error": refused.first().map(ToString::to_string),
            "source": real_name(&args.source.source),
            "folder": real_name(&place.folder),
            "files": wanted.len(),
            "bytes": total,
            "tensors_missing": missing,
            "seconds": seconds,
        }))?;
        return tell_refusals(refused.iter());
    }
    let (size, count) = (shown_size(total), counted(wanted.len(), "object"));
    let (folder, speed) = (shown_path(&place.folder), speed(total, seconds));
    print_text(&format!("{folder}: {size} of {count} kept in {seconds:.3} s at {speed}\n"))?;
    tell_refusals(refused.iter())
}

/// The shards of `found` with the ranges to read, and the number of tensors in `heat` that they do
/// not have.
fn wanted_of(
    found: &[FoundSet],
    all_bytes: bool,
    heat: Option<&HeatFile>,
) -> Result<(WantedBytes, usize), Failure> {
    let (mut wanted, mut missing) = (WantedBytes::new(), 0);
    for found_set in found {
        let Ok(checkpoint) = &found_set.set.outcome else { continue };
        let ranges = ranges_of_set(found_set, checkpoint, all_bytes, heat, &mut missing)?;
        for (source, ranges) in checkpoint.sources().iter().zip(ranges) {
            let file = WarmFile::joined(source.path().to_owned(), ranges);
            wanted.extend(file.map(|file| (source.clone(), file.ranges)));
        }
    }
    Ok((wanted, missing))
}

/// Reads all ranges into the disk cache.
fn read_all(wanted: &WantedBytes, progress: &ProgressBar) -> Outcome {
    let ranges =
        wanted.iter().flat_map(|(source, ranges)| ranges.iter().map(move |range| (source, range)));
    let parts: Vec<(&Arc<Source>, Range<u64>)> = ranges
        .flat_map(|(source, range)| parts_of(range).map(move |part| (source, part)))
        .collect();
    in_threads(&parts, THREADS, || {
        let mut buffer = Vec::new();
        move |(source, part)| {
            buffer.resize(len_of(part) as usize, 0);
            source.read_exact_at(&mut buffer, part.start)?;
            source.check()?;
            progress.inc(len_of(part));
            Ok(())
        }
    })
}

/// Fails if the disk cache does not have the bytes that were read, in the versions that were read.
fn check_kept(place: &DiskCachePlace, wanted: &WantedBytes) -> Outcome {
    for (source, ranges) in wanted {
        let len: u64 = ranges.iter().map(len_of).sum();
        let kept = kept_bytes(&place.folder, source.path(), &source.version(), ranges);
        let bytes = kept.map_err(|e| Failure::at(&place.folder, e))?;
        if bytes < len {
            let (file, folder) = (shown_path(source.path()), shown_path(&place.folder));
            let why =
                "the cache has no room or cannot be written, or the server tells no strong ETag";
            return Err(Failure::Failed(format!(
                "{file}: {folder} kept {} of {}: {why}",
                shown_size(bytes),
                shown_size(len)
            )));
        }
    }
    Ok(())
}
