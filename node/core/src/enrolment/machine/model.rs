//! Machines that register, against a reference cluster: one with every fault,
//! several at once in any order.

use hearth_api::v1::{NodeState, StorageSecurity};

use super::{world::*, *};

/// Registers without a fault, and is home.
fn settles(world: &mut World, cluster: &mut Cluster, told: &Told, script: &Script) {
    let end = run_in(world, cluster, told, script);
    assert!(matches!(end, State::Settled), "{script:?}: {end:?}");
    assert!(world.handed_over);
    assert_eq!(rank(&world.sealed), 3);
    let states: Vec<_> = cluster.nodes.values().map(|record| record.state).collect();
    assert_eq!(states, [NodeState::Up], "{script:?}");
}

#[test]
fn a_machine_registers_and_comes_back() {
    for security in [StorageSecurity::Insecure, StorageSecurity::Encrypted] {
        let mut cluster = Cluster::new(security);
        let mut world = World::asking(1);
        let told = cluster.told(None);
        settles(&mut world, &mut cluster, &told, &Vec::new());
        assert!(world.home);
        // With the parameters, without, with unusable ones, and with a ticket
        // that was rotated: a member needs none.
        for told in [told, Told::Nothing, Told::Unusable("bad".into())] {
            cluster.ticket += 1;
            world.power_cut();
            settles(&mut world, &mut cluster, &told, &Vec::new());
            assert!(!world.home, "the membership worker says so, once it is");
            assert_eq!(world.lives, 1);
        }
    }
}

/// FAULTS 3, 4, 32, 33: every pair of faults at every pair of works. The node
/// that the cluster knows is the one that the disk is of, and the only one.
#[test]
fn any_two_faults_anywhere_and_it_is_still_the_same_node() {
    let clean = 15;
    let blank = Cluster::new(StorageSecurity::Encrypted);
    let told = blank.told(None);
    for first in 0..clean {
        for first_fault in FAULTS {
            for second in first..first + clean {
                for second_fault in FAULTS {
                    let script = vec![(first, first_fault), (second, second_fault)];
                    let (mut world, mut cluster) = (World::asking(1), blank.clone());
                    settles(&mut world, &mut cluster, &told, &script);
                }
            }
        }
    }
}
