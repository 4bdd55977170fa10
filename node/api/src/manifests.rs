//! The Kubernetes objects that a cluster gets when it is founded (`cluster_bootstrap.manifests`): what they must say of
//! themselves, and how much there may be of them.
//!
//! Each is JSON. YAML is turned into JSON by the tools that write parameters: nodes have no parser for it, and kubectl
//! knows what a number with a leading zero means in a manifest.
//!
//! # Invariants
//! - Each object can be addressed: it has `apiVersion`, `kind` and `metadata.name`, in the characters that Kubernetes
//!   allows in a path.
//! - No object is a `Secret`: until they are applied, objects are in the parameters, in the sealed configuration and in
//!   etcd as they are, and Secrets in etcd are encrypted.

use std::fmt;

use serde_json::Value as Json;

use crate::labels::quoted;

/// Maximum number of objects: they are stored in one transaction of etcd, which may have 128 operations.
pub const MAX_OBJECTS: usize = 100;
/// Maximum bytes of all objects together. Parameters may have 256 KiB.
pub const MAX_BYTES: usize = 192 << 10;
/// Maximum bytes of a name or a namespace.
const MAX_NAME: usize = 253;

/// Where an object says what it is, and what it should say there.
const API_VERSION: (&str, &str) = ("/apiVersion", "a version, such as \"v1\" or \"apps/v1\"");
const KIND: (&str, &str) = ("/kind", "a kind, such as \"Deployment\"");
const NAME: (&str, &str) = ("/metadata/name", "the name of an object");
const NAMESPACE: (&str, &str) = ("/metadata/namespace", "the name of a namespace");

/// Why objects are not accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: expected {expected}, got {found}")]
pub struct ManifestError {
    /// The field, such as `manifests[2].metadata.name`.
    pub field: String,
    /// What it should contain.
    pub expected: String,
    /// What it contains.
    pub found: String,
}

/// A Kubernetes object.
#[derive(Clone, PartialEq, Eq)]
pub struct Manifest {
    object: Json,
}

impl Manifest {
    /// Parses JSON. `field` is what errors name.
    ///
    /// # Errors
    /// If it is not an object of Kubernetes with a name, or is a `Secret`.
    pub fn parse(field: &str, text: &str) -> Result<Self, ManifestError> {
        let object: Json = serde_json::from_str(text).map_err(|error| ManifestError {
            field: field.to_owned(),
            expected: "a Kubernetes object in JSON".to_owned(),
            found: error.to_string(),
        })?;
        let manifest = Self { object };
        manifest.check(field)?;
        Ok(manifest)
    }

    fn check(&self, field: &str) -> Result<(), ManifestError> {
        let is_kind = |text: &str| text.chars().all(|c| c.is_ascii_alphanumeric());
        self.expect(field, API_VERSION, is_api_version)?;
        self.expect(field, KIND, |text| !text.is_empty() && is_kind(text))?;
        self.expect(field, NAME, is_name)?;
        if self.namespace().is_some() {
            self.expect(field, NAMESPACE, is_name)?;
        }
        match (self.api_version(), self.kind()) {
            ("v1", "Secret") => Err(ManifestError {
                field: format!("{field}.kind"),
                expected: "no Secret (it would be stored in clear text until it is applied)"
                    .to_owned(),
                found: quoted("Secret"),
            }),
            _ => Ok(()),
        }
    }

    fn expect(
        &self,
        field: &str,
        (path, expected): (&str, &str),
        is_valid: impl Fn(&str) -> bool,
    ) -> Result<(), ManifestError> {
        let found = match self.object.pointer(path) {
            Some(Json::String(text)) if is_valid(text) => return Ok(()),
            Some(Json::String(text)) => quoted(text),
            Some(other) => other.to_string(),
            None => "nothing".to_owned(),
        };
        Err(ManifestError {
            field: format!("{field}{}", path.replace('/', ".")),
            expected: expected.to_owned(),
            found,
        })
    }

    /// Parses all objects of `cluster_bootstrap`, which are applied in this order.
    ///
    /// # Errors
    /// If one is not accepted, or there are too many.
    pub fn parse_all(texts: &[String]) -> Result<Vec<Self>, ManifestError> {
        let too_much = |expected: String, found: usize| ManifestError {
            field: "manifests".to_owned(),
            expected,
            found: found.to_string(),
        };
        if texts.len() > MAX_OBJECTS {
            let expected = format!("at most {MAX_OBJECTS} objects");
            return Err(too_much(expected, texts.len()));
        }
        let bytes = texts.iter().map(String::len).sum();
        if bytes > MAX_BYTES {
            return Err(too_much(format!("at most {MAX_BYTES} bytes"), bytes));
        }
        let texts = texts.iter().enumerate();
        texts
            .map(|(index, text)| Self::parse(&format!("manifests[{index}]"), text))
            .collect()
    }

    fn text(&self, path: &str) -> Option<&str> {
        self.object.pointer(path)?.as_str()
    }

    /// Group and version, such as `apps/v1`.
    pub fn api_version(&self) -> &str {
        self.text(API_VERSION.0).unwrap_or_default()
    }

    /// Its kind, such as `Deployment`.
    pub fn kind(&self) -> &str {
        self.text(KIND.0).unwrap_or_default()
    }

    /// Its namespace, if it names one.
    pub fn namespace(&self) -> Option<&str> {
        let namespace = self.object.pointer(NAMESPACE.0)?;
        // What is no text is an error.
        Some(namespace.as_str().unwrap_or_default())
    }

    /// Its name.
    pub fn name(&self) -> &str {
        self.text(NAME.0).unwrap_or_default()
    }

    /// The whole object as text.
    pub fn to_json(&self) -> String {
        self.object.to_string()
    }

    /// The whole object.
    pub fn object(&self) -> &Json {
        &self.object
    }
}

/// Such as `Deployment kube-system/metrics-server`.
impl fmt::Display for Manifest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (kind, name) = (self.kind(), self.name());
        match self.namespace() {
            Some(namespace) => write!(f, "{kind} {namespace}/{name}"),
            None => write!(f, "{kind} {name}"),
        }
    }
}

/// Without the content.
impl fmt::Debug for Manifest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Manifest({self})")
    }
}

fn is_api_version(text: &str) -> bool {
    let (group, version) = text.rsplit_once('/').unwrap_or(("none", text));
    let is_part = |part: &str| {
        let known = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.');
        !part.is_empty() && part.len() <= MAX_NAME && part.chars().all(known)
    };
    is_part(version) && version.starts_with('v') && is_part(group) && !group.starts_with('.')
}

fn is_name(text: &str) -> bool {
    is_segment(text) && text.len() <= MAX_NAME
}

/// Whether a name can be a segment of a path as it is. Names in Kubernetes have no other characters.
pub fn is_segment(name: &str) -> bool {
    let known = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | ':' | '_');
    !matches!(name, "" | "." | "..") && name.chars().all(known)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Manifest, String> {
        Manifest::parse("manifests[2]", text).map_err(|error| error.to_string())
    }

    #[test]
    fn an_object_says_what_it_is() {
        let text = r#"{"apiVersion":"apps/v1","kind":"Deployment","metadata":{"name":"web","namespace":"shop","labels":{}},"spec":{}}"#;
        let parsed = parse(text).unwrap();
        assert_eq!(parsed.to_string(), "Deployment shop/web");
        assert_eq!((parsed.api_version(), parsed.name()), ("apps/v1", "web"));
        assert!(parsed.object()["spec"].is_object());
        assert_eq!(format!("{parsed:?}"), "Manifest(Deployment shop/web)");
        let text = r#"{"apiVersion":"v1","kind":"Namespace","metadata":{"name":"shop"}}"#;
        assert_eq!(parse(text).unwrap().namespace(), None);
    }

    #[test]
    fn errors_name_the_field_what_is_expected_and_what_was_found() {
        for (text, expected) in [
            (
                "{",
                "manifests[2]: expected a Kubernetes object in JSON, got EOF while parsing an object at line 1 column 1",
            ),
            (
                "[]",
                "manifests[2].apiVersion: expected a version, such as \"v1\" or \"apps/v1\", got nothing",
            ),
            (
                r#"{"apiVersion":"apps/../v1","kind":"A","metadata":{"name":"a"}}"#,
                "manifests[2].apiVersion: expected a version, such as \"v1\" or \"apps/v1\", got \"apps/../v1\"",
            ),
            (
                r#"{"apiVersion":"v1","kind":7,"metadata":{"name":"a"}}"#,
                "manifests[2].kind: expected a kind, such as \"Deployment\", got 7",
            ),
            (
                r#"{"apiVersion":"v1","kind":"Secret","metadata":{"name":"a"}}"#,
                "manifests[2].kind: expected no Secret (it would be stored in clear text until it is applied), got \"Secret\"",
            ),
            (
                r#"{"apiVersion":"v1","kind":"Pod","metadata":{"generateName":"a"}}"#,
                "manifests[2].metadata.name: expected the name of an object, got nothing",
            ),
            (
                r#"{"apiVersion":"v1","kind":"Pod","metadata":{"name":"a","namespace":"b/c"}}"#,
                "manifests[2].metadata.namespace: expected the name of a namespace, got \"b/c\"",
            ),
        ] {
            assert_eq!(parse(text).unwrap_err(), expected);
        }
    }

    #[test]
    fn there_are_limits() {
        let one = |name: &str| {
            format!(r#"{{"apiVersion":"v1","kind":"Pod","metadata":{{"name":"{name}"}}}}"#)
        };
        let parsed = Manifest::parse_all(&[one("a"), one("b")]).unwrap();
        assert_eq!(parsed.len(), 2);
        let error = Manifest::parse_all(&[one("a"), one("")]).unwrap_err();
        assert_eq!(error.field, "manifests[1].metadata.name");
        let error = Manifest::parse_all(&vec![one("a"); MAX_OBJECTS + 1]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "manifests: expected at most 100 objects, got 101"
        );
        let error = Manifest::parse_all(&[" ".repeat(MAX_BYTES + 1)]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "manifests: expected at most 196608 bytes, got 196609"
        );
    }
}
