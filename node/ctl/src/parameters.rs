//! The text form of a machine's parameters, for people: protobuf's JSON mapping of
//! `hearth.v1.NodeParameters`, in JSON, or in YAML of the same tree.
//!
//! A node has no parser for it: [`hearth_parameters`] decodes the message, and this module only
//! converts between the message and text. The conversion is exact in both directions: a message that
//! is written as text and read again is the same message, and so is the text, up to comments, the
//! order of fields and the notations that the mapping leaves open.
//!
//! What is read is read strictly, for the reason for which nodes are strict: an unknown field, a
//! field that is set twice (also by its two names), an unknown name of an enum and a value of
//! another type are errors that name the field ([`check`]). Fields are written with the names in the
//! proto file, because those are the names in all messages about parameters; both names are read.
//! A file is JSON if its first character is `{`, otherwise YAML 1.2. JSON is not left to the YAML
//! parser, although most JSON is YAML: escapes are not the same.
//!
//! The mapping itself is that of prost-reflect, which knows the messages by the descriptors of
//! `hearth-api`, so a new field needs no code here.

mod check;
mod redacted;
mod tree;

#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::LazyLock;

use hearth_api::v1::NodeParameters;
use prost::Message as _;
use prost_reflect::{
    DescriptorPool, DeserializeOptions, DynamicMessage, MessageDescriptor, SerializeOptions,
};
use serde::Serialize;
use serde::ser::Serializer;

pub(crate) use redacted::redacted;
use tree::Tree;

/// The message, by its name in the proto files.
const MESSAGE: &str = "hearth.v1.NodeParameters";

static DESCRIPTOR: LazyLock<MessageDescriptor> = LazyLock::new(|| {
    DescriptorPool::decode(hearth_api::FILE_DESCRIPTOR_SET)
        .ok()
        .and_then(|pool| pool.get_message_by_name(MESSAGE))
        .expect("the descriptors of this program have the parameters")
});

/// A notation of the tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Notation {
    Yaml,
    Json,
}

/// Why text is not read as parameters.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum TextError {
    /// It is not in the notation.
    Syntax {
        notation: Notation,
        /// The error of the parser, with the place.
        what: String,
    },
    /// A value that is not in the message.
    Field {
        /// Its path; empty for the whole message.
        path: String,
        expected: String,
        found: String,
    },
}

impl TextError {
    fn field(path: &str, expected: impl Into<String>, found: impl Into<String>) -> Self {
        Self::Field {
            path: path.to_owned(),
            expected: expected.into(),
            found: found.into(),
        }
    }
}

impl std::error::Error for TextError {}

impl fmt::Display for TextError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Syntax { notation, what } => write!(f, "not {notation:?}: {what}"),
            Self::Field {
                path,
                expected,
                found,
            } => {
                if !path.is_empty() {
                    write!(f, "{path}: ")?;
                }
                write!(f, "expected {expected}, got {found}")
            }
        }
    }
}

/// Reads the text form.
pub(crate) fn read(text: &str) -> Result<NodeParameters, TextError> {
    let tree = check::checked(&DESCRIPTOR, parse(text)?)?;
    // The mapping's own errors name no field: `serde_path_to_error` adds where they occurred.
    let mut track = serde_path_to_error::Track::new();
    let tree = tree.into_json();
    let deserializer = serde_path_to_error::Deserializer::new(tree, &mut track);
    let options = DeserializeOptions::new().deny_unknown_fields(true);
    let read = DynamicMessage::deserialize_with_options(DESCRIPTOR.clone(), deserializer, &options);
    let message = read.map_err(|error| {
        let expected = "a value as in protobuf's JSON mapping";
        TextError::field(&track.path().to_string(), expected, error.to_string())
    })?;
    let decoded = NodeParameters::decode(&message.encode_to_vec()[..]);
    Ok(decoded.expect("both are made from the same proto files"))
}

fn parse(text: &str) -> Result<Tree, TextError> {
    let wrong = |notation, error: &dyn fmt::Display| TextError::Syntax {
        notation,
        what: error.to_string(),
    };
    if text.trim_start().starts_with('{') {
        return serde_json::from_str(text).map_err(|error| wrong(Notation::Json, &error));
    }
    let options = serde_saphyr::options! {
        // Neither is YAML 1.2: "no" is text.
        strict_booleans: true,
        merge_keys: serde_saphyr::options::MergeKeyPolicy::Error,
        reject_unsupported_tags: true,
        // An excerpt of the text may contain a secret.
        with_snippet: false,
    };
    serde_saphyr::from_str_with_options(text, options)
        .map_err(|error| wrong(Notation::Yaml, &error))
}

/// Writes the text form.
pub(crate) fn write(message: &NodeParameters, notation: Notation) -> String {
    Tree::of(message).text(notation)
}

impl Tree {
    fn of(message: &NodeParameters) -> Self {
        let bytes = message.encode_to_vec();
        let message = DynamicMessage::decode(DESCRIPTOR.clone(), &bytes[..]);
        let message = message.expect("both are made from the same proto files");
        // By way of text, which keeps the order of the fields.
        let json = serde_json::to_string(&Mapped(&message));
        let tree = json.and_then(|json| serde_json::from_str(&json));
        tree.expect("the mapping makes JSON of every message")
    }

    fn text(&self, notation: Notation) -> String {
        let text = match notation {
            Notation::Json => serde_json::to_string_pretty(self).ok(),
            Notation::Yaml => {
                let options = serde_saphyr::ser_options! { prefer_block_scalars: false };
                serde_saphyr::to_string_with_options(self, options).ok()
            }
        };
        let mut text = text.expect("a tree of text, numbers, lists and maps can be written");
        if !text.ends_with('\n') {
            text.push('\n');
        }
        text
    }
}

/// A message in protobuf's JSON mapping, with the names of the proto file.
struct Mapped<'a>(&'a DynamicMessage);

impl Serialize for Mapped<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let options = SerializeOptions::new().use_proto_field_name(true);
        self.0.serialize_with_options(serializer, &options)
    }
}
