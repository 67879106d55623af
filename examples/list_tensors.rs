//! Lists the tensors of a checkpoint, with the location of each piece.
//!
//! Run: `cargo run --example list_tensors -- FOLDER`

use std::path::PathBuf;

use tensorfs::Checkpoint;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder: PathBuf = std::env::args_os().nth(1).ok_or("which folder?")?.into();
    let checkpoint = Checkpoint::open(&folder)?;
    let catalog = checkpoint.catalog();
    for tensor in catalog.tensors() {
        println!("{} {} {:?}", tensor.name, tensor.dtype, tensor.shape);
        for piece in tensor.pieces() {
            let shard = &catalog.shard(piece.shard).name;
            println!(
                "  {:?} at {:?} in {shard} bytes {:?}",
                piece.shape, piece.offset, piece.range
            );
        }
    }
    Ok(())
}
