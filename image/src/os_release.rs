//! os-release: the description of an image, for the firmware's tools in the UKI and for the node in `/etc`.

/// The description of a node's image.
#[derive(Debug, Clone)]
pub struct NodeRelease<'a> {
    /// Hearth's version.
    pub version: &'a str,
    /// Variant of the image, for all but the standard one ("debug").
    pub variant: Option<&'a str>,
    /// Revision of the source, if known.
    pub revision: Option<&'a str>,
    /// Time of the source, in Unix seconds. A correct clock is never before it, so it is the node's first estimate of
    /// the time. The source's time and not the build's: the same source gives the same image.
    pub source_time: u64,
    /// Its kernel.
    pub kernel: KernelRelease<'a>,
    /// Bundled programs: the field for the version of each, and the version.
    pub programs: Vec<(&'static str, String)>,
}

/// The description of a kernel.
#[derive(Debug, Clone, Copy)]
pub struct KernelRelease<'a> {
    /// Version of the kernel.
    pub version: &'a str,
    /// Name and version of the source package.
    pub source: &'a str,
    /// SHA-256 of its configuration, in hex.
    pub config_sha256: &'a str,
}

impl KernelRelease<'_> {
    fn fields(&self) -> [(&'static str, String); 3] {
        [
            ("HEARTH_KERNEL_VERSION", self.version.to_owned()),
            ("HEARTH_KERNEL_SOURCE", self.source.to_owned()),
            ("HEARTH_KERNEL_CONFIG_SHA256", self.config_sha256.to_owned()),
        ]
    }
}

/// The text for a node's image.
pub fn of_node(release: &NodeRelease<'_>) -> String {
    let version = release.version;
    let mut fields = vec![
        ("ID", "hearth".to_owned()),
        ("NAME", "Hearth".to_owned()),
        ("PRETTY_NAME", format!("Hearth {version}")),
        ("VERSION_ID", version.to_owned()),
        ("IMAGE_ID", "hearth".to_owned()),
        ("IMAGE_VERSION", version.to_owned()),
    ];
    if let Some(variant) = release.variant {
        fields.push(("VARIANT_ID", variant.to_owned()));
    }
    if let Some(revision) = release.revision {
        fields.push(("BUILD_ID", revision.to_owned()));
    }
    fields.push(("HEARTH_BUILD_TIME", release.source_time.to_string()));
    fields.extend(release.kernel.fields());
    fields.extend(release.programs.iter().cloned());
    text(&fields)
}

/// The text for an image around a program that is not Hearth's.
pub fn around(program: &str, kernel: &KernelRelease<'_>) -> String {
    let mut fields = vec![("ID", "linux".to_owned()), ("NAME", program.to_owned())];
    fields.extend(kernel.fields());
    text(&fields)
}

/// Fields as shell assignments.
fn text(fields: &[(&str, String)]) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
    let line = |(name, value): &(&str, String)| {
        if !value.is_empty() && value.chars().all(plain) {
            return format!("{name}={value}\n");
        }
        let mut quoted = String::new();
        for c in value.chars().filter(|c| !c.is_control()) {
            if "\"$`\\".contains(c) {
                quoted.push('\\');
            }
            quoted.push(c);
        }
        format!("{name}=\"{quoted}\"\n")
    };
    fields.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const KERNEL: KernelRelease<'_> = KernelRelease {
        version: "6.12.1",
        source: "linux-source-6.12 6.12.1-1",
        config_sha256: "ab",
    };

    #[test]
    fn values_are_quoted_where_a_shell_wants_it() {
        let fields = [
            ("A", "plain-1.0".to_owned()),
            ("B", "with blank".to_owned()),
            ("C", "a\"$`\\\nb".to_owned()),
            ("D", String::new()),
        ];
        assert_eq!(
            text(&fields),
            "A=plain-1.0\nB=\"with blank\"\nC=\"a\\\"\\$\\`\\\\b\"\nD=\"\"\n"
        );
    }

    #[test]
    fn a_node_says_what_it_is_and_what_it_was_made_of() {
        let mut release = NodeRelease {
            version: "0.1.0",
            variant: Some("test"),
            revision: Some("0123456789ab-dirty"),
            source_time: 1_700_000_000,
            kernel: KERNEL,
            programs: vec![("HEARTH_ETCD_VERSION", "3.7.3".to_owned())],
        };
        assert_eq!(
            of_node(&release),
            "ID=hearth\nNAME=Hearth\nPRETTY_NAME=\"Hearth 0.1.0\"\nVERSION_ID=0.1.0\nIMAGE_ID=hearth\n\
             IMAGE_VERSION=0.1.0\nVARIANT_ID=test\nBUILD_ID=0123456789ab-dirty\nHEARTH_BUILD_TIME=1700000000\n\
             HEARTH_KERNEL_VERSION=6.12.1\nHEARTH_KERNEL_SOURCE=\"linux-source-6.12 6.12.1-1\"\n\
             HEARTH_KERNEL_CONFIG_SHA256=ab\nHEARTH_ETCD_VERSION=3.7.3\n"
        );
        (release.variant, release.revision) = (None, None);
        let text = of_node(&release);
        assert!(!text.contains("VARIANT_ID") && !text.contains("BUILD_ID"));
    }

    #[test]
    fn an_image_around_a_program_is_named_after_it() {
        assert!(around("hello", &KERNEL).starts_with("ID=linux\nNAME=hello\nHEARTH_KERNEL_"));
    }
}
