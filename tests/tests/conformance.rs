//! Kubernetes' own conformance cases, as far as they run without a registry:
//! `tests/conformance.txt` says which, and why not the others.
//!
//! Each area has a machine of its own. They take long: about twenty minutes
//! each without hardware virtualisation.

use std::collections::BTreeSet;

use hearth_tests::{Cluster, Outcome, TestCtx, here, kubernetes::conformance};

async fn conforms(test: TestCtx, area: &str) -> Outcome {
    let mut cluster = Cluster::founded_as(&test, 1, |_, plan| plan.kubernetes()).await?;
    let node = cluster.node(1).id().to_owned();
    let kubernetes = cluster.kubernetes(&test, 1).await?;
    kubernetes.ready(&[&node]).await?;
    kubernetes.conforms(&test, area).await?;
    cluster.node(1).power_off().await?;
    drop(cluster);
    test.passed()
}

/// A test for each area, and one that there is no other.
macro_rules! areas {
    ($($(#[$about:meta])+ $area:ident,)+) => {
        $(
            $(#[$about])+
            #[tokio::test]
            #[ignore = "long: --long runs it"]
            async fn $area() -> Outcome {
                conforms(TestCtx::begin(here!())?, stringify!($area)).await
            }
        )+

        #[test]
        fn every_area_of_the_list_has_a_test() {
            let tests = BTreeSet::from([$(stringify!($area)),+]);
            assert_eq!(conformance::areas().unwrap(), tests);
        }
    };
}

areas! {
    /// What the API server and the controllers do, without a pod or with few.
    objects,
    /// Containers: how they start, end, are looked at and told of their world.
    pods,
    /// Files in pods that come from objects, and directories that they share.
    volumes,
    /// Pods that others make: deployments, daemon and stateful sets, and who
    /// removes what is left.
    workloads,
    /// Services, names and ways between pods.
    network,
    /// Pods that the API server asks.
    webhooks,
    /// What users do by kubectl.
    kubectl,
    /// Where pods go, where not, and who must give way.
    scheduling,
}
