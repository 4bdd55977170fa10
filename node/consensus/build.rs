//! Generates the etcd client from `proto/`. protox compiles it in this process, so that a build
//! needs no `protoc`.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=proto");
    let descriptors = protox::compile(["etcd.proto"], ["proto"])?;
    tonic_prost_build::configure()
        .build_transport(false)
        .build_server(false)
        .compile_fds(descriptors)?;
    Ok(())
}
