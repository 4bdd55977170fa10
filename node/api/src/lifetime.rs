//! When a connection has to be closed, on either side.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use rustls_pki_types::UnixTime;
use tokio_util::sync::CancellationToken;

use crate::tls::{self, Clock};

/// The reasons for which a connection has to be closed; the first to occur counts.
///
/// A stream polls this before each of its operations. The reading side of an HTTP/2 connection is
/// polled all the time, so the task that owns it wakes when a reason occurs.
pub(crate) struct End {
    reasons: Pin<Box<dyn Future<Output = &'static str> + Send>>,
    /// The reason that occurred.
    reason: Option<&'static str>,
}

impl End {
    /// When this token is cancelled.
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

    /// Also when this future completes, for the reason that it returns.
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

    /// Also when this token is cancelled.
    pub(crate) fn or_with(self, owner: CancellationToken, reason: &'static str) -> Self {
        self.or_when(async move {
            owner.cancelled_owned().await;
            reason
        })
    }

    /// Also after this time.
    pub(crate) fn or_after(self, lifetime: Duration) -> Self {
        self.or_when(async move {
            tokio::time::sleep(lifetime).await;
            "the connection's maximum lifetime has passed"
        })
    }

    /// Also when the peer's certificate expires.
    pub(crate) fn or_past(self, not_after: UnixTime, clock: Clock) -> Self {
        self.or_when(async move {
            past(not_after, &clock).await;
            "the peer's certificate has expired"
        })
    }

    /// Returns an error once a reason has occurred.
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

/// Waits until a point in time has passed. The wall clock may be set at any time and timers follow
/// another clock, so this checks again periodically.
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
