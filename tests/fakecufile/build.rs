//! Gives the library the soname of cuFile. Once the library is loaded from any path, a load of cuFile by this soname
//! returns it. The name of the file differs, because `cargo run` also looks for libraries beside it.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-link-arg-cdylib=-Wl,-soname,libcufile.so.0");
}
