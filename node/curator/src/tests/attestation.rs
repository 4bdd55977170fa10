//! Admission under the policy KNOWN_IMAGES, of machines with emulated TPMs.

use std::path::PathBuf;
use std::sync::Arc;

use hearth_api::v1::join_node_response::Answer;
use hearth_api::v1::management_client::ManagementClient;
use hearth_api::v1::{
    AdmissionPolicy, ClusterConfiguration, ConfigureClusterRequest, GetChallengeRequest,
    GetClusterInfoRequest, GetTrustedImagesRequest, JoinNodeRequest, NodeState, RevokeImageRequest,
    TpmUsage, TrustImageRequest,
};
use hearth_base::testing::within_timeout;
use hearth_cluster::state::Trusted;
use hearth_host::prover::Prover;
use hearth_tpm::boot_log::BootEvent;
use hearth_tpm::images::TrustedImage;
use hearth_tpm::testing::{Swtpm, event_log};
use hearth_tpm::{Digest, Pcr};
use tonic::{Code, Status};

use super::super::testing::{Who, World, quick};
use super::machine::{Machine, approve, ticket};

/// The events of a boot of this image with this command line.
fn boot(image: &str, command_line: &str) -> Vec<BootEvent> {
    let event = |pcr, content: &str| BootEvent {
        pcr,
        digest: Digest::of(&[content.as_bytes()]),
    };
    vec![
        event(Pcr::BOOT_PROGRAMS, "loader"),
        event(Pcr::BOOT_PROGRAMS, image),
        event(Pcr::BOOT_PROGRAMS, "kernel"),
        event(Pcr::COMMAND_LINE, command_line),
        event(Pcr::KERNEL_IMAGE, image),
    ]
}

/// The hardware of a machine.
struct Hardware {
    swtpm: Swtpm,
    directory: tempfile::TempDir,
}

impl Hardware {
    fn new() -> Self {
        Self {
            swtpm: Swtpm::start(),
            directory: tempfile::tempdir().unwrap(),
        }
    }

    /// Boots, and logs `logged` of it.
    fn boots(&mut self, measured: &[BootEvent], logged: &[BootEvent]) -> Arc<Prover> {
        self.swtpm.restart();
        let mut tpm = self.swtpm.tpm();
        for event in measured {
            tpm.extend(event.pcr, &event.digest);
        }
        drop(tpm);
        let log: PathBuf = self.directory.path().join("log");
        std::fs::write(&log, event_log(logged)).unwrap();
        Arc::new(Prover::new(self.swtpm.tpm(), &log))
    }

    fn boots_honestly(&mut self, image: &str, command_line: &str) -> Arc<Prover> {
        let events = boot(image, command_line);
        self.boots(&events, &events)
    }
}

async fn asks_for_known_images(world: &World) {
    let mut management = world.management().await;
    let info = management.get_cluster_info(GetClusterInfoRequest {});
    let info = within_timeout("the settings", info).await.unwrap();
    let request = ConfigureClusterRequest {
        version: info.get_ref().configuration_version,
        configuration: Some(ClusterConfiguration {
            admission_policy: AdmissionPolicy::KnownImages.into(),
            ..ClusterConfiguration::default()
        }),
        field_mask: vec!["admission_policy".into()],
    };
    let changed = management.configure_cluster(request);
    within_timeout("ConfigureCluster", changed).await.unwrap();
}

async fn trust(world: &World, events: &[BootEvent]) -> TrustedImage {
    let image = TrustedImage::booted(events).unwrap();
    let trusted = Trusted {
        image: image.clone(),
        since: 0,
    };
    let mut management = world.management().await;
    let request = TrustImageRequest {
        image: Some(trusted.into()),
    };
    for _ in 0..2 {
        let call = management.trust_image(request.clone());
        within_timeout("TrustImage", call).await.unwrap();
    }
    image
}

fn refused<T: std::fmt::Debug>(answer: Result<T, Status>, code: Code, reason: &str) {
    let refused = answer.unwrap_err();
    assert_eq!(refused.code(), code, "{refused}");
    assert!(refused.message().contains(reason), "{reason}: {refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_is_admitted_by_what_it_has_booted() {
    let world = World::new(quick()).await;
    let ticket = ticket(&world).await;
    let mut hardware = Hardware::new();
    let mut machine = Machine::new();
    machine.tpm = TpmUsage::PresentAndUsed;
    asks_for_known_images(&world).await;

    let answer = machine.register(&world, &ticket).await;
    refused(answer, Code::FailedPrecondition, "needs a TPM 2.0");
    machine.prover = Some(hardware.boots(&[], &[]));
    let answer = machine.register(&world, &ticket).await;
    refused(
        answer,
        Code::FailedPrecondition,
        "nothing of the image was measured",
    );
    machine.prover = Some(hardware.boots_honestly("a", "quiet"));
    let answer = machine.register(&world, &ticket).await;
    refused(answer, Code::FailedPrecondition, "is not trusted");
    assert!(machine.shown(&world).await.is_none());

    let image = trust(&world, &boot("a", "quiet")).await;
    machine.register(&world, &ticket).await.unwrap();
    approve(&world, machine.selector()).await.unwrap();
    machine.commit(&world).await.unwrap();
    let joined = machine.join(&world).await.unwrap();
    assert!(matches!(joined.answer, Some(Answer::Admitted(_))));
    let shown = machine.shown(&world).await.unwrap();
    assert_eq!(shown.state(), NodeState::Up);
    assert_eq!(shown.joins[0].image, image.parts.0);

    // One byte of the image; another command line; a program before it.
    let changed = boot("A", "quiet");
    let with_shell = boot("a", "quiet init=/bin/sh");
    let mut with_rootkit = boot("a", "quiet");
    with_rootkit.insert(
        0,
        BootEvent {
            digest: Digest::of(&[b"rootkit"]),
            ..with_rootkit[0]
        },
    );
    for (events, reason) in [
        (&changed, "is not trusted"),
        (&with_shell, "not with the command line"),
        (&with_rootkit, "has also started the program"),
    ] {
        machine.prover = Some(hardware.boots(events, events));
        refused(machine.join(&world).await, Code::FailedPrecondition, reason);
        // A log of what should have been booted.
        machine.prover = Some(hardware.boots(events, &boot("a", "quiet")));
        refused(
            machine.join(&world).await,
            Code::FailedPrecondition,
            "event log",
        );
    }
    machine.prover = Some(hardware.boots_honestly("a", "quiet"));
    machine.join(&world).await.unwrap();

    let request = RevokeImageRequest {
        parts: image.parts.0.to_vec(),
    };
    let mut management = world.management().await;
    management.revoke_image(request.clone()).await.unwrap();
    refused(
        machine.join(&world).await,
        Code::FailedPrecondition,
        "is not trusted",
    );
    refused(
        management.revoke_image(request).await,
        Code::NotFound,
        "no image",
    );
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_keeps_its_tpm() {
    let world = World::new(quick()).await;
    let mut hardware = Hardware::new();
    let mut machine = Machine::new();
    machine.tpm = TpmUsage::PresentAndUsed;
    // Under ANY nothing is asked.
    machine.prover = Some(hardware.boots_honestly("a", "quiet"));
    machine.becomes_a_node(&world).await;
    machine.join(&world).await.unwrap();
    let shown = machine.shown(&world).await.unwrap();
    assert!(shown.joins[0].image.is_empty());
    asks_for_known_images(&world).await;
    trust(&world, &boot("a", "quiet")).await;
    // The first TPM that proves something is the node's.
    machine.join(&world).await.unwrap();
    let mut thief = Hardware::new();
    let own = machine.prover.replace(thief.boots_honestly("a", "quiet"));
    refused(
        machine.join(&world).await,
        Code::FailedPrecondition,
        "another TPM",
    );
    machine.prover = own;
    machine.join(&world).await.unwrap();
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_proof_is_used_once_and_by_its_caller() {
    let world = World::new(quick()).await;
    let mut hardware = Hardware::new();
    let mut machine = Machine::new();
    machine.tpm = TpmUsage::PresentAndUsed;
    machine.prover = Some(hardware.boots_honestly("a", "quiet"));
    machine.becomes_a_node(&world).await;
    asks_for_known_images(&world).await;
    trust(&world, &boot("a", "quiet")).await;

    let mut client = machine.client(&world, &machine.join_key);
    let proof = machine.proof(&mut client, &machine.join_key).await.unwrap();
    let request = JoinNodeRequest {
        tpm_usage: machine.tpm.into(),
        boot_id: super::super::testing::BOOT_ID.into(),
        proof,
    };
    client.join_node(request.clone()).await.unwrap();
    refused(
        client.join_node(request.clone()).await,
        Code::Unavailable,
        "ask for a challenge again",
    );
    // Replayed in answer to another challenge.
    machine.proof(&mut client, &machine.join_key).await.unwrap();
    refused(
        client.join_node(request).await,
        Code::FailedPrecondition,
        "one TPM",
    );
    // A quote for another key.
    let foreign = machine.proof(&mut client, &machine.key).await.unwrap();
    let request = JoinNodeRequest {
        tpm_usage: machine.tpm.into(),
        boot_id: super::super::testing::BOOT_ID.into(),
        proof: foreign,
    };
    refused(
        client.join_node(request).await,
        Code::FailedPrecondition,
        "another challenge",
    );
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn malformed_keys_and_images_are_refused_with_the_field() {
    let world = World::new(quick()).await;
    asks_for_known_images(&world).await;
    let mut hardware = Hardware::new();
    let prover = hardware.boots_honestly("a", "quiet");
    let good = prover.keys().await.unwrap();
    let machine = Machine::new();
    let mut client = machine.client(&world, &machine.key);
    let off_curve = [&[0, 32][..], &[1; 32], &[0, 32], &[1; 32]].concat();
    for (request, field) in [
        (
            GetChallengeRequest {
                endorsement_key: vec![1],
                ..good.clone()
            },
            "endorsement_key",
        ),
        (
            GetChallengeRequest {
                endorsement_key: off_curve,
                ..good.clone()
            },
            "endorsement_key",
        ),
        (
            GetChallengeRequest {
                attestation_key: vec![1],
                ..good.clone()
            },
            "attestation_key",
        ),
        (
            GetChallengeRequest {
                endorsement_certificate: vec![1; 5000],
                ..good.clone()
            },
            "endorsement_certificate",
        ),
        (
            GetChallengeRequest {
                endorsement_certificate: world.node.certificate.to_vec(),
                ..good
            },
            "endorsement_certificate",
        ),
    ] {
        refused(
            client.get_challenge(request).await,
            Code::InvalidArgument,
            field,
        );
    }
    let needs = client
        .get_challenge(GetChallengeRequest::default())
        .await
        .unwrap();
    assert!(needs.get_ref().required && needs.get_ref().nonce.is_empty());

    let mut management: ManagementClient<_> = world.management().await;
    let listed = management
        .get_trusted_images(GetTrustedImagesRequest {})
        .await;
    assert!(listed.unwrap().get_ref().images.is_empty());
    let image = TrustedImage::booted(&boot("a", "quiet")).unwrap();
    let image: hearth_api::v1::TrustedImage = Trusted { image, since: 0 }.into();
    for (field, change) in [
        (
            "image.parts",
            hearth_api::v1::TrustedImage {
                parts: vec![1],
                ..image.clone()
            },
        ),
        (
            "image.programs",
            hearth_api::v1::TrustedImage {
                programs: Vec::new(),
                ..image.clone()
            },
        ),
        (
            "image.command_lines",
            hearth_api::v1::TrustedImage {
                command_lines: vec![vec![0; 32]; 9],
                ..image
            },
        ),
    ] {
        let request = TrustImageRequest {
            image: Some(change),
        };
        refused(
            management.trust_image(request).await,
            Code::InvalidArgument,
            field,
        );
    }
    // Nodes may not say what they may boot.
    let mut node = ManagementClient::new(world.channel(&Who::Node(&world.node)));
    let request = TrustImageRequest::default();
    refused(node.trust_image(request).await, Code::PermissionDenied, "");
    world.stop().await;
}
