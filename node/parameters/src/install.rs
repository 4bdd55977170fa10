//! `install`: the disk on which an installer puts the node.

use hearth_api::disk_conditions::{DiskConditions, LONGEST, is_word_of_disk};
use hearth_api::labels::quoted;
use hearth_api::v1;

use super::Problem;

/// Parses the message.
pub(super) fn parse(message: v1::Install) -> Result<DiskConditions, Problem> {
    let device = text("device", message.device)?;
    let device = device.map(|name| match name.strip_prefix("/dev/") {
        Some(name) => name.to_owned(),
        None => name,
    });
    if let Some(name) = device.as_ref().filter(|name| name.contains('/')) {
        let expected = "the kernel's name of a disk, such as \"nvme0n1\"";
        return Err(Problem::unwanted("install.device", expected, quoted(name)));
    }
    let (min, max) = (message.min_size_bytes, message.max_size_bytes);
    let max = if max == 0 { u64::MAX } else { max };
    if min > max {
        let expected = format!("at least min_size_bytes, {min}");
        return Err(Problem::unwanted(
            "install.max_size_bytes",
            expected,
            max.to_string(),
        ));
    }
    Ok(DiskConditions {
        serial: text("serial", message.serial)?,
        wwn: text("wwn", message.wwn)?,
        device,
        sizes: min..=max,
        overwrite: text("overwrite", message.overwrite)?,
    })
}

fn text(field: &str, text: String) -> Result<Option<String>, Problem> {
    if !is_word_of_disk(&text) {
        let expected =
            format!("at most {LONGEST} printable characters of ASCII, without blanks around them");
        return Err(Problem::unwanted(
            format!("install.{field}"),
            expected,
            quoted(&text),
        ));
    }
    Ok((!text.is_empty()).then_some(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_message_is_any_disk() {
        let any = parse(v1::Install::default()).unwrap();
        assert_eq!(any.sizes, 0..=u64::MAX);
        assert_eq!((any.serial, any.overwrite), (None, None));
    }

    #[test]
    fn what_no_disk_can_meet_is_refused_with_its_field() {
        let none = v1::Install::default;
        let refused = |message| parse(message).unwrap_err().to_string();
        let message = refused(v1::Install {
            min_size_bytes: 2000,
            max_size_bytes: 1000,
            ..none()
        });
        let expected = "install.max_size_bytes: expected at least min_size_bytes, 2000, got 1000";
        assert_eq!(message, expected);
        let message = refused(v1::Install {
            device: "/dev/disk/by-id/x".into(),
            ..none()
        });
        assert!(message.starts_with("install.device: expected the kernel's name"));
        for serial in [" S1", "S\n1", &"S".repeat(129)] {
            let message = refused(v1::Install {
                serial: serial.into(),
                ..none()
            });
            assert!(message.starts_with("install.serial: expected at most 128"));
        }
        let device = parse(v1::Install {
            device: "/dev/sda".into(),
            ..none()
        });
        assert_eq!(device.unwrap().device.as_deref(), Some("sda"));
    }
}
