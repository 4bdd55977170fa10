//! Commands that change a node's record: approve, roles, labels, settings, decommission, delete.

use std::io::{self, IsTerminal as _};

use hearth_api::client::{Channel, within};
use hearth_api::v1::management_client::ManagementClient;
use hearth_api::v1::{
    self, ApproveNodeRequest, DecommissionNodeRequest, DeleteNodeRequest, NodeSelector, NodeState,
    UpdateNodeLabelsRequest, UpdateNodeRolesRequest, UpdateNodeSettingsRequest, node_selector,
};
use hearth_api::{labels, node_settings};
use tonic::{Code, Response, Status};

use super::super::{print, print_json};
use super::wait::{self, Goal};
use super::{find, show};
use crate::args::{Confirm, Format, Global, Label, Node, Role, RoleName, Setting, Wait};
use crate::failure::{Failure, Kind};
use crate::{connection, output};

pub(super) async fn run(global: &Global, command: Node) -> Result<(), Failure> {
    let channel = connection::open(global).await?;
    let change = Change { global, channel };
    match command {
        Node::Approve { which, output } => change.approve(&which.node, output.form).await,
        Node::Role(Role::Add {
            which,
            roles,
            wait,
            output,
        }) => {
            let node = change.find(&which.node).await?;
            change.roles(&node, &roles, true, wait, output.form).await
        }
        Node::Role(Role::Remove {
            which,
            roles,
            sure,
            wait,
            output,
        }) => {
            let node = change.find(&which.node).await?;
            let consequence = "the data of the roles on it is wiped; with one consensus member \
                               less the cluster tolerates fewer failures";
            warn(&node, "remove roles from", consequence, sure)?;
            change.roles(&node, &roles, false, wait, output.form).await
        }
        Node::Label(label) => change.label(label).await,
        Node::Setting(setting) => change.setting(setting).await,
        Node::Decommission {
            which,
            sure,
            wait,
            output,
        } => {
            let node = change.find(&which.node).await?;
            change.decommission(&node, sure, wait, output.form).await
        }
        Node::Delete {
            which,
            bypass_not_decommissioned,
            bypass_has_roles,
            sure,
        } => {
            let node = change.find(&which.node).await?;
            let request = DeleteNodeRequest {
                node: selector(&node),
                bypass_not_decommissioned,
                bypass_has_roles,
                reset: false,
            };
            change.delete(&node, request, sure).await
        }
        Node::Reset { which, sure } => {
            let node = change.find(&which.node).await?;
            change.reset(&node, sure).await
        }
        // The other commands do not change records.
        Node::List { .. }
        | Node::Describe { .. }
        | Node::Logs { .. }
        | Node::Firewall { .. }
        | Node::Reboot { .. }
        | Node::Network(_)
        | Node::PowerOff { .. } => Ok(()),
    }
}

struct Change<'a> {
    global: &'a Global,
    channel: Channel,
}

fn selector(node: &v1::Node) -> Option<NodeSelector> {
    Some(NodeSelector {
        node: Some(node_selector::Node::NodeId(node.id.clone())),
    })
}

impl Change<'_> {
    fn management(&self) -> ManagementClient<Channel> {
        ManagementClient::new(self.channel.clone())
    }

    async fn find(&self, wanted: &str) -> Result<v1::Node, Failure> {
        find::node(self.global, &self.channel, wanted).await
    }

    async fn call<T>(
        &self,
        what: String,
        call: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, Failure> {
        let answer = within(self.global.timeout, call).await;
        answer
            .map(Response::into_inner)
            .map_err(|status| Failure::call(what, status))
    }

    async fn approve(&self, wanted: &str, form: Format) -> Result<(), Failure> {
        let node = self.find(wanted).await?;
        let request = ApproveNodeRequest {
            node: selector(&node),
        };
        let mut management = self.management();
        let answer = self
            .call(
                format!("approve {}", node.id),
                management.approve_node(request),
            )
            .await?;
        let approved = answer.node.unwrap_or_default();
        match form {
            Format::Json => print_json(&output::Node::from(&approved)),
            Format::Table => {
                let next = match approved.state() {
                    NodeState::Standby => "approved; it becomes UP when the machine has committed",
                    _ => "was already approved",
                };
                print(&format!("{} {next}\n", output::safe(&approved.id)))
            }
        }
    }

    async fn roles(
        &self,
        node: &v1::Node,
        roles: &[RoleName],
        held: bool,
        wait: Wait,
        form: Format,
    ) -> Result<(), Failure> {
        let wanted = |role| roles.contains(&role).then_some(held);
        let request = UpdateNodeRolesRequest {
            node: selector(node),
            consensus_member: wanted(RoleName::ConsensusMember),
            kubernetes_controller: wanted(RoleName::KubernetesController),
            kubernetes_worker: wanted(RoleName::KubernetesWorker),
        };
        let mut management = self.management();
        let call = management.update_node_roles(request);
        let what = format!("change the roles of {}", node.id);
        let answer = self.call(what, call).await?;
        let goal = match held {
            true => Goal::Has(roles),
            false => Goal::HasNot(roles),
        };
        self.complete(answer.node, answer.pending, goal, wait, form)
            .await
    }

    async fn label(&self, label: Label) -> Result<(), Failure> {
        let (which, upsert, delete, output) = match label {
            Label::Set {
                which,
                labels,
                output,
            } => (which, labels, Vec::new(), output),
            Label::Remove {
                which,
                keys,
                output,
            } => (which, Vec::new(), keys, output),
        };
        let label = |(key, value)| v1::Label { key, value };
        let upsert: Vec<_> = upsert.into_iter().map(label).collect();
        labels::check_changes(&upsert, &delete).map_err(|error| {
            Failure::invalid(format!("change the labels of {}", which.node), error)
        })?;
        let node = self.find(&which.node).await?;
        let request = UpdateNodeLabelsRequest {
            node: selector(&node),
            upsert,
            delete,
        };
        let mut management = self.management();
        let call = management.update_node_labels(request);
        let what = format!("change the labels of {}", node.id);
        let answer = self.call(what, call).await?;
        let node = output::Node::from(&answer.node.unwrap_or_default());
        show(&node, output.form)
    }

    async fn setting(&self, setting: Setting) -> Result<(), Failure> {
        let (which, upsert, delete, output) = match setting {
            Setting::Set {
                which,
                settings,
                output,
            } => (which, settings, Vec::new(), output),
            Setting::Remove {
                which,
                names,
                output,
            } => (which, Vec::new(), names, output),
        };
        let setting = |(name, value)| v1::NodeSetting { name, value };
        let upsert: Vec<_> = upsert.into_iter().map(setting).collect();
        node_settings::check_changes(&upsert, &delete).map_err(|error| {
            Failure::invalid(format!("change the settings of {}", which.node), error)
        })?;
        let node = self.find(&which.node).await?;
        let request = UpdateNodeSettingsRequest {
            node: selector(&node),
            upsert,
            delete,
        };
        let mut management = self.management();
        let call = management.update_node_settings(request);
        let what = format!("change the settings of {}", node.id);
        let answer = self.call(what, call).await?;
        let node = output::Node::from(&answer.node.unwrap_or_default());
        show(&node, output.form)
    }

    async fn decommission(
        &self,
        node: &v1::Node,
        sure: Confirm,
        wait: Wait,
        form: Format,
    ) -> Result<(), Failure> {
        let consequence = "it leaves consensus, wipes its keys and with them its data, and cannot \
                           rejoin under this ID";
        warn(node, "decommission", consequence, sure)?;
        let request = DecommissionNodeRequest {
            node: selector(node),
        };
        let mut management = self.management();
        let call = management.decommission_node(request);
        let what = format!("decommission {}", node.id);
        let answer = self.call(what, call).await?;
        self.complete(
            answer.node,
            answer.pending,
            Goal::Decommissioned,
            wait,
            form,
        )
        .await
    }

    /// Waits for the goal if `--wait` is given, and prints the node.
    async fn complete(
        &self,
        node: Option<v1::Node>,
        pending: bool,
        goal: Goal<'_>,
        wait: Wait,
        form: Format,
    ) -> Result<(), Failure> {
        let mut node = node.unwrap_or_default();
        let mut pending = pending;
        if wait.wait {
            node = wait::until(self.global, &self.channel, &node.id, goal).await?;
            pending = false;
        }
        let node = output::Node::from(&node);
        match form {
            Format::Json => print_json(&output::Changed {
                node: &node,
                pending,
            }),
            Format::Table if pending => print(&format!(
                "{}\naccepted; etcd membership change in progress: see `hearthctl etcd members`\n",
                node.text()
            )),
            Format::Table => print(&node.text()),
        }
    }

    async fn delete(
        &self,
        node: &v1::Node,
        request: DeleteNodeRequest,
        sure: Confirm,
    ) -> Result<(), Failure> {
        let consequence = "its record is deleted and its connections are closed at once; it wipes \
                           its keys, and with them its data, when it next contacts the cluster";
        if request.bypass_not_decommissioned {
            warn(node, "delete", consequence, sure)?;
        }
        let advice = format!(
            "run `hearthctl node decommission {} --wait` first; if the machine is lost, \
             use --bypass-not-decommissioned and --bypass-has-roles",
            node.id
        );
        let what = format!("delete {}", node.id);
        self.remove(request, what, advice).await?;
        print(&format!("{} deleted\n", output::safe(&node.id)))
    }

    async fn reset(&self, node: &v1::Node, sure: Confirm) -> Result<(), Failure> {
        let consequence = "its record is deleted, and its connections are closed at once; its machine destroys its data \
                           when it next contacts the cluster, and restarts like a new one";
        warn(node, "reset", consequence, sure)?;
        let request = DeleteNodeRequest {
            node: selector(node),
            reset: true,
            ..Default::default()
        };
        let advice = format!(
            "remove its roles first: `hearthctl node role remove {} ROLE --wait`",
            node.id
        );
        let what = format!("reset {}", node.id);
        self.remove(request, what, advice).await?;
        print(&format!(
            "{} deleted; its machine is ordered to destroy its data\n",
            output::safe(&node.id)
        ))
    }

    /// Deletes a node. The advice is for one that may not be deleted as it is.
    async fn remove(
        &self,
        request: DeleteNodeRequest,
        what: String,
        advice: String,
    ) -> Result<(), Failure> {
        let mut management = self.management();
        let call = management.delete_node(request);
        match within(self.global.timeout, call).await {
            Ok(_) => Ok(()),
            Err(status) if status.code() == Code::FailedPrecondition => {
                Err(Failure::call(what, status).advise(advice))
            }
            Err(status) => Err(Failure::call(what, status)),
        }
    }
}

/// Prints the consequences of a command for a node that is UP. At a terminal, where people mistype,
/// `--yes` is required.
pub(super) fn warn(
    node: &v1::Node,
    what: &str,
    consequence: &str,
    sure: Confirm,
) -> Result<(), Failure> {
    if node.state() != NodeState::Up {
        return Ok(());
    }
    let id = output::safe(&node.id);
    if sure.yes || !io::stdin().is_terminal() {
        eprintln!("hearthctl: {what} {id}: {consequence}");
        return Ok(());
    }
    Err(Failure::new(Kind::Local, format!("{what} {id}"))
        .because(format!("it is UP: {consequence}"))
        .advise("to confirm, repeat the command with --yes"))
}
