//! Reads archives of container images in an extension: tar files with an OCI image layout.
//!
//! Only what such an archive needs is supported: regular files with short names, with headers in
//! the format that all tar programs write (ustar). Blobs are not copied; their offsets are kept.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use serde_json::Value;

/// Headers and contents are padded to blocks of this size.
const BLOCK_BYTES: u64 = 512;
/// Maximum size of an index or a manifest.
const MAX_DOCUMENT_BYTES: u64 = 4 << 20;
/// Maximum number of files in an archive.
const MAX_ENTRIES: usize = 10_000;
/// Maximum number of images in an archive.
const MAX_IMAGES: usize = 100;

/// Annotation of a manifest in the index: the name of the image, as containerd writes it.
const IMAGE_NAME: &str = "io.containerd.image.name";

/// Why an archive cannot be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum ArchiveError {
    /// The file cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// The archive.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The content is invalid.
    #[error("{path} is not a valid image archive: {what}")]
    Malformed {
        /// The archive.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
}

/// The location of a file in the archive, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Extent {
    /// Offset of the content.
    pub offset: u64,
    /// Length of the content.
    pub length: u64,
}

/// An OCI content descriptor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Descriptor {
    /// Media type of the blob.
    pub media_type: String,
    /// `sha256:` and 64 hex digits.
    pub digest: String,
    /// Size in bytes.
    pub size: u64,
}

/// A blob of an image, with its references to other blobs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Blob {
    /// Its descriptor.
    pub descriptor: Descriptor,
    /// Its location in the archive.
    pub extent: Extent,
    /// Role (`config`, `l.0`, `m.0`) and digest of each blob that it refers to.
    pub names: Vec<(String, String)>,
}

/// An image of the archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Image {
    /// Name with registry and tag.
    pub name: String,
    /// Descriptor of its manifest or index.
    pub target: Descriptor,
    /// All its blobs; each after those that it refers to.
    pub blobs: Vec<Blob>,
}

/// An opened archive.
#[derive(Debug)]
pub(super) struct Archive {
    path: PathBuf,
    file: File,
    entries: BTreeMap<String, Extent>,
}

impl Archive {
    /// Opens an archive and reads its headers. Blocks on the disk.
    pub(super) fn open(path: &Path) -> Result<Self, ArchiveError> {
        let file = File::open(path).map_err(|source| ArchiveError::Read {
            path: path.to_owned(),
            source,
        })?;
        let mut archive = Self {
            path: path.to_owned(),
            file,
            entries: BTreeMap::new(),
        };
        archive.entries = archive.read_headers()?;
        Ok(archive)
    }

    /// The file, for reading blobs.
    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// The images that have a name. Blocks on the disk.
    pub(super) fn images(&self) -> Result<Vec<Image>, ArchiveError> {
        let index = self.find("index.json")?;
        let index = self.document(index)?;
        let manifests = list(&index, "manifests");
        if manifests.len() > MAX_IMAGES {
            return Err(self.malformed("too many images"));
        }
        let mut images = Vec::new();
        for manifest in manifests {
            let Some(name) = manifest["annotations"][IMAGE_NAME].as_str() else {
                continue;
            };
            let target = self.descriptor(manifest)?;
            let mut blobs = Vec::new();
            self.collect(&target, &mut blobs, 0)?;
            images.push(Image {
                name: name.to_owned(),
                target,
                blobs,
            });
        }
        Ok(images)
    }

    /// Adds a blob after all blobs that it refers to.
    fn collect(
        &self,
        descriptor: &Descriptor,
        blobs: &mut Vec<Blob>,
        depth: usize,
    ) -> Result<(), ArchiveError> {
        if blobs.iter().any(|blob| blob.descriptor == *descriptor) {
            return Ok(());
        }
        // The maximum depth is an index of indices of manifests.
        if depth > 3 || blobs.len() > MAX_ENTRIES {
            return Err(self.malformed("too many references between blobs"));
        }
        let hex = descriptor.digest.trim_start_matches("sha256:");
        let extent = self.find(&format!("blobs/sha256/{hex}"))?;
        if extent.length != descriptor.size {
            let what = format!("size of {} differs from its descriptor", descriptor.digest);
            return Err(self.malformed(what));
        }
        let mut names = Vec::new();
        for (name, child) in self.children(descriptor, extent)? {
            self.collect(&child, blobs, depth + 1)?;
            names.push((name, child.digest));
        }
        blobs.push(Blob {
            descriptor: descriptor.clone(),
            extent,
            names,
        });
        Ok(())
    }

    /// The blobs that a manifest or an index refers to.
    fn children(
        &self,
        descriptor: &Descriptor,
        extent: Extent,
    ) -> Result<Vec<(String, Descriptor)>, ArchiveError> {
        let kind = &descriptor.media_type;
        let is_manifest = kind.contains(".manifest.") && !kind.contains(".list.");
        let is_index = kind.contains(".index.") || kind.contains(".manifest.list.");
        if !is_manifest && !is_index {
            return Ok(Vec::new());
        }
        let document = self.document(extent)?;
        let mut children = Vec::new();
        if is_manifest {
            let config = self.descriptor(&document["config"])?;
            children.push(("config".to_owned(), config));
        }
        let (key, prefix) = if is_manifest {
            ("layers", "l")
        } else {
            ("manifests", "m")
        };
        for (place, child) in list(&document, key).iter().enumerate() {
            children.push((format!("{prefix}.{place}"), self.descriptor(child)?));
        }
        Ok(children)
    }

    fn descriptor(&self, value: &Value) -> Result<Descriptor, ArchiveError> {
        let wrong = || self.malformed("descriptor without mediaType, digest or size");
        let digest = value["digest"].as_str().ok_or_else(wrong)?;
        let hex = digest.strip_prefix("sha256:").unwrap_or_default();
        let is_hex = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        if hex.len() != 64 || !hex.bytes().all(is_hex) {
            return Err(self.malformed(format!("expected a SHA-256 digest, got {digest:?}")));
        }
        Ok(Descriptor {
            media_type: value["mediaType"].as_str().ok_or_else(wrong)?.to_owned(),
            digest: digest.to_owned(),
            size: value["size"].as_u64().ok_or_else(wrong)?,
        })
    }

    fn find(&self, name: &str) -> Result<Extent, ArchiveError> {
        let found = self.entries.get(name).copied();
        found.ok_or_else(|| self.malformed(format!("missing file {name}")))
    }

    fn document(&self, extent: Extent) -> Result<Value, ArchiveError> {
        if extent.length > MAX_DOCUMENT_BYTES {
            return Err(self.malformed("an index or a manifest is too long"));
        }
        let mut bytes = vec![0; extent.length as usize];
        self.read_at(&mut bytes, extent.offset)?;
        serde_json::from_slice(&bytes).map_err(|error| self.malformed(error.to_string()))
    }

    fn read_headers(&self) -> Result<BTreeMap<String, Extent>, ArchiveError> {
        let length = self
            .file
            .metadata()
            .map_err(|error| self.read(error))?
            .len();
        let mut entries = BTreeMap::new();
        let mut at = 0;
        while at + BLOCK_BYTES <= length {
            let mut header = [0; BLOCK_BYTES as usize];
            self.read_at(&mut header, at)?;
            // Empty blocks mark the end.
            if header.iter().all(|byte| *byte == 0) {
                break;
            }
            let header = Header::parse(&header).map_err(|what| self.malformed(what))?;
            let extent = Extent {
                offset: at + BLOCK_BYTES,
                length: header.length,
            };
            at = extent
                .length
                .checked_next_multiple_of(BLOCK_BYTES)
                .and_then(|filled| extent.offset.checked_add(filled))
                .filter(|end| *end <= length)
                .ok_or_else(|| self.malformed("truncated file"))?;
            if header.is_file {
                entries.insert(header.name, extent);
            }
            if entries.len() > MAX_ENTRIES {
                return Err(self.malformed("too many files"));
            }
        }
        Ok(entries)
    }

    fn read_at(&self, bytes: &mut [u8], offset: u64) -> Result<(), ArchiveError> {
        let read = self.file.read_exact_at(bytes, offset);
        read.map_err(|error| self.read(error))
    }

    fn read(&self, source: io::Error) -> ArchiveError {
        ArchiveError::Read {
            path: self.path.clone(),
            source,
        }
    }

    fn malformed(&self, what: impl Into<String>) -> ArchiveError {
        ArchiveError::Malformed {
            path: self.path.clone(),
            what: what.into(),
        }
    }
}

fn list<'a>(document: &'a Value, key: &str) -> &'a [Value] {
    document[key].as_array().map_or(&[], Vec::as_slice)
}

/// The part of a tar header that is used.
#[derive(Debug, PartialEq, Eq)]
struct Header {
    name: String,
    length: u64,
    is_file: bool,
}

impl Header {
    fn parse(block: &[u8; BLOCK_BYTES as usize]) -> Result<Self, &'static str> {
        let stored = octal(&block[148..156]).ok_or("header without checksum")?;
        let sum = block.iter().enumerate().map(|(place, byte)| match place {
            148..156 => u64::from(b' '),
            _ => u64::from(*byte),
        });
        if sum.sum::<u64>() != stored {
            return Err("wrong checksum of a header");
        }
        let (prefix, name) = match &block[257..262] {
            b"ustar" => (text(&block[345..500]), text(&block[..100])),
            _ => (String::new(), text(&block[..100])),
        };
        let name = if prefix.is_empty() {
            name
        } else {
            format!("{prefix}/{name}")
        };
        Ok(Self {
            name: name.strip_prefix("./").unwrap_or(&name).to_owned(),
            length: octal(&block[124..136]).ok_or("header without length")?,
            is_file: matches!(block[156], b'0' | 0),
        })
    }
}

fn text(field: &[u8]) -> String {
    let end = field.iter().position(|byte| *byte == 0);
    String::from_utf8_lossy(&field[..end.unwrap_or(field.len())]).into_owned()
}

fn octal(field: &[u8]) -> Option<u64> {
    let text = text(field);
    u64::from_str_radix(text.trim(), 8).ok()
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;

    /// An archive with these files.
    pub(crate) fn tar(files: &[(&str, &[u8])]) -> Vec<u8> {
        let mut archive = Vec::new();
        for (name, content) in files {
            let mut header = [0; 512];
            header[..name.len()].copy_from_slice(name.as_bytes());
            header[100..107].copy_from_slice(b"0000644");
            header[124..135].copy_from_slice(format!("{:011o}", content.len()).as_bytes());
            header[148..156].fill(b' ');
            header[156] = b'0';
            header[257..263].copy_from_slice(b"ustar\0");
            let sum: u64 = header.iter().map(|byte| u64::from(*byte)).sum();
            header[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
            archive.extend(header);
            archive.extend(*content);
            archive.resize(archive.len().next_multiple_of(512), 0);
        }
        archive.extend([0; 1024]);
        archive
    }

    pub(crate) fn digest(content: &[u8]) -> String {
        let digest = ring::digest::digest(&ring::digest::SHA256, content);
        format!("sha256:{}", hex::encode(digest))
    }

    fn descriptor(kind: &str, content: &[u8]) -> Value {
        serde_json::json!({
            "mediaType": format!("application/vnd.oci.image.{kind}"),
            "digest": digest(content),
            "size": content.len(),
        })
    }

    /// An archive with one image that has one layer.
    pub(crate) fn image(name: &str, layer: &[u8]) -> Vec<u8> {
        let config = br#"{"architecture":"amd64","os":"linux"}"#;
        let manifest = serde_json::json!({
            "schemaVersion": 2,
            "config": descriptor("config.v1+json", config),
            "layers": [descriptor("layer.v1.tar", layer)],
        });
        let manifest = manifest.to_string().into_bytes();
        let mut listed = descriptor("manifest.v1+json", &manifest);
        listed["annotations"] = serde_json::json!({ IMAGE_NAME: name });
        let index = serde_json::json!({ "schemaVersion": 2, "manifests": [listed] }).to_string();
        let place = |content: &[u8]| format!("./blobs/{}", digest(content).replace(':', "/"));
        tar(&[
            (&place(layer), layer),
            (&place(config), config),
            (&place(&manifest), &manifest),
            ("./index.json", index.as_bytes()),
        ])
    }

    fn open(bytes: &[u8]) -> Result<Vec<Image>, ArchiveError> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.tar");
        std::fs::write(&path, bytes).unwrap();
        Archive::open(&path)?.images()
    }

    #[test]
    fn an_image_comes_with_all_its_blobs_in_order() {
        let images = open(&image("hearth.local/x:1", b"layer")).unwrap();
        let [image] = &images[..] else {
            panic!("{images:?}")
        };
        assert_eq!(image.name, "hearth.local/x:1");
        let [config, layer, manifest] = &image.blobs[..] else {
            panic!("{image:?}")
        };
        assert_eq!(layer.descriptor.digest, digest(b"layer"));
        assert_eq!(layer.extent.length, 5);
        assert_eq!(manifest.descriptor, image.target);
        assert_eq!(
            manifest.names,
            [
                ("config".to_owned(), config.descriptor.digest.clone()),
                ("l.0".to_owned(), layer.descriptor.digest.clone()),
            ]
        );
    }

    #[test]
    fn what_is_missing_is_named() {
        let error = open(&tar(&[("oci-layout", b"{}")])).unwrap_err();
        assert!(error.to_string().ends_with("missing file index.json"));
        let blobless = image("x", b"layer")[1024..].to_vec();
        let error = open(&blobless).unwrap_err().to_string();
        assert!(error.contains("missing file blobs/sha256/"), "{error}");
    }

    #[test]
    fn a_digest_is_no_path() {
        let index = br#"{"manifests":[{"mediaType":"x","size":1,"digest":"sha256:../../x",
            "annotations":{"io.containerd.image.name":"n"}}]}"#;
        let error = open(&tar(&[("index.json", index)]))
            .unwrap_err()
            .to_string();
        assert!(error.contains("expected a SHA-256 digest"), "{error}");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]

        #[test]
        fn any_bytes_are_images_or_refused(bytes: Vec<u8>) {
            let _ = open(&bytes);
        }

        #[test]
        fn a_spoilt_archive_is_images_or_refused(place in 0usize..5000, value: u8, cut in 0usize..6000) {
            let mut bytes = image("hearth.local/x:1", b"layer");
            let place = place % bytes.len();
            bytes[place] = value;
            bytes.truncate(cut.max(1));
            let _ = open(&bytes);
        }
    }
}
