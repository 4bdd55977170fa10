//! Kubernetes' certificates and access.

use std::time::{Duration, SystemTime};

use hearth_api::identity::{NodeCredentials, NodeId, SigningKey};
use hearth_api::recovery::{RecoveryKey, WrappedKey};
use hearth_api::secrets_keys::wrapped_message;
use hearth_api::v1::issue_certificate_request::kubernetes_worker::Purpose;
use hearth_api::v1::issue_certificate_request::{Kind, KubernetesWorker};
use hearth_api::v1::management_client::ManagementClient;
use hearth_api::v1::provide_secrets_keys_request::Provided;
use hearth_api::v1::{
    GetKubernetesAccessRequest, GetKubernetesAccessResponse, GetSecretsKeysRequest,
    IssueCertificateRequest, IssueCertificateResponse, NodeRoles, NodeState,
    ProvideSecretsKeysRequest, node_roles,
};
use hearth_base::testing::within_timeout;
use hearth_consensus::ConsensusUser;
use hearth_consensus::secrets_keys::{Controller, SecretsKeys, StoredKey};
use hearth_host::pki::kubernetes::{KeyAndCertificate, OPERATOR_LIFETIME, WORKER_LIFETIME};
use tonic::{Code, Status};
use x509_parser::extensions::GeneralName;

use super::super::testing::{Who, World, id_of, quick};

fn worker() -> NodeRoles {
    NodeRoles {
        kubernetes_worker: Some(node_roles::KubernetesWorker {}),
        ..Default::default()
    }
}

fn controller() -> NodeRoles {
    NodeRoles {
        kubernetes_controller: Some(node_roles::KubernetesController {}),
        ..Default::default()
    }
}

async fn ask(
    world: &World,
    node: &NodeCredentials,
    purpose: i32,
    public_key: &[u8],
) -> Result<IssueCertificateResponse, Status> {
    let request = IssueCertificateRequest {
        kind: Some(Kind::KubernetesWorker(KubernetesWorker {
            purpose,
            public_key: public_key.to_vec(),
        })),
    };
    let mut curator = world.curator(node);
    let issued = within_timeout("a certificate", curator.issue_certificate(request)).await?;
    Ok(issued.into_inner())
}

fn subject(certificate: &[u8]) -> String {
    let (_, leaf) = x509_parser::parse_x509_certificate(certificate).unwrap();
    leaf.subject().to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_get_a_certificate_for_each_purpose() {
    let world = World::new(quick()).await;
    let node = world.add_node(NodeState::Up).await;
    let id = id_of(&node);
    world.set_roles(&node, worker()).await;
    let mut authorities = Vec::new();
    for (purpose, wanted) in [
        (
            Purpose::KubeletClient,
            format!("CN=system:node:{id}, O=system:nodes"),
        ),
        (Purpose::Proxy, "CN=system:kube-proxy".into()),
        (
            Purpose::Node,
            format!("CN=hearth:node:{id}, O=hearth:nodes"),
        ),
    ] {
        let key = SigningKey::generate();
        let issued = ask(&world, &node, purpose.into(), key.public().as_bytes())
            .await
            .unwrap();
        assert_eq!(subject(&issued.certificate), wanted);
        let held = KeyAndCertificate::new(&key, &issued.certificate, WORKER_LIFETIME).unwrap();
        let due = held.renew_in(SystemTime::now());
        let hour = Duration::from_secs(3600);
        assert!(due > 15 * hour && due <= 16 * hour, "{due:?}");
        authorities.push(issued.ca_certificate);
    }
    assert!(authorities.iter().all(|ca| *ca == authorities[0]));
    assert_ne!(authorities[0], node.ca.to_vec(), "Kubernetes' own");

    // A server certificate needs the node's address.
    let key = SigningKey::generate().public();
    let server = || ask(&world, &node, Purpose::KubeletServer.into(), key.as_bytes());
    let refused = server().await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert!(refused.message().contains("UpdateNodeStatus"), "{refused}");
    for (address, octets) in [
        ("192.0.2.9", &[192, 0, 2, 9][..]),
        ("192.0.2.10", &[192, 0, 2, 10]),
    ] {
        world.report(&node, address).await;
        let issued = server().await.unwrap();
        let (_, leaf) = x509_parser::parse_x509_certificate(&issued.certificate).unwrap();
        let names = leaf.subject_alternative_name().unwrap().unwrap();
        let id = id.to_string();
        assert_eq!(
            names.value.general_names,
            [GeneralName::DNSName(&id), GeneralName::IPAddress(octets)]
        );
    }
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_else_gets_one_and_nothing_else_is_signed() {
    let world = World::new(quick()).await;
    let node = world.add_node(NodeState::Up).await;
    let key = SigningKey::generate().public();
    let key = &key.as_bytes()[..];
    let kubelet = Purpose::KubeletClient.into();
    // Other roles make no difference.
    for roles in [NodeRoles::default(), controller()] {
        world.set_roles(&node, roles).await;
        let refused = ask(&world, &node, kubelet, key).await.unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition);
        assert!(
            refused.message().contains("not a Kubernetes worker"),
            "{refused}"
        );
    }
    world.set_roles(&node, worker()).await;
    let own = node.key.public();
    for (purpose, key, field) in [
        (0, key, "purpose"),
        (77, key, "purpose"),
        (-1, key, "purpose"),
        (kubelet, &[][..], "public_key"),
        (kubelet, &key[..31], "public_key"),
        (kubelet, &[0; 32], "public_key"),
        (kubelet, &own.as_bytes()[..], "public_key"),
    ] {
        let refused = ask(&world, &node, purpose, key).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
        assert!(refused.message().contains(field), "{refused}");
    }
    ask(&world, &node, kubelet, key).await.unwrap();

    // The role is removed, then the node is deleted.
    world.set_roles(&node, NodeRoles::default()).await;
    let refused = ask(&world, &node, kubelet, key).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    world.delete_node(id_of(&node)).await;
    let refused = ask(&world, &node, kubelet, key).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);

    // A node that has only registered, and an unknown one.
    let new = world.add_node(NodeState::Standby).await;
    world.set_roles(&new, worker()).await;
    let refused = ask(&world, &new, kubelet, key).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    world.stop().await;
}

async fn access(world: &World, key: &[u8]) -> Result<GetKubernetesAccessResponse, Status> {
    let request = GetKubernetesAccessRequest {
        public_key: key.to_vec(),
    };
    let mut management = world.management().await;
    let call = management.get_kubernetes_access(request);
    Ok(within_timeout("access", call).await?.into_inner())
}

#[tokio::test(flavor = "multi_thread")]
async fn operators_get_short_access_to_the_controllers_there_are() {
    let world = World::new(quick()).await;
    let key = SigningKey::generate();
    let public = key.public();
    let public = &public.as_bytes()[..];
    let refused = access(&world, public).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert!(
        refused.message().contains("hearthctl node role add"),
        "{refused}"
    );
    let (one, two) = (
        world.add_node(NodeState::Up).await,
        world.add_node(NodeState::Up).await,
    );
    world.set_roles(&one, controller()).await;
    let refused = access(&world, public).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert!(refused.message().contains("address"), "{refused}");
    world.report(&one, "192.0.2.1").await;
    // It is not a controller.
    world.report(&two, "192.0.2.2").await;
    let given = access(&world, public).await.unwrap();
    assert_eq!(given.servers, ["https://192.0.2.1:6443"]);
    world.set_roles(&two, controller()).await;
    world.report(&two, "2001:db8::2").await;
    let mut given = access(&world, public).await.unwrap();
    given.servers.sort();
    assert_eq!(
        given.servers,
        ["https://192.0.2.1:6443", "https://[2001:db8::2]:6443"]
    );

    assert_eq!(subject(&given.certificate), "CN=owner, O=system:masters");
    let held = KeyAndCertificate::new(&key, &given.certificate, OPERATOR_LIFETIME).unwrap();
    let left = held.not_after().duration_since(SystemTime::now()).unwrap();
    let hour = Duration::from_secs(3600);
    assert!(
        left <= hour && left > hour - Duration::from_secs(60),
        "{left:?}"
    );
    // From the same authority as workers' certificates.
    world.set_roles(&one, worker()).await;
    let issued = ask(&world, &one, Purpose::Proxy.into(), public).await;
    assert_eq!(issued.unwrap().ca_certificate, given.ca_certificate);

    for wrong in [&[][..], &public[..31], &[0; 32]] {
        let refused = access(&world, wrong).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    }
    // Nodes are not operators, whatever their roles.
    let mut management = ManagementClient::new(world.channel(&Who::Node(&one)));
    let request = GetKubernetesAccessRequest {
        public_key: public.to_vec(),
    };
    let refused = management.get_kubernetes_access(request).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    world.stop().await;
}

/// An owner adds keys for controllers, and for nobody else.
#[tokio::test(flavor = "multi_thread")]
async fn keys_of_secrets_are_added_for_controllers_only() {
    let world = World::new(quick()).await;
    let wrapped = |byte: u8| WrappedKey::try_from(&[byte; 80][..]).unwrap();
    let recipients = [1, 2, 3].map(|byte| RecoveryKey::from_bytes([byte; 32]).recipient());
    let etcd = world.etcd.handle();
    let keys = SecretsKeys::new(etcd.root().namespaced(ConsensusUser::KubernetesSecrets));
    let known = keys.read().await.unwrap();
    let stored = StoredKey {
        id: "1-0011223344556677".into(),
        wrapped: vec![(recipients[0], wrapped(7))],
        rewritten: true,
    };
    keys.put(&known, 1, &stored).await.unwrap();
    for (byte, recipient) in [(1, recipients[0]), (2, recipients[1])] {
        let controller = Controller {
            recipient,
            generation: 1,
        };
        let node = NodeId::from_bytes([byte; 16]);
        keys.announce(&known, node, &controller).await.unwrap();
    }
    let mut management = world.management().await;
    let listed = management.get_secrets_keys(GetSecretsKeysRequest {});
    let listed = listed.await.unwrap().into_inner();
    assert_eq!((listed.keys.len(), listed.controllers.len()), (1, 2));
    assert_eq!(listed.keys[0].generation, 1);

    let provided = |generation, recipient, byte| ProvideSecretsKeysRequest {
        keys: vec![Provided {
            generation,
            wrapped: Some(wrapped_message(&recipient, &wrapped(byte))),
        }],
    };
    for (request, said) in [
        (provided(2, recipients[1], 8), "keys.generation"),
        (provided(1, recipients[2], 8), "keys.wrapped.recipient"),
        (
            ProvideSecretsKeysRequest {
                keys: vec![Provided::default()],
            },
            "keys.wrapped",
        ),
    ] {
        let refused = management.provide_secrets_keys(request).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument);
        assert!(refused.message().starts_with(said), "{refused}");
    }
    // What is there is not replaced.
    for (recipient, byte) in [(recipients[1], 8), (recipients[0], 9), (recipients[1], 9)] {
        let request = provided(1, recipient, byte);
        management.provide_secrets_keys(request).await.unwrap();
    }
    let now = keys.read().await.unwrap();
    let expected = vec![(recipients[0], wrapped(7)), (recipients[1], wrapped(8))];
    assert_eq!(now.keys[&1].content.wrapped, expected);
    assert!(now.keys[&1].content.rewritten);

    let node = world.add_node(NodeState::Up).await;
    let mut management = ManagementClient::new(world.channel(&Who::Node(&node)));
    let refused = management.get_secrets_keys(GetSecretsKeysRequest {}).await;
    assert_eq!(refused.unwrap_err().code(), Code::PermissionDenied);
    world.stop().await;
}
