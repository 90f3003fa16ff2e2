//! Generates the clients of both services from the repository's protos.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = ["redfence/v1/lock.proto", "redfence/storage/v1/storage.proto"];
    // protox compiles the protos in this process, so that no protoc has to be installed.
    let descriptors = protox::compile(files, ["../../protos"])?;
    tonic_prost_build::configure().build_server(false).compile_fds(descriptors)?;
    println!("cargo:rerun-if-changed=../../protos/redfence");
    Ok(())
}
