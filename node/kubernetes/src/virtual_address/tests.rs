//! Two controllers with a real etcd, each with a network interface of its own, in one network namespace. So the
//! kernel shows at any time which of them has the address.

use std::net::Ipv4Addr;

use hearth_base::event;
use hearth_base::testing::{TestSupervisor, within_timeout};
use hearth_consensus::ConsensusUser;
use hearth_consensus::testing::{Running, Site};
use hearth_sys::testing::{add_veth, in_own_network};

use super::*;

const ADDRESS: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 100);
/// The shortest that etcd grants when it is alone.
const SHORT: Duration = Duration::from_secs(2);

/// One controller.
struct Node {
    interface: &'static str,
    worker: Arc<Worker>,
    settings: Writer<Arc<KubernetesConfiguration>>,
    apiserver: Writer<Progress>,
    _own: Writer<IpAddr>,
}

impl Node {
    async fn new(netlink: &Netlink, etcd: &Running, number: u8, interface: &'static str) -> Self {
        let link = netlink.link_named(interface).await.unwrap();
        netlink.set_up(link.index).await.unwrap();
        let own = Ipv4Addr::new(192, 0, 2, number);
        let cidr = Cidr::new(own.into(), 24).unwrap();
        netlink.add_address(link.index, cidr).await.unwrap();
        let (settings, settings_value) = event::value();
        let (apiserver, apiserver_value) = event::value();
        let (own_writer, own_value) = event::value();
        own_writer.set(own.into());
        settings.set(of(&ADDRESS.to_string()));
        let handle = etcd.handle();
        Self {
            interface,
            worker: Arc::new(Worker {
                store: handle
                    .root()
                    .namespaced(ConsensusUser::KubernetesControllers),
                node: NodeId::from_bytes([number; 16]),
                lease: SHORT,
                settings: settings_value,
                own: own_value,
                apiserver: apiserver_value,
                address_status: Arc::new(event::value().0),
            }),
            settings,
            apiserver,
            _own: own_writer,
        }
    }

    fn run(&self) -> TestSupervisor {
        let worker = self.worker.clone();
        TestSupervisor::run(move |ctx| run(ctx, worker.clone()))
    }

    /// What it reports, once it does.
    async fn reports(&self, wanted: &AddressStatus) {
        let mut statuses = self.worker.address_status.value().watch();
        let reached = statuses.wait_for(|address_status| address_status == wanted);
        within_timeout(&format!("{}: {wanted:?}", self.interface), reached)
            .await
            .unwrap();
    }

    async fn has_it(&self, netlink: &Netlink) -> bool {
        let link = netlink.link_named(self.interface).await.unwrap();
        let addresses = netlink.addresses(link.index).await.unwrap();
        addresses.contains(&Cidr::host(ADDRESS.into()))
    }
}

fn of(address: &str) -> Arc<KubernetesConfiguration> {
    Arc::new(KubernetesConfiguration {
        api_address: address.to_owned(),
        ..KubernetesConfiguration::default()
    })
}

/// Runs a test with two controllers.
fn with_two<F: Future<Output = ()> + Send>(test: impl FnOnce(Netlink, [Node; 2]) -> F + Send) {
    in_own_network(async {
        if !add_veth("one", "two").await {
            return;
        }
        let netlink = Netlink::open().unwrap();
        netlink.set_loopback_up().await.unwrap();
        let site = Site::new();
        site.state
            .0
            .set(hearth_host::cluster_state::State::Home)
            .unwrap();
        let etcd = site.start(true).await;
        let one = Node::new(&netlink, &etcd, 1, "one").await;
        let two = Node::new(&netlink, &etcd, 2, "two").await;
        test(netlink, [one, two]).await;
        etcd.stop().await;
    });
}

#[test]
fn the_address_is_at_one_ready_controller_and_moves_when_that_gives_it_up() {
    with_two(|netlink, [one, two]| async move {
        let first = one.run();
        let _second = two.run();
        let address = IpAddr::from(ADDRESS);
        one.reports(&AddressStatus::NotReady(address)).await;
        assert!(!one.has_it(&netlink).await && !two.has_it(&netlink).await);

        one.apiserver.set(Progress::Serving);
        one.reports(&AddressStatus::Holder(address)).await;
        assert!(one.has_it(&netlink).await);
        two.apiserver.set(Progress::Serving);
        two.reports(&AddressStatus::Standby(address)).await;

        // An API server that fails.
        one.apiserver.set(Progress::Failing("not ready".to_owned()));
        two.reports(&AddressStatus::Holder(address)).await;
        assert!(!one.has_it(&netlink).await && two.has_it(&netlink).await);
        one.reports(&AddressStatus::NotReady(address)).await;

        // Another setting than the address does not move it.
        let mut other = (*of(&ADDRESS.to_string())).clone();
        other.synchronized_labels = vec!["rack".to_owned()];
        two.settings.set(Arc::new(other));
        one.apiserver.set(Progress::Serving);
        one.reports(&AddressStatus::Standby(address)).await;
        assert!(two.has_it(&netlink).await);

        // The end of the role.
        two.settings.set(of(""));
        one.reports(&AddressStatus::Holder(address)).await;
        two.reports(&AddressStatus::None).await;
        assert!(!two.has_it(&netlink).await);
        within_timeout("shutdown", first.stop()).await;
        one.reports(&AddressStatus::None).await;
        assert!(!one.has_it(&netlink).await);
    });
}

#[test]
fn a_holder_that_hangs_loses_the_address_before_another_has_it() {
    with_two(|netlink, [one, two]| async move {
        let address = IpAddr::from(ADDRESS);
        // Its process hangs as soon as it has the address: nothing renews, and nothing gives up.
        one.apiserver.set(Progress::Serving);
        let place = one.worker.judge(&netlink).await.unwrap().unwrap();
        let mut held = None;
        let mut statuses = one.worker.address_status.value().watch();
        tokio::select! {
            lost = one.worker.compete(&netlink, &place, &mut held) => panic!("{lost}"),
            holds = statuses.wait_for(|now| *now == AddressStatus::Holder(address)) => drop(holds),
        }
        assert!(held.is_some() && one.has_it(&netlink).await);

        two.apiserver.set(Progress::Serving);
        let _second = two.run();
        within_timeout("the address moves", async {
            while !two.has_it(&netlink).await {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        })
        .await;
        assert!(!one.has_it(&netlink).await);
        two.reports(&AddressStatus::Holder(address)).await;
    });
}

#[test]
fn an_address_of_another_network_is_refused_with_the_reason() {
    with_two(|_, [one, _two]| async move {
        one.apiserver.set(Progress::Serving);
        one.settings.set(of("198.51.100.1"));
        let _first = one.run();
        let address_status = AddressStatus::OtherNetwork {
            address: [198, 51, 100, 1].into(),
            networks: vec!["192.0.2.1/24".parse().unwrap()],
        };
        one.reports(&address_status).await;
        let condition = address_status.condition().unwrap();
        assert_eq!(
            (
                condition.met,
                condition.reason.as_str(),
                condition.message.as_str()
            ),
            (
                false,
                "OtherNetwork",
                "kubernetes.api_address: expected an address in a network of this node \
                 (192.0.2.1/24), got 198.51.100.1"
            )
        );
        // Corrected.
        one.settings.set(of(&ADDRESS.to_string()));
        one.reports(&AddressStatus::Holder(ADDRESS.into())).await;
    });
}
