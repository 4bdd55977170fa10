//! Links the node so that functions whose code is the same are there once.
//!
//! Generic code is compiled anew in each crate that uses it, and the node has many: without this they cost it a twentieth.
//! The linker is the one that comes with the compiler (LLD). What differs only by where its code is nobody here compares.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-link-arg-bins=-Wl,--icf=all");
}
