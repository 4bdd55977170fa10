//! The kinds of settings: how a value of each kind is read, written and checked.
//!
//! In each kind, `field` returns the setting's field, and creates the messages around it.

use std::ops::RangeInclusive;

use super::{SettingError, Value};
use crate::labels::quoted;
use crate::registries::{self, Credential, HIDDEN};
use crate::v1::ClusterConfiguration;

/// The access of a setting to its field.
pub(super) trait Kind {
    /// The value, which may be none.
    fn value(&self, of: &mut ClusterConfiguration) -> Value;

    /// Checks the value; none is valid.
    fn check(&self, path: &str, of: &mut ClusterConfiguration) -> Result<(), SettingError>;

    /// Sets the value that is written as this text; an empty text removes it. Need not check it.
    fn assign(
        &self,
        path: &str,
        of: &mut ClusterConfiguration,
        text: &str,
    ) -> Result<(), SettingError>;

    /// Copies the value, which may be none.
    fn copy(&self, from: &mut ClusterConfiguration, to: &mut ClusterConfiguration);

    /// Sets the default if there is no value.
    fn fill(&self, of: &mut ClusterConfiguration);

    /// Replaces what is secret in the value.
    fn hide(&self, _of: &mut ClusterConfiguration) {}

    /// Puts what was secret in `from` in the places where [`Kind::hide`] has replaced it.
    fn reveal(
        &self,
        _path: &str,
        _of: &mut ClusterConfiguration,
        _from: &mut ClusterConfiguration,
    ) -> Result<(), SettingError> {
        Ok(())
    }

    /// What the value should be, if there is none and no default either.
    fn missing(&self, _of: &mut ClusterConfiguration) -> Option<String> {
        None
    }
}

/// A text. The empty text is no value.
pub(super) struct Text {
    pub field: fn(&mut ClusterConfiguration) -> &mut String,
    pub default: &'static str,
    pub expected: &'static str,
    pub is_valid: fn(&str) -> bool,
}

impl Kind for Text {
    fn value(&self, of: &mut ClusterConfiguration) -> Value {
        Value::Text((self.field)(of).clone())
    }

    fn check(&self, path: &str, of: &mut ClusterConfiguration) -> Result<(), SettingError> {
        let text = (self.field)(of);
        if text.is_empty() || (self.is_valid)(text) {
            return Ok(());
        }
        Err(error(path, self.expected, quoted(text)))
    }

    fn assign(
        &self,
        _path: &str,
        of: &mut ClusterConfiguration,
        text: &str,
    ) -> Result<(), SettingError> {
        text.clone_into((self.field)(of));
        Ok(())
    }

    fn copy(&self, from: &mut ClusterConfiguration, to: &mut ClusterConfiguration) {
        (self.field)(to).clone_from((self.field)(from));
    }

    fn fill(&self, of: &mut ClusterConfiguration) {
        // An empty default would only create empty messages around it.
        if !self.default.is_empty() && (self.field)(of).is_empty() {
            self.default.clone_into((self.field)(of));
        }
    }
}

/// A value of an enum. 0 is no value.
pub(super) struct Choice {
    pub field: fn(&mut ClusterConfiguration) -> &mut i32,
    /// The name of a value in the proto file; `None` if this release does not know it. The values
    /// of an enum have no gaps.
    pub name: fn(i32) -> Option<&'static str>,
    /// 0 if there is none.
    pub default: i32,
    pub supported: &'static [i32],
}

impl Choice {
    /// The name of a value without the prefix that all names have, or its number. Empty for no
    /// value.
    fn short_name(&self, number: i32) -> String {
        if number == 0 {
            return String::new();
        }
        let prefix = (self.name)(0).and_then(|name| name.strip_suffix("UNSPECIFIED"));
        let Some(name) = (self.name)(number) else {
            return number.to_string();
        };
        name.strip_prefix(prefix.unwrap_or(""))
            .unwrap_or(name)
            .to_owned()
    }

    /// The value with this short name.
    fn number(&self, text: &str) -> Option<i32> {
        (1..)
            .take_while(|number| (self.name)(*number).is_some())
            .find(|number| self.short_name(*number).eq_ignore_ascii_case(text))
    }

    /// The supported values, as an error states them.
    fn expected(&self) -> String {
        let names: Vec<_> = self.supported.iter().map(|n| self.short_name(*n)).collect();
        match names.split_last() {
            Some((last, others)) if !others.is_empty() => {
                format!("{} or {last}", others.join(", "))
            }
            _ => names.concat(),
        }
    }
}

impl Kind for Choice {
    fn value(&self, of: &mut ClusterConfiguration) -> Value {
        Value::Text(self.short_name(*(self.field)(of)))
    }

    fn check(&self, path: &str, of: &mut ClusterConfiguration) -> Result<(), SettingError> {
        let number = *(self.field)(of);
        if number == 0 || self.supported.contains(&number) {
            return Ok(());
        }
        Err(error(path, self.expected(), self.short_name(number)))
    }

    fn assign(
        &self,
        path: &str,
        of: &mut ClusterConfiguration,
        text: &str,
    ) -> Result<(), SettingError> {
        *(self.field)(of) = match text {
            "" => 0,
            text => self
                .number(text)
                .ok_or_else(|| error(path, self.expected(), quoted(text)))?,
        };
        Ok(())
    }

    fn copy(&self, from: &mut ClusterConfiguration, to: &mut ClusterConfiguration) {
        *(self.field)(to) = *(self.field)(from);
    }

    fn fill(&self, of: &mut ClusterConfiguration) {
        let number = (self.field)(of);
        if *number == 0 {
            *number = self.default;
        }
    }

    fn missing(&self, of: &mut ClusterConfiguration) -> Option<String> {
        let is_missing = *(self.field)(of) == 0 && self.default == 0;
        is_missing.then(|| self.expected())
    }
}

/// A number. 0 is no value.
pub(super) struct Number {
    pub field: fn(&mut ClusterConfiguration) -> &mut u32,
    pub default: u32,
    pub range: RangeInclusive<u32>,
}

impl Number {
    fn expected(&self) -> String {
        format!(
            "a number from {} to {}",
            self.range.start(),
            self.range.end()
        )
    }
}

impl Kind for Number {
    fn value(&self, of: &mut ClusterConfiguration) -> Value {
        Value::Number(*(self.field)(of))
    }

    fn check(&self, path: &str, of: &mut ClusterConfiguration) -> Result<(), SettingError> {
        let number = *(self.field)(of);
        if number == 0 || self.range.contains(&number) {
            return Ok(());
        }
        Err(error(path, self.expected(), number.to_string()))
    }

    fn assign(
        &self,
        path: &str,
        of: &mut ClusterConfiguration,
        text: &str,
    ) -> Result<(), SettingError> {
        *(self.field)(of) = match text {
            "" => 0,
            // Would be no value.
            "0" => return Err(error(path, self.expected(), text)),
            text => text
                .parse()
                .map_err(|_| error(path, self.expected(), quoted(text)))?,
        };
        Ok(())
    }

    fn copy(&self, from: &mut ClusterConfiguration, to: &mut ClusterConfiguration) {
        *(self.field)(to) = *(self.field)(from);
    }

    fn fill(&self, of: &mut ClusterConfiguration) {
        let number = (self.field)(of);
        if *number == 0 {
            *number = self.default;
        }
    }
}

/// A list without repetitions, whose elements are valid one by one. The empty list is no value.
pub(super) struct List {
    pub field: fn(&mut ClusterConfiguration) -> &mut Vec<String>,
    pub default: &'static [&'static str],
    pub max_length: usize,
    /// What an element should be. It contains no comma.
    pub expected: &'static str,
    pub is_valid: fn(&str) -> bool,
}

impl Kind for List {
    fn value(&self, of: &mut ClusterConfiguration) -> Value {
        Value::List((self.field)(of).clone())
    }

    fn check(&self, path: &str, of: &mut ClusterConfiguration) -> Result<(), SettingError> {
        let list = (self.field)(of);
        if list.len() > self.max_length {
            let expected = format!("at most {} values", self.max_length);
            return Err(error(path, expected, list.len().to_string()));
        }
        for (index, element) in list.iter().enumerate() {
            let expected = if !(self.is_valid)(element) {
                self.expected
            } else if list[..index].contains(element) {
                "a value that is not listed before"
            } else {
                continue;
            };
            return Err(error(
                &format!("{path}[{index}]"),
                expected,
                quoted(element),
            ));
        }
        Ok(())
    }

    fn assign(
        &self,
        _path: &str,
        of: &mut ClusterConfiguration,
        text: &str,
    ) -> Result<(), SettingError> {
        let elements = text.split(',').map(|element| element.trim().to_owned());
        *(self.field)(of) = match text {
            "" => Vec::new(),
            _ => elements.collect(),
        };
        Ok(())
    }

    fn copy(&self, from: &mut ClusterConfiguration, to: &mut ClusterConfiguration) {
        (self.field)(to).clone_from((self.field)(from));
    }

    fn fill(&self, of: &mut ClusterConfiguration) {
        // An empty default would only create empty messages around the list.
        if !self.default.is_empty() && (self.field)(of).is_empty() {
            *(self.field)(of) = self.default.iter().map(|&text| text.to_owned()).collect();
        }
    }
}

/// A list of certificates of authorities. It can also be written as a PEM file.
pub(super) struct Authorities(pub List);

impl Kind for Authorities {
    fn value(&self, of: &mut ClusterConfiguration) -> Value {
        self.0.value(of)
    }

    fn check(&self, path: &str, of: &mut ClusterConfiguration) -> Result<(), SettingError> {
        self.0.check(path, of)
    }

    fn assign(
        &self,
        path: &str,
        of: &mut ClusterConfiguration,
        text: &str,
    ) -> Result<(), SettingError> {
        match registries::authorities_from_pem(text) {
            Some(elements) => *(self.0.field)(of) = elements,
            None => self.0.assign(path, of, text)?,
        }
        Ok(())
    }

    fn copy(&self, from: &mut ClusterConfiguration, to: &mut ClusterConfiguration) {
        self.0.copy(from, to);
    }

    fn fill(&self, _of: &mut ClusterConfiguration) {}
}

/// A list of credentials, one for each registry. No error repeats one.
pub(super) struct Credentials(pub List);

impl Credentials {
    fn parsed(&self, of: &mut ClusterConfiguration) -> Vec<Option<Credential>> {
        let list = (self.0.field)(of).iter();
        list.map(|text| text.parse().ok()).collect()
    }
}

impl Kind for Credentials {
    fn value(&self, of: &mut ClusterConfiguration) -> Value {
        self.0.value(of)
    }

    fn check(&self, path: &str, of: &mut ClusterConfiguration) -> Result<(), SettingError> {
        let parsed = self.parsed(of);
        if parsed.len() > self.0.max_length {
            return self.0.check(path, of);
        }
        for (index, credential) in parsed.iter().enumerate() {
            let found = match credential {
                None => "something else, which may be a secret".to_owned(),
                Some(credential) => {
                    let others = parsed[..index].iter().flatten();
                    if !others.clone().any(|c| c.registry == credential.registry) {
                        continue;
                    }
                    format!("{} twice", credential.registry)
                }
            };
            return Err(error(&format!("{path}[{index}]"), self.0.expected, found));
        }
        Ok(())
    }

    fn assign(
        &self,
        path: &str,
        of: &mut ClusterConfiguration,
        text: &str,
    ) -> Result<(), SettingError> {
        self.0.assign(path, of, text)
    }

    fn copy(&self, from: &mut ClusterConfiguration, to: &mut ClusterConfiguration) {
        self.0.copy(from, to);
    }

    fn fill(&self, _of: &mut ClusterConfiguration) {}

    fn hide(&self, of: &mut ClusterConfiguration) {
        let hidden = self.parsed(of).into_iter();
        let hidden = hidden.map(|one| one.map_or_else(|| HIDDEN.to_owned(), |one| one.hidden()));
        *(self.0.field)(of) = hidden.collect();
    }

    fn reveal(
        &self,
        path: &str,
        of: &mut ClusterConfiguration,
        from: &mut ClusterConfiguration,
    ) -> Result<(), SettingError> {
        let known = self.parsed(from);
        let wanted = self.parsed(of);
        for (index, one) in wanted.into_iter().enumerate() {
            let Some(one) = one.filter(Credential::is_hidden) else {
                continue;
            };
            let is_same = |place: &usize| {
                let known = known[*place].as_ref();
                known.is_some_and(|known| known.hidden() == one.hidden())
            };
            let place = (0..known.len()).find(is_same).ok_or_else(|| {
                let expected =
                    "a password, because the cluster has none for this registry and user";
                error(&format!("{path}[{index}]"), expected, HIDDEN)
            })?;
            let text = (self.0.field)(from)[place].clone();
            (self.0.field)(of)[index] = text;
        }
        Ok(())
    }
}

fn error(path: &str, expected: impl Into<String>, found: impl Into<String>) -> SettingError {
    SettingError {
        field: path.to_owned(),
        expected: expected.into(),
        found: found.into(),
    }
}
