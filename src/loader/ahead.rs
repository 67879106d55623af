//! Populates the memory of a load ahead of its reads: threads fault in its pages. A read that had to wait for
//! pages would delay the reads after it.

use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread::Scope;
use std::time::{Duration, Instant};

use nix::time::{ClockId, clock_gettime};

use super::choice::{Choice, LastChoice};
use super::message::LoadMessage;
use super::{Loader, MemoryStats, PageSize};
use crate::io::Region;
use crate::plan::Plan;
use crate::sync::Mutex;

/// Maximum number of threads that populate memory. With this number, population is faster than any disk.
const THREADS_MAX: usize = 8;

/// Number of bytes that a thread populates with one call: the size of a huge page. Other threads cannot map memory
/// during the call.
const PART_LEN: usize = 2 << 20;

/// The memory that a load has allocated, and the parts of it that are populated.
pub(super) struct Populator<'a> {
    loader: &'a Loader,
    regions: &'a [Arc<Region>],
    parts: Vec<PopulatePart>,
    /// The end of the earlier load with whose choice of page size this load began. `None` for the first load.
    began: Option<Instant>,
    state: Mutex<State>,
}

/// A part of memory that is populated with one call: number of its region, and range of bytes in it.
type PopulatePart = (usize, Range<usize>);

struct State {
    choice: Choice,
    /// The first part that no thread has taken.
    next: usize,
    /// Whether each part is populated. `ready` is the number of populated parts from the first one on, without gaps.
    there: Vec<bool>,
    ready: usize,
    /// The number of parts, from the first one on, for which the load waits.
    awaited: Option<usize>,
    /// Whether population has ended. The remaining pages are faulted in by their first write.
    ended: bool,
    /// The region for which the kernel was last advised on the page size, and this size. The advice covers the
    /// rest of the region.
    advised: Option<(usize, PageSize)>,
    /// Regions for which small pages were advised.
    small: Vec<usize>,
    stats: MemoryStats,
}

impl<'a> Populator<'a> {
    pub(super) fn new(
        loader: &'a Loader,
        plan: &Plan,
        regions: &'a [Arc<Region>],
    ) -> Populator<'a> {
        let parts = if plan.read < loader.config.populate_min_bytes {
            vec![]
        } else {
            parts_of(plan, regions)
        };
        let last = loader.choice().clone();
        let state = State {
            choice: last.first_of_next_load(),
            next: 0,
            there: vec![false; parts.len()],
            ready: 0,
            awaited: None,
            ended: parts.is_empty(),
            advised: None,
            small: Vec::new(),
            stats: MemoryStats::default(),
        };
        Populator { loader, regions, parts, began: last.made_at, state: Mutex::new(state) }
    }

    /// Whether there is memory to populate.
    pub(super) fn has_parts(&self) -> bool {
        !self.parts.is_empty()
    }

    /// Starts the threads. They send a message to `back` when the memory for which the load waits is populated.
    pub(super) fn spawn_populators<'s>(
        &'s self,
        scope: &'s Scope<'s, '_>,
        cores: usize,
        back: &Sender<LoadMessage>,
    ) {
        let mut started = false;
        for _ in 0..cores.min(THREADS_MAX).min(self.parts.len()) {
            let thread = std::thread::Builder::new().name("tensorfs-page".to_owned());
            let back = back.clone();
            started |= thread.spawn_scoped(scope, move || self.ask(&back)).is_ok();
        }
        self.state.lock().ended |= !started;
    }

    /// Whether the first `len` bytes of `region` and all earlier regions are populated, or population has ended. If
    /// not, the load gets a message once they are populated or population ends.
    pub(super) fn are_populated(&self, region: u32, len: usize) -> bool {
        let wanted = (region as usize, len);
        let needed = self.parts.partition_point(|(region, range)| (*region, range.start) < wanted);
        let mut state = self.state.lock();
        let there = state.ended || needed <= state.ready;
        state.awaited = (!there).then_some(needed);
        there
    }

    /// Ends population.
    pub(super) fn end(&self) {
        self.state.lock().ended = true;
    }

    /// Statistics of population.
    pub(super) fn stats(&self) -> MemoryStats {
        self.state.lock().stats.clone()
    }

    fn ask(&self, back: &Sender<LoadMessage>) {
        let leaves = Leaves(self, back);
        while let Some((number, size)) = self.take() {
            let (region, range) = &self.parts[number];
            let started = thread_time();
            if !self.regions[*region].populate(range.clone()) {
                return;
            }
            self.done(number, size, thread_time().saturating_sub(started), back);
        }
        // Other threads may still be populating, so population does not end here.
        std::mem::forget(leaves);
    }

    /// Takes the next part. Returns its number and page size.
    fn take(&self) -> Option<(usize, PageSize)> {
        let mut state = self.state.lock();
        let number = state.next;
        let (region, range) = self.parts.get(number).filter(|_| !state.ended)?;
        state.next += 1;
        if range.len() < PART_LEN {
            return Some((number, PageSize::Small));
        }
        let size = self.loader.config.pages.unwrap_or(state.choice.now());
        if state.advised != Some((*region, size)) {
            let memory = &self.regions[*region];
            memory.advise(range.start..memory.len(), size == PageSize::Huge);
            state.advised = Some((*region, size));
            if size == PageSize::Small && state.small.last() != Some(region) {
                state.small.push(*region);
            }
        }
        Some((number, size))
    }

    /// Notes that a part is populated.
    fn done(&self, number: usize, size: PageSize, time: Duration, back: &Sender<LoadMessage>) {
        let mut state = self.state.lock();
        let len = self.parts[number].1.len();
        if len == PART_LEN {
            state.choice.took(size, len as u64, time);
        }
        let stats = &mut state.stats;
        let (bytes, total) = match size {
            PageSize::Huge => (&mut stats.huge, &mut stats.huge_time),
            PageSize::Small => (&mut stats.small, &mut stats.small_time),
        };
        *bytes += len as u64;
        *total += time;
        state.there[number] = true;
        while state.there.get(state.ready) == Some(&true) {
            state.ready += 1;
        }
        if state.awaited.is_some_and(|awaited| awaited <= state.ready) {
            state.awaited = None;
            let _ = back.send(LoadMessage::More(Ok(())));
        }
    }
}

impl Drop for Populator<'_> {
    fn drop(&mut self) {
        let state = self.state.get_mut();
        // Population is over, so the kernel may now merge the remaining small pages to huge pages, like those of other
        // memory.
        for &region in &state.small {
            self.regions[region].advise(0..self.regions[region].len(), true);
        }
        if state.next > 0 {
            let mut last = self.loader.choice();
            // If another load has ended meanwhile, the choice of that load is kept, because it is as good as the choice
            // of this load.
            if last.made_at == self.began {
                *last = LastChoice { choice: state.choice.clone(), made_at: Some(Instant::now()) };
            }
        }
    }
}

/// Ends population and sends a message to the load, if a thread ends early.
struct Leaves<'a>(&'a Populator<'a>, &'a Sender<LoadMessage>);

impl Drop for Leaves<'_> {
    fn drop(&mut self) {
        self.0.end();
        let _ = self.1.send(LoadMessage::More(Ok(())));
    }
}

/// The memory that the load allocates for `plan`, in parts. Memory of the caller is left out: most of this memory is
/// populated already, and it may be memory of any kind.
fn parts_of(plan: &Plan, regions: &[Arc<Region>]) -> Vec<PopulatePart> {
    let mut parts = Vec::new();
    for (number, (region, &len)) in regions.iter().zip(&plan.regions).enumerate() {
        if plan.given[number] {
            continue;
        }
        let (mut start, len) = (0, len as usize);
        let mut end = region.start().as_ptr().align_offset(PART_LEN);
        while start < len {
            parts.push((number, start..end.min(len)));
            (start, end) = (end, end + PART_LEN);
        }
    }
    parts.retain(|(_, range)| !range.is_empty());
    parts
}

/// CPU time of this thread. It measures the cost of pages without the time in which other threads ran.
fn thread_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::mpsc::channel;

    use super::*;
    use crate::checkpoint::Checkpoint;
    use crate::loader::LoaderConfig;
    use crate::plan::TensorRequest;

    const LEN: usize = 9 << 20;

    /// A checkpoint with one tensor of LEN bytes, and these bytes.
    fn checkpoint(folder: &Path) -> (Arc<Checkpoint>, Vec<u8>) {
        checkpoint_of(folder, LEN)
    }

    fn checkpoint_of(folder: &Path, len: usize) -> (Arc<Checkpoint>, Vec<u8>) {
        let header =
            format!(r#"{{"a":{{"dtype":"U8","shape":[{len}],"data_offsets":[0,{len}]}}}}"#);
        let data: Vec<u8> = (0..len).map(|index| (index % 251) as u8).collect();
        let start = (header.len() as u64).to_le_bytes();
        let file = [&start, header.as_bytes(), &data].concat();
        std::fs::write(folder.join("model.safetensors"), file).unwrap();
        (Checkpoint::open(folder).unwrap(), data)
    }

    fn loader(pages: Option<PageSize>) -> Loader {
        Loader::new(LoaderConfig {
            pages,
            populate_min_bytes: 0,
            inline_max_bytes: 0,
            ..LoaderConfig::default()
        })
    }

    #[test]
    fn memory_is_taken_in_the_pages_that_are_wanted_and_the_stats_say_so() {
        let folder = tempfile::tempdir().unwrap();
        let (checkpoint, data) = checkpoint(folder.path());
        for pages in [None, Some(PageSize::Huge), Some(PageSize::Small)] {
            let loader = loader(pages);
            let loaded = loader.load_all(&checkpoint).unwrap();
            assert!(loaded.bytes(0) == data, "{pages:?}");
            let MemoryStats { huge, small, .. } = loaded.report.stats.memory;
            // Before Linux 5.14 no memory is populated.
            assert!(huge + small == 0 || huge + small >= LEN as u64, "{huge} {small}");
            assert!(pages != Some(PageSize::Small) || huge == 0, "{huge}");
            assert!(
                pages != Some(PageSize::Huge) || huge + small == 0 || huge >= 6 << 20,
                "{huge}"
            );
        }
    }

    #[test]
    fn pages_are_chosen_for_one_matrix_of_a_model_too() {
        let folder = tempfile::tempdir().unwrap();
        let len = 33 << 20;
        let (checkpoint, data) = checkpoint_of(folder.path(), len);
        let loader =
            Loader::new(LoaderConfig { pages: Some(PageSize::Small), ..LoaderConfig::default() });
        let loaded = loader.load_all(&checkpoint).unwrap();
        assert!(loaded.bytes(0) == data);
        let MemoryStats { huge, small, .. } = loaded.report.stats.memory;
        // Before Linux 5.14 no memory is populated.
        assert!(huge == 0 && (small == 0 || small >= len as u64), "{huge} {small}");
        let probe = Region::new(PART_LEN as u64).unwrap();
        assert_eq!(small > 0, probe.populate(0..PART_LEN));
    }

    #[test]
    fn a_load_goes_on_where_memory_cannot_be_asked_for() {
        let folder = tempfile::tempdir().unwrap();
        let (checkpoint, data) = checkpoint(folder.path());
        let refused = move || {
            crate::io::refuse(nix::libc::SYS_madvise);
            let loaded = loader(None).load_all(&checkpoint).unwrap();
            assert!(loaded.bytes(0) == data);
            assert_eq!(loaded.report.stats.memory, MemoryStats::default());
        };
        std::thread::spawn(refused).join().unwrap();
    }

    #[test]
    fn a_read_waits_until_its_memory_is_there_and_is_told_so() {
        let folder = tempfile::tempdir().unwrap();
        let (checkpoint, _) = checkpoint(folder.path());
        let loader = loader(None);
        let plan = loader.plan(&checkpoint, &[TensorRequest::whole(0)]).unwrap();
        let regions: Vec<_> = plan.regions.iter().map(|&len| Region::new(len).unwrap()).collect();
        let ahead = Populator::new(&loader, &plan, &regions);
        let (back, returned) = channel();
        assert!(!ahead.are_populated(0, 1) && !ahead.are_populated(0, LEN));
        ahead.ask(&back);
        assert!(matches!(returned.try_recv(), Ok(LoadMessage::More(Ok(())))));
        assert!(ahead.are_populated(0, 1) && ahead.are_populated(0, LEN));
    }

    #[test]
    fn nothing_waits_for_memory_that_nobody_asks_for_any_more() {
        let folder = tempfile::tempdir().unwrap();
        let (checkpoint, _) = checkpoint(folder.path());
        let loader = loader(None);
        let plan = loader.plan(&checkpoint, &[TensorRequest::whole(0)]).unwrap();
        let regions: Vec<_> = plan.regions.iter().map(|&len| Region::new(len).unwrap()).collect();
        let ahead = Populator::new(&loader, &plan, &regions);
        let (back, returned) = channel();
        drop(Leaves(&ahead, &back));
        assert!(matches!(returned.try_recv(), Ok(LoadMessage::More(Ok(())))));
        assert!(ahead.are_populated(0, LEN) && ahead.take().is_none());
    }

    #[test]
    fn memory_that_was_given_is_not_asked_for() {
        let folder = tempfile::tempdir().unwrap();
        let (checkpoint, _) = checkpoint(folder.path());
        let loader = loader(None);
        let request = TensorRequest { destination: Some(1 << 30), ..TensorRequest::whole(0) };
        let plan = loader.plan(&checkpoint, &[request]).unwrap();
        let regions: Vec<_> = plan.regions.iter().map(|&len| Region::new(len).unwrap()).collect();
        assert_eq!(parts_of(&plan, &regions), []);
    }
}
