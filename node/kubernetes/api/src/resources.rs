//! Objects of any kind, with what the API server says of their kind: for objects that come from outside, while
//! [`kinds`](super::kinds) are those that Hearth itself uses.

use http::uri::PathAndQuery;
use http::{Method, StatusCode};
use serde_json::Value as Json;

use super::{APPLY, ApiError, Client, apply_query, path, segment};

/// The namespace of objects that name none.
const DEFAULT_NAMESPACE: &str = "default";

/// Where the objects of a kind are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resource {
    /// Path of the API group and version.
    root: String,
    /// Name of the resource in a URL, such as `deployments`.
    plural: String,
    is_namespaced: bool,
}

impl Client {
    /// Where objects of this kind are; `None` if the API server does not know it, or not yet. `api_version` is such as
    /// `apps/v1`.
    ///
    /// # Errors
    /// If the API server does not answer.
    pub async fn resource(
        &self,
        api_version: &str,
        kind: &str,
    ) -> Result<Option<Resource>, ApiError> {
        let root = root(api_version)?;
        let answer = match self.ask(Method::GET, root.parse()?, None).await {
            Ok(answer) => answer,
            Err(error) if error.is(StatusCode::NOT_FOUND) => return Ok(None),
            Err(error) => return Err(error),
        };
        let list: Json = serde_json::from_slice(&answer)?;
        let entries = list["resources"].as_array().into_iter().flatten();
        let found = entries
            .filter(|entry| entry["kind"] == kind)
            .find_map(|entry| {
                let plural = entry["name"].as_str()?;
                // What has a slash is a part of an object, such as `deployments/scale`.
                (!plural.contains('/')).then(|| Resource {
                    root: root.clone(),
                    plural: plural.to_owned(),
                    is_namespaced: entry["namespaced"] == true,
                })
            });
        Ok(found)
    }

    /// Like [`Objects::apply`](super::Objects::apply).
    ///
    /// # Errors
    /// If the API server refuses it, or does not answer.
    pub async fn apply(
        &self,
        resource: &Resource,
        name: Name<'_>,
        object: &Json,
    ) -> Result<(), ApiError> {
        let path = resource.path(name, &apply_query())?;
        let body = Some((APPLY, object));
        self.ask(Method::PATCH, path, body).await.map(drop)
    }

    /// Whether there is such an object.
    ///
    /// # Errors
    /// If the API server does not answer.
    pub async fn exists(&self, resource: &Resource, name: Name<'_>) -> Result<bool, ApiError> {
        let path = resource.path(name, "")?;
        match self.ask(Method::GET, path, None).await {
            Ok(_) => Ok(true),
            Err(error) if error.is(StatusCode::NOT_FOUND) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// Namespace and name of an object. One that names no namespace is in `default`, if its kind has namespaces.
pub type Name<'a> = (Option<&'a str>, &'a str);

impl Resource {
    fn path(&self, (namespace, name): Name<'_>, query: &str) -> Result<PathAndQuery, ApiError> {
        let namespace = self
            .is_namespaced
            .then(|| namespace.unwrap_or(DEFAULT_NAMESPACE));
        path(&self.root, namespace, &self.plural, Some(name), query)
    }
}

/// Path of an API group and version.
fn root(api_version: &str) -> Result<String, ApiError> {
    match api_version.split_once('/') {
        None => Ok(format!("/api/{}", segment(api_version)?)),
        Some((group, version)) => {
            let (group, version) = (segment(group)?, segment(version)?);
            Ok(format!("/apis/{group}/{version}"))
        }
    }
}
