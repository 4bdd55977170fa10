//! Follows services and their pods, as the API servers tell of them.
//!
//! Of each object only what has a name is kept. Most news are about the rest
//! (leaders that renew their claims in annotations of endpoints, every two
//! seconds), and make no new zone. A zone is told when both kinds have been
//! listed completely; while a listing is repeated, and while no API server
//! answers, the last one stands: old answers are better than none.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::sync::Arc;

use futures::StreamExt;
use hearth_base::event::Writer;
use hearth_base::supervisor::{Failure, Outcome};
use k8s_openapi::api::core::v1;
use kube::api::Api;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Client, Resource};

use super::zone::{Endpoint, Endpoints, Key, Objects, Port, Service, Target, Zone};
use crate::kubernetes::access::{Pauses, Watching};

/// News that are at hand together make one zone.
const TOGETHER: usize = 256;

/// One kind of objects: what was told, and the listing that is under way.
struct Kind<T> {
    name: &'static str,
    listed: bool,
    known: BTreeMap<Key, T>,
    coming: BTreeMap<Key, T>,
}

impl<T: PartialEq> Kind<T> {
    fn new(name: &'static str) -> Self {
        Self {
            name,
            listed: false,
            known: BTreeMap::new(),
            coming: BTreeMap::new(),
        }
    }

    /// Tells whether anything is different now.
    fn apply<K>(&mut self, event: Event<K>, read: impl Fn(&K) -> Option<T>) -> bool
    where
        K: Resource,
    {
        match event {
            Event::Init => {
                self.coming.clear();
                false
            }
            Event::InitApply(object) => {
                if let (Some(key), Some(value)) = (key(&object), read(&object)) {
                    self.coming.insert(key, value);
                }
                false
            }
            Event::InitDone => {
                let coming = std::mem::take(&mut self.coming);
                let news = !self.listed || coming != self.known;
                self.listed = true;
                self.known = coming;
                news
            }
            Event::Apply(object) => {
                let Some(key) = key(&object) else {
                    return false;
                };
                match read(&object) {
                    Some(value) if self.known.get(&key) == Some(&value) => false,
                    Some(value) => {
                        self.known.insert(key, value);
                        true
                    }
                    None => self.known.remove(&key).is_some(),
                }
            }
            Event::Delete(object) => {
                key(&object).is_some_and(|key| self.known.remove(&key).is_some())
            }
        }
    }
}

fn key<K: Resource>(object: &K) -> Option<Key> {
    let meta = object.meta();
    Some((meta.namespace.clone()?, meta.name.clone()?))
}

/// Follows them by this client. Ends by an error only: watches that are
/// refused or broken begin again by themselves.
pub async fn follow(
    client: Client,
    server: Ipv4Addr,
    zone: &Writer<Arc<Zone>>,
    watching: &Watching<'_>,
) -> Outcome {
    let services = watcher(
        Api::<v1::Service>::all(client.clone()),
        watcher::Config::default(),
    );
    let endpoints = watcher(
        Api::<v1::Endpoints>::all(client),
        watcher::Config::default(),
    );
    let services = services.backoff(Pauses).ready_chunks(TOGETHER);
    let endpoints = endpoints.backoff(Pauses).ready_chunks(TOGETHER);
    tokio::pin!(services, endpoints);
    let mut of_services = Kind::new("services");
    let mut of_endpoints = Kind::new("endpoints");
    loop {
        let news = tokio::select! {
            Some(events) = services.next() => {
                take(&mut of_services, events, service, watching)
            }
            Some(events) = endpoints.next() => {
                take(&mut of_endpoints, events, endpoints_of, watching)
            }
            else => return Err(Failure::msg("the watches ended")),
        };
        if !(news && of_services.listed && of_endpoints.listed) {
            continue;
        }
        let objects = Objects {
            services: of_services.known,
            endpoints: of_endpoints.known,
        };
        zone.set(Arc::new(Zone::new(&objects, server)));
        watching.good();
        (of_services.known, of_endpoints.known) = (objects.services, objects.endpoints);
    }
}

fn take<K: Resource, T: PartialEq>(
    kind: &mut Kind<T>,
    events: Vec<watcher::Result<Event<K>>>,
    read: impl Fn(&K) -> Option<T>,
    watching: &Watching<'_>,
) -> bool {
    let mut news = false;
    for event in events {
        match event {
            Ok(event) => news |= kind.apply(event, &read),
            Err(error) => watching.failed(kind.name, &error),
        }
    }
    news
}

/// What names need of a service; nothing if it has none.
fn service(object: &v1::Service) -> Option<Service> {
    let spec = object.spec.as_ref()?;
    let target = match (spec.type_.as_deref(), spec.cluster_ip.as_deref()) {
        (Some("ExternalName"), _) => Target::Elsewhere(spec.external_name.clone()?),
        (_, Some("None")) => Target::Headless,
        (_, Some(address)) => Target::Address(address.parse().ok()?),
        // Not admitted yet.
        (_, None) => return None,
    };
    let ports = spec.ports.iter().flatten();
    let ports = ports.filter_map(|port| {
        Some(Port {
            name: port.name.clone().filter(|name| !name.is_empty())?,
            protocol: port.protocol.clone().unwrap_or_else(|| "TCP".to_owned()),
            number: u16::try_from(port.port).ok()?,
        })
    });
    Some(Service {
        target,
        ports: ports.collect(),
    })
}

/// The pods that are ready. (Of a service that wants the others, too, Kubernetes
/// lists them all as ready.)
#[allow(deprecated)] // Kubernetes 1.20 has no other form that is stable.
fn endpoints_of(object: &v1::Endpoints) -> Option<Endpoints> {
    let mut all = Endpoints::new();
    for subset in object.subsets.iter().flatten() {
        let ports = subset.ports.iter().flatten();
        let ports: Vec<Port> = ports
            .filter_map(|port| {
                Some(Port {
                    name: port.name.clone().filter(|name| !name.is_empty())?,
                    protocol: port.protocol.clone().unwrap_or_else(|| "TCP".to_owned()),
                    number: u16::try_from(port.port).ok()?,
                })
            })
            .collect();
        for address in subset.addresses.iter().flatten() {
            if let Ok(ip) = address.ip.parse() {
                all.push(Endpoint {
                    address: ip,
                    hostname: address.hostname.clone().filter(|name| !name.is_empty()),
                    ports: ports.clone(),
                });
            }
        }
    }
    Some(all)
}
