use std::net::Ipv4Addr;

use hearth_api::testing::dual_stack_ranges;
use proptest::prelude::*;

use super::*;

/// The address of a caller.
const REMOTE: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));

fn check_status(status: NodeStatus, remote: IpAddr) -> Result<NodeStatus, Status> {
    super::check_status(status, remote, &ClusterRanges::DEFAULT)
}

fn status() -> NodeStatus {
    NodeStatus {
        external_address: "192.0.2.1".into(),
        curator_port: 7835,
        version: "0.1.0".into(),
        boot_id: "1b4e28ba-2fa1-11d2-883f-0016d3cca427".into(),
        sent_at: 1,
        cluster_state: ClusterState::Home.into(),
        consensus: None,
        address_counter: 1,
        conditions: Vec::new(),
        recorded_settings: None,
        time: None,
        second_address: String::new(),
        damaged_member_id: None,
        etcd_starts: None,
        storage: None,
    }
}

fn condition(r#type: &str, reason: &str, message: &str) -> NodeCondition {
    NodeCondition {
        r#type: r#type.into(),
        met: false,
        reason: reason.into(),
        message: message.into(),
    }
}

#[test]
fn conditions_are_few_short_and_printable() {
    let with = |conditions: Vec<NodeCondition>| {
        check_status(
            NodeStatus {
                conditions,
                ..status()
            },
            REMOTE,
        )
    };
    let good = condition("KubernetesWorker", "NotInstalled", "the image has none");
    assert!(with(vec![good.clone(), condition("Other", "", "")]).is_ok());
    let long = "x".repeat(LONGEST_CONDITION + 1);
    for (field, wrong) in [
        ("type", condition("", "A", "")),
        ("type", condition("worker", "A", "")),
        ("type", condition("Kubernetes Worker", "A", "")),
        ("type", condition(&"A".repeat(65), "A", "")),
        ("type", good.clone()),
        ("reason", condition("A", "not installed", "")),
        ("message", condition("A", "A", "two\nlines")),
        ("message", condition("A", "A", "\x1b[2J")),
        ("message", condition("A", "A", &long)),
    ] {
        let error = with(vec![good.clone(), wrong]).unwrap_err();
        assert_eq!(error.code(), tonic::Code::InvalidArgument);
        assert!(error.message().contains(field), "{error}");
    }
    let many = (0..=MOST_CONDITIONS).map(|n| condition(&format!("A{n}"), "", ""));
    assert!(with(many.collect()).is_err());
}

#[test]
fn what_a_node_has_recorded_is_a_policy_and_keys() {
    let with = |cold_start_policy, recovery_recipient: &[u8], owner_public_key: &[u8]| {
        let recorded = RecordedSettings {
            cold_start_policy,
            recovery_recipient: recovery_recipient.to_vec(),
            owner_public_key: owner_public_key.to_vec(),
        };
        check_status(
            NodeStatus {
                recorded_settings: Some(recorded),
                ..status()
            },
            REMOTE,
        )
    };
    assert!(with(0, &[], &[]).is_ok());
    for (field, status) in [
        ("cold_start_policy", with(99, &[], &[])),
        ("recovery_recipient", with(1, &[9; 31], &[])),
        ("owner_public_key", with(1, &[], &[9; 33])),
    ] {
        let error = status.unwrap_err();
        assert_eq!(error.code(), tonic::Code::InvalidArgument);
        assert!(error.message().contains(field), "{error}");
    }
}

#[test]
fn what_a_node_says_about_its_data_partition_is_short_and_printable() {
    let with = |security, cipher: &str| {
        let storage = StorageStatus {
            security,
            cipher: cipher.into(),
        };
        check_status(
            NodeStatus {
                storage: Some(storage),
                ..status()
            },
            REMOTE,
        )
    };
    let encrypted = StorageSecurity::Encrypted.into();
    assert!(with(encrypted, "capi:xts(aes)-plain64").is_ok());
    for (field, status) in [
        ("security", with(99, "")),
        ("cipher", with(encrypted, "\x1b[2J")),
        (
            "cipher",
            with(encrypted, &"x".repeat(LONGEST_CONDITION + 1)),
        ),
    ] {
        let error = status.unwrap_err();
        assert_eq!(error.code(), tonic::Code::InvalidArgument);
        assert!(error.message().contains(field), "{error}");
    }
}

#[test]
fn what_a_node_says_about_its_clock_is_short_and_printable() {
    let good = TimeStatus {
        source: TimeSource::Dhcp.into(),
        servers: vec!["192.0.2.1".into()],
        problem: "none of 1 answers".into(),
        ..TimeStatus::default()
    };
    let with = |time: TimeStatus| {
        check_status(
            NodeStatus {
                time: Some(time),
                ..status()
            },
            REMOTE,
        )
    };
    assert!(with(good.clone()).is_ok());
    let source = TimeStatus {
        source: 99,
        ..good.clone()
    };
    let many = TimeStatus {
        servers: vec![String::new(); MOST_TIME_SOURCES + 1],
        ..good.clone()
    };
    let server = TimeStatus {
        servers: vec!["\x1b[2J".into()],
        ..good.clone()
    };
    let problem = TimeStatus {
        problem: "x".repeat(LONGEST_CONDITION + 1),
        ..good
    };
    for (field, time) in [
        ("source", source),
        ("servers", many),
        ("servers", server),
        ("problem", problem),
    ] {
        let error = with(time).unwrap_err();
        assert_eq!(error.code(), tonic::Code::InvalidArgument);
        assert!(error.message().contains(field), "{error}");
    }
}

#[test]
fn a_status_has_an_address_that_others_can_use() {
    assert!(check_status(status(), REMOTE).is_ok());
    for wrong in [
        "",
        "localhost",
        "192.0.2.1:80",
        "0.0.0.0",
        "::",
        "255.255.255.255",
        "224.0.0.1",
        "ff02::1",
        "192.0.2.01",
        "127.0.0.1",
        "::1",
        "::ffff:192.0.2.1",
        "fe80::1",
        "10.208.3.1",
        "10.224.0.1",
    ] {
        let status = NodeStatus {
            external_address: wrong.into(),
            ..status()
        };
        let error = check_status(status, REMOTE).unwrap_err();
        assert!(
            error.message().contains("external_address"),
            "{wrong}: {error}"
        );
    }
    let here = NodeStatus {
        external_address: "127.0.0.1".into(),
        ..status()
    };
    let status = NodeStatus {
        external_address: "2001:DB8:0::1".into(),
        ..status()
    };
    assert_eq!(
        check_status(status, REMOTE).unwrap().external_address,
        "2001:db8::1"
    );
    assert!(check_status(here, Ipv4Addr::LOCALHOST.into()).is_ok());
}

#[test]
fn a_second_address_is_one_of_the_other_family() {
    let with = |second: &str| NodeStatus {
        second_address: second.into(),
        ..status()
    };
    for good in ["", "2001:db8::7", "fd00::1"] {
        let checked = check_status(with(good), REMOTE).unwrap();
        assert_eq!(checked.second_address, good);
    }
    for wrong in ["192.0.2.9", "x", "::1", "fe80::1", "ff02::1", "::"] {
        let error = check_status(with(wrong), REMOTE).unwrap_err();
        assert!(error.message().contains("second_address"), "{error}");
    }
    let ranges = dual_stack_ranges();
    for pods in ["fd00:1::1", "fd00:2::1"] {
        assert!(super::check_status(with(pods), REMOTE, &ranges).is_err());
    }
}

#[test]
fn each_wrong_field_is_named() {
    let wrong = [
        (
            "curator_port",
            NodeStatus {
                curator_port: 65_536,
                ..status()
            },
        ),
        (
            "version",
            NodeStatus {
                version: String::new(),
                ..status()
            },
        ),
        (
            "version",
            NodeStatus {
                version: "x\n".into(),
                ..status()
            },
        ),
        (
            "boot_id",
            NodeStatus {
                boot_id: "a b".into(),
                ..status()
            },
        ),
        (
            "cluster_state",
            NodeStatus {
                cluster_state: 99,
                ..status()
            },
        ),
    ];
    for (field, status) in wrong {
        let error = check_status(status, REMOTE).unwrap_err();
        assert!(error.message().contains(field), "{error}");
    }
}

#[test]
fn the_time_of_sending_is_no_news() {
    let later = NodeStatus {
        sent_at: 2,
        ..status()
    };
    assert!(same(&status(), &later));
    assert!(!same(
        &status(),
        &NodeStatus {
            curator_port: 1,
            ..later
        }
    ));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn arbitrary_fields_are_judged_without_harm(
        external_address: String, version: String, boot_id: String,
        curator_port: u32, cluster_state: i32,
    ) {
        let _ = check_status(NodeStatus {
            external_address, curator_port, version, boot_id, sent_at: 0, cluster_state,
            consensus: None, address_counter: 0, conditions: Vec::new(),
            recorded_settings: None, time: None, second_address: String::new(), damaged_member_id: None,
            etcd_starts: None,
            storage: None,
        }, REMOTE);
    }
}
