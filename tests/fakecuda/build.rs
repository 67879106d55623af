//! Gives the library the name that programs load the driver by: once it is loaded from anywhere,
//! the system takes it for the driver. The file has another name, for `cargo run` looks for
//! libraries beside it.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-link-arg-cdylib=-Wl,-soname,libcuda.so");
}
