//! Parses any bytes as the `.metadata` of a distributed checkpoint, and as a file with its items. Checks that
//! chunks lie in their tensors, files in the folder, and accepted items in their file.

#![no_main]

#[path = "../shared/extents.rs"]
mod extents;

use extents::check_extents;
use libfuzzer_sys::fuzz_target;
use tensorfs::internal::format::pickle::{DistcpMetadata, StoredChunk, TrainingState, parse_items};

fuzz_target!(|data: &[u8]| {
    let (metadata, file) = data.split_at(data.len() / 2);
    for bytes in [data, metadata] {
        let Ok(metadata) = DistcpMetadata::parse(bytes, TrainingState::All) else { continue };
        for (name, chunks) in &metadata.files {
            assert!(name.ends_with(".distcp") && !name.contains('/'), "{name}");
            chunks.iter().for_each(check_chunk);
            check_items(file, chunks);
        }
    }
});

fn check_chunk(chunk: &StoredChunk) {
    assert_eq!(chunk.shape.len(), chunk.tensor.shape.len());
    for ((first, size), whole) in chunk.offset.iter().zip(&chunk.shape).zip(&chunk.tensor.shape) {
        assert!(first.checked_add(*size).is_some_and(|end| end <= *whole));
    }
}

fn check_items(file: &[u8], chunks: &[StoredChunk]) {
    let mut reader = file;
    let Ok(description) =
        parse_items(&mut reader, chunks, chunks.len()).expect("memory can be read")
    else {
        return;
    };
    assert_eq!(description.len(), chunks.len());
    check_extents(file, &description);
}
