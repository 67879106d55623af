//! Reference code for each kernel, which is found by its name.

use tensorfs::Dtype;
use tensorfs::internal::cast::Cast;

/// A kernel `NAME(const void* from, void* to, unsigned long long elements)`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kernel(Cast);

impl Kernel {
    /// The kernel of this name, if there is one.
    pub(crate) fn named(name: &str) -> Option<Kernel> {
        let casts = Dtype::ALL
            .iter()
            .flat_map(|from| Dtype::ALL.iter().filter_map(move |to| Cast::new(*from, *to)));
        casts.into_iter().find(|cast| cast.kernel() == name).map(Kernel)
    }

    /// Number of bytes that the kernel reads, and number of bytes that it writes.
    pub(crate) fn lens(self, elements: u64) -> (u64, u64) {
        (elements * self.0.from().bits() / 8, elements * self.0.to().bits() / 8)
    }

    /// Required alignment of the two addresses, in bytes.
    pub(crate) fn aligns(self) -> (u64, u64) {
        (self.0.from().bits() / 8, self.0.to().bits() / 8)
    }

    pub(crate) fn run(self, from: u64, to: u64, elements: u64) {
        let (source, target) = self.lens(elements);
        // SAFETY: the launch checked that the source and the target lie in live memory.
        let from = unsafe { std::slice::from_raw_parts(from as *const u8, source as usize) };
        // SAFETY: the launch checked that the target lies in live memory; only a wrong program writes there at the same
        // time.
        let to = unsafe { std::slice::from_raw_parts_mut(to as *mut u8, target as usize) };
        self.0.convert(from, to);
    }
}
