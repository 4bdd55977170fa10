//! The network of a node as it is printed.

use hearth_api::v1::get_network_response::Device as DeviceMessage;
use hearth_api::v1::{GetNetworkResponse, NodeParameters};
use serde::Serialize;
use serde_json::Value as Json;

use super::present;
use crate::parameters::{self, Notation};
use crate::table::{Table, printable};

/// A node's network configuration and devices.
#[derive(Debug, Serialize)]
pub(crate) struct NodeNetwork {
    /// The node's ID.
    node: String,
    /// Its address for other nodes; null if it has none.
    address: Option<String>,
    /// Set by an operator, as opposed to the machine's parameters.
    set_by_operator: bool,
    /// How long the configuration is still tried, in seconds; null if it is not being tried.
    trial_seconds_left: Option<u32>,
    /// As in the parameters; null if every device gets its addresses by itself.
    network_config: Json,
    devices: Vec<Device>,
    /// What the interfaces lack.
    problems: Vec<String>,
    /// The configuration as text; in JSON it is `network_config`.
    #[serde(skip)]
    text: String,
}

#[derive(Debug, Serialize)]
struct Device {
    name: String,
    /// Null if it has none.
    mac: Option<String>,
    carrier: bool,
    /// In bytes.
    mtu: u32,
    addresses: Vec<String>,
    /// The bond to which it belongs; null if to none.
    bond: Option<String>,
}

impl NodeNetwork {
    /// Of the node with this ID.
    pub(crate) fn of(node: &str, network: GetNetworkResponse) -> Self {
        let parameters = NodeParameters {
            network_config: network.network_config,
            ..NodeParameters::default()
        };
        let json = parameters::write(&parameters, Notation::Json);
        let json: Json = serde_json::from_str(&json).unwrap_or_default();
        let text = match parameters.network_config {
            Some(_) => parameters::write(&parameters, Notation::Yaml),
            None => String::new(),
        };
        let is_tried = !network.trial_id.is_empty();
        Self {
            node: node.to_owned(),
            address: present(&network.address),
            set_by_operator: network.set_by_operator,
            trial_seconds_left: is_tried.then_some(network.trial_seconds_left),
            network_config: json["network_config"].clone(),
            devices: network.devices.into_iter().map(Device::from).collect(),
            problems: network.problems,
            text,
        }
    }

    /// For people. The configuration is in YAML, as `--from` takes it.
    pub(crate) fn text(&self) -> String {
        let address = self.address.as_deref().unwrap_or("none");
        let from = match self.set_by_operator {
            true => "an operator",
            false => "the machine's parameters",
        };
        let mut text = format!(
            "Node:           {}\nAddress:        {}\nConfiguration:  from {from}",
            printable(&self.node),
            printable(address)
        );
        if let Some(left) = self.trial_seconds_left {
            text += &format!(", tried for {left} s more unless it is confirmed");
        }
        text.push('\n');
        for problem in &self.problems {
            text += &format!("Problem:        {}\n", printable(problem));
        }
        text.push('\n');
        text += &self.table().to_string();
        text.push('\n');
        match &self.text[..] {
            "" => text += "Every Ethernet device gets its addresses by itself.\n",
            // Values are quoted where they have characters that a terminal interprets.
            yaml => text += yaml,
        }
        text
    }

    fn table(&self) -> Table {
        let mut table = Table::new(&["DEVICE", "MAC", "CARRIER", "MTU", "BOND", "ADDRESSES"]);
        for device in &self.devices {
            table.row([
                printable(&device.name),
                device.mac.as_deref().map(printable).unwrap_or_default(),
                if device.carrier { "yes" } else { "no" }.to_owned(),
                device.mtu.to_string(),
                device.bond.as_deref().map(printable).unwrap_or_default(),
                printable(&device.addresses.join(",")),
            ]);
        }
        table
    }
}

impl From<DeviceMessage> for Device {
    fn from(device: DeviceMessage) -> Self {
        Self {
            name: device.name,
            mac: present(&device.mac),
            carrier: device.carrier,
            mtu: device.mtu,
            addresses: device.addresses,
            bond: present(&device.bond),
        }
    }
}

#[cfg(test)]
mod tests {
    use hearth_api::v1::NetworkConfig;

    use super::*;

    #[test]
    fn a_network_is_shown_as_it_can_be_set() {
        let network = GetNetworkResponse {
            network_config: Some(NetworkConfig {
                addresses: vec!["192.0.2.10/24".into()],
                ..NetworkConfig::default()
            }),
            set_by_operator: true,
            trial_id: vec![7; 16],
            trial_seconds_left: 42,
            devices: vec![DeviceMessage {
                name: "eth0".into(),
                mac: "52:54:00:12:34:56".into(),
                carrier: true,
                mtu: 1500,
                addresses: vec!["192.0.2.10/24".into()],
                bond: String::new(),
            }],
            problems: vec!["waits for\neth1".into()],
            address: "192.0.2.10".into(),
        };
        let shown = NodeNetwork::of("hearth-a1", network);
        let expected = "\
Node:           hearth-a1
Address:        192.0.2.10
Configuration:  from an operator, tried for 42 s more unless it is confirmed
Problem:        waits for\u{fffd}eth1

DEVICE  MAC                CARRIER  MTU   BOND  ADDRESSES
eth0    52:54:00:12:34:56  yes      1500  -     192.0.2.10/24

network_config:
  addresses:
  - 192.0.2.10/24
";
        assert_eq!(shown.text(), expected);
        let json = serde_json::to_value(&shown).unwrap();
        assert_eq!(json["network_config"]["addresses"][0], "192.0.2.10/24");
        assert_eq!(json["trial_seconds_left"], 42);
        let automatic = NodeNetwork::of("hearth-a1", GetNetworkResponse::default());
        assert!(automatic.text().ends_with("by itself.\n"));
        assert_eq!(
            serde_json::to_value(&automatic).unwrap()["network_config"],
            Json::Null
        );
    }
}
