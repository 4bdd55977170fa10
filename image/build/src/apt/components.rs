//! Further components in the machine's package entries.

use super::entries::Form;

/// Components that are added to the entries for these suites. Entries of other providers have other suites.
pub(super) struct Components<'a> {
    pub(super) suites: [String; 3],
    pub(super) components: &'a [&'a str],
}

impl Components<'_> {
    pub(super) fn added_to(&self, text: &str, form: Form) -> String {
        match form {
            Form::Lines => self.in_lines(text),
            Form::Stanzas => self.in_stanzas(text),
        }
    }

    fn is_suite(&self, word: &str) -> bool {
        self.suites.iter().any(|suite| suite == word)
    }

    /// Those that are not among the words of an entry, each after a blank.
    fn missing_in(&self, entry: &str) -> String {
        let listed = |component: &str| entry.split_whitespace().any(|word| word == component);
        let missing = self.components.iter().filter(|word| !listed(word));
        missing.map(|word| format!(" {word}")).collect()
    }

    fn in_lines(&self, text: &str) -> String {
        let mut lines = String::new();
        for line in text.lines() {
            let entry = line.split('#').next().unwrap_or_default().trim_end();
            match entry.split_whitespace().any(|word| self.is_suite(word)) {
                true => lines += &format!("{entry}{}\n", self.missing_in(entry)),
                false => lines += &format!("{line}\n"),
            }
        }
        lines
    }

    fn in_stanzas(&self, text: &str) -> String {
        let stanzas = text.split("\n\n").map(|stanza| self.in_stanza(stanza));
        stanzas.collect::<Vec<_>>().join("\n")
    }

    fn in_stanza(&self, stanza: &str) -> String {
        let field = |line: &str, wanted: &str| {
            let (name, value) = line.split_once(':')?;
            let is = name.eq_ignore_ascii_case(wanted);
            is.then(|| value.to_owned())
        };
        let ours = stanza.lines().any(|line| {
            let suites = field(line, "suites").unwrap_or_default();
            suites.split_whitespace().any(|word| self.is_suite(word))
        });
        let mut lines = String::new();
        for line in stanza.lines() {
            lines += line;
            if ours && let Some(listed) = field(line, "components") {
                lines += &self.missing_in(&listed);
            }
            lines += "\n";
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn components_are_added_to_the_entries_of_the_release_alone() {
        let firmware = Components {
            suites: super::super::suites("bookworm"),
            components: &["non-free-firmware"],
        };
        let lines = "deb http://mirror/debian bookworm main # ours\n\
                     deb http://mirror/debian bookworm-updates main non-free-firmware\n\
                     deb http://other/apt cloud-sdk-bookworm main\n";
        assert_eq!(
            firmware.in_lines(lines),
            "deb http://mirror/debian bookworm main non-free-firmware\n\
             deb http://mirror/debian bookworm-updates main non-free-firmware\n\
             deb http://other/apt cloud-sdk-bookworm main\n"
        );
        let stanzas = "Types: deb\nComponents: main\nSuites: bookworm-security\n\n\
                       Types: deb\nSuites: nodistro\nComponents: main\n";
        assert_eq!(
            firmware.in_stanzas(stanzas),
            "Types: deb\nComponents: main non-free-firmware\nSuites: bookworm-security\n\n\
             Types: deb\nSuites: nodistro\nComponents: main\n"
        );
        let none = Components {
            components: &[],
            ..firmware
        };
        assert_eq!(none.in_stanzas(stanzas), stanzas);
    }
}
