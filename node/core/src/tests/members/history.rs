//! Clients read and write through the curators of three members while these fail, and what they saw is checked.

use hearth_history::{Clients, History, Plan, Reads};

use super::*;

const ALL: [usize; 3] = [0, 1, 2];

/// What can happen to a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// Its etcd stands still.
    Pause,
    /// Its etcd does not reach the others.
    Cut,
    /// Its etcd is killed, and started again by the node.
    Kill,
    /// It loses power.
    Power,
    /// Its wall clock jumps an hour ahead, and back.
    Clock,
}

const FAULTS: [Fault; 5] = [
    Fault::Pause,
    Fault::Cut,
    Fault::Kill,
    Fault::Power,
    Fault::Clock,
];

impl Cluster {
    async fn begin(&mut self, fault: Fault, number: usize) {
        let node = &self.nodes[number];
        match fault {
            Fault::Pause => node.site.pause_etcd().await,
            Fault::Cut => self.network.cut_off(&[node.id()]),
            Fault::Kill => node.signal_any_etcd(Signal::SIGKILL),
            Fault::Power => self.cut_power(number).await,
            Fault::Clock => node.clock.set(3600),
        }
    }

    fn end_of(&mut self, fault: Fault, number: usize) {
        let node = &self.nodes[number];
        match fault {
            Fault::Pause => node.signal_any_etcd(Signal::SIGCONT),
            Fault::Cut => self.network.cut_off(&[]),
            Fault::Kill => {}
            Fault::Power => self.boot(number),
            Fault::Clock => node.clock.set(0),
        }
    }

    /// The leader of etcd, which orders all writes. The leading curator may be on another node.
    async fn leader_of_etcd(&self) -> usize {
        within_timeout("a leader of etcd", async {
            loop {
                let members = self.status().await.members;
                match members.iter().find(|member| member.leader) {
                    Some(leader) => return self.number_of(&leader.node_id),
                    None => tokio::time::sleep(LOOK).await,
                }
            }
        })
        .await
    }

    /// One client of each member's curator.
    async fn clients(&self, seed: u64) -> Clients {
        let plan = Plan {
            node: self.nodes[0].id().to_string(),
            labels: vec!["history-a".into(), "history-b".into()],
            reads: Reads::Linearizable,
            patience: Duration::from_secs(2),
            pace: Duration::from_millis(5),
        };
        let channels = self.endpoints().into_iter();
        let channels = channels.map(|endpoint| self.channel(vec![endpoint]));
        let clients = Clients::start(plan, channels.collect(), seed).await;
        let clients = clients.unwrap_or_else(|error| panic!("{error}"));
        self.go_on(&clients, &ALL).await;
        clients
    }

    /// Waits until the clients of these members' curators get answers.
    async fn go_on(&self, clients: &Clients, numbers: &[usize]) {
        if let Err(error) = clients.go_on(numbers, BOUND).await {
            self.print_logs();
            panic!("{error}");
        }
    }
}

async fn three() -> Cluster {
    let cluster = Cluster::new(3, quick()).await;
    cluster.set_member(1, true).await.unwrap();
    cluster.set_member(2, true).await.unwrap();
    cluster.becomes(&ALL).await;
    cluster
}

fn check(history: &History) {
    match history.check() {
        Ok(checked) => println!("{checked}"),
        Err(error) => panic!("{error}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_clients_see_while_the_leader_fails_is_linearizable() {
    let mut cluster = three().await;
    let clients = cluster.clients(1).await;
    for fault in FAULTS {
        let leader = cluster.leader_of_etcd().await;
        cluster.begin(fault, leader).await;
        let others: Vec<usize> = ALL.into_iter().filter(|n| *n != leader).collect();
        cluster.go_on(&clients, &others).await;
        cluster.end_of(fault, leader);
        cluster.go_on(&clients, &ALL).await;
    }
    check(&clients.stop().await.unwrap());
    cluster.end().await;
}

/// Two members fail at once, in different ways: mostly there is no quorum.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "long: some minutes, with other faults each time; for `--ignored`"]
async fn what_clients_see_while_any_two_fail_is_linearizable() {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let mut cluster = three().await;
    let clients = cluster.clients(seed).await;
    for round in 0..25 {
        let (mut faults, mut numbers) = (FAULTS, ALL);
        random.shuffle(&mut faults);
        random.shuffle(&mut numbers);
        println!("round {round}: {:?} of {:?}", &faults[..2], &numbers[..2]);
        let both: Vec<(Fault, usize)> = faults.into_iter().zip(numbers).take(2).collect();
        for (fault, number) in &both {
            cluster.begin(*fault, *number).await;
        }
        // Until it is known to all, as far as it concerns them.
        clients.try_on(&ALL, BOUND).await.unwrap();
        for (fault, number) in both {
            cluster.end_of(fault, number);
        }
        cluster.go_on(&clients, &ALL).await;
    }
    check(&clients.stop().await.unwrap());
    cluster.end().await;
}
