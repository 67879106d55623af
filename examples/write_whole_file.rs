//! Reads a sharded checkpoint as one safetensors file, without a mount, and writes that file.
//!
//! Run: `cargo run --release --example write_whole_file -- FOLDER OUT.safetensors`

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;

use tensorfs::Checkpoint;
use tensorfs::internal::reader::Reader;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args_os().skip(1).map(PathBuf::from);
    let (Some(folder), Some(out)) = (args.next(), args.next()) else {
        return Err("which folder, and which file to write?".into());
    };
    let reader = Reader::open(&Checkpoint::open(&folder)?.single_file())?;
    let mut file = File::create_new(&out)?;
    let mut chunk = vec![0; 8 << 20];
    let mut at = 0;
    while at < reader.len() {
        let len = reader.read_at(at, &mut chunk)?;
        file.write_all(&chunk[..len])?;
        at += len as u64;
    }
    println!("{}: {at} bytes", out.display());
    Ok(())
}
