//! Storage benchmark: sealing by a TPM compared with clevis and systemd-creds, proofs of what was booted, first boots with
//! authenticated encryption compared with those without authentication, and starts of encrypted nodes compared with those
//! of insecure ones.
//!
//! Sealing and proofs are measured on this host, without machines, by the example `tpm_bench` of `hearth-tpm`; here it is
//! built like the node and run. For sealing it compares whole processes: the others are programs, so ours is one, too.
//! Then two clusters of three nodes are formed ([`hearth_lab::measure::storage`]) and started in alternation.

use std::time::Duration;

use anyhow::Result;
use hearth_api::v1::StorageSecurityPolicy;
use hearth_lab::measure::Lab;
use hearth_lab::measure::cluster::Progress;
use hearth_lab::measure::storage::{Disks, Subject, Times};
use hearth_qemu::accel;

use super::{Records, ratio, until_interrupted};
use crate::command::Cmd;
use crate::image::{self, Artifacts, build_tpm_bench};
use crate::setup::{self, Needs};
use crate::ui::{Task, Ui};
use crate::{program, target};

/// Number of nodes, all of them voters.
const NODES: u16 = 3;

/// Measures `rounds` of each comparison; None: the default numbers.
pub(super) fn measure(
    ui: &Ui,
    node: &Artifacts,
    rounds: Option<u32>,
    accel: accel::Choice,
    records: &mut Records,
) -> Result<()> {
    setup::ensure(ui, Needs::NODE | Needs::RUN | Needs::TPM | Needs::BENCH)?;
    by_tpm(ui, rounds.unwrap_or(20), records)?;
    first_boots(ui, node, rounds.unwrap_or(3), accel, records)?;
    starts(ui, node, rounds.unwrap_or(3), accel, records)
}

fn by_tpm(ui: &Ui, rounds: u32, records: &mut Records) -> Result<()> {
    let program = build_tpm_bench(ui, &target::folder("bench")?.join("tpm-bench"))?;
    for (what, word) in [("sealing", "compare"), ("attestation", "attest")] {
        let task = ui.task(format!("measuring {what}"));
        let measured = Cmd::new(&program).args([word, &rounds.to_string()]);
        records.take_in(&measured.output(ui)?)?;
        task.done();
    }
    Ok(())
}

/// The first boots that are compared: with authenticated encryption, and without authentication.
const FIRST_BOOTS: [(&str, StorageSecurityPolicy); 2] = [
    (
        "authenticated",
        StorageSecurityPolicy::NeedsEncryptionAndAuthentication,
    ),
    ("encrypted", StorageSecurityPolicy::NeedsEncryption),
];

fn first_boots(
    ui: &Ui,
    node: &Artifacts,
    rounds: u32,
    accel: accel::Choice,
    records: &mut Records,
) -> Result<()> {
    let lab = Lab {
        accel: accel::choose(accel)?.accel,
        folder: target::folder("bench")?,
    };
    let node = image::to_boot(node);
    let length = u64::from(rounds + 1) * FIRST_BOOTS.len() as u64;
    let task = ui.counted_task("measuring first boots of encrypted nodes", length);
    let mut samples: [Vec<f64>; 2] = Default::default();
    let measuring = async {
        // The first round warms the host's caches and is not counted.
        for number in 0..=rounds {
            // Every other round runs in the opposite order.
            let mut order = [0, 1];
            order.rotate_left((number % 2) as usize);
            for index in order {
                let (what, storage) = FIRST_BOOTS[index];
                task.now(what);
                let boot = lab.node_with(&node, what, storage).await?;
                if number > 0 {
                    samples[index].push(boot.whole.as_secs_f64());
                }
                task.step();
            }
        }
        anyhow::Ok(())
    };
    until_interrupted(measuring)?;
    task.done();
    for ((what, _), seconds) in FIRST_BOOTS.iter().zip(&samples) {
        records.add(format!("storage.first_boot_seconds_{what}"), "s", seconds);
    }
    let [authenticated, encrypted] = &samples;
    let ratios = ratio(authenticated, encrypted);
    records.add("storage.first_boot_ratio_authenticated", "ratio", &ratios);
    Ok(())
}

fn starts(
    ui: &Ui,
    node: &Artifacts,
    rounds: u32,
    accel: accel::Choice,
    records: &mut Records,
) -> Result<()> {
    let lab = Lab {
        accel: accel::choose(accel)?.accel,
        folder: target::folder("bench")?.join("storage"),
    };
    let (node, switch) = (image::to_boot(node), program::switch(ui)?);
    let length = (u64::from(rounds) + 1) * Disks::ALL.len() as u64;
    let task = ui.counted_task("measuring starts of encrypted nodes", length);
    let mut samples: [Vec<Times>; 2] = Default::default();
    let measuring = async {
        let mut subjects = Vec::new();
        for disks in Disks::ALL {
            let told = |progress: Progress<'_>| match progress {
                Progress::First => task.now(format!("{}: one node", disks.word())),
                Progress::Others => task.now(format!("{}: three voters", disks.word())),
                Progress::NotYet(error) => {
                    let why = hearth_api::chain(error);
                    task.now(format!("{}: three voters ({why})", disks.word()));
                }
            };
            subjects.push(Subject::form(disks, &lab, &node, &switch, NODES, told).await?);
            task.step();
        }
        for number in 0..rounds {
            // Every other round runs in the opposite order.
            let mut order = [0, 1];
            order.rotate_left((number % 2) as usize);
            for index in order {
                let told = |what: &str| now(&task, Disks::ALL[index], what);
                samples[index].push(subjects[index].round(told).await?);
                task.step();
            }
        }
        for subject in subjects {
            subject.end()?;
        }
        anyhow::Ok(())
    };
    until_interrupted(measuring)?;
    task.done();
    let [insecure, encrypted] = &samples;
    record(insecure, encrypted, records);
    Ok(())
}

fn now(task: &Task, disks: Disks, what: &str) {
    task.now(format!("{}: {what}", disks.word()));
}

fn record(insecure: &[Times], encrypted: &[Times], records: &mut Records) {
    let both = |part: fn(&Times) -> Duration| {
        let of = |times: &[Times]| times.iter().map(|t| part(t).as_secs_f64()).collect();
        (of(encrypted), of(insecure))
    };
    let mut seconds = |name: &str, (ours, theirs): &(Vec<f64>, Vec<f64>)| {
        records.add(format!("storage.{name}_seconds"), "s", ours);
        records.add(format!("storage.{name}_seconds_insecure"), "s", theirs);
    };
    let cold_start = both(|times| times.cold_start);
    seconds("cold_start", &cold_start);
    let reboot = both(|times| times.reboot);
    seconds("reboot", &reboot);
    let power_cut = both(|times| times.power_cut);
    seconds("power_cut", &power_cut);
    let ratios = ratio(&cold_start.0, &cold_start.1);
    records.add("storage.cold_start_ratio", "ratio", &ratios);
    records.add(
        "storage.reboot_ratio",
        "ratio",
        &ratio(&reboot.0, &reboot.1),
    );
    let pairs = power_cut.0.iter().zip(&power_cut.1);
    let more: Vec<f64> = pairs.map(|(ours, theirs)| ours - theirs).collect();
    records.add("storage.power_cut_extra_seconds", "s", &more);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encrypted_is_compared_with_insecure() {
        let times = |seconds: [u64; 3]| {
            let [cold_start, reboot, power_cut] = seconds.map(Duration::from_secs);
            vec![Times {
                cold_start,
                reboot,
                power_cut,
            }]
        };
        let mut records = Records::new("abc");
        record(&times([10, 20, 30]), &times([12, 20, 33]), &mut records);
        let compared: Vec<(&str, f64)> = records
            .all()
            .iter()
            .filter(|record| crate::promises::Bound::of(&record.name).is_some())
            .map(|record| (&record.name[..], record.median))
            .collect();
        assert_eq!(
            compared,
            [
                ("storage.cold_start_ratio", 1.2),
                ("storage.reboot_ratio", 1.0),
                ("storage.power_cut_extra_seconds", 3.0)
            ]
        );
    }
}
