//! The machine's own screen.

use std::fs;
use std::path::Path;

use anyhow::{Context, ensure};
use hearth_tests::{Cluster, Outcome, TestCtx, bounds, here};

/// The graphics card that firmware knows. The kernel goes on with what the firmware has set up.
const CARD: &str = "VGA";

/// A machine with a screen registers: a camera reads from the screen the key that the serial console shows.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn a_camera_reads_the_key_that_is_to_be_approved() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut cluster = Cluster::founded_as(&test, 2, |number, plan| {
        Ok(match number {
            2 => plan.uefi().device(CARD),
            _ => plan,
        })
    })
    .await?;
    cluster.register(&[2]).await?;
    let vm = cluster.node(2).vm()?;
    let key = hex::encode(vm.shows_its_key().await?);
    let path = test.folder().join("screen.ppm");
    let read = async {
        loop {
            vm.photograph(&path).await?;
            if let Some(code) = code_on(&path)? {
                return anyhow::Ok(code);
            }
            tokio::time::sleep(bounds::LOOK_AGAIN).await;
        }
    };
    let read = tokio::time::timeout(bounds::SETTLED, read).await;
    let read = read.context("there is no code on the screen")??;
    ensure!(
        read.to_lowercase() == key,
        "{read} on the screen, {key} on the console"
    );
    cluster.approve(2).await?;
    cluster.node(2).home().await?;
    drop(cluster);
    test.passed()
}

/// The text of the QR code in a picture.
fn code_on(path: &Path) -> anyhow::Result<Option<String>> {
    let picture = fs::read(path).context("the picture")?;
    // "P6", width and height, and the largest value, each followed by one blank.
    let mut fields = picture.splitn(5, |byte| byte.is_ascii_whitespace());
    ensure!(fields.next() == Some(b"P6"), "not a PPM picture");
    let mut number = || -> anyhow::Result<usize> {
        let digits = fields.next().context("a field of the picture")?;
        Ok(std::str::from_utf8(digits)?.parse()?)
    };
    let (width, height, _) = (number()?, number()?, number()?);
    let pixels = fields.next().context("a picture without pixels")?;
    ensure!(
        pixels.len() == width * height * 3,
        "a picture that is cut off"
    );
    let green = |x, y| pixels[(y * width + x) * 3 + 1];
    let mut picture = rqrr::PreparedImage::prepare_from_greyscale(width, height, green);
    let codes = picture.detect_grids();
    Ok(codes.iter().find_map(|code| Some(code.decode().ok()?.1)))
}
