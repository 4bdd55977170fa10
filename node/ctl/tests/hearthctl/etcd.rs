//! `hearthctl cluster ticket` and `hearthctl etcd members`.

use hearth_api::v1::{
    ConsensusMemberStatus, ConsensusStore, consensus_member_status, membership_change,
};

use super::*;

#[tokio::test]
async fn tickets_and_members_are_shown() {
    let f = Fixture::new();
    let script = Script {
        register_ticket: vec![7; 32],
        consensus: GetConsensusStatusResponse {
            members: vec![
                ConsensusMemberStatus {
                    member_id: 0xa1,
                    node_id: "hearth-a1".into(),
                    peer_urls: vec!["https://hearth-a1:7834".into()],
                    started: true,
                    leader: true,
                    alarms: vec![consensus_member_status::Alarm::NoSpace.into()],
                    ..ConsensusMemberStatus::default()
                },
                ConsensusMemberStatus {
                    member_id: 0xc3,
                    learner: true,
                    ..ConsensusMemberStatus::default()
                },
            ],
            changes: vec![MembershipChange {
                node_id: "hearth-c3".into(),
                kind: membership_change::Kind::Join.into(),
                member_id: 0xc3,
                reason: "not in sync yet".into(),
            }],
            store: Some(ConsensusStore {
                file_bytes: 1 << 30,
                used_bytes: (1 << 30) - 1,
                quota_bytes: 1 << 30,
            }),
        },
        ..f.script()
    };
    let curator = TestCurator::start(&f.cluster, script, wall_clock()).await;
    f.take_ownership(&curator).await;
    let ticket = "07".repeat(32);
    assert_eq!(f.ok(&["cluster", "ticket"]).await, format!("{ticket}\n"));
    let rotated = f
        .json(&["cluster", "ticket", "--rotate", "-o", "json"])
        .await;
    assert_eq!(rotated["register_ticket"], format!("08{}", &ticket[2..]));

    assert_eq!(
        f.ok(&["etcd", "members"]).await,
        "MEMBER            NODE       ROLE     STARTED  PEER URLS\n\
         00000000000000a1  hearth-a1  leader   yes      https://hearth-a1:7834\n\
         00000000000000c3  -          learner  no       -\n\
         \n\
         PENDING  NODE       REASON\n\
         JOIN     hearth-c3  not in sync yet\n\
         \n\
         STORE       IN USE      QUOTA\n\
         1024.0 MiB  1023.9 MiB  1024.0 MiB\n\
         \n\
         alarm on member 00000000000000a1: database quota exceeded; writes fail until space is \
         reclaimed\n"
    );
    let shown = f.json(&["etcd", "members", "-o", "json"]).await;
    assert_eq!(shown["members"][0]["member_id"], "00000000000000a1");
    assert_eq!(shown["members"][1]["node_id"], Value::Null);
    assert_eq!(shown["changes"][0]["kind"], "JOIN");
    assert_eq!(shown["members"][0]["alarms"], json!(["NO_SPACE"]));
    assert_eq!(shown["store"]["file_bytes"], 1 << 30);
}
