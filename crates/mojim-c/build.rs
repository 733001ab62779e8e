//! Gives the shared library its name, so that programs linked with `-lmojim` find it.
fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libmojim.so");
    println!("cargo:rerun-if-changed=build.rs");
}
