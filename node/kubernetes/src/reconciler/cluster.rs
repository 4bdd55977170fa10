//! The reconciler's view of the cluster, from the curators: the nodes and the settings.

use std::sync::Arc;

use hearth_agent::View;
use hearth_api::v1::{ControlPlaneScheduling, KubernetesConfiguration, NodeState, PodNetwork};
use hearth_base::event::{Value, Writer};
use hearth_base::supervisor::{Context, Outcome};
use hearth_network_policy::node::Network;

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
        let cluster = Arc::new(Cluster {
            patterns: settings.synchronized_labels.clone(),
            taint_control_plane: settings.control_plane_scheduling()
                == ControlPlaneScheduling::Tainted,
            other_network: settings.pod_network() == PodNetwork::None,
            ..of_view(&view)
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

fn of_view(view: &View) -> Cluster {
    let up = view.nodes.iter();
    let up = up.filter(|(_, node)| node.state == NodeState::Up);
    let member = |node: &hearth_agent::Seen| {
        let labels = node.labels.iter();
        Member {
            worker: node.roles.kubernetes_worker.is_some(),
            controller: node.roles.kubernetes_controller.is_some(),
            consensus: node.roles.consensus_member.is_some(),
            labels: labels
                .map(|label| (label.key.clone(), label.value.clone()))
                .collect(),
            gateway: node.networking.map(|part| part.range.gateway()),
            network: (node.networking).and_then(|part| Network::of(part.range.cidr())),
        }
    };
    Cluster {
        nodes: up.map(|(id, node)| (*id, member(node))).collect(),
        ..Cluster::default()
    }
}
