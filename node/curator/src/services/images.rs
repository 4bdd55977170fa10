//! The methods of `Management` about trusted images.

use hearth_api::tls;
use hearth_api::v1::{
    self, GetTrustedImagesResponse, RevokeImageRequest, RevokeImageResponse, TrustImageRequest,
    TrustImageResponse,
};
use hearth_cluster::decisions::{Rejection, admission};
use hearth_tpm::Digest;
use hearth_tpm::images::TrustedImage;
use tonic::Status;

use crate::core::Core;

/// Maximum number of programs of an image, and of its command lines.
const MOST_DIGESTS: usize = 8;

pub(super) async fn trust(
    core: &Core,
    request: TrustImageRequest,
) -> Result<TrustImageResponse, Status> {
    let image = parse(request.image.unwrap_or_default())?;
    let decide = || async {
        core.reads.linearizable().await?;
        let found = core.cache.image(&image.parts);
        let now = tls::unix_seconds(&core.clock);
        let write = admission::trust(&image, found.as_ref(), core.cache.images().len(), now)?;
        Ok(((), write))
    };
    if let ((), Some(_)) = core.write_with_retry(decide).await? {
        tracing::info!(image = %image.parts, "an operator trusts an image");
    }
    Ok(TrustImageResponse {})
}

pub(super) async fn list(core: &Core) -> Result<GetTrustedImagesResponse, Status> {
    core.reads.linearizable().await?;
    let mut images: Vec<v1::TrustedImage> = core
        .cache
        .images()
        .into_iter()
        .map(|image| image.content.into())
        .collect();
    images
        .sort_by(|one, other| (one.trusted_at, &one.parts).cmp(&(other.trusted_at, &other.parts)));
    Ok(GetTrustedImagesResponse { images })
}

pub(super) async fn revoke(
    core: &Core,
    request: RevokeImageRequest,
) -> Result<RevokeImageResponse, Status> {
    let parts = digest("parts", &request.parts)?;
    let decide = || async {
        core.reads.linearizable().await?;
        let write = admission::revoke(&parts, core.cache.image(&parts).as_ref())?;
        Ok(((), Some(write)))
    };
    core.write_with_retry(decide).await?;
    tracing::info!(image = %parts, "an operator has revoked an image");
    Ok(RevokeImageResponse {})
}

fn parse(image: v1::TrustedImage) -> Result<TrustedImage, Rejection> {
    Ok(TrustedImage {
        parts: digest("image.parts", &image.parts)?,
        programs: digests("image.programs", &image.programs, 2)?,
        command_lines: digests("image.command_lines", &image.command_lines, 0)?,
    })
}

fn digests(
    field: &'static str,
    digests: &[Vec<u8>],
    least: usize,
) -> Result<Vec<Digest>, Rejection> {
    if !(least..=MOST_DIGESTS).contains(&digests.len()) {
        return Err(Rejection::Field {
            field,
            wanted: "at most 8 digests, and at least two of programs",
            found: digests.len().to_string(),
        });
    }
    digests.iter().map(|bytes| digest(field, bytes)).collect()
}

fn digest(field: &'static str, bytes: &[u8]) -> Result<Digest, Rejection> {
    bytes.try_into().map(Digest).map_err(|_| Rejection::Field {
        field,
        wanted: "a SHA-256 digest of 32 bytes",
        found: bytes.len().to_string(),
    })
}
