//! The reconciler's view of the cluster, from the curators: the nodes and the settings.

use std::sync::Arc;

use hearth_agent::View;
use hearth_api::node_settings::NodeSettings;
use hearth_api::ranges::ClusterRanges;
use hearth_api::v1::{ControlPlaneScheduling, KubernetesConfiguration, NodeState, PodNetwork};
use hearth_base::event::{Value, Writer};
use hearth_base::supervisor::{Context, Outcome};
use hearth_host::networking::NodeSubnets;

use super::nodes::{Cluster, Member};

/// Inputs and output.
pub(crate) struct Worker {
    /// Input: the nodes.
    pub view: Value<Arc<View>>,
    /// Input: the settings, for label patterns, taints and the pod network.
    pub settings: Value<Arc<KubernetesConfiguration>>,
    /// Output, set once both are known.
    pub cluster: Writer<Arc<Cluster>>,
}

/// Keeps the output up to date.
pub(crate) async fn run(ctx: Context, worker: Arc<Worker>) -> Outcome {
    ctx.healthy();
    ctx.until_cancelled(follow(&worker)).await
}

/// Returns only on an error.
async fn follow(worker: &Worker) -> Outcome {
    let mut views = worker.view.watch();
    let mut view = views.next().await?;
    let mut all_settings = worker.settings.watch();
    let mut settings = all_settings.next().await?;
    loop {
        let ranges = ClusterRanges::of(&settings)?;
        let cluster = Arc::new(Cluster {
            patterns: settings.synchronized_labels.clone(),
            taint_control_plane: settings.control_plane_scheduling()
                == ControlPlaneScheduling::Tainted,
            other_network: settings.pod_network() == PodNetwork::None,
            ..of_view(&view, ranges)
        });
        if worker.cluster.value().get().as_ref() != Some(&cluster) {
            worker.cluster.set(cluster);
        }
        tokio::select! {
            newer = views.next() => view = newer?,
            newer = all_settings.next() => settings = newer?,
        }
    }
}

fn of_view(view: &View, ranges: ClusterRanges) -> Cluster {
    let up = view.nodes.iter();
    let up = up.filter(|(_, node)| node.state == NodeState::Up);
    let member = |node: &hearth_agent::Seen| {
        let labels = node.labels.iter();
        let subnets = node.networking.map(|part| part.range.subnets(&ranges));
        // One of another network has no pods here.
        let subnets = subnets.and_then(Result::ok);
        Member {
            worker: node.roles.kubernetes_worker.is_some(),
            controller: node.roles.kubernetes_controller.is_some(),
            consensus: node.roles.consensus_member.is_some(),
            labels: labels
                .map(|label| (label.key.clone(), label.value.clone()))
                .collect(),
            taints: NodeSettings::of(&node.settings).taints,
            gateway: subnets.map(|subnets| subnets.gateway()),
            networks: subnets
                .iter()
                .flat_map(NodeSubnets::all)
                .map(|subnet| subnet.range)
                .collect(),
        }
    };
    Cluster {
        nodes: up.map(|(id, node)| (*id, member(node))).collect(),
        ranges,
        ..Cluster::default()
    }
}
