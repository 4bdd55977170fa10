//! Images of one layer, as archives in OCI format.
//!
//! An archive is a tar of a folder: blobs named by their SHA-256 (layer, configuration, manifest), an index that names
//! the manifest, and a file with the layout version. containerd takes the image's name from the annotation on the
//! index. Layers are not compressed: the extension's file system compresses everything once.

use std::path::Path;

use hearth_build::command::{Cmd, CommandError};
use hearth_build::files::{self, FileError};
use hearth_build::progress::Progress;
use ring::digest::{SHA256, digest};
use serde_json::{Value, json};

/// Why an archive could not be written.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    /// tar could not be run or failed.
    #[error(transparent)]
    Tar(#[from] CommandError),
    /// A file system call failed.
    #[error(transparent)]
    File(#[from] FileError),
}

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";

/// Writes an image with the files below `rootfs` to `archive`, under each of `names` ("hearth.local/pause:1"). `config`
/// is the part of the image's configuration that applies when a container starts: command, environment, user. Works in
/// `scratch`, an empty folder.
pub(crate) fn write(
    progress: &dyn Progress,
    names: &[&str],
    rootfs: &Path,
    config: &Value,
    scratch: &Path,
    archive: &Path,
) -> Result<(), ArchiveError> {
    let layout = scratch.join("layout");
    let blobs = layout.join("blobs/sha256");
    files::create_dir(&blobs)?;
    let layer = scratch.join("layer");
    tar(progress, rootfs, &layer)?;
    let layer = put(&blobs, LAYER, &files::read(&layer)?)?;
    let config = json!({
        "architecture": "amd64",
        "os": "linux",
        "config": config,
        "rootfs": { "type": "layers", "diff_ids": [&layer["digest"]] },
    });
    let config = put(&blobs, CONFIG, config.to_string().as_bytes())?;
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": config,
        "layers": [layer],
    });
    let manifest = put(&blobs, MANIFEST, manifest.to_string().as_bytes())?;
    let named = |name: &&str| {
        let mut manifest = manifest.clone();
        manifest["annotations"] = json!({
            "io.containerd.image.name": name,
            "org.opencontainers.image.ref.name": name.rsplit(':').next().unwrap_or_default(),
        });
        manifest
    };
    let manifests: Vec<_> = names.iter().map(named).collect();
    let index = json!({ "schemaVersion": 2, "manifests": manifests });
    let form = json!({ "imageLayoutVersion": "1.0.0" });
    for (file, content) in [("index.json", index), ("oci-layout", form)] {
        files::write(&layout.join(file), content.to_string())?;
    }
    tar(progress, &layout, archive)?;
    Ok(())
}

/// Adds a blob; returns its descriptor.
fn put(blobs: &Path, media_type: &str, content: &[u8]) -> Result<Value, FileError> {
    let hash = hex::encode(digest(&SHA256, content));
    files::write(&blobs.join(&hash), content)?;
    Ok(json!({
        "mediaType": media_type,
        "digest": format!("sha256:{hash}"),
        "size": content.len(),
    }))
}

/// A tar of `folder` that contains nothing but names, modes and contents.
fn tar(progress: &dyn Progress, folder: &Path, archive: &Path) -> Result<(), CommandError> {
    Cmd::new("tar")
        .env("LC_ALL", "C")
        .args(["--create", "--format=ustar", "--sort=name", "--mtime=@0"])
        .args(["--owner=0", "--group=0", "--numeric-owner", "--file"])
        .arg(archive)
        .arg("--directory")
        .arg(folder)
        .arg(".")
        .run(progress)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use hearth_build::progress::Silent;

    use super::*;

    /// The blob with this descriptor, checked against it.
    fn blob(layout: &Path, reference: &Value) -> Vec<u8> {
        let hash = reference["digest"]
            .as_str()
            .unwrap()
            .strip_prefix("sha256:")
            .unwrap();
        let content = fs::read(layout.join("blobs/sha256").join(hash)).unwrap();
        assert_eq!(hex::encode(digest(&SHA256, &content)), hash);
        assert_eq!(reference["size"], content.len());
        content
    }

    fn archive(dir: &Path) -> Vec<u8> {
        let rootfs = dir.join("rootfs");
        let scratch = dir.join("scratch");
        for folder in [&rootfs, &scratch] {
            fs::create_dir_all(folder).unwrap();
        }
        fs::write(rootfs.join("program"), "content").unwrap();
        let config = json!({ "Entrypoint": ["/program"] });
        let path = dir.join("image.tar");
        write(
            &Silent,
            &["local/name:1", "local/other:2"],
            &rootfs,
            &config,
            &scratch,
            &path,
        )
        .unwrap();
        fs::read(path).unwrap()
    }

    #[test]
    fn references_lead_from_the_index_to_the_layer() {
        let dir = tempfile::tempdir().unwrap();
        archive(dir.path());
        let layout = dir.path().join("scratch/layout");
        let json = |bytes: &[u8]| serde_json::from_slice::<Value>(bytes).unwrap();
        let index = json(&fs::read(layout.join("index.json")).unwrap());
        let [entry, other] = index["manifests"].as_array().unwrap().as_slice() else {
            panic!("{index}");
        };
        let name = |entry: &Value| entry["annotations"]["io.containerd.image.name"].clone();
        assert_eq!(
            [name(entry), name(other)],
            ["local/name:1", "local/other:2"]
        );
        assert_eq!(entry["digest"], other["digest"]);
        let manifest = json(&blob(&layout, entry));
        let config = json(&blob(&layout, &manifest["config"]));
        assert_eq!(config["config"]["Entrypoint"][0], "/program");
        assert_eq!(
            config["rootfs"]["diff_ids"][0],
            manifest["layers"][0]["digest"]
        );
        let layer = blob(&layout, &manifest["layers"][0]);
        assert!(layer.windows(7).any(|bytes| bytes == b"content"));
    }

    #[test]
    fn the_same_files_give_the_same_bytes() {
        let one = tempfile::tempdir().unwrap();
        let two = tempfile::tempdir().unwrap();
        let first = archive(one.path());
        fs::create_dir_all(two.path().join("rootfs")).unwrap();
        // Another order of entries in the folder, another time.
        fs::write(two.path().join("rootfs/program"), "first").unwrap();
        assert_eq!(archive(two.path()), first);
    }
}
