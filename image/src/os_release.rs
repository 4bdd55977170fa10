//! os-release: what an image says of itself, to the firmware's tools through the UKI and to the node in `/etc`.

/// What a node's image says.
#[derive(Debug, Clone)]
pub struct NodeRelease<'a> {
    /// Hearth's own.
    pub version: &'a str,
    /// What kind of image it is where it is not the one for users ("debug").
    pub variant: Option<&'a str>,
    /// Of the source, where that is known.
    pub revision: Option<&'a str>,
    /// Of the source, in Unix seconds. No clock before it is right, so it is the node's first guess of the time. The source's
    /// time and not the build's: the same source gives the same image.
    pub source_time: u64,
    /// Its kernel.
    pub kernel: KernelRelease<'a>,
    /// Programs that ride along: the field for the version of each, and the version.
    pub programs: Vec<(&'static str, String)>,
}

/// What is said of a kernel.
#[derive(Debug, Clone, Copy)]
pub struct KernelRelease<'a> {
    /// Its own version.
    pub version: &'a str,
    /// The source package.
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

/// The text for an image around a program which is not ours.
pub fn around(program: &str, kernel: &KernelRelease<'_>) -> String {
    let mut fields = vec![("ID", "linux".to_owned()), ("NAME", program.to_owned())];
    fields.extend(kernel.fields());
    text(&fields)
}

/// Fields as lines for a shell.
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
            programs: vec![("HEARTH_ETCD_VERSION", "3.4.23".to_owned())],
        };
        assert_eq!(
            of_node(&release),
            "ID=hearth\nNAME=Hearth\nPRETTY_NAME=\"Hearth 0.1.0\"\nVERSION_ID=0.1.0\nIMAGE_ID=hearth\n\
             IMAGE_VERSION=0.1.0\nVARIANT_ID=test\nBUILD_ID=0123456789ab-dirty\nHEARTH_BUILD_TIME=1700000000\n\
             HEARTH_KERNEL_VERSION=6.12.1\nHEARTH_KERNEL_SOURCE=\"linux-source-6.12 6.12.1-1\"\n\
             HEARTH_KERNEL_CONFIG_SHA256=ab\nHEARTH_ETCD_VERSION=3.4.23\n"
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
