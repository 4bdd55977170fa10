//! A tree of values as JSON and YAML have them. It keeps the order of fields, which `serde_json`'s own
//! does not, and refuses a key that occurs twice, of which that one keeps the last value.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde::ser::{Serialize, Serializer};
use serde_json::{Number, Value as Json};

/// A value.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Tree {
    Null,
    Bool(bool),
    Number(Number),
    Text(String),
    List(Vec<Tree>),
    /// In the order of the text; no key occurs twice.
    Map(Vec<(String, Tree)>),
}

impl Tree {
    /// The same as a value of `serde_json`, without the order.
    pub(super) fn into_json(self) -> Json {
        match self {
            Self::Null => Json::Null,
            Self::Bool(value) => Json::Bool(value),
            Self::Number(number) => Json::Number(number),
            Self::Text(text) => Json::String(text),
            Self::List(list) => Json::Array(list.into_iter().map(Self::into_json).collect()),
            Self::Map(map) => {
                let fields = map.into_iter();
                Json::Object(
                    fields
                        .map(|(key, value)| (key, value.into_json()))
                        .collect(),
                )
            }
        }
    }

    /// The value at a path of keys.
    pub(super) fn at_mut(&mut self, path: &[&str]) -> Option<&mut Self> {
        let Some((first, rest)) = path.split_first() else {
            return Some(self);
        };
        let Self::Map(map) = self else {
            return None;
        };
        let (_, value) = map.iter_mut().find(|(key, _)| key == first)?;
        value.at_mut(rest)
    }
}

impl Serialize for Tree {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Null => serializer.serialize_unit(),
            Self::Bool(value) => serializer.serialize_bool(*value),
            Self::Number(number) => number.serialize(serializer),
            Self::Text(text) => serializer.serialize_str(text),
            Self::List(list) => serializer.collect_seq(list),
            Self::Map(map) => serializer.collect_map(map.iter().map(|(key, value)| (key, value))),
        }
    }
}

impl<'de> Deserialize<'de> for Tree {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Values)
    }
}

struct Values;

impl<'de> Visitor<'de> for Values {
    type Value = Tree;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E: Error>(self) -> Result<Tree, E> {
        Ok(Tree::Null)
    }

    fn visit_none<E: Error>(self) -> Result<Tree, E> {
        Ok(Tree::Null)
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Tree, E> {
        Ok(Tree::Bool(value))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Tree, E> {
        Ok(Tree::Number(value.into()))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Tree, E> {
        Ok(Tree::Number(value.into()))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Tree, E> {
        let number = Number::from_f64(value);
        number
            .map(Tree::Number)
            .ok_or_else(|| E::custom("expected a finite number"))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Tree, E> {
        Ok(Tree::Text(value.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Tree, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element()? {
            list.push(item);
        }
        Ok(Tree::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Tree, A::Error> {
        let mut map: Vec<(String, Tree)> = Vec::new();
        while let Some(key) = fields.next_key::<String>()? {
            if map.iter().any(|(other, _)| *other == key) {
                return Err(A::Error::custom(format!("{key:?} occurs twice")));
            }
            map.push((key, fields.next_value()?));
        }
        Ok(Tree::Map(map))
    }
}
