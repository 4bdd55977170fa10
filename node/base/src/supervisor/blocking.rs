//! Work that blocks, for runnables.
//!
//! What it logs is the runnable's that has asked for it, because it runs within that one's span. And it is boxed before tokio sees
//! it: tokio's task for it is compiled for each kind of work, some kilobytes each time, and a node has fifty kinds.

use std::any::Any;
use std::future::Future;
use std::marker::PhantomData;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::task::{self, JoinError, JoinHandle};
use tracing::Span;

type Erased = Box<dyn Any + Send>;

/// Work on a thread that may block; its result when it is awaited. It runs to its end even if this is dropped.
#[derive(Debug)]
#[must_use = "the result, and whether it panicked, is known when it is awaited"]
pub struct Blocking<T> {
    task: JoinHandle<Erased>,
    result: PhantomData<fn() -> T>,
}

/// Runs work on a thread that may block, like [`tokio::task::spawn_blocking`], within the caller's span.
pub fn spawn_blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Blocking<T> {
    Blocking {
        task: spawn(Box::new(move || Box::new(work()))),
        result: PhantomData,
    }
}

#[allow(
    clippy::disallowed_methods,
    reason = "this is what is used instead of it"
)]
fn spawn(work: Box<dyn FnOnce() -> Erased + Send>) -> JoinHandle<Erased> {
    let span = Span::current();
    task::spawn_blocking(move || span.in_scope(work))
}

impl<T: 'static> Future for Blocking<T> {
    /// An error if the work has panicked, or the runtime is shutting down.
    type Output = Result<T, JoinError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let ended = ready!(Pin::new(&mut self.task).poll(context));
        Poll::Ready(ended.map(|result| *result.downcast().expect("the work returns a T")))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};
    use std::thread::{self, ThreadId};

    use tracing::Subscriber;
    use tracing::span::Id;
    use tracing_subscriber::layer::{self, Layer, SubscriberExt as _};

    use super::*;

    #[tokio::test]
    async fn a_result_or_a_panic_is_returned() {
        assert_eq!(spawn_blocking(|| "done".to_owned()).await.unwrap(), "done");
        let panicked = spawn_blocking(|| -> u8 { panic!("on purpose") }).await;
        assert!(panicked.unwrap_err().is_panic());
    }

    /// The threads that enter a span.
    #[derive(Clone, Default)]
    struct Entered(Arc<Mutex<Vec<ThreadId>>>);

    impl<S: Subscriber> Layer<S> for Entered {
        fn on_enter(&self, _: &Id, _: layer::Context<'_, S>) {
            self.0.lock().unwrap().push(thread::current().id());
        }
    }

    #[tokio::test]
    async fn it_runs_within_the_span_of_its_caller() {
        let entered = Entered::default();
        let logs = tracing_subscriber::registry().with(entered.clone());
        let _default = tracing::subscriber::set_default(logs);
        let span = tracing::info_span!("runnable");
        let asked = span.in_scope(|| spawn_blocking(|| thread::current().id()));
        let ran_on = asked.await.unwrap();
        assert_ne!(ran_on, thread::current().id());
        assert!(entered.0.lock().unwrap().contains(&ran_on));
    }
}
