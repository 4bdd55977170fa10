//! Clusters whose certificates expire: while they are in use, and while the cluster is off. Only with `--long`.

use std::time::Duration;

use anyhow::{Context, ensure};
use hearth_api::v1::{ClusterConfiguration, ConfigureClusterRequest};
use hearth_tests::cluster::Cluster;
use hearth_tests::{Outcome, TestCtx, bounds, here};
use tokio::time::Instant;

use crate::clock::ahead;

/// The shortest that the setting allows.
const LIFETIME: Duration = Duration::from_secs(120);
/// Of each node, while one is written to.
const RENEWALS: usize = 5;
/// Each of half a lifetime: twice as many as it takes.
const ROUNDS: usize = 10;
/// How long the other cluster is off.
const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);
/// What nodes log when they have renewed theirs.
const RENEWED: &str = "root.role.certificates  renewed certificates";
/// What they log of a call or a stream that fails.
const LOST: &str = " E root.role.";

/// Certificates that are valid for two minutes are renewed five times during continuous writes. No write fails, and no
/// node loses its connection to the curators.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn all_are_renewed_under_load_and_no_call_fails() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut cluster = test.cluster(3).await?;
    set_lifetime(&cluster, LIFETIME).await?;
    // Nodes renew their certificates when they start, then when half of the time of those has passed.
    cluster.cut_all().await?;
    cluster.start_all().await?;
    cluster.log_in().await?;
    cluster.voters_with(&[1, 2, 3]).await?;
    cluster.all_healthy().await?;

    let before = consoles(&mut cluster)?;
    let mut failures = 0;
    for _ in 0..ROUNDS {
        // What an operator has to do, too: a certificate that is half as old as it gets is replaced.
        cluster.log_in().await?;
        let writer = cluster.writer(1).await?;
        let ends = Instant::now() + LIFETIME / 2;
        while Instant::now() < ends {
            writer.goes_on().await?;
        }
        failures += writer.counts().1;
        writer.verify(cluster.owner()).await?;
        cluster.all_healthy().await?;
        if least_renewed(&mut cluster, &before)? >= RENEWALS {
            break;
        }
    }
    ensure!(failures == 0, "{failures} writes have failed");
    let least = least_renewed(&mut cluster, &before)?;
    ensure!(least >= RENEWALS, "a node has renewed its {least} times");
    drop(cluster);
    test.passed()
}

/// Off until every certificate has expired: those of nodes, of users and of Kubernetes; only the CAs have not.
#[tokio::test]
#[ignore = "long: --long runs it"]
async fn a_cluster_that_was_off_for_a_year_comes_back() -> Outcome {
    let test = TestCtx::begin(here!())?;
    let mut cluster = test.cluster(3).await?;
    cluster.cut_all().await?;
    for member in cluster.nodes() {
        member.node.clock(ahead(YEAR));
    }
    cluster.start_all().await?;
    cluster.log_in().await?;
    cluster.voters_with(&[1, 2, 3]).await?;
    cluster.all_healthy().await?;
    let writer = cluster.writer(2).await?;
    writer.goes_on().await?;
    writer.verify(cluster.owner()).await?;
    drop(cluster);
    test.passed()
}

/// The console of each node in this boot.
fn consoles(cluster: &mut Cluster) -> anyhow::Result<Vec<Vec<u8>>> {
    let mut consoles = Vec::new();
    for member in cluster.nodes() {
        let logs = member.node.serial_logs()?;
        let (_, log) = logs.first().context("no log")?;
        consoles.push(log.clone());
    }
    Ok(consoles)
}

/// How often the node has renewed its certificates that has done so least often, since the consoles were as given.
///
/// # Errors
/// If a node has lost the curators since.
fn least_renewed(cluster: &mut Cluster, before: &[Vec<u8>]) -> anyhow::Result<usize> {
    let mut least = usize::MAX;
    for (now, before) in consoles(cluster)?.iter().zip(before) {
        let since = now.get(before.len()..).context("another boot")?;
        let since = String::from_utf8_lossy(since);
        least = least.min(since.matches(RENEWED).count());
        let lost = since.lines().find(|line| line.contains(LOST));
        ensure!(lost.is_none(), "{lost:?}");
    }
    Ok(least)
}

async fn set_lifetime(cluster: &Cluster, lifetime: Duration) -> Outcome {
    let info = cluster.owner().info().await?;
    let request = ConfigureClusterRequest {
        version: info.configuration_version,
        configuration: Some(ClusterConfiguration {
            certificate_lifetime_seconds: u32::try_from(lifetime.as_secs())?,
            ..ClusterConfiguration::default()
        }),
        field_mask: vec!["certificate_lifetime_seconds".to_owned()],
    };
    let mut management = cluster.owner().once().management();
    tokio::time::timeout(bounds::CALL, management.configure_cluster(request)).await??;
    Ok(())
}
