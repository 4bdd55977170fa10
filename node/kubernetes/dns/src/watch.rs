//! Watches services and endpoints, and builds the zone.
//!
//! Of each object only the fields that DNS needs are kept. Most updates change other fields
//! (leaders that renew their leases in annotations of endpoints, every two seconds) and cause no
//! new zone. The first zone is published when both kinds have been listed completely. While a list
//! is repeated, and while no API server responds, the last zone stays: stale answers are better
//! than none.

use std::net::Ipv4Addr;
use std::sync::Arc;

use futures::StreamExt as _;
use hearth_base::event::Writer;
use hearth_base::supervisor::{Failure, Outcome};
use hearth_kubernetes_api::store::{Event, Kept, Known};
use hearth_kubernetes_api::watch::{Which, watch};
use hearth_kubernetes_api::{ApiError, Client, Watching, fields, kinds};

use super::zone::{Endpoint, Endpoints, Port, Service, Target, Zone};

/// Maximum number of pending events that are combined into one new zone.
const MAX_NEWS_PER_ZONE: usize = 256;

/// Maximum number of addresses that are kept of one object; Kubernetes' own controller writes no
/// more, but users can.
const MAX_ADDRESSES: usize = 1000;
/// The same of ports, of which each address has a copy.
const MAX_PORTS: usize = 100;

/// Watches with this client. Returns only on an error; watches that fail are retried.
pub(crate) async fn follow(
    client: Client,
    server: Ipv4Addr,
    zone: &Writer<Arc<Zone>>,
    watching: &Watching<'_>,
) -> Outcome {
    let mut of_services = Known::default();
    let mut of_endpoints = Known::default();
    let objects = client.all(kinds::SERVICES);
    let services = watch(objects, Which::All, service, of_services.full());
    let objects = client.all(kinds::ENDPOINTS);
    let endpoints = watch(objects, Which::All, endpoints_of, of_endpoints.full());
    let services = services.ready_chunks(MAX_NEWS_PER_ZONE);
    let endpoints = endpoints.ready_chunks(MAX_NEWS_PER_ZONE);
    tokio::pin!(services, endpoints);
    loop {
        let news = tokio::select! {
            Some(told) = services.next() => take(&mut of_services, told, "services", watching),
            Some(told) = endpoints.next() => take(&mut of_endpoints, told, "endpoints", watching),
            else => return Err(Failure::msg("the watches ended")),
        };
        let (Some(services), Some(endpoints)) = (of_services.all(), of_endpoints.all()) else {
            continue;
        };
        if news {
            zone.set(Arc::new(Zone::new(services, endpoints, server)));
            watching.good();
        }
    }
}

/// Applies events; returns whether anything has changed.
fn take<T: Kept + PartialEq>(
    known: &mut Known<T>,
    told: Vec<Result<Event<T>, ApiError>>,
    what: &str,
    watching: &Watching<'_>,
) -> bool {
    let mut news = false;
    for told in told {
        match told {
            Ok(event) => {
                watching.hears();
                news |= known.take(event);
            }
            Err(error) => watching.failed(what, &error),
        }
    }
    news
}

/// The part of a service that DNS needs; `None` if it has no address yet.
fn service(object: fields::Service) -> Option<Service> {
    let spec = object.spec;
    let target = match (spec.kind.as_str(), spec.cluster_ip.as_str()) {
        ("ExternalName", _) => Target::Elsewhere(spec.external_name),
        (_, "None") => Target::Headless,
        // Empty: not allocated yet.
        (_, address) => Target::Address(address.parse().ok()?),
    };
    Some(Service {
        target,
        ports: named(spec.ports),
    })
}

fn named(ports: Vec<fields::Port>) -> Vec<Port> {
    ports.into_iter().filter_map(port).take(MAX_PORTS).collect()
}

/// Converts a port; `None` if it has no name.
fn port(port: fields::Port) -> Option<Port> {
    let protocol = match port.protocol.as_str() {
        "" => "TCP".to_owned(),
        _ => port.protocol,
    };
    Some(Port {
        name: Some(port.name).filter(|name| !name.is_empty())?,
        protocol,
        number: u16::try_from(port.port).ok()?,
    })
}

/// The endpoints that are ready. (With `publishNotReadyAddresses` Kubernetes lists all of them as
/// ready.)
fn endpoints_of(object: fields::Endpoints) -> Option<Endpoints> {
    let mut all = Endpoints::new();
    for subset in object.subsets {
        let ports = named(subset.ports);
        for address in subset.addresses {
            if all.len() < MAX_ADDRESSES
                && let Ok(ip) = address.ip.parse()
            {
                all.push(Endpoint {
                    address: ip,
                    hostname: Some(address.hostname).filter(|name| !name.is_empty()),
                    ports: ports.clone(),
                });
            }
        }
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_object_of_any_size_has_a_limited_number_of_addresses() {
        let addresses: Vec<_> = (0..3 * MAX_ADDRESSES)
            .map(|n| json!({ "ip": format!("10.208.{}.{}", n / 250, n % 250) }))
            .collect();
        let ports: Vec<_> = (0..3 * MAX_PORTS)
            .map(|n| json!({ "name": format!("p{n}"), "port": 80 }))
            .collect();
        let object = json!({
            "metadata": { "namespace": "default", "name": "many" },
            "subsets": [{ "addresses": addresses, "ports": ports }],
        });
        let object = serde_json::from_value(object).unwrap();
        let kept = endpoints_of(object).unwrap();
        assert_eq!(kept.len(), MAX_ADDRESSES);
        assert!(
            kept.iter()
                .all(|endpoint| endpoint.ports.len() == MAX_PORTS)
        );
    }
}
