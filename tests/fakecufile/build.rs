//! Gives the library the name that programs load cuFile by: once it is loaded from anywhere, the
//! system takes it for cuFile. The file has another name, for `cargo run` looks for libraries
//! beside it.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-link-arg-cdylib=-Wl,-soname,libcufile.so.0");
}
