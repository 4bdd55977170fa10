//! Boots of a node, in alternation with those of a bare init and of a machine that only powers off.
//!
//! A node counts as HOME when its owner, on the host, has got its list of nodes: GetNodes, answered over mutual TLS with
//! the owner's certificate. First contact and the exchange of the owner key for that certificate come before it and are
//! included. The bare init does the minimum for etcd to serve from a disk on the same kernel. All three run on identical
//! machines, one at a time and in alternation, and every other round in the opposite order, so that neither a slow
//! moment of the host nor the cache contents left by the previous one affect only one of them.

use std::time::Duration;

use hearth_qemu::artifacts::Image;
use hearth_qemu::phases::Phase;

use super::records::{Records, ratio};
use super::{Lab, MEMORY, Measured, Way};
use crate::Result;

/// The images and their machines.
pub struct Machines {
    /// The node.
    pub node: Image,
    /// The image that it is compared with.
    pub bare: Image,
    /// Makes the machines.
    pub lab: Lab,
}

/// The measurements of one boot method, round by round.
#[derive(Default)]
pub struct Samples {
    node: Vec<Measured>,
    bare: Vec<Measured>,
    floor: Vec<f64>,
}

impl Samples {
    /// Measures one boot of each kind. `began` is called before each, `done` after it.
    ///
    /// # Errors
    /// If one of them fails or times out.
    pub async fn round(
        &mut self,
        machines: &Machines,
        way: Way,
        swapped: bool,
        began: impl Fn(Kind),
        done: impl Fn(),
    ) -> Result<()> {
        let order = match swapped {
            false => [Kind::Node, Kind::Bare, Kind::Floor],
            true => [Kind::Floor, Kind::Bare, Kind::Node],
        };
        let Machines { node, bare, lab } = machines;
        for kind in order {
            began(kind);
            match kind {
                Kind::Node => self.node.push(lab.node(node, way, MEMORY).await?),
                Kind::Bare => self.bare.push(lab.bare(bare, way).await?),
                Kind::Floor => self.floor.push(lab.floor(bare, way).await?.as_secs_f64()),
            }
            done();
        }
        Ok(())
    }

    /// Adds the records of what was measured.
    pub fn record(&self, way: Way, records: &mut Records) {
        let way = way.word();
        let name = |what: &str| format!("boot.{way}.{what}");
        let home = wholes(&self.node);
        let bare = wholes(&self.bare);
        records.add(name("home_seconds"), "s", &home);
        for (phase, seconds) in phases(&self.node) {
            records.add(name(&format!("phase.{phase}_seconds")), "s", &seconds);
        }
        records.add(name("bare_first_put_seconds"), "s", &bare);
        for (phase, seconds) in phases(&self.bare) {
            records.add(name(&format!("bare_phase.{phase}_seconds")), "s", &seconds);
        }
        records.add(name("floor_seconds"), "s", &self.floor);
        let mut against = |what, theirs: &[f64]| {
            let name = name(&format!("home_ratio_{what}"));
            records.add(name, "ratio", &ratio(&home, theirs));
        };
        against("bare", &bare);
        against("floor", &self.floor);
        let peaks = |boots: &[Measured]| boots.iter().map(|b| b.peak as f64).collect::<Vec<_>>();
        for (name, boots) in [
            (format!("memory.qemu_peak_bytes_{way}"), &self.node),
            (format!("memory.qemu_peak_bytes_{way}_bare"), &self.bare),
        ] {
            records.add(name, "bytes", &peaks(boots));
        }
    }
}

/// What is booted.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    /// The node, until it is HOME.
    Node,
    /// The bare init, until its etcd has acknowledged a put.
    Bare,
    /// The bare init, which only powers off.
    Floor,
}

impl Kind {
    /// Its name, for progress reports.
    pub fn word(self) -> &'static str {
        match self {
            Kind::Node => "node",
            Kind::Bare => "bare init",
            Kind::Floor => "floor",
        }
    }
}

fn wholes(boots: &[Measured]) -> Vec<f64> {
    boots.iter().map(|boot| boot.whole.as_secs_f64()).collect()
}

/// Seconds by phase, for phases that every boot reported. The time after the last one, from the node's report that it
/// is HOME to the owner's answer, is `answer`.
fn phases(boots: &[Measured]) -> Vec<(&'static str, Vec<f64>)> {
    let took = |phase: Phase| {
        let took = |boot: &Measured| Some(boot.timeline.get(phase)?.took.as_secs_f64());
        let seconds = boots.iter().map(took).collect::<Option<Vec<_>>>()?;
        Some((phase.word(), seconds))
    };
    let rest = |boot: &Measured| {
        let last = boot.timeline.passed().last();
        let told = last.map_or(Duration::ZERO, |passed| passed.at);
        boot.whole.saturating_sub(told).as_secs_f64()
    };
    let answers: Vec<f64> = boots.iter().map(rest).collect();
    // A boot that ends with its last phase has none.
    let answer = answers
        .iter()
        .any(|rest| *rest > 0.0)
        .then_some(("answer", answers));
    Phase::ALL
        .into_iter()
        .filter_map(took)
        .chain(answer)
        .collect()
}
