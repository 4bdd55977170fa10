//! Watches services and endpoints, and builds the zone.
//!
//! Endpoints are read from slices, which have those of both address families; an `Endpoints` object has those
//! of one. (Kubernetes makes slices of `Endpoints` that users write.)
//!
//! Of each object only the fields that DNS needs are kept. Most updates change other fields
//! (leaders that renew their leases in annotations of endpoints, every two seconds) and cause no
//! new zone. The first zone is published when both kinds have been listed completely. While a list
//! is repeated, and while no API server responds, the last zone stays: stale answers are better
//! than none.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use futures::StreamExt as _;
use hearth_api::ranges::ClusterRanges;
use hearth_base::event::Writer;
use hearth_base::supervisor::{Failure, Outcome};
use hearth_kubernetes_api::store::{Event, Kept, Known};
use hearth_kubernetes_api::watch::{Which, watch};
use hearth_kubernetes_api::{ApiError, Client, Watching, fields, kinds};

use super::zone::{Endpoint, Port, Service, Slice, Target, Zone};

/// Maximum number of pending events that are combined into one new zone.
const MAX_NEWS_PER_ZONE: usize = 256;

/// Maximum number of addresses that are kept of one object; Kubernetes' own controller writes no
/// more, but users can.
const MAX_ADDRESSES: usize = 1000;
/// The same of ports, of which each address has a copy.
const MAX_PORTS: usize = 100;
/// The number of address families, of each of which a service has one address at most.
const FAMILIES: usize = 2;

/// Watches with this client. Returns only on an error; watches that fail are retried.
pub(crate) async fn follow(
    client: Client,
    (ranges, server): (ClusterRanges, Ipv4Addr),
    zone: &Writer<Arc<Zone>>,
    watching: &Watching<'_>,
) -> Outcome {
    let mut of_services = Known::default();
    let mut of_slices = Known::default();
    let objects = client.all(kinds::SERVICES);
    let services = watch(objects, Which::All, service, of_services.full());
    let objects = client.all(kinds::ENDPOINT_SLICES);
    let slices = watch(objects, Which::All, slice, of_slices.full());
    let services = services.ready_chunks(MAX_NEWS_PER_ZONE);
    let slices = slices.ready_chunks(MAX_NEWS_PER_ZONE);
    tokio::pin!(services, slices);
    loop {
        let news = tokio::select! {
            Some(told) = services.next() => take(&mut of_services, told, "services", watching),
            Some(told) = slices.next() => take(&mut of_slices, told, "endpoint slices", watching),
            else => return Err(Failure::msg("the watches ended")),
        };
        let (Some(services), Some(slices)) = (of_services.all(), of_slices.all()) else {
            continue;
        };
        if news {
            zone.set(Arc::new(Zone::new(services, slices, ranges, server)));
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
        (_, address) => {
            let mut addresses = vec![spec.cluster_ip.clone()];
            let others = spec.cluster_ips.into_iter();
            addresses.extend(others.filter(|other| other != address));
            let addresses = addresses.iter().filter_map(|address| address.parse().ok());
            let addresses: Vec<IpAddr> = addresses.take(FAMILIES).collect();
            if addresses.is_empty() {
                // Not allocated yet.
                return None;
            }
            Target::Addresses(addresses)
        }
    };
    let ports = spec.ports.into_iter();
    let ports = ports.filter_map(|it| port(it.name, it.protocol, it.port));
    Some(Service {
        target,
        ports: ports.take(MAX_PORTS).collect(),
    })
}

/// Converts a port; `None` if it has no name.
fn port(name: String, protocol: String, number: i32) -> Option<Port> {
    let protocol = match protocol.as_str() {
        "" => "TCP".to_owned(),
        _ => protocol,
    };
    Some(Port {
        name: Some(name).filter(|name| !name.is_empty())?,
        protocol,
        number: u16::try_from(number).ok()?,
    })
}

/// The endpoints of a slice that are ready. (With `publishNotReadyAddresses` Kubernetes lists all of them as
/// ready.) `None` if it is of no service.
fn slice(mut object: fields::EndpointSlice) -> Option<Slice> {
    let service = object.metadata.labels.remove(fields::SERVICE_NAME)?;
    let ports = object.ports.into_iter().flatten();
    let ports = ports.filter_map(|it| {
        let (name, protocol) = (it.name.unwrap_or_default(), it.protocol.unwrap_or_default());
        port(name, protocol, it.port?)
    });
    let ports: Vec<Port> = ports.take(MAX_PORTS).collect();
    let endpoints = object.endpoints.into_iter().flatten();
    let endpoints = endpoints.filter_map(|endpoint| {
        let is_ready = endpoint.conditions.ready != Some(false);
        let address = endpoint.addresses.first().filter(|_| is_ready)?;
        Some(Endpoint {
            address: address.parse().ok()?,
            hostname: endpoint.hostname.filter(|name| !name.is_empty()),
            ports: ports.clone(),
        })
    });
    Some(Slice {
        endpoints: endpoints.take(MAX_ADDRESSES).collect(),
        service,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_object_of_any_size_has_a_limited_number_of_addresses() {
        let addresses: Vec<_> = (0..3 * MAX_ADDRESSES)
            .map(|n| json!({ "addresses": [format!("10.208.{}.{}", n / 250, n % 250)] }))
            .collect();
        let ports: Vec<_> = (0..3 * MAX_PORTS)
            .map(|n| json!({ "name": format!("p{n}"), "port": 80 }))
            .collect();
        let object = json!({
            "metadata": {
                "namespace": "default",
                "name": "many-x",
                "labels": { "kubernetes.io/service-name": "many" },
            },
            "endpoints": addresses,
            "ports": ports,
        });
        let kept = slice(serde_json::from_value(object).unwrap()).unwrap();
        assert_eq!(kept.service, "many");
        let kept = kept.endpoints;
        assert_eq!(kept.len(), MAX_ADDRESSES);
        assert!(
            kept.iter()
                .all(|endpoint| endpoint.ports.len() == MAX_PORTS)
        );
    }

    #[test]
    fn an_endpoint_is_ready_unless_its_slice_denies_it() {
        let object = json!({
            "metadata": { "labels": { "kubernetes.io/service-name": "db" } },
            "addressType": "IPv6",
            "endpoints": [
                { "addresses": ["fd00:1::5"], "hostname": "db-0", "conditions": { "ready": true } },
                { "addresses": ["fd00:1::6"] },
                { "addresses": ["fd00:1::7"], "conditions": { "ready": false } },
            ],
            "ports": [{ "name": "sql", "port": 5432, "protocol": "TCP" }, { "port": null }],
        });
        let kept = slice(serde_json::from_value(object).unwrap()).unwrap();
        let addresses = kept.endpoints.iter().map(|it| it.address.to_string());
        assert_eq!(addresses.collect::<Vec<_>>(), ["fd00:1::5", "fd00:1::6"]);
        assert_eq!(kept.endpoints[0].hostname.as_deref(), Some("db-0"));
        assert_eq!(kept.endpoints[0].ports.len(), 1);
        // As Kubernetes writes one without endpoints.
        let object = json!({
            "metadata": { "labels": { "kubernetes.io/service-name": "db" } },
            "endpoints": null,
            "ports": null,
        });
        let kept = slice(serde_json::from_value(object).unwrap()).unwrap();
        assert!(kept.endpoints.is_empty());
        let stray = json!({ "metadata": { "name": "x" }, "endpoints": [] });
        assert_eq!(slice(serde_json::from_value(stray).unwrap()), None);
    }

    #[test]
    fn a_service_has_the_addresses_that_it_was_given() {
        let addresses = |spec| {
            let object = json!({ "spec": spec });
            let service = service(serde_json::from_value(object).unwrap());
            service.map(|service| service.target)
        };
        let one: IpAddr = "10.224.0.7".parse().unwrap();
        let other: IpAddr = "fd00:2::7".parse().unwrap();
        assert_eq!(
            addresses(json!({ "clusterIP": one, "clusterIPs": [one, other] })),
            Some(Target::Addresses(vec![one, other]))
        );
        assert_eq!(
            addresses(json!({ "clusterIP": one })),
            Some(Target::Addresses(vec![one]))
        );
        let headless = json!({ "clusterIP": "None", "clusterIPs": ["None"] });
        assert_eq!(addresses(headless), Some(Target::Headless));
        assert_eq!(addresses(json!({ "clusterIP": "" })), None);
    }
}
