//! The image that a machine's disk is based on.

use std::fs::{self, File, Metadata};
use std::io::{self, BufReader, ErrorKind, Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::SeekFrom as Extent;
use rustix::io::Errno;

/// How a machine's disk relates to the given image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Image {
    /// The disk has just been made from it.
    New,
    /// The disk is based on it, or on one with the same bytes.
    Same,
    /// The disk is based on another image, which the machine continues to use.
    Older,
}

/// Keeps `image` as `base`: by a hard link, or, across file systems, by a sparse copy.
pub(super) fn keep(image: &Path, base: &Path) -> io::Result<()> {
    match fs::remove_file(base) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    // The file itself, not a symbolic link to it, whose target may change.
    let image = image.canonicalize()?;
    match fs::hard_link(&image, base) {
        Err(error)
            if matches!(
                error.kind(),
                ErrorKind::CrossesDevices | ErrorKind::PermissionDenied
            ) =>
        {
            let partial = base.with_extension("partial");
            copy_sparse(&image, &partial)?;
            fs::rename(&partial, base)
        }
        linked => linked,
    }
}

/// How the disk based on `base` relates to `image`.
pub(super) fn compare(base: &Path, image: &Path) -> io::Result<Image> {
    let same_file = |a: &Metadata, b: &Metadata| (a.dev(), a.ino()) == (b.dev(), b.ino());
    let (a, b) = (fs::metadata(base)?, fs::metadata(image)?);
    if same_file(&a, &b) || (a.len() == b.len() && same_bytes(base, image)?) {
        return Ok(Image::Same);
    }
    Ok(Image::Older)
}

/// Compares two files of the same length.
fn same_bytes(a: &Path, b: &Path) -> io::Result<bool> {
    const PIECE: usize = 1 << 18;
    let open = |path| File::open(path).map(|file| BufReader::with_capacity(PIECE, file));
    let (mut a, mut b) = (open(a)?, open(b)?);
    let (mut x, mut y) = (vec![0; PIECE], vec![0; PIECE]);
    loop {
        let count = a.read(&mut x)?;
        if count == 0 {
            return Ok(true);
        }
        b.read_exact(&mut y[..count])?;
        if x[..count] != y[..count] {
            return Ok(false);
        }
    }
}

/// Copies only what is written; the rest remains a hole.
fn copy_sparse(from: &Path, to: &Path) -> io::Result<()> {
    let mut from = File::open(from)?;
    let mut to = File::create(to)?;
    let length = from.metadata()?.len();
    to.set_len(length)?;
    let mut at = 0;
    while at < length {
        let start = match rustix::fs::seek(&from, Extent::Data(at)) {
            Ok(start) => start,
            // Only a hole up to the end.
            Err(Errno::NXIO) => break,
            Err(error) => return Err(error.into()),
        };
        let end = rustix::fs::seek(&from, Extent::Hole(start))?;
        from.seek(SeekFrom::Start(start))?;
        to.seek(SeekFrom::Start(start))?;
        io::copy(&mut (&from).take(end - start), &mut to)?;
        at = end;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    /// 4 MiB, of which two pieces are written.
    fn sparse(path: &Path) {
        let mut file = File::create(path).expect("a file");
        file.write_all(&[1; 5000]).expect("written");
        file.seek(SeekFrom::Start(2 << 20)).expect("sought");
        file.write_all(&[2; 70000]).expect("written");
        file.set_len(4 << 20).expect("a length");
    }

    #[test]
    fn a_rebuilt_image_does_not_change_the_base() {
        let folder = tempfile::tempdir().expect("a folder");
        let (image, base) = (folder.path().join("image"), folder.path().join("base"));
        sparse(&image);
        keep(&image, &base).expect("kept");
        assert_eq!(compare(&base, &image).expect("compared"), Image::Same);

        // As a builder does: under another name, then renamed.
        let next = folder.path().join("next");
        sparse(&next);
        fs::rename(&next, &image).expect("replaced");
        assert_eq!(compare(&base, &image).expect("compared"), Image::Same);
        sparse(&next);
        let mut file = File::options().write(true).open(&next).expect("opened");
        file.seek(SeekFrom::Start(3 << 20)).expect("sought");
        file.write_all(&[3]).expect("written");
        fs::rename(&next, &image).expect("replaced");
        assert_eq!(compare(&base, &image).expect("compared"), Image::Older);
        // Kept again, replacing the previous one.
        keep(&image, &base).expect("kept");
        assert_eq!(compare(&base, &image).expect("compared"), Image::Same);
    }

    #[test]
    fn a_copy_has_the_same_bytes_and_holes() {
        let folder = tempfile::tempdir().expect("a folder");
        let (image, copy) = (folder.path().join("image"), folder.path().join("copy"));
        sparse(&image);
        copy_sparse(&image, &copy).expect("copied");
        assert!(same_bytes(&image, &copy).expect("compared"));
        let blocks = |path: &Path| fs::metadata(path).expect("metadata").blocks();
        assert!(
            blocks(&copy) <= blocks(&image) + 64,
            "{} {}",
            blocks(&copy),
            blocks(&image)
        );
        assert_eq!(fs::metadata(&copy).expect("metadata").len(), 4 << 20);
    }
}
