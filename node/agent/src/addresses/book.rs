//! The store, as those share it who ask, answer, announce and sign.
//!
//! Anyone may bring records, so what that can cost is bounded: signatures of
//! those who were not asked are checked at a pace, a message whose records do
//! not hold is not read to its end, and answers have a pace, too. Nothing of
//! what is refused changes anything.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hearth_api::identity::{NodeCredentials, NodeId};
use hearth_api::proofs::{self, ProofError};
use hearth_api::tls::{self, Clock, TlsError, Trust};
use hearth_api::v1::node_local_server::NodeLocal;
use hearth_api::v1::{ExchangeAddressesRequest, ExchangeAddressesResponse, NodeAddress};
use hearth_base::event::{self, Value, Writer};
use rustls_pki_types::UnixTime;
use tokio::time::Instant;
use tonic::{Request, Response, Status};

use crate::learned::{Heard, Learned, Located, MOST, Store};

/// Signatures of those who were not asked: at once, and for each second.
const CHECKS: (f64, f64) = (512.0, 100.0);
/// Answers.
const ANSWERS: (f64, f64) = (256.0, 128.0);
/// Records of one message that do not hold, until the rest is not looked at.
const FORGERIES: usize = 8;
/// Others get their turn after so many records.
const AT_A_TIME: usize = 16;
/// Bytes of a certificate; ours are well below.
const LARGEST_CERTIFICATE: usize = 4 << 10;

/// See the module.
pub struct Book {
    clock: Clock,
    inside: Mutex<Inside>,
    learned: Writer<Learned>,
    own: Writer<NodeAddress>,
    forgotten: Writer<u64>,
}

struct Inside {
    /// `None` until the node knows who it is.
    open: Option<(Trust, Store)>,
    checks: Pace,
    answers: Pace,
}

/// Why records come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Brought {
    /// By a node of the cluster that we have asked.
    Answer,
    /// By anyone, of themselves.
    Unasked,
}

impl Book {
    /// Empty, and closed until [`Self::open`]. The value is where the others
    /// are.
    pub fn new(clock: Clock) -> (Arc<Self>, Value<Learned>) {
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
            forgotten: event::value().0,
        };
        (Arc::new(book), learned)
    }

    /// From now on it is this node's. What is known stays when that is said
    /// again.
    pub fn open(&self, credentials: &NodeCredentials) -> Result<(), TlsError> {
        let (trust, own) = Trust::of_node(credentials, tls::now(&self.clock))?;
        let mut inside = self.inside();
        let store = match inside.open.take() {
            Some((_, store)) => store,
            None => Store::new(own),
        };
        inside.open = Some((trust, store));
        Ok(())
    }

    fn inside(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What this node says of itself; its counter must be durable.
    pub fn set_own(&self, located: Located, record: NodeAddress) {
        if let Some((_, store)) = &mut self.inside().open {
            store.set_own(located, record.clone());
        }
        self.own.set(record);
    }

    /// The same, to follow.
    pub fn own(&self) -> Value<NodeAddress> {
        self.own.value()
    }

    /// The highest counter under which others have heard of this node, and of
    /// which it does not know itself.
    pub fn forgotten(&self) -> Value<u64> {
        self.forgotten.value()
    }

    /// These are the cluster's nodes.
    pub fn set_members(&self, members: BTreeSet<NodeId>) {
        let mut inside = self.inside();
        if let Some((_, store)) = &mut inside.open
            && store.set_members(members)
        {
            self.learned.set(Arc::new(store.others()));
        }
    }

    /// Everything that can be told to others.
    pub fn records(&self) -> Vec<NodeAddress> {
        let inside = self.inside();
        let open = inside.open.as_ref();
        open.map(|(_, store)| store.records()).unwrap_or_default()
    }

    /// Takes in what holds; tells how much of it was news.
    pub async fn take_in(&self, records: &[NodeAddress], brought: Brought) -> usize {
        let (mut news, mut forgeries) = (0, 0);
        for (index, record) in records.iter().take(MOST).enumerate() {
            if index % AT_A_TIME == AT_A_TIME - 1 {
                tokio::task::yield_now().await;
            }
            match self.learn(record, brought) {
                None => break,
                Some(Ok(Heard::News(node, located))) => {
                    tracing::info!(%node, address = %located.host, "a node says where it is");
                    news += 1;
                }
                Some(Ok(Heard::Forgotten(counter))) => {
                    let known = self.forgotten.value().get().unwrap_or_default();
                    self.forgotten.set(counter.max(known));
                }
                Some(Ok(_)) => {}
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

    /// `None`: nothing more for now.
    fn learn(&self, record: &NodeAddress, brought: Brought) -> Option<Result<Heard, ProofError>> {
        let now = tls::now(&self.clock);
        let mut inside = self.inside();
        let Inside { open, checks, .. } = &mut *inside;
        let (trust, store) = open.as_mut()?;
        let mut exhausted = false;
        let heard = store.learn(record, |record| {
            if brought == Brought::Unasked && !checks.take() {
                exhausted = true;
                return Err(ProofError::Signature { what: "not read" });
            }
            check(record, trust, now)
        });
        if exhausted {
            return None;
        }
        if let Ok(Heard::News(..)) = heard {
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
    // It is kept if it holds.
    if record.certificate.len() > LARGEST_CERTIFICATE {
        return Err(ProofError::Field {
            what: "node address",
            field: "certificate",
            why: format!("more than {LARGEST_CERTIFICATE} bytes"),
        });
    }
    proofs::check_address(record, trust, now)
}

/// What any node answers to anyone.
pub struct Local(pub Arc<Book>);

#[tonic::async_trait]
impl NodeLocal for Local {
    async fn exchange_addresses(
        &self,
        request: Request<ExchangeAddressesRequest>,
    ) -> Result<Response<ExchangeAddressesResponse>, Status> {
        let records = request.into_inner().addresses;
        if records.len() > MOST {
            return Err(Status::invalid_argument(format!(
                "addresses: {}, wanted at most {MOST}",
                records.len()
            )));
        }
        if !self.0.inside().answers.take() {
            return Err(Status::resource_exhausted(
                "too many ask this node for addresses: ask again in a while",
            ));
        }
        self.0.take_in(&records, Brought::Unasked).await;
        Ok(Response::new(ExchangeAddressesResponse {
            addresses: self.0.records(),
        }))
    }
}

/// So much at once, and so much for each second.
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

    /// Whether there is one more.
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
    use hearth_api::testing::TestCluster;
    use hearth_api::tls::wall_clock;

    use super::*;

    fn ip(last: u8) -> IpAddr {
        IpAddr::from([192, 0, 2, last])
    }

    fn record(node: &NodeCredentials, last: u8, counter: u64) -> NodeAddress {
        let id = NodeId::from_public_key(&node.key.public());
        proofs::sign_address(node, id, ip(last), counter)
    }

    #[tokio::test]
    async fn only_the_clusters_own_words_are_taken_in() {
        let (cluster, other) = (TestCluster::new(), TestCluster::new());
        let (own, peer, stranger) = (cluster.node(), cluster.node(), other.node());
        let (book, learned) = Book::new(wall_clock());
        let honest = record(&peer, 1, 1);
        assert_eq!(
            book.take_in(std::slice::from_ref(&honest), Brought::Answer)
                .await,
            0
        );
        book.open(&own).unwrap();
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
        assert_eq!(book.take_in(&all, Brought::Answer).await, 1);
        assert_eq!(book.records(), std::slice::from_ref(&honest));
        assert_eq!(learned.get().unwrap().len(), 1);
        // Said again, it is no news, and opening again loses nothing.
        book.open(&own).unwrap();
        assert_eq!(book.take_in(&all, Brought::Answer).await, 0);
        // Nobody hides news behind forgeries: the message ends with them.
        let mut flood = vec![record(&stranger, 2, 1); FORGERIES];
        flood.push(record(&peer, 3, 2));
        assert_eq!(book.take_in(&flood, Brought::Answer).await, 0);

        book.set_members(BTreeSet::new());
        assert!(learned.get().unwrap().is_empty());
    }

    proptest::proptest! {
        /// What comes by datagram comes from anyone.
        #[test]
        fn arbitrary_bytes_are_no_word(bytes: Vec<u8>, flips: Vec<(usize, u8)>) {
            use prost::Message as _;
            use proptest::prelude::*;
            let cluster = TestCluster::new();
            let (book, _) = Book::new(wall_clock());
            book.open(&cluster.node()).unwrap();
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
                let heard = book.learn(&word, Brought::Unasked);
                let is_news = matches!(heard, Some(Ok(Heard::News(..))));
                prop_assert_eq!(is_news, word == honest);
            }
        }
    }

    #[tokio::test]
    async fn a_node_hears_of_what_it_has_forgotten() {
        let own = TestCluster::new().node();
        let (book, _) = Book::new(wall_clock());
        book.open(&own).unwrap();
        book.take_in(&[record(&own, 1, 5)], Brought::Unasked).await;
        assert_eq!(book.forgotten().get(), Some(5));
        assert!(book.records().is_empty(), "it does not say so itself");
    }

    #[tokio::test(start_paused = true)]
    async fn those_who_were_not_asked_are_heard_at_a_pace() {
        let (cluster, other) = (TestCluster::new(), TestCluster::new());
        let (book, _) = Book::new(wall_clock());
        book.open(&cluster.node()).unwrap();
        let forged = [record(&other.node(), 1, 1)];
        let mut asked = 0;
        while book.learn(&forged[0], Brought::Unasked).is_some() {
            asked += 1;
            assert!(asked < 10_000, "there is no bound");
        }
        let honest = record(&cluster.node(), 1, 1);
        let honest = [honest];
        assert_eq!(book.take_in(&honest, Brought::Unasked).await, 0);
        // Whom we ask is not held up by that.
        let another = [record(&cluster.node(), 2, 1)];
        assert_eq!(book.take_in(&another, Brought::Answer).await, 1);
        tokio::time::advance(std::time::Duration::from_secs(1)).await;
        assert_eq!(book.take_in(&honest, Brought::Unasked).await, 1);
    }

    #[tokio::test]
    async fn an_exchange_goes_both_ways_and_has_bounds() {
        let cluster = TestCluster::new();
        let (own, peer) = (cluster.node(), cluster.node());
        let (book, _) = Book::new(wall_clock());
        book.open(&own).unwrap();
        let (host, counter) = (ip(1), 1);
        book.set_own(Located { host, counter }, record(&own, 1, 1));
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
