use hearth_consensus::testing::Peer;

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_is_a_member_no_more_is_no_peer_either() {
    let cluster = Cluster::new(3, quick()).await;
    cluster.set_member(1, true).await.unwrap();
    cluster.set_member(2, true).await.unwrap();
    cluster.becomes(&[0, 1, 2]).await;
    let stay = [0, 1].map(|number| {
        let site = &cluster.nodes[number].site;
        (site.node_id, site.config(false).peer_listen)
    });
    // A copy of certificate and key: the node itself removes them when it leaves.
    let copied = Peer::with(&cluster.nodes[2].site.root.data.etcd().peer());
    let mut open = Vec::new();
    for (node, address) in stay {
        let mut connection = copied.connect(node, address).await.unwrap();
        connection.members().await.unwrap();
        open.push(connection);
    }
    cluster.set_member(2, false).await.unwrap();
    cluster.becomes(&[0, 1]).await;
    for connection in open {
        within_timeout("the connection is closed", connection.closed()).await;
    }
    for (node, address) in stay {
        copied.members(node, address).await.unwrap_err();
    }
    let member = Peer::with(&cluster.nodes[0].site.root.data.etcd().peer());
    let [_, (node, address)] = stay;
    member.members(node, address).await.unwrap();
    cluster.end().await;
}
