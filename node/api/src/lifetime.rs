//! When a connection has to end, on either side.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use rustls_pki_types::UnixTime;
use tokio_util::sync::CancellationToken;

use crate::tls::{self, Clock};

/// The first of several reasons for which a connection ends.
///
/// A stream asks it before each of its own operations. The reading side of an
/// HTTP/2 connection is polled all the time, so the task that owns it wakes
/// when the reason comes.
pub(crate) struct End {
    reasons: Pin<Box<dyn Future<Output = &'static str> + Send>>,
    /// The one that came.
    reason: Option<&'static str>,
}

impl End {
    /// With whoever holds this token, and for this reason.
    pub(crate) fn with(owner: CancellationToken, reason: &'static str) -> Self {
        Self::when(async move {
            owner.cancelled_owned().await;
            reason
        })
    }

    fn when(reasons: impl Future<Output = &'static str> + Send + 'static) -> Self {
        Self {
            reasons: Box::pin(reasons),
            reason: None,
        }
    }

    /// Also when this is over, for the reason that it gives.
    pub(crate) fn or_when(
        self,
        other: impl Future<Output = &'static str> + Send + 'static,
    ) -> Self {
        Self::when(async move {
            tokio::select! {
                reason = self.reasons => reason,
                reason = other => reason,
            }
        })
    }

    /// Also with whoever holds this token, and for this reason.
    pub(crate) fn or_with(self, owner: CancellationToken, reason: &'static str) -> Self {
        self.or_when(async move {
            owner.cancelled_owned().await;
            reason
        })
    }

    /// Also after some time.
    pub(crate) fn or_after(self, lifetime: Duration) -> Self {
        self.or_when(async move {
            tokio::time::sleep(lifetime).await;
            "its time is over"
        })
    }

    /// Also with the peer's certificate.
    pub(crate) fn or_past(self, not_after: UnixTime, clock: Clock) -> Self {
        self.or_when(async move {
            past(not_after, &clock).await;
            "the peer's certificate has expired"
        })
    }

    /// An error once there is a reason.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        if self.reason.is_none()
            && let Poll::Ready(reason) = self.reasons.as_mut().poll(cx)
        {
            self.reason = Some(reason);
        }
        match self.reason {
            Some(reason) => Err(io::Error::new(io::ErrorKind::ConnectionAborted, reason)),
            None => Ok(()),
        }
    }
}

/// Waits until a point in time is past. The wall clock may be set at any time
/// and timers follow another clock, so this looks again from time to time.
async fn past(point: UnixTime, clock: &Clock) {
    const LOOK_AGAIN: Duration = Duration::from_secs(60);
    loop {
        let now = tls::now(clock);
        if now > point {
            return;
        }
        let left = Duration::from_secs(point.as_secs() - now.as_secs() + 1);
        tokio::time::sleep(left.min(LOOK_AGAIN)).await;
    }
}
