//! The parameters on the EFI system partition of an image or a device.
//!
//! `fatfs` changes the file system that the image builder has made. The directory of the file exists
//! in every image; to make it is not needed, and what the crate makes of `.` and `..` is reported by
//! `fsck.vfat`.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::ops::Range;

use fatfs::{FileSystem, FsOptions};
use fscommon::{BufStream, StreamSlice};
use hearth_api::names::disk::ESP_PARAMETERS;
use hearth_parameters::MAX_SIZE;

use super::layout::Layout;

/// Why the parameters on an EFI system partition cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[error("the EFI system partition: cannot {step}")]
pub(crate) struct EspError {
    step: &'static str,
    source: io::Error,
}

impl EspError {
    fn of(step: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self { step, source }
    }
}

type Volume<'a> = BufStream<StreamSlice<&'a File>>;

fn volume<'a>(disk: &'a File, esp: &Range<u64>) -> Result<Volume<'a>, EspError> {
    let slice = StreamSlice::new(disk, esp.start, esp.end).map_err(EspError::of("find it"))?;
    Ok(BufStream::new(slice))
}

fn mount<'a, 'b>(volume: &'b mut Volume<'a>) -> Result<FileSystem<&'b mut Volume<'a>>, EspError> {
    FileSystem::new(volume, FsOptions::new()).map_err(EspError::of("read its file system"))
}

/// The parameters, if there are any. Of larger ones than a node reads, a byte more than those.
pub(crate) fn read_parameters(disk: &File, layout: &Layout) -> Result<Option<Vec<u8>>, EspError> {
    let mut volume = volume(disk, &layout.esp)?;
    let files = mount(&mut volume)?;
    let file = match files.root_dir().open_file(ESP_PARAMETERS) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(EspError::of("open the parameters")(error)),
    };
    let mut bytes = Vec::new();
    file.take(MAX_SIZE as u64 + 1)
        .read_to_end(&mut bytes)
        .map_err(EspError::of("read the parameters"))?;
    Ok(Some(bytes))
}

/// Writes the parameters. Of former ones, which have secrets, nothing is left.
pub(crate) fn write_parameters(
    disk: &File,
    layout: &Layout,
    parameters: &[u8],
) -> Result<(), EspError> {
    let failed = EspError::of("write the parameters");
    let mut volume = volume(disk, &layout.esp)?;
    let files = mount(&mut volume)?;
    let written = files
        .root_dir()
        .create_file(ESP_PARAMETERS)
        .and_then(|mut file| {
            let former = file.seek(SeekFrom::End(0))?;
            file.seek(SeekFrom::Start(0))?;
            io::copy(&mut io::repeat(0).take(former), &mut file)?;
            file.seek(SeekFrom::Start(0))?;
            file.write_all(parameters)?;
            file.truncate()?;
            file.flush()
        });
    let done = written.and_then(|()| files.unmount());
    // The buffer's own end would tell nobody of an error.
    done.and_then(|()| volume.flush()).map_err(failed)
}
