//! `hearthctl image`: which images nodes may boot, and disks to boot them from.

mod write;

use std::path::Path;

use hearth_api::client::{Channel, within};
use hearth_api::v1::management_client::ManagementClient;
use hearth_api::v1::{self, GetTrustedImagesRequest, RevokeImageRequest, TrustImageRequest};
use hearth_tpm::images::TrustedImage;

use super::{print, print_json};
use crate::args::{Format, Global, Image};
use crate::failure::{Failure, Kind};
use crate::{connection, files, output};

pub(super) async fn run(global: &Global, command: Image) -> Result<(), Failure> {
    match command {
        Image::Trust { file } => trust(global, &file).await,
        Image::List { output } => list(global, output.form).await,
        Image::Revoke { image } => revoke(global, &image).await,
        Image::Write(wanted) => write::image(wanted).await,
        Image::SetParameters(wanted) => write::parameters(wanted).await,
    }
}

async fn trust(global: &Global, file: &Path) -> Result<(), Failure> {
    let content = files::read(file, usize::MAX)?;
    let image = TrustedImage::parse(&content).map_err(|error| {
        Failure::new(Kind::Local, format!("read {}", files::read_from(file)))
            .because(error)
            .advise("give the file measurements.json, which is beside the image")
    })?;
    let request = TrustImageRequest {
        image: Some(hearth_operator::trusted_image(&image)),
    };
    let mut management = ManagementClient::new(connection::open(global).await?);
    within(global.timeout, management.trust_image(request))
        .await
        .map_err(|status| Failure::call("trust the image", status))?;
    print(&format!("image {} is trusted\n", image.parts))
}

async fn list(global: &Global, form: Format) -> Result<(), Failure> {
    let mut management = ManagementClient::new(connection::open(global).await?);
    let images = trusted(global, &mut management).await?;
    let images: Vec<_> = images.iter().map(output::Image::from).collect();
    match form {
        Format::Table => print(&output::image_table(&images).to_string()),
        Format::Json => print_json(&images),
    }
}

async fn revoke(global: &Global, wanted: &str) -> Result<(), Failure> {
    const WHAT: &str = "revoke the image";
    let mut management = ManagementClient::new(connection::open(global).await?);
    let images = trusted(global, &mut management).await?;
    let matching = images.iter().map(|image| &image.parts);
    let matching: Vec<_> = matching
        .filter(|parts| hex::encode(parts).starts_with(wanted))
        .collect();
    let [parts] = matching[..] else {
        let found = matching.len();
        return Err(Failure::new(Kind::Local, WHAT)
            .because(format!("{found} trusted images begin with {wanted:?}"))
            .advise("see the trusted images: hearthctl image list"));
    };
    let request = RevokeImageRequest {
        parts: parts.clone(),
    };
    within(global.timeout, management.revoke_image(request))
        .await
        .map_err(|status| Failure::call(WHAT, status))?;
    print(&format!(
        "image {} is not trusted any more\n",
        hex::encode(parts)
    ))
}

async fn trusted(
    global: &Global,
    management: &mut ManagementClient<Channel>,
) -> Result<Vec<v1::TrustedImage>, Failure> {
    let call = management.get_trusted_images(GetTrustedImagesRequest {});
    let images = within(global.timeout, call).await;
    images
        .map(|images| images.into_inner().images)
        .map_err(|status| Failure::call("list the trusted images", status))
}
