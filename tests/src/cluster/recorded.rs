//! A cluster that was recorded ([`crate::sweep`]), to be booted from what power cuts leave of its disks.

use hearth_lab::Owner;
use hearth_qemu::disk::Disk;
use hearth_qemu::switch::NetworkOptions;

use super::{Cluster, Machines, Member, curators, installed, usual};
use crate::places::Occupant;
use crate::{Outcome, TestCtx};

impl Cluster {
    /// The machines of these nodes of this owner, powered off. To take ownership once, all of them are booted from these
    /// disks: the first may need the votes of the others.
    ///
    /// # Errors
    /// If the first does not become HOME.
    pub(crate) async fn recorded(
        test: &TestCtx,
        nodes: &[String],
        owner: &Owner,
        disks: Vec<Disk>,
    ) -> anyhow::Result<Self> {
        test.turn(Occupant::Cluster)?;
        let count = u16::try_from(nodes.len())?;
        let Machines {
            mut members,
            network,
        } = installed(test, &NetworkOptions::default(), usual(test, count)).await?;
        for (member, id) in members.iter_mut().zip(nodes) {
            member.id.clone_from(id);
            member.node.owner = owner.clone();
        }
        boot(&mut members, disks).await?;
        members[0].home().await?;
        let owner = members[0].vm()?.owned().await?;
        let mut cluster = Self {
            members,
            owner: owner.at(curators(&network).await?)?,
            network,
        };
        cluster.cut_all().await?;
        Ok(cluster)
    }

    /// Boots all machines from these disks, without parameters.
    ///
    /// # Errors
    /// If one is powered on, or QEMU does not start.
    pub(crate) async fn boot_from(&mut self, disks: Vec<Disk>) -> Outcome {
        boot(&mut self.members, disks).await
    }
}

async fn boot(members: &mut [Member], disks: Vec<Disk>) -> Outcome {
    for (member, disk) in members.iter_mut().zip(disks) {
        member.node.insert(disk);
        member.node.parameters = None;
        member.start().await?;
    }
    Ok(())
}
