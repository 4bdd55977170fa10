//! Whether another machine uses an address that was given to this one.
//!
//! An address in the parameters is used whatever others do: to give it up would leave the node without any. But it is said, on the
//! console and in the node's condition, as long as it is so.

use std::net::IpAddr;
use std::time::Duration;

use hearth_parameters::Mac;
use hearth_sys::conflict::{Detector, PROBE_INTERVAL, PROBES};
use hearth_sys::netlink::Link;
use tokio::time::{sleep, timeout};

use super::report::{News, Reporter};

/// How long after the first probes, and after a claim, an address is probed again.
const LATER_INTERVAL: Duration = Duration::from_secs(60);

/// Watches an address; never returns while that is possible.
pub(super) async fn watch(reporter: &Reporter, link: &Link, address: IpAddr) {
    let (IpAddr::V4(v4), Some(mac)) = (address, link.mac) else {
        // Of IPv6 the kernel does not use an address that another machine has.
        return;
    };
    let ended = match Detector::open(link.index, mac, v4) {
        Ok(detector) => follow(reporter, link, &detector).await,
        Err(error) => error,
    };
    let name = &link.name;
    tracing::warn!("{name}: cannot watch for other machines with address {address}: {ended}");
}

/// Returns only on an error.
async fn follow(reporter: &Reporter, link: &Link, detector: &Detector) -> std::io::Error {
    let address = detector.address();
    let (mut claimed, mut probes) = (false, 0_u32);
    loop {
        detector.probe();
        probes = probes.saturating_add(1);
        let wait = if probes <= PROBES {
            PROBE_INTERVAL
        } else {
            LATER_INTERVAL
        };
        match timeout(wait, detector.next()).await {
            Ok(Ok(by)) => {
                let name = &link.name;
                let why = format!(
                    "address {address} of {name} is used by another machine, too: {}",
                    Mac(by)
                );
                tracing::warn!("network setup: {why}");
                reporter.tell(News::Lacks(why)).await;
                (claimed, probes) = (true, 0);
                sleep(LATER_INTERVAL).await;
                detector.forget();
            }
            Ok(Err(error)) => return error,
            Err(_) if claimed && probes >= PROBES => {
                claimed = false;
                tracing::info!(
                    "address {address} of {} is this machine's alone again",
                    link.name
                );
                reporter.tell(News::LacksNothing).await;
            }
            Err(_) => {}
        }
    }
}
