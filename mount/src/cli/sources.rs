//! The checkpoints that a command reads: parses options, scans the source and proves the
//! checkpoints.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tensorfs::internal::checkpoint::{Checkpoint, FolderId, Set, Tail, Tree};
use tensorfs::internal::consolidate::SourceFiles;
use tensorfs::internal::error::{shown_argument, shown_path};
use tensorfs::internal::format::OutputFormat;
use tensorfs::internal::mount_origin::{
    MountOrigin, changed_since_mount, resolve_bytes, resolve_mount,
};
use tensorfs::internal::open_options::{OpenOptions, Prefer};
use tensorfs::internal::store::hub_cache;
use tensorfs::internal::view::{Files, View};

use super::args;
use super::output::{Failure, Outcome, UNPROVEN_TAIL};
use crate::log;
use crate::options::{Options, Use, escape};

/// The commands that accept several views or models, for errors.
const SEVERAL: &str = "only mount, serve, ls, inspect and consolidate";

/// The value of `--index-dir` as a mount option.
pub(super) fn index_option(folder: Option<&OsStr>) -> Option<String> {
    folder.map(|folder| format!("index-dir={}", escape(&folder.to_string_lossy())))
}

/// If `source` is the name of a model in the hub cache, replaces it by the path of the model.
pub(super) fn resolve(source: &mut PathBuf) -> Outcome {
    *source = hub_cache::resolve(source)?;
    Ok(())
}

/// Scans the source of a query about one view. For a path on a mount, `-o` applies to the files that
/// the mount shows.
pub(super) fn open_source(args: &args::SourceArgs, options: Options) -> Result<Tree, Failure> {
    if options.open.views.is_some() {
        let why = "option tp needs rank=, or shows a view for each rank";
        return Err(Failure::Usage(format!("{why}; {SEVERAL} take several views")));
    }
    scan_source(args, options, false)
}

/// Scans the source of `command`, which works on the bytes of the source. For a path on a mount,
/// this is the source behind the mount: only that source has checksums and an index. The view of
/// the tree is the view that `-o` gives. If `-o` gives no view, the view of the tree has only the
/// format of the mount.
pub(super) fn open_bytes(
    command: &str,
    args: &args::SourceArgs,
    options: Options,
) -> Result<Tree, Failure> {
    let index = options.index_dir.folder();
    let mut open = options.open_with_secret().map_err(Failure::Failed)?;
    let path = match resolve_bytes(&args.source) {
        None => args.source.clone(),
        Some(Ok(MountOrigin { path, options: mounted, .. })) => {
            let (zero, state) = open.zero_and_state_or(&mounted);
            let found_by_default = open.prefer == Prefer::default();
            let prefer = if found_by_default { mounted.prefer } else { open.prefer };
            let view = if options.has_view { open.view } else { mounted.view };
            let follow = mounted.follow.into_iter().chain(open.follow).collect();
            open = OpenOptions { prefer, zero, state, view, follow, ..open };
            path
        }
        Some(Err(why)) => {
            let shown = shown_path(&args.source);
            return Err(Failure::Failed(format!(
                "{shown}: {command} reads the source of a mount, and {why}: name the source itself"
            )));
        }
    };
    scan_tree(&path, &OpenOptions { index, ..open })
}

/// Refuses a path on a mount with several views, for commands that work on one view.
pub(super) fn refuse_several_views(args: &args::SourceArgs) -> Result<(), Failure> {
    let origin = resolve_mount(&args.source);
    let Some(views) = origin.and_then(|origin| origin.options.views) else { return Ok(()) };
    let folder = |name: &str| shown_path(&args.source.join(name));
    let names: Vec<String> = views.iter().take(4).map(|(name, _)| folder(name)).collect();
    Err(Failure::Usage(format!(
        "{}: several views here, name the folder of one: {}{}",
        shown_path(&args.source),
        names.join(", "),
        if views.iter().count() > names.len() { ", ..." } else { "" }
    )))
}

/// Scans the source of a query, like `open_source`, but accepts several views.
pub(super) fn open_source_with_views(
    args: &args::SourceArgs,
    options: Options,
) -> Result<Tree, Failure> {
    scan_source(args, options, true)
}

fn scan_source(
    args: &args::SourceArgs,
    options: Options,
    with_views: bool,
) -> Result<Tree, Failure> {
    let index = options.index_dir.folder();
    let given = options.open_with_secret().map_err(Failure::Failed)?;
    let behind =
        resolve_mount(&args.source).and_then(|origin| origin.open_with(&given, options.has_view));
    let (path, mut open) = behind.unwrap_or_else(|| (args.source.clone(), given));
    if !with_views {
        (open.views, open.hub) = (None, false);
    }
    if let Some(why) = changed_since_mount(&args.source) {
        let path = shown_path(&args.source);
        log::note(&format!("{path}: read as it is mounted, not from its source: {why}"));
    }
    scan_tree(&path, &OpenOptions { index, ..open })
}

/// Scans `path`, and prints a note about what the scan left out.
fn scan_tree(path: &Path, options: &OpenOptions) -> Result<Tree, Failure> {
    let tree = Tree::scan(path, options)?;
    // If the source has no checkpoint, the error of the command contains this summary, so no note
    // is needed.
    if let Some(summary) = tree.left_out.summary().filter(|_| !tree.families().is_empty()) {
        log::note(&format!("{}: {summary}", shown_path(&tree.source)));
    }
    Ok(tree)
}

/// Starts the log of `command`, raises its limit of open files, and parses its options `-o`.
///
/// # Errors
/// If an option is wrong, or has no effect on the command.
pub(super) fn begin_source_command(
    args: &args::SourceArgs,
    command: &args::SourceCommand,
) -> Result<Options, Failure> {
    log::start(args.verbose);
    tensorfs::internal::source::raise_limit();
    let mut words = args.options.clone();
    words.extend(index_option(args.index_dir.as_deref()));
    let options = Options::parse(&words, false).map_err(Failure::Usage)?;
    let args::SourceCommand { name, uses } = command;
    let Some((option, own)) = Options::other_than(&words, uses) else { return Ok(options) };
    let takes_views = uses.contains(&Use::View);
    let why = match own {
        None => format!("{name} does not take it, it is for mounts"),
        Some(Use::Source | Use::Reads) => format!("{name} does not take it"),
        Some(_) if !takes_views => {
            format!("{name} is about the bytes of the source, which are the same in all views")
        }
        Some(Use::Views | Use::Hub) => format!("{SEVERAL} take it"),
        Some(_) => format!("{name} reads tensors, whatever files show them"),
    };
    let option = shown_argument(&option);
    Err(Failure::Usage(format!("option {option}: {why}; leave it out")))
}

/// A set, and the path below the source of the folder that contains it.
pub(super) struct FoundSet {
    pub(super) directory: PathBuf,
    pub(super) set: Set,
}

/// Proves all sets in `tree`. Returns the sets that the command has to handle, and notes.
pub(super) fn prove_all(tree: &Tree) -> Result<(Vec<FoundSet>, Vec<String>), Failure> {
    let mut found = Vec::new();
    let mut notes = skipped_notes(tree);
    for head in tree.families() {
        let (sets, more) = prove_family(tree, head);
        found.extend(sets);
        notes.extend(more);
    }
    if found.is_empty() {
        return Err(Failure::Failed(tree.nothing_found()));
    }
    Ok((found, notes))
}

/// Notes about files that the scan of `tree` left out.
pub(super) fn skipped_notes(tree: &Tree) -> Vec<String> {
    tree.left_out.lines.iter().cloned().chain(tree.left_out.summary()).collect()
}

/// Proves the family of folders with the top folder `head`. Returns the sets that the command has
/// to handle, and notes.
pub(super) fn prove_family(tree: &Tree, head: FolderId) -> (Vec<FoundSet>, Vec<String>) {
    let (mut found, mut notes) = (Vec::new(), Vec::new());
    for (id, proved) in tree.prove(head) {
        let directory = &tree.folder(id).relative;
        notes.extend(proved.notes.iter().map(|note| {
            let place = shown_path(directory);
            if place.is_empty() { note.clone() } else { format!("{place}: {note}") }
        }));
        let sets = proved.sets.into_iter().filter(|set| set.shown_at_parent.is_none());
        found.extend(sets.map(|set| FoundSet { directory: directory.clone(), set }));
    }
    (found, notes)
}

/// The only checkpoint of the source, notes about it, and the files of the source. The checkpoint
/// may be too large for one virtual file. Options about files and their format have no effect here,
/// because the caller refuses or applies these options.
pub(super) fn one_checkpoint(
    args: &args::SourceArgs,
    mut options: Options,
) -> Result<(Arc<Checkpoint>, Vec<String>, SourceFiles), Failure> {
    options.open.view =
        View { files: Files::Original, format: OutputFormat::default(), ..options.open.view };
    options.has_view = !options.open.view.keeps_tensors();
    refuse_several_views(args)?;
    let tree = open_source(args, options)?;
    let (found, mut notes) = prove_all(&tree)?;
    match <[FoundSet; 1]>::try_from(found) {
        Ok([FoundSet { set, .. }]) => {
            let checkpoint = set.outcome?;
            if checkpoint.tail == Tail::Unproven {
                notes.push(UNPROVEN_TAIL.to_owned());
            }
            Ok((checkpoint, notes, SourceFiles::of(&tree)))
        }
        Err(found) => {
            let name = |found: &FoundSet| {
                // The name of a file identifies the set, because the mount may show the set under
                // another name.
                let file = found.set.files.first().unwrap_or(&found.set.name);
                shown_path(&found.directory.join(file))
            };
            let names: Vec<String> = found.iter().take(4).map(name).collect();
            Err(Failure::Usage(format!(
                "{}: {} checkpoints here, name one of them: {}{}",
                shown_path(&args.source),
                found.len(),
                names.join(", "),
                if found.len() > names.len() { ", ..." } else { "" }
            )))
        }
    }
}
