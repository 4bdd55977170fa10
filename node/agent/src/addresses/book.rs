//! The address book: the record store, shared by gossip, broadcast and the server.
//!
//! Any caller may send records, so their cost is bounded: signatures in unsolicited records are
//! verified at a limited rate, the rest of a message is ignored after several invalid records, and
//! responses have a rate limit, too. Rejected records change nothing.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hearth_api::identity::NodeId;
use hearth_api::proofs::{self, ProofError};
use hearth_api::tls::{self, Clock, OwnCertificate, Trust};
use hearth_api::v1::node_local_server::NodeLocal;
use hearth_api::v1::{
    ExchangeAddressesRequest, ExchangeAddressesResponse, GetTimeRequest, GetTimeResponse,
    NodeAddress,
};
use hearth_base::event::{self, Value, Writer};
use hearth_sys::clock;
use rustls_pki_types::UnixTime;
use tokio::time::Instant;
use tonic::{Request, Response, Status};

use crate::learned::{AddressRecord, LearnResult, MOST, PeerAddresses, Store};

/// Rate limit for signatures in unsolicited records: burst, and per second.
const CHECKS: (f64, f64) = (512.0, 100.0);
/// Rate limit for responses: burst, and per second.
const ANSWERS: (f64, f64) = (256.0, 128.0);
/// Maximum number of invalid records in a message before the rest is ignored.
const FORGERIES: usize = 8;
/// Number of records after which the task yields.
const AT_A_TIME: usize = 16;
/// Maximum size of a certificate in bytes; the cluster's are far below.
const LARGEST_CERTIFICATE: usize = 4 << 10;

/// The address book; see the module.
pub struct AddressBook {
    clock: Clock,
    inside: Mutex<Inside>,
    learned: Writer<PeerAddresses>,
    own: Writer<NodeAddress>,
    lost_counter: Writer<u64>,
}

struct Inside {
    /// `None` until the node is a member.
    open: Option<(Trust, Store)>,
    checks: Pace,
    answers: Pace,
}

/// How records were received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// In the response of a cluster node to our request.
    Answer,
    /// Unsolicited, from an unauthenticated sender.
    Unasked,
}

impl AddressBook {
    /// An empty book that ignores records until [`Self::open`]. The returned value has the
    /// addresses of the other nodes.
    pub fn new(clock: Clock) -> (Arc<Self>, Value<PeerAddresses>) {
        let (learned_writer, learned) = event::value();
        let book = Self {
            clock,
            inside: Mutex::new(Inside {
                open: None,
                checks: Pace::new(CHECKS),
                answers: Pace::new(ANSWERS),
            }),
            learned: learned_writer,
            own: event::value().0,
            lost_counter: event::value().0,
        };
        (Arc::new(book), learned)
    }

    /// Accepts records from now on. Records are kept if it is called again.
    pub fn open(&self, own: &OwnCertificate) {
        let mut inside = self.inside();
        let store = match inside.open.take() {
            Some((_, store)) => store,
            None => Store::new(own.node()),
        };
        inside.open = Some((Trust::of_node(own), store));
    }

    fn inside(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets this node's own record; its counter must be durable.
    pub fn set_own(&self, located: AddressRecord, record: NodeAddress) {
        if let Some((_, store)) = &mut self.inside().open {
            store.set_own(located, record.clone());
        }
        self.own.set(record);
    }

    /// This node's own record.
    pub fn own(&self) -> Value<NodeAddress> {
        self.own.value()
    }

    /// The highest counter of a record which this node has signed and does not remember.
    pub fn lost_counter(&self) -> Value<u64> {
        self.lost_counter.value()
    }

    /// Sets the nodes of the cluster. Records of other nodes are dropped.
    pub fn set_members(&self, members: BTreeSet<NodeId>) {
        let mut inside = self.inside();
        if let Some((_, store)) = &mut inside.open
            && store.set_members(members)
        {
            self.learned.set(Arc::new(store.others()));
        }
    }

    /// All records that can be sent to others.
    pub fn records(&self) -> Vec<NodeAddress> {
        let inside = self.inside();
        let open = inside.open.as_ref();
        open.map(|(_, store)| store.records()).unwrap_or_default()
    }

    /// Stores the valid records; returns how many of them are new.
    pub async fn store_valid(&self, records: &[NodeAddress], brought: Source) -> usize {
        let (mut news, mut forgeries) = (0, 0);
        for (index, record) in records.iter().take(MOST).enumerate() {
            if index % AT_A_TIME == AT_A_TIME - 1 {
                tokio::task::yield_now().await;
            }
            match self.learn(record, brought) {
                None => break,
                Some(Ok(learned)) => news += usize::from(self.tell(learned)),
                Some(Err(error)) => {
                    tracing::debug!("{}", hearth_api::chain(&error));
                    forgeries += 1;
                    if forgeries >= FORGERIES {
                        break;
                    }
                }
            }
        }
        news
    }

    /// Stores a record if it is new; returns whether a node of the cluster has signed it. One that is
    /// beyond the rate limit counts as not signed.
    pub fn store_signed(&self, record: &NodeAddress, brought: Source) -> bool {
        match self.learn(record, brought) {
            Some(Ok(LearnResult::Known)) => self.is_signed(record),
            Some(Ok(learned)) => self.tell(learned),
            Some(Err(error)) => {
                tracing::debug!("{}", hearth_api::chain(&error));
                false
            }
            None => false,
        }
    }

    /// Whether the node of a record that is not newer than the stored one has signed it.
    fn is_signed(&self, record: &NodeAddress) -> bool {
        let now = tls::now(&self.clock);
        let mut inside = self.inside();
        let Inside { open, checks, .. } = &mut *inside;
        open.as_ref().is_some_and(|(trust, store)| {
            store.has(record) || checks.take() && check(record, trust, now).is_ok()
        })
    }

    /// Returns whether this is news.
    fn tell(&self, learned: LearnResult) -> bool {
        match learned {
            LearnResult::News(node, located) => {
                tracing::info!(%node, address = %located.host, "learned a node's address");
                return true;
            }
            LearnResult::Forgotten(counter) => {
                let known = self.lost_counter.value().get().unwrap_or_default();
                self.lost_counter.set(counter.max(known));
            }
            _ => {}
        }
        false
    }

    /// `None`: the rate limit is exceeded.
    fn learn(
        &self,
        record: &NodeAddress,
        brought: Source,
    ) -> Option<Result<LearnResult, ProofError>> {
        let now = tls::now(&self.clock);
        let mut inside = self.inside();
        let Inside { open, checks, .. } = &mut *inside;
        let (trust, store) = open.as_mut()?;
        let mut exhausted = false;
        let heard = store.learn(record, |record| {
            if brought == Source::Unasked && !checks.take() {
                exhausted = true;
                return Err(ProofError::Signature {
                    what: "not verified",
                });
            }
            check(record, trust, now)
        });
        if exhausted {
            return None;
        }
        if let Ok(LearnResult::News(..)) = heard {
            // Under the lock, so that an older state is never the last one.
            self.learned.set(Arc::new(store.others()));
        }
        Some(heard)
    }
}

fn check(
    record: &NodeAddress,
    trust: &Trust,
    now: UnixTime,
) -> Result<(NodeId, IpAddr), ProofError> {
    // A valid record is stored with its certificate.
    if record.certificate.len() > LARGEST_CERTIFICATE {
        return Err(ProofError::Field {
            what: "node address",
            field: "certificate",
            why: format!("expected at most {LARGEST_CERTIFICATE} bytes"),
        });
    }
    proofs::check_address(record, trust, now)
}

/// The service that every node offers to the other nodes.
pub struct Local(pub Arc<AddressBook>);

#[tonic::async_trait]
impl NodeLocal for Local {
    async fn exchange_addresses(
        &self,
        request: Request<ExchangeAddressesRequest>,
    ) -> Result<Response<ExchangeAddressesResponse>, Status> {
        let records = request.into_inner().addresses;
        if records.len() > MOST {
            return Err(Status::invalid_argument(format!(
                "addresses: expected at most {MOST}, got {}",
                records.len()
            )));
        }
        if !self.0.inside().answers.take() {
            return Err(Status::resource_exhausted(
                "too many address exchanges with this node: retry later",
            ));
        }
        self.0.store_valid(&records, Source::Unasked).await;
        Ok(Response::new(ExchangeAddressesResponse {
            addresses: self.0.records(),
        }))
    }

    async fn get_time(
        &self,
        _: Request<GetTimeRequest>,
    ) -> Result<Response<GetTimeResponse>, Status> {
        Ok(Response::new(GetTimeResponse {
            time_ms: clock::unix_milliseconds(),
            synchronized: clock::is_synchronised(),
        }))
    }
}

/// A token bucket: burst, and rate per second.
pub(crate) struct Pace {
    most: f64,
    each_second: f64,
    left: f64,
    at: Instant,
}

impl Pace {
    pub(crate) fn new((most, each_second): (f64, f64)) -> Self {
        Self {
            most,
            each_second,
            left: most,
            at: Instant::now(),
        }
    }

    /// Takes a token, if there is one.
    pub(crate) fn take(&mut self) -> bool {
        let now = Instant::now();
        let since = now.duration_since(self.at).as_secs_f64();
        self.at = now;
        self.left = (self.left + since * self.each_second).min(self.most);
        let is_there = self.left >= 1.0;
        if is_there {
            self.left -= 1.0;
        }
        is_there
    }
}

#[cfg(test)]
mod tests {
    use hearth_api::identity::NodeCredentials;
    use hearth_api::testing::{self, TestCluster};
    use hearth_api::tls::wall_clock;

    use super::*;

    fn ip(last: u8) -> IpAddr {
        IpAddr::from([192, 0, 2, last])
    }

    fn record(node: &NodeCredentials, last: u8, counter: u64) -> NodeAddress {
        proofs::sign_address(&testing::own(node), ip(last), counter)
    }

    #[tokio::test]
    async fn only_the_clusters_own_words_are_taken_in() {
        let (cluster, other) = (TestCluster::new(), TestCluster::new());
        let (own, peer, stranger) = (cluster.node(), cluster.node(), other.node());
        let (book, learned) = AddressBook::new(wall_clock());
        let honest = record(&peer, 1, 1);
        assert_eq!(
            book.store_valid(std::slice::from_ref(&honest), Source::Answer)
                .await,
            0
        );
        book.open(&testing::own(&own));
        let renamed = NodeAddress {
            host: ip(9).to_string(),
            counter: 7,
            ..honest.clone()
        };
        let large = NodeAddress {
            certificate: vec![0; LARGEST_CERTIFICATE + 1],
            ..honest.clone()
        };
        let all = [
            renamed,
            large,
            record(&stranger, 2, 1),
            NodeAddress::default(),
            honest.clone(),
        ];
        assert_eq!(book.store_valid(&all, Source::Answer).await, 1);
        assert_eq!(book.records(), std::slice::from_ref(&honest));
        assert_eq!(learned.get().unwrap().len(), 1);
        // A repeated record is not new, and opening again loses nothing.
        book.open(&testing::own(&own));
        assert_eq!(book.store_valid(&all, Source::Answer).await, 0);
        // New records cannot be hidden behind forged ones: the rest of the message is ignored.
        let mut flood = vec![record(&stranger, 2, 1); FORGERIES];
        flood.push(record(&peer, 3, 2));
        assert_eq!(book.store_valid(&flood, Source::Answer).await, 0);

        book.set_members(BTreeSet::new());
        assert!(learned.get().unwrap().is_empty());
    }

    proptest::proptest! {
        /// Datagrams are unauthenticated.
        #[test]
        fn arbitrary_bytes_are_no_word(bytes: Vec<u8>, flips: Vec<(usize, u8)>) {
            use prost::Message as _;
            use proptest::prelude::*;
            let cluster = TestCluster::new();
            let (book, _) = AddressBook::new(wall_clock());
            book.open(&testing::own(&cluster.node()));
            let honest = record(&cluster.node(), 1, 1);
            let mut damaged = honest.encode_to_vec();
            let length = damaged.len();
            for (place, flip) in flips {
                damaged[place % length] ^= flip;
            }
            for bytes in [bytes, damaged] {
                let Ok(word) = NodeAddress::decode(&bytes[..]) else {
                    continue;
                };
                let heard = book.learn(&word, Source::Unasked);
                let is_news = matches!(heard, Some(Ok(LearnResult::News(..))));
                prop_assert_eq!(is_news, word == honest);
            }
        }
    }

    #[tokio::test]
    async fn a_node_hears_of_what_it_has_forgotten() {
        let own = TestCluster::new().node();
        let (book, _) = AddressBook::new(wall_clock());
        book.open(&testing::own(&own));
        book.store_valid(&[record(&own, 1, 5)], Source::Unasked)
            .await;
        assert_eq!(book.lost_counter().get(), Some(5));
        assert!(book.records().is_empty(), "not sent to others");
    }

    #[tokio::test(start_paused = true)]
    async fn those_who_were_not_asked_are_heard_at_a_pace() {
        let (cluster, other) = (TestCluster::new(), TestCluster::new());
        let (book, _) = AddressBook::new(wall_clock());
        book.open(&testing::own(&cluster.node()));
        let forged = [record(&other.node(), 1, 1)];
        let mut asked = 0;
        while book.learn(&forged[0], Source::Unasked).is_some() {
            asked += 1;
            assert!(asked < 10_000, "no rate limit");
        }
        let honest = record(&cluster.node(), 1, 1);
        let honest = [honest];
        assert_eq!(book.store_valid(&honest, Source::Unasked).await, 0);
        // Responses to our own requests are not limited.
        let another = [record(&cluster.node(), 2, 1)];
        assert_eq!(book.store_valid(&another, Source::Answer).await, 1);
        tokio::time::advance(std::time::Duration::from_secs(1)).await;
        assert_eq!(book.store_valid(&honest, Source::Unasked).await, 1);
    }

    #[tokio::test]
    async fn an_exchange_goes_both_ways_and_has_bounds() {
        let cluster = TestCluster::new();
        let (own, peer) = (cluster.node(), cluster.node());
        let (book, _) = AddressBook::new(wall_clock());
        book.open(&testing::own(&own));
        let (host, counter) = (ip(1), 1);
        book.set_own(AddressRecord { host, counter }, record(&own, 1, 1));
        let local = Local(book.clone());
        let ask = |addresses| {
            let request = ExchangeAddressesRequest { addresses };
            local.exchange_addresses(Request::new(request))
        };
        let answer = ask(vec![record(&peer, 2, 1)]).await.unwrap();
        assert_eq!(answer.into_inner().addresses.len(), 2);
        assert_eq!(
            ask(Vec::new()).await.unwrap().into_inner().addresses.len(),
            2
        );
        let many = ask(vec![NodeAddress::default(); MOST + 1]).await;
        assert_eq!(many.unwrap_err().code(), tonic::Code::InvalidArgument);
    }
}
