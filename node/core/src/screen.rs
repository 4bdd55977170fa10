//! What the machine's own screen shows.
//!
//! A machine that does not do what it should is looked at by somebody in front of it, or by a photograph of its screen. So the
//! screen says at one glance who the machine is, what state it is in, and what it waits for or why it refuses; the log is for the serial
//! line and for `hearthctl node logs`. A key that an operator has to approve is shown as a QR code, too.
//!
//! [`page`] is the pure function from what is known to the lines. The worker draws them when something has changed, at most twice a second,
//! and each minute, since the page has a clock and the kernel may have written over it. A machine without virtual terminals has no
//! screen.

mod code;
mod page;

use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use hearth_api::tls::Clock;
use hearth_api::v1::NodeCondition;
use hearth_base::event::{Value, Watcher};
use hearth_base::supervisor::{Context, Outcome};
use hearth_enrolment::machine::EnrolmentStatus;
use hearth_host::cluster_state::{ClusterState, State};
use hearth_host::handover::MemberData;
use hearth_sys::screen::{self, Screen};
use tokio::time::{Instant, sleep, sleep_until};

use page::Known;

/// The shortest time between two drawings.
const CALM: Duration = Duration::from_millis(500);
/// The longest time.
const CLOCK: Duration = Duration::from_secs(60);

/// The inputs of the screen.
pub(crate) struct Worker {
    /// Version of the image.
    pub version: String,
    pub clock: Clock,
    /// When the node has started.
    pub started: Instant,
    pub member: Value<MemberData>,
    pub cluster_state: ClusterState,
    pub status: Value<EnrolmentStatus>,
    pub address: Value<IpAddr>,
    pub second_address: Value<Option<IpAddr>>,
    pub network_problems: Value<Vec<String>>,
    pub conditions: Value<Vec<NodeCondition>>,
}

/// Shows what is known.
pub(crate) async fn run(ctx: Context, worker: Arc<Worker>) -> Outcome {
    let mut screen = match Screen::open(Path::new(screen::DEVICE)) {
        Ok(screen) => screen,
        Err(error) => {
            tracing::debug!(%error, "no screen");
            ctx.healthy();
            ctx.done();
            return Ok(());
        }
    };
    ctx.healthy();
    ctx.until_cancelled(async {
        let mut changes = Changes::of(&worker);
        loop {
            let lines = page::lines(&worker.known(), screen.size());
            screen.draw(&lines)?;
            let due = Instant::now() + CLOCK;
            sleep(CALM).await;
            tokio::select! {
                () = changes.next() => {}
                () = sleep_until(due) => {}
            }
        }
    })
    .await
}

impl Worker {
    fn known(&self) -> Known {
        let own = self.member.get().map(|member| {
            let certificate = &member.own;
            (
                certificate.node().to_string(),
                certificate.cluster().to_string(),
            )
        });
        let (node, cluster) = own.unzip();
        let unmet = self.conditions.get().unwrap_or_default();
        let unmet = unmet.into_iter().filter(|condition| !condition.met);
        let unmet = unmet.map(|condition| format!("{}: {}", condition.r#type, condition.message));
        Known {
            version: self.version.clone(),
            uptime: self.started.elapsed(),
            now: UNIX_EPOCH
                + self
                    .clock
                    .current_time()
                    .map_or(Duration::ZERO, |now| Duration::from_secs(now.as_secs())),
            state: self.cluster_state.get(),
            node,
            cluster,
            address: self.address.get(),
            second: self.second_address.get().flatten(),
            status: self.status.get(),
            problems: self
                .network_problems
                .get()
                .unwrap_or_default()
                .into_iter()
                .chain(unmet)
                .collect(),
        }
    }
}

/// Follows the inputs.
struct Changes {
    member: Watcher<MemberData>,
    state: Watcher<State>,
    status: Watcher<EnrolmentStatus>,
    address: Watcher<IpAddr>,
    second: Watcher<Option<IpAddr>>,
    problems: Watcher<Vec<String>>,
    conditions: Watcher<Vec<NodeCondition>>,
}

impl Changes {
    fn of(worker: &Worker) -> Self {
        Self {
            member: worker.member.watch(),
            state: worker.cluster_state.watch(),
            status: worker.status.watch(),
            address: worker.address.watch(),
            second: worker.second_address.watch(),
            problems: worker.network_problems.watch(),
            conditions: worker.conditions.watch(),
        }
    }

    /// Waits for one. A writer that has ended changes nothing any more.
    async fn next(&mut self) {
        tokio::select! {
            Ok(_) = self.member.next() => {}
            Ok(_) = self.state.next() => {}
            Ok(_) = self.status.next() => {}
            Ok(_) = self.address.next() => {}
            Ok(_) = self.second.next() => {}
            Ok(_) = self.problems.next() => {}
            Ok(_) = self.conditions.next() => {}
            else => std::future::pending().await,
        }
    }
}
