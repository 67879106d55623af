//! Gives the library the soname of the CUDA driver. Once it is loaded from any path, a load of the driver by that name
//! returns it. The name of the file differs, because `cargo run` also looks for libraries beside it.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-link-arg-cdylib=-Wl,-soname,libcuda.so");
}
