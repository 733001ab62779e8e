//! Gives the shared library its name, so that programs linked with `-lmojim_itm` find it.
fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libmojim_itm.so");
    println!("cargo:rerun-if-changed=build.rs");
}
