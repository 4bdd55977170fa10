//! Label selectors.

use std::collections::BTreeMap;

use hearth_kubernetes_api::store::Kept as _;
use serde::Deserialize;

/// Labels by key.
pub type Labels = BTreeMap<String, String>;

/// A label selector. All parts must match; one without parts matches everything.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Selector {
    match_labels: Labels,
    match_expressions: Vec<Requirement>,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
struct Requirement {
    key: String,
    operator: Operator,
    #[serde(default)]
    values: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
enum Operator {
    In,
    NotIn,
    Exists,
    DoesNotExist,
}

impl Selector {
    /// Whether it matches an object with these labels.
    pub fn matches(&self, labels: &Labels) -> bool {
        let equal = |(key, value): (&String, &String)| labels.get(key) == Some(value);
        self.match_labels.iter().all(equal)
            && self.match_expressions.iter().all(|it| it.holds(labels))
    }

    pub(crate) fn bytes(&self) -> usize {
        let texts = |it: &Requirement| it.values.iter().map(|text| 24 + text.len()).sum::<usize>();
        let all = self.match_expressions.iter();
        let all = all.map(|it| size_of::<Requirement>() + it.key.len() + texts(it));
        self.match_labels.bytes() + all.sum::<usize>()
    }
}

impl Requirement {
    fn holds(&self, labels: &Labels) -> bool {
        let value = labels.get(&self.key);
        let listed = value.is_some_and(|value| self.values.contains(value));
        match self.operator {
            Operator::In => listed,
            // An object without the label matches, too.
            Operator::NotIn => !listed,
            Operator::Exists => value.is_some(),
            Operator::DoesNotExist => value.is_none(),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn selectors_match_as_those_of_kubernetes() {
        let labels: Labels = [("app", "web"), ("tier", "front")]
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .into();
        let expression = |key: &str, operator: &str, values: &[&str]| {
            let it = json!({ "key": key, "operator": operator, "values": values });
            json!({ "matchExpressions": [it] })
        };
        for (selector, wanted) in [
            (json!({}), true),
            (json!({ "matchLabels": { "app": "web" } }), true),
            (
                json!({ "matchLabels": { "app": "web", "tier": "back" } }),
                false,
            ),
            (json!({ "matchLabels": { "none": "" } }), false),
            (expression("app", "In", &["db", "web"]), true),
            (expression("app", "In", &["db"]), false),
            (expression("none", "In", &[""]), false),
            (expression("app", "NotIn", &["db"]), true),
            (expression("app", "NotIn", &["web"]), false),
            (expression("none", "NotIn", &["web"]), true),
            (expression("app", "Exists", &[]), true),
            (expression("none", "Exists", &[]), false),
            (expression("none", "DoesNotExist", &[]), true),
            (expression("app", "DoesNotExist", &[]), false),
        ] {
            let parsed: Selector = serde_json::from_value(selector.clone()).unwrap();
            assert_eq!(parsed.matches(&labels), wanted, "{selector}");
        }
        let unknown = expression("app", "Gt", &["1"]);
        assert!(serde_json::from_value::<Selector>(unknown).is_err());
    }
}
