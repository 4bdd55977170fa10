//! `hearthctl etcd`: shows the status of etcd.

use hearth_api::client::within;
use hearth_api::v1::GetConsensusStatusRequest;
use hearth_api::v1::curator_client::CuratorClient;

use super::{print, print_json};
use crate::args::{Etcd, Format, Global};
use crate::failure::Failure;
use crate::{connection, output};

pub(super) async fn run(global: &Global, command: Etcd) -> Result<(), Failure> {
    let Etcd::Members { output } = command;
    let mut curator = CuratorClient::new(connection::open(global).await?);
    let request = GetConsensusStatusRequest {};
    let status = within(global.timeout, curator.get_consensus_status(request))
        .await
        .map_err(|status| Failure::call("list the etcd members", status))?;
    let consensus = output::Consensus::from(status.get_ref());
    match output.form {
        Format::Table => print(&consensus.text()),
        Format::Json => print_json(&consensus),
    }
}
