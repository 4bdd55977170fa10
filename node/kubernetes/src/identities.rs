//! The user and permissions of each kind of certificate, at a real API server.

use hearth_api::identity::{NodeId, UserName};
use hearth_host::pki::kubernetes::Certificate;
use hearth_kubernetes_api::Client;

use super::testing::Cluster;

/// Lists all secrets; the error names the user that the API server has refused.
async fn asks(client: Client) -> Result<(), String> {
    let answer = client.text("/api/v1/secrets").await;
    answer.map(drop).map_err(|error| error.to_string())
}

#[tokio::test(flavor = "multi_thread")]
async fn each_certificate_is_somebody_and_nobody_else() {
    let Some(cluster) = Cluster::start().await else {
        return;
    };
    let node = NodeId::from_bytes([5; 16]);
    let address = [192, 0, 2, 5].into();
    let (owner, eve) = (UserName::owner(), UserName::new("eve").unwrap());
    for what in [
        Certificate::Operator(&owner),
        Certificate::Reconciler,
        Certificate::ApiServerKubeletClient,
        Certificate::ControllerManager,
    ] {
        assert_eq!(asks(cluster.client(&what)).await, Ok(()), "{what:?}");
    }
    // Authenticated, but not authorized: the message names the user.
    for (what, user) in [
        (Certificate::Operator(&eve), "eve".to_owned()),
        (Certificate::Scheduler, "system:kube-scheduler".into()),
        (Certificate::Proxy, "system:kube-proxy".into()),
        (
            Certificate::KubeletClient(node),
            format!("system:node:{node}"),
        ),
        (Certificate::Node(node), format!("hearth:node:{node}")),
    ] {
        let refused = asks(cluster.client(&what)).await.unwrap_err();
        let named = format!("User \"{user}\" cannot list");
        assert!(refused.contains(&named), "{what:?}: {refused}");
    }
    // Not authenticated: serving certificates, and certificates of the other CA.
    for what in [
        Certificate::KubeletServer { node, address },
        Certificate::FrontProxyClient,
    ] {
        let refused = asks(cluster.client(&what)).await.unwrap_err();
        assert!(refused.contains("Unauthorized"), "{what:?}: {refused}");
    }
}
