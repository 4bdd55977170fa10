//! Authorization of methods, and how the owner gets a certificate.

use bytes::Bytes;
use futures::FutureExt as _;
use hearth_api::client::Channel;
use hearth_api::first_contact;
use hearth_api::identity::{ClusterId, FirstContactSecret, NodeKey, SigningKey, UserCredentials};
use hearth_api::permissions::{Authorization, Permission, authorization, missing};
use hearth_api::private::StoredNode;
use hearth_api::tls::{OwnCertificate, wall_clock};
use hearth_api::v1::aaa_client::AaaClient;
use hearth_api::v1::curator_local_client::CuratorLocalClient;
use hearth_api::v1::management_client::ManagementClient;
use hearth_api::v1::{
    EscrowRequest, GetCaCertificateRequest, GetClusterInfoRequest, NodeState, WatchRequest,
};
use hearth_base::testing::{BOUND, within_timeout};
use hearth_cluster::state;
use hearth_consensus::fenced::{Condition, Write};
use hearth_consensus::testing::Site;
use hearth_host::pki;
use http_body_util::{BodyExt as _, Full};
use prost::Message as _;
use prost_types::FileDescriptorProto;
use tonic::Code;
use tonic_reflection::pb::v1::ServerReflectionRequest;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
use tower::{Service as _, ServiceExt as _};

use super::super::founding::{self, FoundingError};
use super::super::testing::{Who, World, bootstrap_data, id_of, quick};

/// Calls a method with these bytes as its only message. The result is `Ok` if the first answer is a
/// message, whatever comes later.
async fn call(channel: &Channel, path: &str, message: &[u8]) -> (Code, String) {
    let length = u32::try_from(message.len()).unwrap().to_be_bytes();
    let frame = [&[0], &length[..], message].concat();
    let request = http::Request::post(format!("http://curator.hearth{path}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(tonic::body::Body::new(Full::new(Bytes::from(frame))))
        .unwrap();
    let mut channel = channel.clone();
    let answer = tokio::time::timeout(BOUND, async {
        let response = channel.ready().await.unwrap().call(request).await;
        let (parts, mut body) = match response {
            Ok(response) => response.into_parts(),
            Err(error) => return (Code::Unavailable, error.to_string()),
        };
        if let Some(status) = tonic::Status::from_header_map(&parts.headers) {
            return (status.code(), status.message().to_owned());
        }
        match body.frame().await {
            Some(Ok(frame)) => match frame.into_trailers() {
                Ok(trailers) => {
                    let status = tonic::Status::from_header_map(&trailers).unwrap();
                    (status.code(), status.message().to_owned())
                }
                Err(_) => (Code::Ok, String::new()),
            },
            Some(Err(status)) => (status.code(), status.message().to_owned()),
            None => (Code::Unknown, "no status".into()),
        }
    });
    answer
        .await
        .unwrap_or_else(|_| panic!("{path} does not answer"))
}

/// Every method of the four services, from the descriptors.
fn methods() -> Vec<String> {
    let set = prost_types::FileDescriptorSet::decode(hearth_api::FILE_DESCRIPTOR_SET).unwrap();
    let mut methods = Vec::new();
    for service in set.file.iter().flat_map(|file| &file.service) {
        let served = ["Curator", "CuratorLocal", "Aaa", "Management"];
        if served.contains(&service.name()) {
            let paths = service.method.iter();
            methods.extend(paths.map(|m| format!("/hearth.v1.{}/{}", service.name(), m.name())));
        }
    }
    assert!(methods.len() >= 8, "{methods:?}");
    methods
}

#[tokio::test(flavor = "multi_thread")]
async fn each_method_is_for_those_whom_its_option_names() {
    let world = World::new(quick()).await;
    let (owner, stranger) = (world.owner().await, SigningKey::generate());
    let standby = world.add_node(NodeState::Standby).await;
    let callers = [
        ("nobody", Who::Nobody),
        ("a stranger", Who::HolderOf(&stranger)),
        ("a node", Who::Node(&world.node)),
        ("a node that is not UP", Who::Node(&standby)),
        ("the owner", Who::User(&owner)),
    ];
    for (name, who) in &callers {
        let channel = world.channel(who);
        for path in methods() {
            let subject = match who {
                Who::Node(node) => Some(hearth_api::identity::Subject::Node(id_of(node))),
                Who::User(_) => Some(hearth_api::identity::Subject::User(
                    hearth_api::identity::UserName::owner(),
                )),
                _ => None,
            };
            let needed: &[Permission] = match authorization(&path).unwrap() {
                Authorization::Unauthenticated => &[],
                Authorization::Need(need) => need,
            };
            let (code, message) = call(&channel, &path, &[]).await;
            let of_member = !path.contains("/hearth.v1.CuratorLocal/");
            let wanted = match subject {
                None if !needed.is_empty() => Some(Code::Unauthenticated),
                Some(subject) if missing(&subject, needed).is_some() => {
                    Some(Code::PermissionDenied)
                }
                Some(_) if *name == "a node that is not UP" && of_member => {
                    Some(Code::PermissionDenied)
                }
                _ => None,
            };
            match wanted {
                Some(wanted) => assert_eq!(code, wanted, "{name} {path}: {message}"),
                // An empty message is invalid for most methods, but authorization has passed.
                None => assert!(
                    matches!(
                        code,
                        Code::Ok
                            | Code::InvalidArgument
                            | Code::Unauthenticated
                            | Code::FailedPrecondition
                    ),
                    "{name} {path}: {code:?} {message}"
                ),
            }
        }
        let health = call(&channel, "/grpc.health.v1.Health/Check", &[]).await;
        assert_eq!(health.0, Code::Ok, "{name}");
        for path in [
            "/hearth.v1.Curator/Nothing",
            "/x/y",
            "/hearth.v1.NodeDebug/GetState",
        ] {
            let (code, _) = call(&channel, path, &[]).await;
            assert_ne!(code, Code::Ok, "{name} {path}");
        }
    }
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_bytes_harm_the_curator() {
    let world = World::new(quick()).await;
    let owner = world.owner().await;
    let channels = [
        world.channel(&Who::Nobody),
        world.channel(&Who::HolderOf(&owner.key)),
        world.channel(&Who::Node(&world.node)),
        world.channel(&Who::User(&owner)),
    ];
    let deep: Vec<u8> = [0x12, 0x7f].repeat(300);
    let messages = [
        vec![0xff; 40],
        // A field of 2 GiB, of which two bytes are sent.
        vec![0x0a, 0xff, 0xff, 0xff, 0xff, 0x07, 1, 2],
        deep,
        vec![0x0a, 2, 0xc3, 0x28],
        vec![b'a'; 1 << 20],
        vec![0x08; 30],
    ];
    for channel in &channels {
        for path in methods() {
            for message in &messages {
                let (code, said) = call(channel, &path, message).await;
                assert!(
                    !matches!(code, Code::Unknown | Code::DataLoss),
                    "{path}: {code:?} {said}"
                );
                assert!(
                    !said.contains("handler of this call failed"),
                    "{path} panicked"
                );
            }
        }
    }
    assert_eq!(world.nodes().await.len(), 1);
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_owner_takes_ownership_again_and_again_and_nobody_else_does() {
    let world = World::new(quick()).await;
    let fetch = |secret: FirstContactSecret| {
        let endpoint = world.endpoint();
        async move { first_contact::fetch_ca(&endpoint, &secret, BOUND, wall_clock()).await }
    };
    let ca = fetch(world.data.seed.first_contact_secret.clone())
        .await
        .unwrap();
    assert_eq!(ca.certificate(), &world.node.ca);
    assert!(fetch(FirstContactSecret::generate()).await.is_err());
    let mut local = CuratorLocalClient::new(world.channel(&Who::Nobody));
    let short = GetCaCertificateRequest { nonce: vec![1; 15] };
    let refused = local.get_ca_certificate(short).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    // Requests of unauthenticated clients have a small limit.
    let nonce = vec![1; 2 << 10];
    let long = GetCaCertificateRequest { nonce };
    let refused = local.get_ca_certificate(long).await.unwrap_err();
    assert_eq!(refused.code(), Code::OutOfRange, "{refused}");

    let owner = || EscrowRequest {
        identity: "owner".into(),
        ..EscrowRequest::default()
    };
    let mut aaa = AaaClient::new(world.channel(&Who::HolderOf(&world.owner_key)));
    for identity in ["", "root", "owner "] {
        let request = EscrowRequest {
            identity: identity.into(),
            ..EscrowRequest::default()
        };
        let refused = aaa.escrow(request).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument);
    }
    let mut certificates = Vec::new();
    for _ in 0..2 {
        let issued = aaa.escrow(owner()).await.unwrap().into_inner();
        assert_eq!(issued.ca_certificate, world.node.ca.to_vec());
        certificates.push(issued.certificate.clone());
        let credentials = UserCredentials {
            key: SigningKey::from_seed(*world.owner_key.expose_seed()),
            certificate: issued.certificate.into(),
            ca: world.node.ca.clone(),
        };
        let channel = world.channel(&Who::User(&credentials));
        let info = ManagementClient::new(channel.clone())
            .get_cluster_info(GetClusterInfoRequest {})
            .await
            .unwrap()
            .into_inner();
        assert_eq!(
            ClusterId::try_from(&info.cluster_id[..]),
            Ok(world.site.cluster_id)
        );
        assert_eq!(info.version, "0.1.0-test");
        assert_eq!(
            info.configuration.unwrap().cluster_domain,
            "cluster.internal"
        );
        // The certificate can be used to request another one.
        AaaClient::new(channel).escrow(owner()).await.unwrap();
    }
    assert_ne!(certificates[0], certificates[1]);

    let stranger = SigningKey::generate();
    for (who, wanted) in [
        (Who::Nobody, Code::Unauthenticated),
        (Who::HolderOf(&stranger), Code::PermissionDenied),
        (Who::HolderOf(&world.node.key), Code::PermissionDenied),
        (Who::Node(&world.node), Code::PermissionDenied),
    ] {
        let mut aaa = AaaClient::new(world.channel(&who));
        let refused = aaa.escrow(owner()).await.unwrap_err();
        assert_eq!(refused.code(), wanted, "{refused}");
    }
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_node_is_cut_off_at_once() {
    let world = World::new(quick()).await;
    let node = world.add_node(NodeState::Up).await;
    let mut curator = world.curator(&node);
    let request = WatchRequest::default();
    let mut events = curator.watch(request.clone()).await.unwrap().into_inner();
    within_timeout("the backlog", events.message())
        .await
        .unwrap();

    world.delete_node(id_of(&node)).await;
    let end = within_timeout("the end", async {
        loop {
            if let Err(status) = events.message().await {
                return status;
            }
        }
    });
    assert_eq!(end.await.code(), Code::PermissionDenied);
    let refused = within_timeout("a refusal", curator.watch(request))
        .await
        .unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    assert!(refused.message().contains("not a member"), "{refused}");

    // A node with the same ID and another key is not the same node.
    let again = world.add_node(NodeState::Up).await;
    let mut forged = again.clone();
    forged.key = NodeKey::generate();
    assert!(OwnCertificate::new(&forged, wall_clock()).is_err());
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_is_founded_once() {
    let site = Site::new();
    let etcd = site.start(true).await;
    let client = etcd.client();
    let owner = hearth_api::identity::OwnerKey::generate();
    let data = bootstrap_data(&site, &owner);
    let authorities = pki::load(&site.root.data.etcd(), site.cluster_id).unwrap();
    let found = |data| founding::found(&client, data, &authorities);

    found(&data).await.unwrap();
    let listing = client.list("").await.unwrap();
    found(&data).await.unwrap();
    let unchanged = client.list("").await.unwrap();
    assert!(listing.records == unchanged.records);
    assert_eq!(listing.revision, unchanged.revision);
    let keys: Vec<_> = listing.records.iter().map(|r| r.key.as_str()).collect();
    let node = format!("nodes/{}", site.node_id);
    let join_key = format!("join_keys/{}", data.join_key);
    assert_eq!(
        keys,
        [
            "cluster",
            "epoch",
            &join_key,
            &node,
            "pki/cluster",
            "pki/etcd"
        ]
    );

    let mut other = bootstrap_data(&site, &owner);
    other.cluster_id = ClusterId::generate();
    assert!(matches!(
        found(&other).await,
        Err(FoundingError::OtherCluster { found, .. }) if found == site.cluster_id
    ));
    let mut other = bootstrap_data(&site, &owner);
    other.node_key = NodeKey::generate();
    assert!(matches!(found(&other).await, Err(FoundingError::OtherNode)));
    etcd.stop().await;
}

// One thread: with several, the request may be answered while it is being made.
#[tokio::test]
async fn a_founding_that_was_cut_short_is_completed() {
    let site = Site::new();
    let etcd = site.start(true).await;
    let client = etcd.client();
    let data = bootstrap_data(&site, &hearth_api::identity::OwnerKey::generate());
    let authorities = pki::load(&site.root.data.etcd(), site.cluster_id).unwrap();
    // The request may have been sent, and nothing waits for the reply.
    let cut = founding::found(&client, &data, &authorities).now_or_never();
    assert!(cut.is_none());
    founding::found(&client, &data, &authorities).await.unwrap();
    assert_eq!(client.list("nodes/").await.unwrap().records.len(), 1);
    etcd.stop().await;
}

/// A node may have committed at another curator, and connect here before the records arrive.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_has_just_become_a_member_is_not_refused() {
    let world = World::new(quick()).await;
    for _ in 0..30 {
        let node = world.add_node(NodeState::Standby).await;
        let mut curator = world.curator(&node);
        let request = WatchRequest::default();
        // On a busy host the connection may be closed before the refusal arrives: then retry.
        within_timeout("a refusal", async {
            loop {
                let refused = curator.watch(request.clone()).await.unwrap_err();
                match refused.code() {
                    Code::PermissionDenied => return,
                    Code::Unknown | Code::Unavailable | Code::Cancelled => {}
                    _ => panic!("{refused}"),
                }
            }
        })
        .await;

        let key = state::node_key(id_of(&node));
        let record = world.client().get(&key).await.unwrap().unwrap();
        let mut stored = StoredNode::decode(&record.value[..]).unwrap();
        stored.state = NodeState::Up.into();
        let write = Write::when(Condition::Unchanged(key.clone(), record.mod_revision));
        let write = write.put(key, stored.encode_to_vec());
        world.client().write(write).await.unwrap();
        within_timeout("a watch", curator.watch(request))
            .await
            .unwrap();
    }
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn members_are_told_the_services_and_their_messages() {
    let world = World::new(quick()).await;
    let owner = world.owner().await;
    let ask = |request| {
        let requests = futures::stream::iter([ServerReflectionRequest {
            host: String::new(),
            message_request: Some(request),
        }]);
        let mut client = ServerReflectionClient::new(world.channel(&Who::User(&owner)));
        async move {
            let answers = client.server_reflection_info(requests).await.unwrap();
            let answer = answers.into_inner().message().await.unwrap().unwrap();
            answer.message_response.unwrap()
        }
    };
    let listed = ask(MessageRequest::ListServices(String::new())).await;
    let MessageResponse::ListServicesResponse(listed) = listed else {
        panic!("{listed:?}");
    };
    let mut names: Vec<_> = listed.service.into_iter().map(|s| s.name).collect();
    names.sort();
    let expected = ["Aaa", "Curator", "CuratorLocal", "Management"];
    let expected = expected.map(|name| format!("hearth.v1.{name}"));
    assert_eq!(names[0], "grpc.health.v1.Health");
    assert_eq!(names[1..], expected);
    let symbol = "hearth.v1.Management".to_owned();
    let described = ask(MessageRequest::FileContainingSymbol(symbol)).await;
    let MessageResponse::FileDescriptorResponse(described) = described else {
        panic!("{described:?}");
    };
    let file = FileDescriptorProto::decode(&described.file_descriptor_proto[0][..]).unwrap();
    assert_eq!(file.name(), "hearth/v1/management.proto");

    for (who, code) in [
        (Who::Nobody, Code::Unauthenticated),
        (
            Who::HolderOf(&SigningKey::generate()),
            Code::Unauthenticated,
        ),
    ] {
        let path = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo";
        let answer = call(&world.channel(&who), path, &[]).await;
        assert_eq!(answer.0, code, "{}", answer.1);
    }
    world.stop().await;
}
