//! Configuration fragments: the requested Kconfig options, and a check of the outcome.
//!
//! The format is Kconfig's own, parsed strictly: a line that Kconfig would take for a comment although its author meant
//! an option (`# CONFIG_X is not st`) is an error, and so are `=m` (there are no modules) and an option named twice.

use std::collections::BTreeMap;
use std::fmt;

/// Why a fragment cannot be used.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum FragmentError {
    /// A line is neither an option nor a comment.
    #[error(
        "{file}:{line}: `{text}`: expected `CONFIG_NAME=y`, `CONFIG_NAME=number`, `CONFIG_NAME=\"text\"` or `# CONFIG_NAME is not set`"
    )]
    Malformed {
        /// Name of the file.
        file: String,
        /// Line number, counted from 1.
        line: usize,
        /// Text of the line.
        text: String,
    },
    /// An option occurs twice in the same file.
    #[error("{file}:{line}: duplicate option {name}")]
    Duplicate {
        /// Name of the file.
        file: String,
        /// Line number of the second occurrence, counted from 1.
        line: usize,
        /// Name of the option.
        name: String,
    },
    /// Kconfig dropped options.
    #[error(
        "Kconfig did not apply {} of the fragment's options (unknown in this kernel series, or with an unmet dependency):\n{}",
        .0.len(), Dropped::list(.0)
    )]
    Dropped(Vec<Dropped>),
}

/// An option whose outcome differs from the fragment.
#[derive(Debug, PartialEq, Eq)]
pub struct Dropped {
    /// Name with its prefix: `CONFIG_X`.
    pub name: String,
    /// Value in the fragment.
    pub wanted: Value,
    /// Value in the configuration.
    pub got: Value,
}

impl Dropped {
    fn list(all: &[Dropped]) -> String {
        let lines: Vec<String> = all
            .iter()
            .map(|one| format!("  {}: expected {}, got {}", one.name, one.wanted, one.got))
            .collect();
        lines.join("\n")
    }
}

/// An option's value. Kconfig writes a disabled option as "is not set", or omits it if it cannot be chosen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    /// Not set.
    Unset,
    /// As written: `y`, a number, or text in quotes.
    Set(String),
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Unset => write!(f, "not set"),
            Value::Set(value) => write!(f, "{value}"),
        }
    }
}

/// Options and their requested values. Its `Display` is a fragment in Kconfig's format, sorted and without comments.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Fragment {
    options: BTreeMap<String, Value>,
}

impl Fragment {
    /// Parses a fragment; `file` is its name in errors.
    pub fn parse(text: &str, file: &str) -> Result<Fragment, FragmentError> {
        let mut options = BTreeMap::new();
        for (index, text) in text.lines().enumerate() {
            let line = index + 1;
            let malformed = || FragmentError::Malformed {
                file: file.to_owned(),
                line,
                text: text.to_owned(),
            };
            if text.trim().is_empty() || (text.starts_with('#') && !text.starts_with("# CONFIG_")) {
                continue;
            }
            let (name, value) = option(text)
                .filter(|(_, value)| is_wantable(value))
                .ok_or_else(malformed)?;
            if options.insert(name.to_owned(), value).is_some() {
                return Err(FragmentError::Duplicate {
                    file: file.to_owned(),
                    line,
                    name: name.to_owned(),
                });
            }
        }
        Ok(Fragment { options })
    }

    /// This fragment, overridden by another.
    pub fn overlaid(mut self, over: Fragment) -> Fragment {
        self.options.extend(over.options);
        self
    }

    /// Compares the outcome, a whole `.config`, with the fragment.
    pub fn verify(&self, config: &str) -> Result<(), FragmentError> {
        let outcome: BTreeMap<&str, Value> = config.lines().filter_map(option).collect();
        let dropped: Vec<Dropped> = self
            .options
            .iter()
            .filter_map(|(name, wanted)| {
                let got = outcome.get(name.as_str()).cloned().unwrap_or(Value::Unset);
                (got != *wanted).then(|| Dropped {
                    name: name.clone(),
                    wanted: wanted.clone(),
                    got,
                })
            })
            .collect();
        if dropped.is_empty() {
            Ok(())
        } else {
            Err(FragmentError::Dropped(dropped))
        }
    }
}

impl fmt::Display for Fragment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, value) in &self.options {
            match value {
                Value::Unset => writeln!(f, "# {name} is not set")?,
                Value::Set(value) => writeln!(f, "{name}={value}")?,
            }
        }
        Ok(())
    }
}

/// The option that a line of a configuration sets or unsets.
fn option(line: &str) -> Option<(&str, Value)> {
    let (name, value) = match line.strip_prefix("# ") {
        Some(line) => (line.strip_suffix(" is not set")?, Value::Unset),
        None => {
            let (name, value) = line.split_once('=')?;
            (name, Value::Set(value.to_owned()))
        }
    };
    let bare = name.strip_prefix("CONFIG_")?;
    let is_name = !bare.is_empty() && bare.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    is_name.then_some((name, value))
}

/// Whether a fragment may request this value.
fn is_wantable(value: &Value) -> bool {
    let Value::Set(value) = value else {
        return true;
    };
    let is_text = value.len() >= 2 && value.starts_with('"') && value.ends_with('"');
    let is_hex = value
        .strip_prefix("0x")
        .is_some_and(|digits| u64::from_str_radix(digits, 16).is_ok());
    value == "y" || is_text || is_hex || value.parse::<i64>().is_ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(text: &str) -> Result<Fragment, FragmentError> {
        Fragment::parse(text, "f")
    }

    #[test]
    fn options_are_read_and_comments_are_not() {
        let text = "# ---- Boot ----\n\nCONFIG_B=\"x=y\"\nCONFIG_A=y\n# CONFIG_C is not set\nCONFIG_D=-1\nCONFIG_E=0x10\n";
        let sorted =
            "CONFIG_A=y\nCONFIG_B=\"x=y\"\n# CONFIG_C is not set\nCONFIG_D=-1\nCONFIG_E=0x10\n";
        assert_eq!(parse(text).unwrap().to_string(), sorted);
    }

    #[test]
    fn every_malformed_line_is_named() {
        let lines = [
            "CONFIG_A=m",
            "CONFIG_A=n",
            "CONFIG_A=",
            "CONFIG_A",
            "A=y",
            "CONFIG_=y",
            "CONFIG_A B=y",
            "CONFIG_A=\"",
            "# CONFIG_A is not st",
            "# CONFIG_A=y",
            " CONFIG_A=y",
            "CONFIG_A=yes",
        ];
        for text in lines {
            let wanted = FragmentError::Malformed {
                file: "f".into(),
                line: 2,
                text: text.into(),
            };
            assert_eq!(parse(&format!("# Why.\n{text}\n")), Err(wanted));
        }
    }

    #[test]
    fn an_option_named_twice_is_an_error() {
        let wanted = FragmentError::Duplicate {
            file: "f".into(),
            line: 2,
            name: "CONFIG_A".into(),
        };
        assert_eq!(parse("CONFIG_A=y\n# CONFIG_A is not set\n"), Err(wanted));
    }

    #[test]
    fn a_later_fragment_wins() {
        let both = parse("CONFIG_A=y\nCONFIG_B=y\n")
            .unwrap()
            .overlaid(parse("# CONFIG_A is not set\n").unwrap());
        assert_eq!(both.to_string(), "# CONFIG_A is not set\nCONFIG_B=y\n");
    }

    #[test]
    fn each_dropped_option_is_named() {
        let fragment = parse(
            "CONFIG_A=y\n# CONFIG_B is not set\n# CONFIG_C is not set\nCONFIG_D=1\nCONFIG_E=y\n",
        )
        .unwrap();
        // A is unknown, C was turned on, D differs; B is absent and E present, as requested.
        let error = fragment
            .verify("CONFIG_C=y\nCONFIG_D=2\nCONFIG_E=y\n# CONFIG_F is not set\n")
            .unwrap_err();
        let message = error.to_string();
        let lines: Vec<&str> = message.lines().skip(1).collect();
        assert_eq!(
            lines,
            [
                "  CONFIG_A: expected y, got not set",
                "  CONFIG_C: expected not set, got y",
                "  CONFIG_D: expected 1, got 2"
            ]
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn no_text_panics(text in "(# |CONFIG_|[A-Z=\"\n yé]| is not set){0,40}") {
            let _ = parse(&text);
        }

        #[test]
        fn what_is_wanted_verifies_against_itself(
            options in proptest::collection::btree_map("[A-Z0-9_]{1,12}", proptest::option::of("y|[0-9]{1,9}|\"[a-z ]{0,9}\""), 0..20)
        ) {
            let text: String = options
                .iter()
                .map(|(name, value)| match value {
                    Some(value) => format!("CONFIG_{name}={value}\n"),
                    None => format!("# CONFIG_{name} is not set\n"),
                })
                .collect();
            let fragment = parse(&text).unwrap();
            prop_assert_eq!(fragment.verify(&text), Ok(()));
            prop_assert_eq!(parse(&fragment.to_string()), Ok(fragment));
        }
    }
}
