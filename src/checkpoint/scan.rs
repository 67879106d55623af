//! Scans a source: lists its folders and files, and resolves links.
//!
//! Folders of the source itself are scanned first, then folders behind one link, then folders
//! behind two links, and so on. So a source within the limits is scanned completely before links
//! add more paths. If a limit is exceeded, the largest part is left out, and its folder shows the
//! reason. Other folders beside it are not affected.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::{Error, Result, shown_path};
use crate::format::names;
use crate::index::now;
use crate::store::Store;
use crate::store::resolve::{LinkBounds, Unusable};
use crate::version::{FileId, Version};

use super::folder::{File, Folder, FolderId, Misfit};
use super::folders::ScanLimits;

/// Maximum number of lines about left-out names for each reason.
const LINES_MAX: usize = 10;

/// Maximum number of left-out folders in the note of a folder.
const NAMED_MAX: usize = 20;

/// The names that a scan left out.
#[derive(Clone, Debug, Default)]
pub struct LeftOut {
    /// Lines about left-out names. Each reason has a line for each of its first names.
    pub lines: Vec<String>,
    /// Number of names left out for each reason.
    counts: BTreeMap<Unusable, usize>,
}

impl LeftOut {
    /// One line with the number of left-out names, the reasons and advice. `None` if no name was
    /// left out.
    pub fn summary(&self) -> Option<String> {
        let count: usize = self.counts.values().sum();
        if count == 0 {
            return None;
        }
        let reasons =
            self.counts.iter().map(|(why, n)| format!("{} ({})", why.counted(*n), why.advice()));
        let names = if count == 1 { "name is" } else { "names are" };
        Some(format!("{count} {names} skipped: {}", reasons.collect::<Vec<_>>().join(", ")))
    }

    /// Whether parts of the source are left out because a limit is exceeded.
    pub fn is_partial(&self) -> bool {
        let too_much = [Unusable::TooManyLinks, Unusable::TooManyFiles];
        too_much.iter().any(|why| self.counts.contains_key(why))
    }

    fn add(&mut self, why: Unusable, line: impl FnOnce() -> String) {
        let count = self.counts.entry(why).or_default();
        *count += 1;
        if *count <= LINES_MAX {
            self.lines.push(line());
        }
    }
}

/// The entries of a folder. All paths that lead to the folder share them.
pub(super) struct Listing {
    pub(super) store: Store,
    pub(super) version: Version,
    pub(super) files: Arc<[File]>,
    pub(super) misfits: Arc<[Misfit]>,
    pub(super) folders: Vec<Arc<Subfolder>>,
    /// Real paths of other folders on whose entries the targets of the links depend.
    pub(super) targets: Arc<[PathBuf]>,
    /// Time at which the listing began, in seconds since 1970.
    pub(super) begun: i64,
    /// Whether names are left out because their versions could not be read.
    pub(super) partial: bool,
    /// Number of entries.
    pub(super) len: usize,
}

/// A subfolder, or a link to a folder.
pub(super) struct Subfolder {
    pub(super) name: OsString,
    pub(super) real: PathBuf,
    pub(super) version: Version,
    pub(super) is_link: bool,
}

/// The place in a tree at which a scan begins.
#[derive(Default)]
pub(super) struct Graft {
    /// Path of the scanned folder below the source.
    pub(super) relative: PathBuf,
    /// The folders above the scanned folder.
    pub(super) above: Vec<FileId>,
    /// Whether a link leads to the scanned folder, or to a folder that contains it.
    pub(super) linked: bool,
}

/// A folder that becomes part of the tree.
struct ScanPlace {
    folder: Arc<Subfolder>,
    parent: Option<usize>,
    depth: usize,
    /// Whether a link leads to this folder, or to a folder that contains it.
    linked: bool,
    /// `None` if the folder is not read yet, cannot be read, or is closed.
    listing: Option<Arc<Listing>>,
    children: Vec<usize>,
    /// Why its content is left out. `None` if it is not left out.
    closed: Option<Unusable>,
    /// Whether the targets of links in it or below it are left out because a limit is exceeded.
    trimmed: bool,
}

/// A scan in progress.
pub(super) struct Scan<'a> {
    bounds: &'a LinkBounds,
    limits: ScanLimits,
    /// Whether subfolders are scanned too.
    deep: bool,
    /// The folders, parents before children.
    places: Vec<ScanPlace>,
    /// Indexes in `places` of the folders to read next.
    next: VecDeque<usize>,
    /// Indexes in `places` of the folders behind one more link, which are read after `next`.
    behind_links: VecDeque<usize>,
    /// Listings by the real path of the folder. Each folder is read only once, even if several links lead to it.
    listings: HashMap<PathBuf, Arc<Listing>>,
    /// Paths of subfolders that were reported as left out.
    told: HashSet<PathBuf>,
    entries: usize,
    linked: usize,
    linked_entries: usize,
    left_out: LeftOut,
    graft: Graft,
}

impl<'a> Scan<'a> {
    /// A scan within `bounds` and `limits`. If `deep` is set, it scans subfolders too.
    pub(super) fn new(bounds: &'a LinkBounds, limits: ScanLimits, deep: bool) -> Scan<'a> {
        Scan {
            bounds,
            limits,
            deep,
            places: Vec::new(),
            next: VecDeque::new(),
            behind_links: VecDeque::new(),
            listings: HashMap::new(),
            told: HashSet::new(),
            entries: 0,
            linked: 0,
            linked_entries: 0,
            left_out: LeftOut::default(),
            graft: Graft::default(),
        }
    }

    /// The folders of the source at `root`, and the names that were left out. Parents come before
    /// children, and siblings are sorted by name. Folders refer to their parent and children by
    /// index.
    ///
    /// # Errors
    /// The source itself cannot be read, or has too many files of its own.
    pub(super) fn run(mut self, root: PathBuf, graft: Graft) -> Result<(Vec<Folder>, LeftOut)> {
        let version = self
            .bounds
            .store()
            .version_behind_links(&root)
            .map_err(|e| Error::io(&root, "read", e))?;
        let root = Subfolder { name: OsString::new(), real: root, version, is_link: false };
        self.graft = graft;
        self.linked = usize::from(self.graft.linked);
        self.places.push(ScanPlace {
            folder: Arc::new(root),
            parent: None,
            depth: self.graft.above.len(),
            linked: self.graft.linked,
            listing: None,
            children: Vec::new(),
            closed: None,
            trimmed: false,
        });
        self.next.push_back(0);
        loop {
            let Some(index) = self.next.pop_front() else {
                if self.behind_links.is_empty() {
                    break;
                }
                std::mem::swap(&mut self.next, &mut self.behind_links);
                continue;
            };
            if let Err(error) = self.enter(index) {
                if index == 0 {
                    return Err(error);
                }
                let relative = shown_path(&self.relative(index));
                self.left_out
                    .add(Unusable::Unreadable, || format!("{relative}: not shown: {error}"));
                continue;
            }
            for &child in &self.places[index].children {
                let is_link = self.places[child].folder.is_link;
                let queue = if is_link { &mut self.behind_links } else { &mut self.next };
                queue.push_back(child);
            }
            self.close_folders_over_limits()?;
        }
        Ok(self.finish())
    }

    /// Reads the folder at `index`, and adds its subfolders to `places`.
    fn enter(&mut self, index: usize) -> Result<()> {
        let place = &self.places[index];
        let listing = match self.listings.get(&place.folder.real) {
            Some(listing) => listing.clone(),
            None => {
                let listing = Arc::new(read(self.bounds, &place.folder.real)?);
                self.listings.insert(place.folder.real.clone(), listing.clone());
                let relative = self.relative(index);
                for misfit in listing.misfits.iter() {
                    self.skip(&relative.join(&misfit.name), misfit.why);
                }
                listing
            }
        };
        let above = self.above(index);
        let (depth, linked) = (self.places[index].depth + 1, self.places[index].linked);
        *(if linked { &mut self.linked_entries } else { &mut self.entries }) += listing.len;
        let deep = self.deep;
        for folder in listing.folders.iter().filter(|_| deep) {
            let why = if above.contains(&folder.version.file()) {
                Unusable::Above
            } else if depth >= self.limits.depth {
                Unusable::TooDeep
            } else {
                let child = self.places.len();
                let linked = linked || folder.is_link;
                self.linked += usize::from(linked);
                self.places.push(ScanPlace {
                    folder: folder.clone(),
                    parent: Some(index),
                    depth,
                    linked,
                    listing: None,
                    children: Vec::new(),
                    closed: None,
                    trimmed: false,
                });
                self.places[index].children.push(child);
                continue;
            };
            if self.told.insert(self.places[index].folder.real.join(&folder.name)) {
                let relative = self.relative(index).join(&folder.name);
                self.skip(&relative, why);
            }
        }
        self.places[index].listing = Some(listing);
        Ok(())
    }

    /// The folder at `index` and all folders above it.
    fn above(&self, index: usize) -> Vec<FileId> {
        let parents = std::iter::successors(Some(index), |&index| self.places[index].parent);
        let scanned = parents.map(|index| self.places[index].folder.version.file());
        scanned.chain(self.graft.above.iter().copied()).collect()
    }

    /// Path of the folder at `index`, relative to the source.
    fn relative(&self, index: usize) -> PathBuf {
        let parents = std::iter::successors(Some(index), |&index| self.places[index].parent);
        let mut names: Vec<&OsStr> = parents
            .map(|index| self.places[index].folder.name.as_os_str())
            .filter(|name| !name.is_empty())
            .collect();
        names.push(self.graft.relative.as_os_str());
        names.iter().rev().collect()
    }

    fn skip(&mut self, relative: &Path, why: Unusable) {
        self.left_out.add(why, || {
            format!("{}: not shown: {}; {}", shown_path(relative), why.text(), why.advice())
        });
    }

    /// Leaves out the largest parts until the rest is well below the limits. Folders behind links
    /// are counted separately: links take no space, so they must not displace real files.
    ///
    /// # Errors
    /// The source itself has too many files.
    fn close_folders_over_limits(&mut self) -> Result<()> {
        if self.linked > self.limits.linked {
            let weigh = |place: &ScanPlace| usize::from(place.linked && place.closed.is_none());
            self.linked =
                self.close_folders_down_to(self.limits.linked, &weigh, Unusable::TooManyLinks)?;
        }
        if self.linked_entries > self.limits.linked_entries {
            let weigh = |place: &ScanPlace| if place.linked { place.len() } else { 0 };
            self.linked_entries = self.close_folders_down_to(
                self.limits.linked_entries,
                &weigh,
                Unusable::TooManyLinks,
            )?;
        }
        if self.entries > self.limits.entries {
            let weigh = |place: &ScanPlace| if place.linked { 0 } else { place.len() };
            self.entries =
                self.close_folders_down_to(self.limits.entries, &weigh, Unusable::TooManyFiles)?;
        }
        Ok(())
    }

    /// Closes folders until the remaining weight is at most three quarters of `max`. Returns the
    /// remaining weight. Descends from the root as long as one subfolder has more than half of the
    /// weight of its parent, so that the small folders beside that subfolder are not closed. In the
    /// folder at which the descent ends, the heaviest subfolders are closed, or only the links in
    /// them. The descent does not pass links, because a part of a link's target is of no use.
    fn close_folders_down_to(
        &mut self,
        max: usize,
        weigh: &dyn Fn(&ScanPlace) -> usize,
        why: Unusable,
    ) -> Result<usize> {
        let mut weights = self.weights(weigh);
        while weights[0] > max {
            let mut index = 0;
            let heaviest = |index: usize| {
                let children = self.places[index].children.iter().copied();
                children.max_by_key(|&child| weights[child]).filter(|&child| weights[child] > 0)
            };
            while let Some(child) = heaviest(index)
                .filter(|&child| weights[child] * 2 > weights[index] && !self.places[child].linked)
            {
                index = child;
            }
            let mut children = self.places[index].children.clone();
            let of_children: usize = children.iter().map(|&child| weights[child]).sum();
            if of_children * 2 < weights[index] {
                // Most of the weight is files of the folder itself.
                if index == 0 {
                    let root = shown_path(&self.bounds.root());
                    return Err(Error::usage(format!("{root}: {}; {}", why.text(), why.advice())));
                }
                children = vec![index];
            }
            // Among folders of equal weight, the last folder by name is closed first.
            children.sort_by_key(|&child| std::cmp::Reverse((weights[child], child)));
            let mut left = weights[0];
            for child in children {
                if left <= max / 4 * 3 {
                    break;
                }
                left -= weights[child];
                if why == Unusable::TooManyLinks {
                    self.close_links(child);
                } else {
                    self.close(child, why);
                }
            }
            self.places[index].trimmed |= why == Unusable::TooManyLinks;
            self.forget_closed();
            weights = self.weights(weigh);
        }
        Ok(weights[0])
    }

    /// The weight of each folder, including everything below it.
    fn weights(&self, weigh: &dyn Fn(&ScanPlace) -> usize) -> Vec<usize> {
        let mut weights = vec![0; self.places.len()];
        for (index, place) in self.places.iter().enumerate().rev() {
            weights[index] += weigh(place);
            if let Some(parent) = place.parent {
                weights[parent] += weights[index];
            }
        }
        weights
    }

    /// Leaves out the targets of the links in and below the folder at `index`. Its files are kept.
    fn close_links(&mut self, index: usize) {
        let mut next = vec![index];
        while let Some(index) = next.pop() {
            if self.places[index].linked {
                self.close(index, Unusable::TooManyLinks);
            } else {
                next.extend(&self.places[index].children);
            }
        }
    }

    /// Leaves out the content of the folder at `index`.
    fn close(&mut self, index: usize, why: Unusable) {
        let relative = self.relative(index);
        self.skip(&relative, why);
        let place = &mut self.places[index];
        place.closed = Some(why);
        place.listing = None;
    }

    /// Removes everything below closed folders. The closed folders themselves are kept, with a
    /// weight of 0.
    fn forget_closed(&mut self) {
        let mut now_at: Vec<Option<usize>> = Vec::with_capacity(self.places.len());
        let mut kept: Vec<ScanPlace> = Vec::new();
        for mut place in std::mem::take(&mut self.places) {
            let parent = place
                .parent
                .map(|index| now_at[index].filter(|&index| kept[index].closed.is_none()));
            now_at.push(match parent {
                Some(None) => None,
                parent => {
                    place.parent = parent.flatten();
                    kept.push(place);
                    Some(kept.len() - 1)
                }
            });
        }
        let open = |index: &usize| kept[*index].closed.is_none();
        for queue in [&mut self.next, &mut self.behind_links] {
            *queue = queue.iter().filter_map(|&index| now_at[index].filter(open)).collect();
        }
        for place in &mut kept {
            let children = place.children.iter().filter_map(|&index| now_at[index]);
            place.children = children.collect();
        }
        self.places = kept;
    }

    fn finish(self) -> (Vec<Folder>, LeftOut) {
        let mut folders: Vec<Folder> = Vec::new();
        let mut next: Vec<(usize, Option<FolderId>, PathBuf)> =
            vec![(0, None, self.graft.relative.clone())];
        while let Some((index, parent, relative)) = next.pop() {
            let place = &self.places[index];
            let Some(folder) = self.folder(index, parent, &relative) else { continue };
            let id = folders.len();
            if let Some(parent) = parent {
                folders[parent].children.push((place.folder.name.clone(), id));
            }
            folders.push(folder);
            // The stack returns the last pushed folder first.
            let children = place.children.iter().rev();
            next.extend(
                children.map(|&child| {
                    (child, Some(id), relative.join(&self.places[child].folder.name))
                }),
            );
        }
        (folders, self.left_out)
    }

    /// The folder at `index` in the form that a tree has. `None` if it cannot be read.
    fn folder(&self, index: usize, parent: Option<FolderId>, relative: &Path) -> Option<Folder> {
        let place = &self.places[index];
        let shown = match (&place.listing, place.closed) {
            (Some(listing), _) => listing.folder(),
            (None, Some(_)) => {
                let version = self.bounds.store().version(&place.folder.real).ok()?;
                let store = self.bounds.store().clone();
                Folder { version: Some(version), store, ..Folder::default() }
            }
            (None, None) => return None,
        };
        let is = left_out;
        let mut lacks = Vec::from_iter(place.closed.map(|why| is("this folder", why)));
        if place.trimmed {
            let advice = Unusable::TooManyLinks.advice();
            lacks
                .push(format!("links here lead to too many folders, some are not shown; {advice}"));
        }
        let closed: Vec<_> = place
            .children
            .iter()
            .map(|&child| &self.places[child])
            .filter_map(|p| Some((&p.folder.name, p.closed?)))
            .collect();
        let lines = closed.iter().take(NAMED_MAX);
        lacks.extend(lines.map(|(name, why)| is(&shown_path(name.as_ref()), *why)));
        if closed.len() > NAMED_MAX {
            lacks.push(format!("{} more folders are not shown", closed.len() - NAMED_MAX));
        }
        Some(Folder {
            relative: relative.to_owned(),
            path: place.folder.real.clone(),
            parent,
            lacks,
            linked: place.linked,
            ..shown
        })
    }
}

/// The line about a folder whose content is left out.
pub(super) fn left_out(name: &str, why: Unusable) -> String {
    format!("{name} is not shown: it is {}; {}", why.text(), why.advice())
}

impl Listing {
    /// A folder with these entries. It has no place in a tree yet.
    pub(super) fn folder(&self) -> Folder {
        Folder {
            store: self.store.clone(),
            version: Some(self.version),
            files: self.files.clone(),
            misfits: self.misfits.clone(),
            targets: self.targets.clone(),
            listed: self.begun,
            partial: self.partial,
            ..Folder::default()
        }
    }
}

impl ScanPlace {
    /// Number of entries, 0 if the folder was not read.
    fn len(&self) -> usize {
        self.listing.as_ref().map_or(0, |listing| listing.len)
    }
}

/// Lists the folder at `path`, and resolves its links.
pub(super) fn read(bounds: &LinkBounds, path: &Path) -> Result<Listing> {
    let read_error = |e| Error::io(path, "read", e);
    let (store, begun) = (bounds.store(), now());
    let listing = store.list(&bounds.base_of(path), path).map_err(read_error)?;
    let (mut files, mut misfits, mut folders) = (Vec::new(), Vec::new(), Vec::new());
    let mut targets = BTreeSet::new();
    let len = listing.entries.len();
    for (name, version) in listing.entries {
        let here = path.join(&name);
        let is_link = version.is_link();
        let found = if is_link {
            let found = bounds.resolve(&here);
            let real = found.as_ref().ok().map(|(real, _)| real.as_path());
            targets.extend(store.folders_on_the_way(&here, real));
            found
        } else {
            Ok((here, version))
        };
        let (real, version) = match found {
            Ok((_, version)) if bounds.leaves_out(&version) => {
                misfits.push(Misfit { name, why: Unusable::Mount });
                continue;
            }
            Ok(found) => found,
            Err(why) => {
                misfits.push(Misfit { name, why });
                continue;
            }
        };
        if version.is_file() && name.to_str().is_none() && is_weight_file(&name) {
            misfits.push(Misfit { name, why: Unusable::NotUtf8 });
        } else if version.is_file() {
            files.push(File { name, store: store.clone(), path: real, version });
        } else if version.is_folder() {
            folders.push(Arc::new(Subfolder { name, real, version, is_link }));
        } else {
            misfits.push(Misfit { name, why: Unusable::Special });
        }
    }
    targets.remove(path);
    Ok(Listing {
        store: store.clone(),
        version: listing.version,
        files: files.into(),
        misfits: misfits.into(),
        folders,
        targets: targets.into_iter().collect(),
        begun,
        partial: listing.partial,
        len,
    })
}

fn is_weight_file(name: &OsStr) -> bool {
    let name = name.as_encoded_bytes();
    !name.starts_with(b".")
        && names::WEIGHT_SUFFIXES.iter().any(|end| name.ends_with(end.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::open_options::Links;

    const LIMITS: ScanLimits =
        ScanLimits { depth: 40, entries: 50, linked: 12, linked_entries: 30 };

    fn files(folder: &Path, count: usize) {
        std::fs::create_dir_all(folder).unwrap();
        (0..count).for_each(|n| std::fs::write(folder.join(n.to_string()), "").unwrap());
    }

    fn scan(root: &Path) -> Result<(Vec<Folder>, LeftOut)> {
        let root = std::fs::canonicalize(root).unwrap();
        let bounds = LinkBounds::new(Store::LOCAL, root.clone(), Vec::new(), Links::Inside);
        Scan::new(&bounds, LIMITS, true).run(root, Graft::default())
    }

    fn shape(folders: &[Folder]) -> Vec<(String, usize, bool)> {
        let row = |folder: &Folder| {
            let name = folder.relative.to_str().unwrap().to_owned();
            (name, folder.files.len(), !folder.lacks.is_empty())
        };
        folders.iter().map(row).collect()
    }

    fn row(name: &str, files: usize, lacks: bool) -> (String, usize, bool) {
        (name.to_owned(), files, lacks)
    }

    #[test]
    fn a_folder_of_too_many_files_is_left_out_and_its_neighbours_stay() {
        let root = tempfile::tempdir().unwrap();
        files(&root.path().join("a/small"), 3);
        files(&root.path().join("b/big"), 60);
        files(&root.path().join("c"), 2);
        let (folders, left_out) = scan(root.path()).unwrap();
        let expected = [
            row("", 0, false),
            row("a", 0, false),
            row("a/small", 3, false),
            row("b", 0, true),
            row("b/big", 0, true),
            row("c", 2, false),
        ];
        assert_eq!(shape(&folders), expected);
        assert!(left_out.is_partial() && left_out.summary().unwrap().contains("too many files"));
        for (id, folder) in folders.iter().enumerate() {
            assert!(folder.children.iter().all(|&(_, child)| folders[child].parent == Some(id)));
        }
    }

    #[test]
    fn a_source_of_too_many_files_of_its_own_is_refused() {
        let root = tempfile::tempdir().unwrap();
        files(root.path(), 60);
        assert!(scan(root.path()).unwrap_err().to_string().contains("too many files"));
    }

    #[test]
    fn links_that_lead_to_too_much_take_no_place_of_real_files() {
        let root = tempfile::tempdir().unwrap();
        let link = |to: &str, from: &str| {
            std::os::unix::fs::symlink(to, root.path().join(from)).unwrap();
        };
        files(&root.path().join("a"), 20);
        files(&root.path().join("farm/target"), 4);
        (0..9).for_each(|n| link("target", &format!("farm/link{n}")));
        files(&root.path().join("z"), 1);
        link("../a", "z/one");
        let (folders, _) = scan(root.path()).unwrap();
        let found = shape(&folders);
        for expected in [row("a", 20, false), row("farm", 0, true), row("z", 1, false)] {
            assert!(found.contains(&expected), "{found:?}");
        }
        assert!(found.contains(&row("farm/target", 4, false)), "{found:?}");
        let links = found.iter().filter(|(name, ..)| name.starts_with("farm/link"));
        assert!(links.clone().any(|(_, _, lacks)| *lacks) && links.count() == 9, "{found:?}");
    }
}
