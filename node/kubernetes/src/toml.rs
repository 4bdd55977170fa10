//! Writes TOML, the form of containerd's configuration. Only a few kinds of lines are needed, so there is no
//! dependency on a TOML writer.

use std::fmt::Write as _;
use std::path::Path;

/// A TOML file that is being written.
#[derive(Default)]
pub(crate) struct Toml(String);

impl Toml {
    /// The file's content.
    pub(crate) fn into_text(self) -> String {
        self.0
    }

    pub(crate) fn line(&mut self, line: &str) -> &mut Self {
        self.0.push_str(line);
        self.0.push('\n');
        self
    }

    pub(crate) fn table(&mut self, name: &str) -> &mut Self {
        self.line(&format!("\n[{name}]"))
    }

    pub(crate) fn text(&mut self, key: &str, value: &str) -> &mut Self {
        self.line(&format!("{key} = {}", quoted(value)))
    }

    pub(crate) fn path(&mut self, key: &str, value: &Path) -> &mut Self {
        self.text(key, &value.to_string_lossy())
    }

    pub(crate) fn number(&mut self, key: &str, value: i64) -> &mut Self {
        self.line(&format!("{key} = {value}"))
    }

    pub(crate) fn flag(&mut self, key: &str, value: bool) -> &mut Self {
        self.line(&format!("{key} = {value}"))
    }
}

/// Encodes a basic string of TOML.
pub(crate) fn quoted(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    for character in text.chars() {
        match character {
            '"' | '\\' => {
                out.push('\\');
                out.push(character);
            }
            character if character.is_control() => {
                // Writing to a String cannot fail.
                let _ = write!(out, "\\u{:04X}", u32::from(character));
            }
            character => out.push(character),
        }
    }
    out.push('"');
    out
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]

        /// JSON strings have the syntax of TOML basic strings, except for DEL, which JSON does not
        /// require to be escaped.
        #[test]
        fn any_text_comes_back(text: String) {
            let line = quoted(&text);
            prop_assert!(!line.contains(char::is_control));
            prop_assert_eq!(serde_json::from_str::<String>(&line).unwrap(), text);
        }
    }
}
