//! Generates the clients of containerd and the service that API servers ask for keys from `proto/`. protox compiles
//! them in this process, so that a build needs no `protoc`.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=proto");
    let descriptors = protox::compile(
        [
            "containerd/content.proto",
            "containerd/cri.proto",
            "containerd/images.proto",
            "containerd/leases.proto",
            "containerd/snapshots.proto",
        ],
        ["proto"],
    )?;
    tonic_prost_build::configure()
        .build_transport(false)
        .build_server(false)
        .compile_fds(descriptors)?;
    let provider = protox::compile(["kms/v2.proto"], ["proto"])?;
    tonic_prost_build::configure()
        .build_transport(false)
        .compile_fds(provider)?;
    Ok(())
}
