//! Parses any bytes as an index. As a whole file, random bytes must be refused. As the content
//! behind a valid frame, they must be refused, or it must be possible to use the content, lay it
//! out and write it again, without a read outside of the shards.

#![no_main]

use libfuzzer_sys::fuzz_target;
use tensorfs::internal::catalog::{Catalog, Piece};
use tensorfs::internal::error::ErrorKind;
use tensorfs::internal::format::OutputFormat;
use tensorfs::internal::index::Index;
use tensorfs::internal::layout::{Extent, Layout};
use tensorfs::internal::view::FileSpec;

/// Why what is believed may still not be shown as one file.
const REFUSALS: [ErrorKind; 4] = [
    ErrorKind::Misaligned,
    ErrorKind::Overflow,
    ErrorKind::HeaderTooLarge,
    ErrorKind::UnknownDtype,
];

fuzz_target!(|data: &[u8]| {
    if let Ok(index) = Index::decode(data) {
        // Only a seed has a checksum that is right.
        assert_eq!(index.encode().as_deref(), Some(data));
    }
    let Ok(index) = Index::decode_unframed(data) else { return };
    for set in &index.sets {
        check(&set.catalog);
    }
    let bytes = index.encode().expect("as short as the content");
    assert_eq!(Index::decode(&bytes).expect("reads back"), index);
});

fn check(catalog: &Catalog) {
    let inside = |piece: Piece<'_>| {
        let shard = catalog.shard(piece.shard);
        assert!(!shard.is_description(&piece.range) && piece.range.end <= shard.file_len);
        piece.len()
    };
    let mut total = 0;
    for tensor in catalog.tensors() {
        assert_eq!(tensor.pieces().map(inside).sum::<u64>(), tensor.len, "{tensor:?}");
        assert!(tensor.replicas().map(inside).all(|len| len <= tensor.len), "{tensor:?}");
        assert_eq!(catalog.tensor(tensor.name).map(|t| t.position()), Some(tensor.position()));
        total += tensor.len;
    }
    assert_eq!(catalog.data_len(), total);
    for format in [OutputFormat::Safetensors, OutputFormat::Bintensors] {
        match Layout::of(catalog, &FileSpec::single("model", format)) {
            Ok(layout) => check_layout(catalog, &layout),
            Err(fault) => assert!(REFUSALS.contains(&fault.kind), "{fault}"),
        }
    }
}

fn check_layout(catalog: &Catalog, layout: &Layout) {
    for start in [0, layout.header().len() as u64, layout.len() / 2] {
        layout.extents(start..layout.len(), &mut |extent| {
            if let Extent::Run { shard, range, .. } | Extent::Scatter { shard, range, .. } = extent
            {
                let shard = catalog.shard(shard);
                assert!(!shard.is_description(&range) && range.end <= shard.file_len);
            }
        });
    }
}
