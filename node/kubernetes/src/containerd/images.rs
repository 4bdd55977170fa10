//! Imports the images of an extension into containerd.
//!
//! A node without a registry can run only pods whose images it has, so the images of the extension
//! are imported whenever containerd starts. An image that exists with the same content is skipped;
//! one of the same name with other content is replaced, because the name belongs to the extension.
//! Images are not unpacked here: the container runtime does that when the first container needs it.
//!
//! Blobs are written before the image that refers to them, and containerd may collect unreferenced
//! content at any moment. So everything happens under one lease with a fixed name, which an import
//! that was interrupted leaves behind and the next one reuses.

use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hearth_api::client::within;
use hearth_base::supervisor::spawn_blocking;
use prost::Message;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status};

use super::archive::{Archive, ArchiveError, Blob, Image};
use super::connection::{Connection, LEASE, leased};
use super::wire::content::content_client::ContentClient;
use super::wire::content::{InfoRequest, InfoResponse, WriteAction, WriteContentRequest};
use super::wire::images::{
    self, CreateImageRequest, CreateImageResponse, Descriptor, GetImageRequest, GetImageResponse,
    UpdateImageRequest, UpdateImageResponse,
};
use super::wire::leases::{CreateRequest, CreateResponse, DeleteRequest, DeleteResponse};

/// gRPC services of containerd, below `containerd.services`.
const CONTENT: &str = "content.v1.Content";
const IMAGES: &str = "images.v1.Images";
const LEASES: &str = "leases.v1.Leases";

/// Timeout of a call; emulated disks are slow.
const CALL_BOUND: Duration = Duration::from_secs(60);
/// Timeout for writing one blob.
const BLOB_BOUND: Duration = Duration::from_secs(600);
/// Size of the pieces of a blob. (containerd accepts messages of up to 16 MiB.)
const PIECE_BYTES: u64 = 1 << 20;
/// Maximum number of pieces in the queue.
const MAX_WAITING_PIECES: usize = 2;

/// Why an archive cannot be imported.
#[derive(Debug, thiserror::Error)]
pub(super) enum ImportError {
    /// The archive cannot be used.
    #[error(transparent)]
    Archive(#[from] ArchiveError),
    /// A blob cannot be read.
    #[error("cannot read a blob of {archive}")]
    Blob {
        /// Path of the archive.
        archive: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// A call to containerd has failed.
    #[error("cannot {step}")]
    Containerd {
        /// The step, as a verb.
        step: String,
        /// containerd's answer.
        source: Status,
    },
}

fn failed(step: impl Into<String>) -> impl FnOnce(Status) -> ImportError {
    move |source| ImportError::Containerd {
        step: step.into(),
        source,
    }
}

/// Imports the images of an archive that containerd does not have, and returns their names.
pub(super) async fn import(
    connection: &Connection,
    path: &Path,
) -> Result<Vec<String>, ImportError> {
    let owned = path.to_owned();
    let opened = spawn_blocking(move || {
        let archive = Archive::open(&owned)?;
        let images = archive.images()?;
        Ok::<_, ArchiveError>((archive, images))
    });
    let (archive, images) = opened.await.map_err(|error| ImportError::Blob {
        archive: path.to_owned(),
        source: error.into(),
    })??;
    let import = Import {
        connection,
        archive: Arc::new(archive),
        path,
    };
    let mut new = Vec::new();
    for image in images {
        if !import.has(&image).await? {
            new.push(image);
        }
    }
    if !new.is_empty() {
        import.lease().await?;
        for image in &new {
            import.add(image).await?;
        }
        import.release().await?;
    }
    Ok(new.into_iter().map(|image| image.name).collect())
}

struct Import<'a> {
    connection: &'a Connection,
    archive: Arc<Archive>,
    path: &'a Path,
}

impl Import<'_> {
    /// Calls one of containerd's own services.
    async fn ask<Q: Message, A: Message + Default>(
        &self,
        service: &str,
        method: &str,
        question: Q,
    ) -> Result<A, Status> {
        let path = format!("/containerd.services.{service}/{method}");
        let asked = self.connection.ask(path, leased(question));
        within(CALL_BOUND, asked).await
    }

    /// Whether the image exists with this content.
    async fn has(&self, image: &Image) -> Result<bool, ImportError> {
        let name = image.name.clone();
        let found = self.ask(IMAGES, "Get", GetImageRequest { name }).await;
        match found {
            Ok(GetImageResponse { image: found }) => {
                let target = found.and_then(|image| image.target);
                Ok(target.is_some_and(|target| target.digest == image.target.digest))
            }
            Err(status) if status.code() == Code::NotFound => Ok(false),
            Err(status) => Err(failed(format!("get image {}", image.name))(status)),
        }
    }

    async fn lease(&self) -> Result<(), ImportError> {
        let id = LEASE.to_owned();
        let made = self.ask::<_, CreateResponse>(LEASES, "Create", CreateRequest { id });
        match made.await {
            Err(status) if status.code() == Code::AlreadyExists => Ok(()),
            made => made.map(drop).map_err(failed("create a lease")),
        }
    }

    async fn release(&self) -> Result<(), ImportError> {
        let id = LEASE.to_owned();
        let released = self.ask::<_, DeleteResponse>(LEASES, "Delete", DeleteRequest { id });
        let released = released.await.map(drop);
        released.map_err(failed("delete a lease"))
    }

    async fn add(&self, image: &Image) -> Result<(), ImportError> {
        for blob in &image.blobs {
            if !self.has_blob(blob).await? {
                self.write_blob(blob).await?;
            }
        }
        let record = images::Image {
            name: image.name.clone(),
            labels: Default::default(),
            target: Some(Descriptor {
                media_type: image.target.media_type.clone(),
                digest: image.target.digest.clone(),
                size: i64::try_from(image.target.size).unwrap_or(i64::MAX),
            }),
        };
        let image = Some(record.clone());
        let created =
            self.ask::<_, CreateImageResponse>(IMAGES, "Create", CreateImageRequest { image });
        let created = created.await.map(drop);
        let name = &record.name;
        let step = failed(format!("create image {name}"));
        match created {
            Err(status) if status.code() == Code::AlreadyExists => {}
            created => return created.map_err(step),
        }
        let image = Some(record);
        let updated =
            self.ask::<_, UpdateImageResponse>(IMAGES, "Update", UpdateImageRequest { image });
        updated.await.map(drop).map_err(step)
    }

    /// Whether the blob exists, with the labels for its references.
    async fn has_blob(&self, blob: &Blob) -> Result<bool, ImportError> {
        let digest = blob.descriptor.digest.clone();
        let found = self.ask(CONTENT, "Info", InfoRequest { digest }).await;
        match found {
            // Without the labels, the blobs that it refers to would be garbage-collected.
            Ok(InfoResponse { info }) => Ok(info.is_some_and(|info| {
                let labels = labels(blob);
                labels
                    .iter()
                    .all(|(key, value)| info.labels.get(key) == Some(value))
            })),
            Err(status) if status.code() == Code::NotFound => Ok(false),
            Err(status) => Err(failed(format!("look up {}", blob.descriptor.digest))(
                status,
            )),
        }
    }

    /// Writes a blob from the archive to containerd.
    async fn write_blob(&self, blob: &Blob) -> Result<(), ImportError> {
        let (pieces, queue) = mpsc::channel(MAX_WAITING_PIECES);
        let (archive, sent) = (self.archive.clone(), blob.clone());
        let reader = spawn_blocking(move || send_pieces(&archive, &sent, &pieces));
        let step = || failed(format!("write {}", blob.descriptor.digest));
        let writing = async {
            let mut client = ContentClient::new(self.connection.channel());
            let call = client.write(leased(ReceiverStream::new(queue)));
            let mut answers = call.await?.into_inner();
            // Each piece is acknowledged; the last response is that of the commit.
            while let Some(answer) = answers.message().await? {
                if answer.action() == WriteAction::Commit {
                    return Ok(());
                }
            }
            Err(Status::aborted("stream ended before the commit"))
        };
        let written = tokio::time::timeout(BLOB_BOUND, writing).await;
        // The queue has been dropped by now, so the reader ends.
        let read = reader.await.unwrap_or_else(|error| Err(error.into()));
        read.map_err(|source| ImportError::Blob {
            archive: self.path.to_owned(),
            source,
        })?;
        match written {
            // The same blob has been pulled in the meantime.
            Ok(Err(status)) if status.code() == Code::AlreadyExists => Ok(()),
            Ok(written) => written.map_err(step()),
            Err(_) => Err(step()(Status::deadline_exceeded("timeout"))),
        }
    }
}

/// Sends a blob in pieces, the last one with the commit. Returns early, without an error, if the
/// queue is closed.
fn send_pieces(
    archive: &Archive,
    blob: &Blob,
    pieces: &mpsc::Sender<WriteContentRequest>,
) -> io::Result<()> {
    let total = blob.extent.length;
    let mut offset = 0;
    loop {
        let mut data = vec![0; (total - offset).min(PIECE_BYTES) as usize];
        archive
            .file()
            .read_exact_at(&mut data, blob.extent.offset + offset)?;
        let end = offset + data.len() as u64;
        let last = end == total;
        let piece = WriteContentRequest {
            action: if last {
                WriteAction::Commit.into()
            } else {
                WriteAction::Write.into()
            },
            r#ref: format!("{LEASE}-{}", blob.descriptor.digest),
            total: i64::try_from(total).unwrap_or(i64::MAX),
            expected: blob.descriptor.digest.clone(),
            offset: i64::try_from(offset).unwrap_or(i64::MAX),
            data,
            labels: labels(blob).into_iter().collect(),
        };
        if pieces.blocking_send(piece).is_err() || last {
            return Ok(());
        }
        offset = end;
    }
}

/// Labels of a blob: its references, for containerd's garbage collection.
fn labels(blob: &Blob) -> Vec<(String, String)> {
    let label = |(name, digest): &(String, String)| {
        (
            format!("containerd.io/gc.ref.content.{name}"),
            digest.clone(),
        )
    };
    blob.names.iter().map(label).collect()
}

#[cfg(test)]
mod tests {
    use super::super::archive::tests::image;
    use super::*;

    fn pieces(layer: &[u8]) -> Vec<WriteContentRequest> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.tar");
        std::fs::write(&path, image("x:1", layer)).unwrap();
        let archive = Archive::open(&path).unwrap();
        let images = archive.images().unwrap();
        let layer = &images[0].blobs[1];
        let (sender, mut queue) = mpsc::channel(64);
        send_pieces(&archive, layer, &sender).unwrap();
        drop(sender);
        let mut all = Vec::new();
        while let Some(piece) = queue.blocking_recv() {
            all.push(piece);
        }
        all
    }

    #[test]
    fn a_blob_goes_in_pieces_and_the_last_commits() {
        let layer: Vec<u8> = (0..3 * PIECE_BYTES / 2).map(|n| n as u8).collect();
        let pieces = pieces(&layer);
        let actions: Vec<_> = pieces.iter().map(WriteContentRequest::action).collect();
        assert_eq!(actions, [WriteAction::Write, WriteAction::Commit]);
        assert_eq!(pieces[1].offset, PIECE_BYTES as i64);
        let sent: Vec<u8> = pieces.into_iter().flat_map(|piece| piece.data).collect();
        assert!(sent == layer);
    }

    #[test]
    fn an_empty_blob_is_one_commit() {
        let pieces = pieces(b"");
        assert_eq!(pieces.len(), 1);
        assert_eq!(pieces[0].action(), WriteAction::Commit);
    }
}
