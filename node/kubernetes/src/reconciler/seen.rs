//! What the reconciler knows of the objects of Kubernetes: a watch for each kind.

use futures::stream::{BoxStream, StreamExt as _};
use hearth_kubernetes_api::fields::{Claim, Node, Object, Volume};
use hearth_kubernetes_api::store::{Event, Full, Kept, Known};
use hearth_kubernetes_api::watch::{Which, watch};
use hearth_kubernetes_api::{Client, Objects, Watching, kinds};
use hearth_network_policy::objects::{Namespace, Pod, Policy};
use serde::de::DeserializeOwned;

use super::policies::Published;
use crate::policy;
use crate::volumes::plan;

/// The watched objects.
#[derive(Default)]
pub(super) struct Seen {
    pub nodes: Known<Node>,
    pub claims: Known<Claim>,
    pub volumes: Known<Volume>,
    pub pods: Known<Pod>,
    pub namespaces: Known<Namespace>,
    pub policies: Known<Policy>,
    pub published: Known<Published>,
}

/// An event of one of the watches.
pub(super) enum News {
    Nodes(Event<Node>),
    Claims(Event<Claim>),
    Volumes(Event<Volume>),
    Pods(Event<Pod>),
    Namespaces(Event<Namespace>),
    Policies(Event<Policy>),
    Published(Event<Published>),
}

impl Seen {
    /// Returns whether something has changed on which network policies depend.
    pub(super) fn take(&mut self, news: News) -> bool {
        match news {
            News::Nodes(event) => {
                self.nodes.take(event);
            }
            News::Claims(event) => {
                self.claims.take(event);
            }
            News::Volumes(event) => {
                self.volumes.take(event);
            }
            News::Pods(event) => return self.pods.take(event),
            News::Namespaces(event) => return self.namespaces.take(event),
            News::Policies(event) => return self.policies.take(event),
            News::Published(event) => return self.published.take(event),
        }
        false
    }
}

/// The watches of a leader.
pub(super) struct Sources<'a> {
    /// With all permissions.
    pub client: &'a Client,
    /// The runnable that watches.
    pub watching: &'a Watching<'a>,
}

impl<'a> Sources<'a> {
    /// Watches objects.
    fn follow<O, T>(
        &self,
        objects: Objects,
        read: fn(O) -> Option<T>,
        full: Full,
        news: fn(Event<T>) -> News,
    ) -> BoxStream<'a, News>
    where
        O: Object + DeserializeOwned + 'a,
        T: Kept + Send + 'a,
    {
        let (watching, what) = (self.watching, objects.kind().plural);
        let told = watch(objects, Which::All, read, full);
        let told = told.filter_map(move |told| async move {
            match told {
                Ok(event) => Some(news(event)),
                Err(error) => {
                    watching.failed(what, &error);
                    None
                }
            }
        });
        told.boxed()
    }

    /// All of them. `seen` is to take what they return.
    pub(super) fn all(&self, seen: &Seen) -> [BoxStream<'a, News>; 7] {
        let all = |kind| self.client.all(kind);
        let maps = self.client.within(policy::NAMESPACE, kinds::CONFIG_MAPS);
        [
            self.follow(all(kinds::NODES), Some, seen.nodes.full(), News::Nodes),
            self.follow(
                all(kinds::CLAIMS),
                plan::waiting,
                seen.claims.full(),
                News::Claims,
            ),
            self.follow(
                all(kinds::VOLUMES),
                Some,
                seen.volumes.full(),
                News::Volumes,
            ),
            self.follow(all(kinds::PODS), Pod::read, seen.pods.full(), News::Pods),
            self.follow(
                all(kinds::NAMESPACES),
                Namespace::read,
                seen.namespaces.full(),
                News::Namespaces,
            ),
            self.follow(
                all(kinds::NETWORK_POLICIES),
                Policy::read,
                seen.policies.full(),
                News::Policies,
            ),
            self.follow(
                maps,
                Published::read,
                seen.published.full(),
                News::Published,
            ),
        ]
    }
}
