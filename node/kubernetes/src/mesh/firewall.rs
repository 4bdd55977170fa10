//! iptables rules for packets of pods, in a chain of our own in two tables.
//!
//! | table | rule |
//! |---|---|
//! | nat | packets from pods to other addresses than pods are masqueraded, because other machines have no route back |
//! | mangle | packets with the source address of a pod that arrive neither from the bridge nor from the mesh are dropped: they could be forged by the network between the nodes |
//! | mangle | the same for packets to the address of a service: services are for pods and nodes only, other machines would have access otherwise |
//!
//! The chains are complete before jumps to them are added, and are not changed while they are
//! correct, so there is no moment without the rules.

use hearth_api::names::{POD_NETWORK, SERVICE_NETWORK};
use hearth_host::networking::PodRange;
use hearth_sys::iptables::{Iptables, IptablesError};

use super::{BRIDGE, LINK};

const CHAIN: &str = "HEARTH-PODS";

/// Sets up and removes the rules.
#[derive(Clone, Debug)]
pub(super) struct Firewall {
    /// The program.
    pub iptables: Iptables,
}

/// A table: the rules of our chain, and the jumps to it.
struct Table {
    name: &'static str,
    from: &'static str,
    /// `-I` or `-A`: whether the jump is the first or the last rule there.
    place: &'static str,
    /// Matches of the jumps.
    only: &'static [&'static [&'static str]],
    rules: Vec<Vec<String>>,
}

fn tables(range: PodRange) -> [Table; 2] {
    let words = |text: String| text.split(' ').map(str::to_owned).collect();
    let masquerade = format!("-s {range} ! -d {POD_NETWORK} -j MASQUERADE");
    let let_by = |link| words(format!("-i {link} -j RETURN"));
    [
        Table {
            name: "nat",
            from: "POSTROUTING",
            place: "-A",
            only: &[&[]],
            rules: vec![words(masquerade)],
        },
        Table {
            name: "mangle",
            from: "PREROUTING",
            place: "-I",
            only: &[&["-s", POD_NETWORK], &["-d", SERVICE_NETWORK]],
            rules: vec![
                let_by(BRIDGE),
                let_by(LINK),
                let_by("lo"),
                words("-j DROP".into()),
            ],
        },
    ]
}

impl Firewall {
    /// Sets up the rules.
    pub(super) async fn make(&self, range: PodRange) -> Result<(), IptablesError> {
        for table in tables(range) {
            if !self.is_whole(&table).await? {
                self.fill(&table).await?;
            }
            for lead in table.leads() {
                if !self
                    .iptables
                    .holds(table.name, "-C", table.from, &lead)
                    .await?
                {
                    self.iptables
                        .change(table.name, table.place, table.from, &lead)
                        .await?;
                }
            }
        }
        Ok(())
    }

    /// Removes the rules.
    pub(super) async fn remove(&self) -> Result<(), IptablesError> {
        // The jumps and the names of the chains do not depend on the range.
        let any = PodRange::all().next();
        for table in any.map(tables).into_iter().flatten() {
            for lead in table.leads() {
                while self
                    .iptables
                    .holds(table.name, "-C", table.from, &lead)
                    .await?
                {
                    self.iptables
                        .change(table.name, "-D", table.from, &lead)
                        .await?;
                }
            }
            if self.iptables.holds(table.name, "-S", CHAIN, &[]).await? {
                self.iptables.change(table.name, "-F", CHAIN, &[]).await?;
                self.iptables.change(table.name, "-X", CHAIN, &[]).await?;
            }
        }
        Ok(())
    }

    async fn is_whole(&self, table: &Table) -> Result<bool, IptablesError> {
        for rule in &table.rules {
            let rule: Vec<&str> = rule.iter().map(String::as_str).collect();
            if !self.iptables.holds(table.name, "-C", CHAIN, &rule).await? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    async fn fill(&self, table: &Table) -> Result<(), IptablesError> {
        let is_there = self.iptables.holds(table.name, "-S", CHAIN, &[]).await?;
        // Flush or create the chain.
        let command = if is_there { "-F" } else { "-N" };
        self.iptables
            .change(table.name, command, CHAIN, &[])
            .await?;
        for rule in &table.rules {
            let rule: Vec<&str> = rule.iter().map(String::as_str).collect();
            self.iptables.change(table.name, "-A", CHAIN, &rule).await?;
        }
        Ok(())
    }
}

impl Table {
    fn leads(&self) -> impl Iterator<Item = Vec<&'static str>> {
        self.only
            .iter()
            .map(|only| [only, &["-j", CHAIN][..]].concat())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;
    use std::path::Path;

    use hearth_api::names::{EXTENSION_KUBERNETES, EXTENSIONS};
    use hearth_host::layout;
    use nix::sched::{CloneFlags, unshare};

    use super::*;
    use crate::testing;

    fn range(number: usize) -> PodRange {
        PodRange::all().nth(number).unwrap()
    }

    async fn rules(firewall: &Firewall, table: &str, chain: &str) -> String {
        let ended = firewall
            .iptables
            .run(table, "-S", chain, &[])
            .await
            .unwrap();
        ended.said
    }

    async fn whole(firewall: &Firewall) {
        for _ in 0..2 {
            firewall.make(range(3)).await.unwrap();
            assert_eq!(
                rules(firewall, "nat", CHAIN).await,
                "-N HEARTH-PODS -A HEARTH-PODS -s 10.208.3.0/24 ! -d 10.208.0.0/12 -j MASQUERADE"
            );
            assert_eq!(
                rules(firewall, "mangle", CHAIN).await,
                "-N HEARTH-PODS -A HEARTH-PODS -i hearth-pods -j RETURN \
                 -A HEARTH-PODS -i hearth-mesh -j RETURN -A HEARTH-PODS -i lo -j RETURN \
                 -A HEARTH-PODS -j DROP"
            );
            assert_eq!(
                rules(firewall, "mangle", "PREROUTING").await,
                "-P PREROUTING ACCEPT -A PREROUTING -d 10.224.0.0/16 -j HEARTH-PODS \
                 -A PREROUTING -s 10.208.0.0/12 -j HEARTH-PODS"
            );
        }
    }

    async fn rules_come_and_go(firewall: &Firewall) {
        firewall.remove().await.unwrap();
        whole(firewall).await;
        // The rules were changed, or the setup was interrupted.
        for (table, what, rest) in [
            ("nat", "-F", &[][..]),
            ("mangle", "-D", &["-j", "DROP"]),
            ("nat", "-A", &["-j", "ACCEPT"]),
        ] {
            firewall
                .iptables
                .change(table, what, CHAIN, rest)
                .await
                .unwrap();
            if what != "-A" {
                whole(firewall).await;
            }
        }
        // The node gets another range.
        firewall.make(range(4)).await.unwrap();
        let nat = rules(firewall, "nat", CHAIN).await;
        assert!(
            nat.contains("10.208.4.0/24") && !nat.contains("10.208.3.0"),
            "{nat}"
        );
        for _ in 0..2 {
            firewall.remove().await.unwrap();
            for (table, chain) in [("nat", "POSTROUTING"), ("mangle", "PREROUTING")] {
                let left = rules(firewall, table, chain).await;
                assert_eq!(left, format!("-P {chain} ACCEPT"));
            }
        }
        let wrong = firewall
            .iptables
            .run("nat", "-F", "NOWHERE", &[])
            .await
            .unwrap();
        let error = wrong.well().unwrap_err().to_string();
        assert!(
            error.contains("-t nat -F NOWHERE") && error.contains("No chain"),
            "{error}"
        );
    }

    /// With the real program, in a network namespace of the test. Children are started by a thread
    /// that is not in it, so they enter it with `nsenter`.
    #[test]
    fn the_kernel_has_the_rules() {
        let mounted = Path::new(EXTENSIONS).join(EXTENSION_KUBERNETES);
        let real = layout::Bundle::under(&mounted).programs().join("iptables");
        if !real.exists() {
            let place = mounted.display();
            testing::skipped(&format!("no Kubernetes bundle at {place}"));
            return;
        }
        let run = || {
            if unshare(CloneFlags::CLONE_NEWNET).is_err() {
                testing::skipped("this requires permission to create network namespaces");
                return;
            }
            let directory = tempfile::tempdir().unwrap();
            let iptables = directory.path().join("iptables");
            let own = format!(
                "/proc/{}/task/{}/ns/net",
                std::process::id(),
                nix::unistd::gettid()
            );
            let script = format!(
                "#!/bin/sh\nexec /usr/bin/nsenter --net={own} {} \"$@\"\n",
                real.display()
            );
            std::fs::write(&iptables, script).unwrap();
            let executable = std::fs::Permissions::from_mode(0o755);
            std::fs::set_permissions(&iptables, executable).unwrap();
            let iptables = Iptables::at(iptables);
            let firewall = Firewall { iptables };
            tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap()
                .block_on(rules_come_and_go(&firewall));
        };
        std::thread::scope(|scope| scope.spawn(run).join().unwrap());
    }
}
