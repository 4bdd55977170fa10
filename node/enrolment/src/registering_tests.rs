//! The driver against a real curator: a machine registers, is approved, commits, rejoins, and is
//! removed.

use std::sync::Arc;

use hearth_api::client::Channel;
use hearth_api::identity::{PublicKey, Ticket};
use hearth_api::v1::management_client::ManagementClient;
use hearth_api::v1::{
    ApproveNodeRequest, ClusterDirectory, DeleteNodeRequest, GetRegisterTicketRequest,
    NodeSelector, NodeState, cluster_directory, node_selector,
};
use hearth_curator::testing::{World, quick};
use hearth_host::cluster_state::State;
use hearth_host::credentials;
use hearth_host::directory::DirectoryStore;
use hearth_host::parameters::{self, Found, Source};
use hearth_host::storage::header::{HeaderState, Phase};
use hearth_parameters::{Cluster, Network, Parameters, Register};

use super::driver::tests::{Boot, Machine};
use super::machine::EnrolmentStatus;
use super::sealed::{Registering, Sealed};
use crate::EnrolmentId;

/// A cluster, and its owner.
pub(super) struct Home {
    pub(crate) world: World,
    management: ManagementClient<Channel>,
}

impl Home {
    pub(crate) async fn new() -> Self {
        let world = World::new(quick()).await;
        let management = world.management().await;
        Self { world, management }
    }

    async fn ticket(&mut self, rotate: bool) -> Ticket {
        let request = GetRegisterTicketRequest { rotate };
        let answer = self.management.get_register_ticket(request).await.unwrap();
        answer.into_inner().register_ticket[..].try_into().unwrap()
    }

    fn directory(&self) -> ClusterDirectory {
        let port = self.world.ready.get().unwrap();
        ClusterDirectory {
            nodes: vec![cluster_directory::Node {
                id: self.world.site.node_id.to_string(),
                addresses: vec![cluster_directory::Address {
                    host: "127.0.0.1".into(),
                    port: port.into(),
                }],
                roles: None,
            }],
        }
    }

    /// The parameters for a machine.
    async fn input(&mut self) -> Parameters {
        Parameters {
            cluster: Cluster::Register(Register {
                directory: self.directory(),
                ticket: self.ticket(false).await,
                ca: self.world.node.ca.clone(),
                labels: Vec::new(),
            }),
            network: Network::default(),
            wipe: None,
            time_servers: Vec::new(),
            install: None,
        }
    }

    async fn approve(&mut self, key: PublicKey) {
        let request = ApproveNodeRequest {
            node: Some(selector(key)),
        };
        self.management.approve_node(request).await.unwrap();
    }

    pub(crate) async fn delete(&mut self, key: PublicKey) {
        let request = DeleteNodeRequest {
            node: Some(selector(key)),
            bypass_not_decommissioned: true,
            bypass_has_roles: true,
            reset: false,
        };
        self.management.delete_node(request).await.unwrap();
    }

    /// All nodes except the first, by their public keys.
    async fn others(&self) -> Vec<(Vec<u8>, NodeState)> {
        let own = self.world.site.node_id.to_string();
        let nodes = self.world.nodes().await;
        let others = nodes.iter().filter(|node| node.id != own);
        others
            .map(|node| (node.public_key.clone(), node.state()))
            .collect()
    }
}

fn selector(key: PublicKey) -> NodeSelector {
    NodeSelector {
        node: Some(node_selector::Node::PublicKey(key.as_bytes().to_vec())),
    }
}

pub(super) fn loaded(parameters: &Parameters) -> parameters::Loaded {
    Ok(Some(Found {
        source: Source::FwCfg,
        parameters: parameters.clone(),
        ignored: Vec::new(),
    }))
}

impl Machine {
    fn registering(&self) -> Arc<Registering> {
        match self.sealed() {
            Sealed::Registering(registering) => registering,
            other => panic!("{other:?}"),
        }
    }

    fn key(&self) -> PublicKey {
        self.registering().node_key.public()
    }
}

impl Boot {
    async fn waits(&self) -> String {
        let waits = |status: &EnrolmentStatus| matches!(status, EnrolmentStatus::Waiting { .. });
        match self.until(waits).await {
            EnrolmentStatus::Waiting { reason, .. } => reason,
            other => panic!("{other:?}"),
        }
    }

    async fn refused(&self) -> String {
        let refused = |status: &EnrolmentStatus| matches!(status, EnrolmentStatus::Refused(_));
        match self.until(refused).await {
            EnrolmentStatus::Refused(reason) => reason,
            other => panic!("{other:?}"),
        }
    }

    async fn retries(&self) -> String {
        let retries = |status: &EnrolmentStatus| matches!(status, EnrolmentStatus::Retrying { .. });
        match self.until(retries).await {
            EnrolmentStatus::Retrying { reason, .. } => reason,
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn a_machine_registers_is_approved_and_comes_home() {
    let mut home = Home::new().await;
    let input = home.input().await;
    let machine = Machine::new();
    let boot = machine.boot(loaded(&input));
    let reason = boot.waits().await;
    let key = machine.key();
    assert!(
        reason.ends_with(&format!("run: hearthctl node approve {key}")),
        "{reason}"
    );
    boot.becomes(State::Foreign).await;
    assert!(boot.member.get().is_none());
    assert_eq!(
        home.others().await,
        [(key.as_bytes().to_vec(), NodeState::New)]
    );
    // A known node does not need the ticket any more.
    home.ticket(true).await;

    home.approve(key).await;
    let member = boot.settled().await;
    boot.becomes(State::Home).await;
    assert_eq!(member.own.cluster(), home.world.site.cluster_id);
    assert_eq!(member.directory, home.directory());
    assert_eq!(member.own.key().public(), key);
    assert_eq!(
        home.others().await,
        [(key.as_bytes().to_vec(), NodeState::Up)]
    );
    let reports = boot.off().await;
    let approval = "hearth: waiting for approval by an operator of cluster ";
    assert!(
        reports[0] == "hearth: reached storage encrypted",
        "{reports:?}"
    );
    assert!(reports[1].starts_with(approval), "{reports:?}");
    assert_eq!(reports.len(), 2, "it is said once: {reports:?}");
    assert_eq!(
        DirectoryStore::new(&machine.root.esp).load().unwrap(),
        Some(home.directory())
    );
    let Sealed::Member(sealed) = machine.sealed() else {
        panic!("{:?}", machine.sealed());
    };
    assert_eq!(sealed.owner, Some(home.world.owner_key.public()));
    assert_eq!(sealed.identity.node_id, member.own.node());

    // It rejoins with its join key, without parameters.
    let boot = machine.boot(Ok(None));
    let again = boot.settled().await;
    assert_eq!(again.own.node(), member.own.node());
    assert_eq!(again.own.certificate(), member.own.certificate());
    assert_eq!(boot.state.get(), State::Unknown, "until it is acknowledged");
    boot.off().await;
    home.world.stop().await;
}

/// FAULTS 3, 4, 33: power cuts between all tasks.
#[tokio::test]
async fn a_registration_that_ends_anywhere_is_continued_by_the_next_boot() {
    let mut home = Home::new().await;
    let input = home.input().await;
    let machine = Machine::new();
    let stops = [
        "generate keys",
        "save the sealed configuration",
        "register with the cluster",
        "initialise the data partition",
        "create the file system",
        "mark the data partition ready",
        "mount the data partition",
        "commit the registration",
        "save the node's credentials",
        "hand over to the role server",
    ];
    for stop in stops {
        let boot = machine.boot(loaded(&input));
        boot.until(|status| match status {
            EnrolmentStatus::Working(work) => work == stop,
            // It is beyond that: a short-lived status may be missed.
            EnrolmentStatus::Waiting { .. } | EnrolmentStatus::Settled => true,
            _ => false,
        })
        .await;
        if stop.starts_with("mount") {
            boot.waits().await;
            home.approve(machine.key()).await;
        }
        boot.off().await;
    }
    let boot = machine.boot(Ok(None));
    let member = boot.settled().await;
    boot.off().await;
    let key = member.own.key().public();
    assert_eq!(
        home.others().await,
        [(key.as_bytes().to_vec(), NodeState::Up)],
        "one machine, one node"
    );
    home.world.stop().await;
}

#[tokio::test]
async fn a_wrong_ticket_is_told_and_the_next_parameters_mend_it() {
    let mut home = Home::new().await;
    let right = home.input().await;
    let mut wrong = right.clone();
    if let Cluster::Register(register) = &mut wrong.cluster {
        register.ticket = Ticket::generate();
    }
    let machine = Machine::new();
    let boot = machine.boot(loaded(&wrong));
    let reason = boot.retries().await;
    assert!(reason.contains("PermissionDenied"), "{reason}");
    assert!(reason.contains("ticket"), "{reason}");
    assert_eq!(
        machine.header(),
        HeaderState::Blank,
        "nothing is made for it"
    );
    let key = machine.key();
    boot.off().await;

    let boot = machine.boot(loaded(&right));
    boot.waits().await;
    assert_eq!(machine.key(), key, "the same enrolment");
    home.approve(key).await;
    boot.settled().await;
    boot.off().await;
    home.world.stop().await;
}

/// FAULTS 30.
#[tokio::test]
async fn who_is_deleted_while_it_waits_needs_another_life() {
    let mut home = Home::new().await;
    let input = home.input().await;
    let machine = Machine::new();
    let boot = machine.boot(loaded(&input));
    boot.waits().await;
    let (key, enrolment) = (machine.key(), machine.registering().enrolment_id);
    home.delete(key).await;
    let reason = boot.refused().await;
    assert!(reason.contains("PermissionDenied"), "{reason}");
    let token = format!("wipe.enrolment_id = {enrolment}");
    assert!(reason.contains(&token), "{reason}");
    boot.off().await;

    let mut wiping = input;
    wiping.wipe = Some(enrolment);
    let boot = machine.boot(loaded(&wiping));
    boot.waits().await;
    assert_ne!(machine.key(), key);
    home.approve(machine.key()).await;
    let member = boot.settled().await;
    assert_ne!(member.own.key().public(), key);
    boot.off().await;
    home.world.stop().await;
}

/// A machine that is a member, powered off.
pub(super) async fn member(home: &mut Home) -> (Machine, PublicKey) {
    let input = home.input().await;
    let machine = Machine::new();
    let boot = machine.boot(loaded(&input));
    boot.waits().await;
    let key = machine.key();
    home.approve(key).await;
    boot.settled().await;
    boot.off().await;
    (machine, key)
}

#[tokio::test]
async fn a_member_that_was_deleted_is_disowned_when_it_comes_back() {
    let mut home = Home::new().await;
    let (machine, key) = member(&mut home).await;
    let enrolment = machine.sealed().enrolment_id();
    home.delete(key).await;
    // At once, and permanently: the cluster is not needed for that any more.
    for gone in [false, true] {
        if gone {
            home.world.stop_curator().await;
        }
        let boot = machine.boot(Ok(None));
        let reason = boot.waits().await;
        assert!(reason.contains("has removed this node"), "{reason}");
        let token = format!("wipe.enrolment_id = {enrolment}");
        assert!(reason.contains(&token), "{reason}");
        boot.becomes(State::Disowning).await;
        assert!(boot.member.get().is_none());
        boot.off().await;
        let Sealed::Disowned(disowned) = machine.sealed() else {
            panic!("{:?}", machine.sealed());
        };
        assert_eq!(disowned.enrolment_id, enrolment);
    }
    home.world.start_curator().await;
    home.management = home.world.management().await;
    let mut wiping = home.input().await;
    wiping.wipe = Some(enrolment);
    let boot = machine.boot(loaded(&wiping));
    boot.waits().await;
    assert_ne!(machine.key(), key);
    boot.off().await;
    home.world.stop().await;
}

/// As after a restore from a backup.
#[tokio::test]
async fn a_cluster_that_does_not_know_a_member_wipes_nothing() {
    let mut home = Home::new().await;
    let (machine, key) = member(&mut home).await;
    let id = machine.sealed();
    let Sealed::Member(sealed) = &id else {
        panic!("{id:?}");
    };
    home.world.delete_node(sealed.identity.node_id).await;
    let boot = machine.boot(Ok(None));
    let reason = boot.retries().await;
    assert!(reason.contains("JoinNode: "), "{reason}");
    assert_eq!(boot.state.get(), State::Unknown);
    boot.off().await;
    assert!(machine.sealed().is_same(&id), "untouched");
    let HeaderState::Header(header) = machine.header() else {
        panic!("{:?}", machine.header());
    };
    assert_eq!(header.phase, Phase::Ready);
    let files = machine.root.data.node().credentials();
    let kept = credentials::load(&files).unwrap().unwrap();
    assert_eq!(kept.key.public(), key);
    home.world.stop().await;
}

#[tokio::test]
async fn parameters_for_another_cluster_begin_anew_only_before_an_answer() {
    let mut home = Home::new().await;
    let right = home.input().await;
    let mut wrong = right.clone();
    if let Cluster::Register(register) = &mut wrong.cluster {
        register.ca = hearth_api::testing::TestCluster::new().ca().clone();
    }
    let machine = Machine::new();
    let boot = machine.boot(loaded(&wrong));
    let reason = boot.retries().await;
    assert!(reason.contains("certificate rejected"), "{reason}");
    let first: EnrolmentId = machine.registering().enrolment_id;
    boot.off().await;

    let boot = machine.boot(loaded(&right));
    boot.waits().await;
    let second = machine.registering().enrolment_id;
    assert_ne!(second, first);
    boot.off().await;

    // The cluster has answered, so the node's identity is fixed.
    let boot = machine.boot(loaded(&wrong));
    boot.waits().await;
    assert_eq!(machine.registering().enrolment_id, second);
    boot.off().await;
    home.world.stop().await;
}
