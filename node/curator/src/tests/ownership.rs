//! The replacement of the owner and of the recovery key.

use hearth_api::identity::OwnerKey;
use hearth_api::ownership::{self, Replacement};
use hearth_api::recovery::RecoveryKey;
use hearth_api::v1::aaa_client::AaaClient;
use hearth_api::v1::join_node_response::Answer;
use hearth_api::v1::management_client::ManagementClient;
use hearth_api::v1::{EscrowRequest, GetClusterInfoRequest, OwnerReplacement, ReplaceOwnerRequest};
use hearth_base::testing::within_timeout;
use tonic::{Code, Status};

use super::super::testing::{Pulse, Who, World, quick};
use super::machine::Machine;

/// Asks as the holder of this owner key.
async fn replace(
    world: &World,
    owner: &OwnerKey,
    replacement: Option<&OwnerReplacement>,
) -> Result<(), Status> {
    let channel = world.channel(&Who::User(&world.owner_with(owner).await));
    let request = ReplaceOwnerRequest {
        replacement: replacement.cloned(),
    };
    let mut management = ManagementClient::new(channel);
    let call = management.replace_owner(request);
    within_timeout("an answer", call).await.map(drop)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_owner_names_another_one_and_is_the_owner_no_more() {
    let world = World::new(quick()).await;
    let machine = Machine::new();
    let node = machine.becomes_a_node(&world).await;
    let mut pulse = Pulse::open(&world, &node).await.unwrap();
    let before = pulse.beat().await.unwrap().unlock_settings;
    let (former, owner) = (&world.owner_key, OwnerKey::generate());
    let recipient = RecoveryKey::generate().recipient();
    let cluster = world.site.cluster_id;
    let replacement = Replacement::sign(cluster, former, &owner, recipient);
    // A connection that was open before.
    let open = world.channel(&Who::User(&world.owner().await));
    let mut as_former = ManagementClient::new(open);
    as_former
        .get_cluster_info(GetClusterInfoRequest {})
        .await
        .unwrap();

    replace(&world, former, Some(&replacement)).await.unwrap();
    let refused = as_former.get_cluster_info(GetClusterInfoRequest {}).await;
    assert_eq!(refused.unwrap_err().code(), Code::PermissionDenied);
    let escrow = || EscrowRequest {
        identity: "owner".into(),
        ..EscrowRequest::default()
    };
    let mut aaa = AaaClient::new(world.channel(&Who::HolderOf(former)));
    let refused = aaa.escrow(escrow()).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    let mut aaa = AaaClient::new(world.channel(&Who::HolderOf(&owner)));
    aaa.escrow(escrow()).await.unwrap();
    // The answer may have been lost.
    replace(&world, &owner, Some(&replacement)).await.unwrap();
    let channel = world.channel(&Who::User(&world.owner_with(&owner).await));
    let mut management = ManagementClient::new(channel);
    let info = management.get_cluster_info(GetClusterInfoRequest {}).await;
    let info = info.unwrap().into_inner();
    assert_eq!(info.owner_public_key, owner.public().as_bytes());
    assert_eq!(info.recovery_recipient, recipient.as_bytes());

    // Nodes notice, and get what they need to follow.
    within_timeout("another digest", async {
        while pulse.beat().await.unwrap().unlock_settings == before {}
    })
    .await;
    let Some(Answer::Admitted(admitted)) = machine.join(&world).await.unwrap().answer else {
        panic!("not admitted");
    };
    let all = &admitted.owner_replacements;
    let last = ownership::follow(cluster, former.public(), all).unwrap();
    let last = last.unwrap();
    assert_eq!(
        (last.owner, last.recovery_recipient),
        (owner.public(), recipient)
    );
    assert_eq!(admitted.owner_public_key, owner.public().as_bytes());
    assert_eq!(admitted.recovery_recipient, recipient.as_bytes());
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_owner_who_is_not_named_by_the_present_one_is_refused() {
    let world = World::new(quick()).await;
    let cluster = world.site.cluster_id;
    let (former, owner) = (&world.owner_key, OwnerKey::generate());
    let recipient = RecoveryKey::generate().recipient();
    let sign = |former, owner| Replacement::sign(cluster, former, owner, recipient);
    let third = OwnerKey::generate();
    let forged = OwnerReplacement {
        former_owner_public_key: former.public().as_bytes().to_vec(),
        ..sign(&third, &owner)
    };
    for (replacement, text) in [
        (None, "replacement: expected a signed replacement"),
        (Some(forged), "invalid signature"),
        (
            Some(sign(&third, &owner)),
            "expected the key of the present owner",
        ),
        (Some(sign(former, former)), "expected another key"),
        (Some(OwnerReplacement::default()), "former_owner_public_key"),
    ] {
        let refused = replace(&world, former, replacement.as_ref()).await;
        let refused = refused.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument);
        assert!(refused.message().contains(text), "{refused}");
    }
    replace(&world, former, Some(&sign(former, &owner)))
        .await
        .unwrap();
    // An earlier replacement is not made again.
    replace(&world, &owner, Some(&sign(&owner, &third)))
        .await
        .unwrap();
    let refused = replace(&world, &third, Some(&sign(former, &owner))).await;
    assert_eq!(refused.unwrap_err().code(), Code::InvalidArgument);
    world.stop().await;
}
