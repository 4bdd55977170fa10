//! Delays handshakes from addresses of nodes that have been refused.
//!
//! A node that has all its connections is refused after its handshake, since only the handshake says which
//! node it is. Its client may then begin the next handshake at once, and handshakes are what costs a server
//! most: without a delay, a single node can keep it busy with nothing else. Other clients at the same
//! address are delayed as well.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::Refused;
use crate::shares::Shares;

/// Handshakes from an address are delayed for this long after a node was refused there.
const DELAYED_FOR: Duration = Duration::from_secs(60);
/// Addresses that are kept before those are forgotten that are delayed no more.
const FORGET_BEYOND: usize = 1024;

/// Handshakes that are delayed at the same time. A further one replaces the oldest one of the address
/// that has the most.
const MOST: usize = 256;

/// The addresses.
pub(super) struct Delays {
    /// How long a handshake is delayed.
    each: Duration,
    until: Mutex<HashMap<IpAddr, Instant>>,
    shares: Arc<Shares<IpAddr>>,
}

impl Delays {
    pub(super) fn new(each: Duration) -> Self {
        Self {
            each,
            until: Mutex::default(),
            shares: Shares::new(MOST, MOST),
        }
    }

    /// A node was refused at this address.
    pub(super) fn refused(&self, from: IpAddr) {
        let now = Instant::now();
        let mut until = self.until.lock().unwrap_or_else(PoisonError::into_inner);
        if until.len() >= FORGET_BEYOND {
            until.retain(|_, until| *until > now);
        }
        until.insert(from, now + DELAYED_FOR);
    }

    /// Waits before a handshake from this address, if it is delayed, or until the peer has `gone`:
    /// those that give up must not take the places of those that wait.
    pub(super) async fn wait(
        &self,
        from: IpAddr,
        gone: impl Future<Output = ()>,
    ) -> Result<(), Refused> {
        if !self.is_delayed(from) {
            return Ok(());
        }
        let share = self.shares.take(from);
        tokio::select! {
            biased;
            () = share.lost() => Err(Refused::Replaced),
            () = gone => Err(Refused::Gone),
            () = tokio::time::sleep(self.each) => Ok(()),
        }
    }

    fn is_delayed(&self, from: IpAddr) -> bool {
        let until = self.until.lock().unwrap_or_else(PoisonError::into_inner);
        until
            .get(&from)
            .is_some_and(|until| *until > Instant::now())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_address_is_delayed_for_a_while_and_no_other() {
        let delays = Delays::new(Duration::from_secs(2));
        let address = |number: u32| IpAddr::from(number.to_be_bytes());
        let waited = async |number: u32| {
            let begin = Instant::now();
            let wait = delays.wait(address(number), std::future::pending());
            wait.await.unwrap();
            begin.elapsed().as_secs()
        };
        assert_eq!(waited(1).await, 0);
        delays.refused(address(1));
        assert_eq!(
            (waited(1).await, waited(2).await, waited(1).await),
            (2, 0, 2)
        );
        let given_up = delays.wait(address(1), async {}).await;
        assert!(matches!(given_up, Err(Refused::Gone)));
        tokio::time::advance(DELAYED_FOR).await;
        assert_eq!(waited(1).await, 0);
        for number in 0..2 * FORGET_BEYOND as u32 {
            delays.refused(address(number));
            tokio::time::advance(DELAYED_FOR / 16).await;
        }
        assert!(delays.until.lock().unwrap().len() <= FORGET_BEYOND);
    }
}
