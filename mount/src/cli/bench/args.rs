//! The command line of `tensorfs bench`: arguments and cases.

use std::path::PathBuf;

use clap::ValueEnum;
use tensorfs::internal::size::parse_size;
use tensorfs::words;

/// Arguments of `bench`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = CASES_HELP)]
pub(crate) struct BenchArgs {
    /// Checkpoint folder, tree of them (the largest is measured), or one file of a checkpoint
    #[arg(required_unless_present = "make", conflicts_with = "make")]
    pub(crate) source: Option<PathBuf>,
    /// The real file to measure against; without it one is written, and removed afterwards
    #[arg(long, value_name = "FILE")]
    pub(super) against: Option<PathBuf>,
    /// Only these cases, separated by commas; see --help
    #[arg(long, value_name = "CASES", value_delimiter = ',', value_parser = Case::parse,
          default_value = Case::DEFAULT)]
    pub(super) cases: Vec<Case>,
    /// How often each side of a case is measured
    #[arg(long, value_name = "N", default_value_t = 5,
          value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) runs: u32,
    /// Make a checkpoint with random weights and measure that
    #[arg(long, value_enum)]
    pub(super) make: Option<Made>,
    /// Size of the checkpoint to make
    #[arg(long, requires = "make", default_value = "4G", value_parser = size)]
    pub(super) size: u64,
    /// Mount options, as for `mount`
    #[arg(short = 'o', value_name = "OPTIONS")]
    pub(super) options: Vec<String>,
    /// Print JSON, with all single runs
    #[arg(long)]
    pub(super) json: bool,
    /// Leave the files that were written where they are
    #[arg(long)]
    pub(super) keep: bool,
    /// Folder for the files that are written; on the file system of the source
    #[arg(long, value_name = "DIR")]
    pub(super) dir: Option<PathBuf>,
    /// How the page cache is emptied
    #[arg(long, value_enum, default_value_t = Evict::Auto)]
    pub(super) evict: Evict,
    /// Seconds that one run may take (default: 60, and one more for each 20 MB)
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    pub(super) time_limit: Option<u64>,
}

/// A checkpoint that can be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Made {
    /// Shards with a weight map, as transformers saves
    Hf,
    /// torch DCP, cut by columns: rows of 2 KiB in each shard
    DcpColumns,
    /// torch DCP, cut by rows
    DcpRows,
}

/// How the page cache is emptied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Evict {
    /// As root drop-caches, else fadvise
    Auto,
    /// All that the machine has cached: needs root, and slows down whatever else runs
    DropCaches,
    /// Only the files that are measured
    Fadvise,
}

words! {
    /// How the bytes are read.
    pub(super) enum Pattern {
        Read = "read",
        Read4 = "read4",
        Direct = "direct",
        Mmap = "mmap",
        MmapShuffled = "mmap-shuffled",
        MmapSorted = "mmap-sorted",
        Random4k = "random4k",
        Load = "load",
        FromPretrained = "from-pretrained",
    }
}

words! {
    /// The content of the page cache when a run begins.
    pub(super) enum CacheState {
        /// No bytes.
        Cold = "cold",
        /// The bytes that the mount shows, and the real file.
        Warm = "warm",
        /// The shards and the real file, but no bytes of the mounted file.
        SourceCached = "source-cached",
        /// No bytes. The kernel serves the mount from an assembled file.
        Assembled = "assembled",
    }
}

/// A way of reading and a state of the page cache that are measured together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Case {
    pub(super) name: String,
    pub(super) pattern: Pattern,
    pub(super) state: CacheState,
}

const CASES_HELP: &str = "\
Cases, each cold (nothing in the page cache) unless it says else:
  read           one thread, from start to end, 1 MiB at a time
  read4          four threads, a quarter each, 1 MiB at a time
  direct         O_DIRECT, 8 MiB at a time
  mmap           mapped shared; copied to a buffer from start to end
  mmap-shuffled  as mmap, tensor by tensor in random order
  mmap-sorted    as mmap, in the order of the sorted names of the tensors
  random4k       one thread, pages of 4 KiB all over the file (thousands a second)
  load           safetensors.numpy.load_file by $TENSORFS_PYTHON or python3
  from-pretrained  AutoModel.from_pretrained by the same, where it has
                 transformers and torch; then every page of every parameter
  source-cached  `read`: the shards are cached, what the mount shows is not
  reread         `read`: everything is cached
  assembled      `read` after -o assemble=, where this tensorfs has it
Any pattern (the first nine) also goes as PATTERN:warm, PATTERN:source-cached
and PATTERN:assembled. The real file is cached in the first two of these.

Every run on the mount has a fresh mount and a fresh daemon. Mount and real
file take turns, so that both meet the same noise. Readers are processes of
their own, with a time limit.

As root, cold means `sync` and 3 into /proc/sys/vm/drop_caches, for the whole
machine; --evict=fadvise leaves other files alone. Where the kernel tells what
is cached (cachestat, Linux 6.5) each run is checked and the exceptions noted.
Memory for the file is allocated and freed before each run: hosts take free
memory away from virtual machines, and its first use is slow.

GB is 1e9 bytes. `pairs` is the median ratio of runs that followed each other;
`noise` is the range of the real file's own runs over their median.";

impl Case {
    /// All cases worth measuring.
    const DEFAULT: &str = "read,read4,direct,mmap,mmap-shuffled,mmap-sorted,random4k,load,\
                           from-pretrained,source-cached,reread,mmap:warm,mmap-sorted:warm,\
                           load:warm,from-pretrained:warm,assembled";

    fn parse(name: &str) -> Result<Case, String> {
        let (pattern, state) = match name {
            "source-cached" | "assembled" => ("read", name),
            "reread" => ("read", "warm"),
            _ => name.split_once(':').unwrap_or((name, "cold")),
        };
        match (pattern.parse(), state.parse()) {
            (Ok(pattern), Ok(state)) => Ok(Case { name: name.to_owned(), pattern, state }),
            _ => Err("no such case; --help lists them".to_owned()),
        }
    }
}

impl Pattern {
    /// Whether the reader keeps all bytes that it reads in memory.
    pub(super) fn keeps_all(self) -> bool {
        matches!(self, Pattern::Load | Pattern::FromPretrained)
    }
}

fn size(text: &str) -> Result<u64, String> {
    let size = parse_size(text).filter(|size| *size > 0);
    size.ok_or_else(|| "expected a size like 512M or 4G".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_default_case_is_known_and_a_wrong_one_is_not() {
        for name in Case::DEFAULT.split(',') {
            assert!(Case::parse(name).is_ok(), "{name}");
        }
        let reread = Case::parse("reread").unwrap();
        assert_eq!((reread.pattern, reread.state), (Pattern::Read, CacheState::Warm));
        for name in ["", "reads", "read:hot", "reread:warm"] {
            assert!(Case::parse(name).is_err(), "{name}");
        }
    }
}
