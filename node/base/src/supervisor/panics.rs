//! Catches the panic of a runnable, with its source location.
//!
//! `catch_unwind` gives only the payload; only the panic hook knows the location. So a hook,
//! installed before the existing one (which still runs), leaves the location in a thread-local that
//! the catcher reads on the same thread right afterwards.

use std::any::Any;
use std::cell::RefCell;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::pin::pin;
use std::sync::Once;
use std::task::Poll;

thread_local! {
    static PLACE: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Installs the hook, once per process.
pub(super) fn note_places() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        let previous = take_hook();
        set_hook(Box::new(move |info| {
            let place = info.location().map(ToString::to_string);
            // A thread that is being torn down has no thread-locals any more; then the location is
            // lost, and the panic is still caught.
            let _ = PLACE.try_with(|cell| {
                if let Ok(mut cell) = cell.try_borrow_mut() {
                    *cell = place;
                }
            });
            previous(info);
        }));
    });
}

/// Runs a future to its end; a panic becomes a message with its location.
///
/// The future is never polled again after a panic, and it is dropped here, so only its destructors
/// see the state that the panic left half done: that is why the assertion of unwind safety holds.
pub(super) async fn caught<F: Future>(future: F) -> Result<F::Output, String> {
    let mut future = pin!(future);
    std::future::poll_fn(move |context| {
        match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(context))) {
            Ok(Poll::Pending) => Poll::Pending,
            Ok(Poll::Ready(output)) => Poll::Ready(Ok(output)),
            Err(payload) => {
                let place = PLACE.with(|cell| cell.borrow_mut().take());
                Poll::Ready(Err(describe(payload.as_ref(), place.as_deref())))
            }
        }
    })
    .await
}

/// `panicked at src/file.rs:12:5: message`
pub(super) fn describe(payload: &(dyn Any + Send), place: Option<&str>) -> String {
    let message = payload
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("(no message)");
    match place {
        Some(place) => format!("panicked at {place}: {message}"),
        None => format!("panicked: {message}"),
    }
}
