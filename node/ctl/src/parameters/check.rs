//! Compares a tree with the messages that it is to become, before the library does: the library's
//! errors do not say what was expected, and of a field that is set by both of its names it keeps one
//! value.

use hearth_api::labels::quoted;
use hearth_api::registries::HIDDEN;
use prost_reflect::{EnumDescriptor, FieldDescriptor, Kind, MessageDescriptor};

use super::TextError;
use super::tree::Tree;

/// The tree with the names of the proto file, and without fields that are null: those are not set.
pub(super) fn checked(message: &MessageDescriptor, tree: Tree) -> Result<Tree, TextError> {
    self::message(message, tree, "")
}

fn message(message: &MessageDescriptor, tree: Tree, path: &str) -> Result<Tree, TextError> {
    let Tree::Map(map) = tree else {
        let expected = format!("the fields of {}", message.full_name());
        return Err(TextError::field(path, expected, kind(&tree)));
    };
    let mut known: Vec<(String, Tree)> = Vec::new();
    for (key, value) in map {
        let field = message
            .get_field_by_name(&key)
            .or_else(|| message.get_field_by_json_name(&key));
        let Some(field) = field else {
            let names: Vec<_> = message.fields().map(|one| one.name().to_owned()).collect();
            let expected = match names.is_empty() {
                true => "no field".to_owned(),
                false => format!("one of the fields {}", names.join(", ")),
            };
            return Err(TextError::field(path, expected, quoted(&key)));
        };
        let path = match path {
            "" => field.name().to_owned(),
            path => format!("{path}.{}", field.name()),
        };
        if known.iter().any(|(name, _)| name == field.name()) {
            let found = format!("{} and {}", field.name(), field.json_name());
            return Err(TextError::field(&path, "one value", found));
        }
        let other = known.iter().find(|(name, _)| {
            let other = message.get_field_by_name(name);
            field.containing_oneof().is_some()
                && other.and_then(|other| other.containing_oneof()) == field.containing_oneof()
        });
        if let Some((other, _)) = other {
            let expected = format!("either {other} or {}", field.name());
            return Err(TextError::field(parent(&path), expected, "both"));
        }
        if value != Tree::Null {
            known.push((field.name().to_owned(), self::field(&field, value, &path)?));
        }
    }
    Ok(Tree::Map(known))
}

fn parent(path: &str) -> &str {
    path.rsplit_once('.').map_or("", |(parent, _)| parent)
}

fn field(field: &FieldDescriptor, value: Tree, path: &str) -> Result<Tree, TextError> {
    if !field.is_list() {
        return single(field, value, path);
    }
    let Tree::List(list) = value else {
        return Err(TextError::field(path, "a list", kind(&value)));
    };
    let items = list.into_iter().enumerate();
    let items = items.map(|(index, item)| single(field, item, &format!("{path}[{index}]")));
    items.collect::<Result<_, _>>().map(Tree::List)
}

fn single(field: &FieldDescriptor, value: Tree, path: &str) -> Result<Tree, TextError> {
    let expected = match (field.kind(), &value) {
        (Kind::Message(inner), _) => return message(&inner, value, path),
        (Kind::Bytes, Tree::Text(text)) if text == HIDDEN => {
            let expected = "the secret (show it with --show-secrets)";
            return Err(TextError::field(path, expected, HIDDEN));
        }
        // How bytes and numbers are written is up to the mapping.
        (Kind::String | Kind::Bytes, Tree::Text(_)) | (Kind::Bool, Tree::Bool(_)) => None,
        (Kind::String, Tree::Number(_) | Tree::Bool(_)) => Some("text, in quotation marks".into()),
        (Kind::String, _) => Some("text".to_owned()),
        (Kind::Bytes, _) => Some("bytes in base64".to_owned()),
        (Kind::Bool, _) => Some("true or false".to_owned()),
        (Kind::Enum(values), Tree::Text(name)) => match values.get_value_by_name(name) {
            Some(_) => None,
            None => Some(names(&values)),
        },
        (Kind::Enum(_), Tree::Number(_)) => None,
        (Kind::Enum(values), _) => Some(names(&values)),
        (_, Tree::Number(_) | Tree::Text(_)) => None,
        (_, _) => Some("a number".to_owned()),
    };
    match (expected, &value) {
        (None, _) => Ok(value),
        (Some(expected), Tree::Text(text)) => Err(TextError::field(path, expected, quoted(text))),
        (Some(expected), _) => Err(TextError::field(path, expected, kind(&value))),
    }
}

fn names(values: &EnumDescriptor) -> String {
    let names: Vec<_> = values
        .values()
        .map(|value| value.name().to_owned())
        .collect();
    format!("one of {}", names.join(", "))
}

/// What is there, without the value of what may be a secret.
fn kind(tree: &Tree) -> String {
    match tree {
        Tree::Null => "nothing".to_owned(),
        Tree::Bool(value) => value.to_string(),
        Tree::Number(number) => number.to_string(),
        Tree::Text(_) => "text".to_owned(),
        Tree::List(_) => "a list".to_owned(),
        Tree::Map(_) => "fields".to_owned(),
    }
}
