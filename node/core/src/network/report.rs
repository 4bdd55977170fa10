//! What an interface tells the worker.

use tokio::sync::mpsc;

use super::choice::Seen;

/// What is new of an interface.
#[derive(Clone, Debug)]
pub(super) enum News {
    Has(Seen),
    /// Why it does not have what it should, or should not be used as it is.
    Lacks(String),
    LacksNothing,
}

/// Tells what is new of one interface.
#[derive(Clone)]
pub(super) struct Reporter {
    /// Its place in the order of preference.
    pub order: usize,
    pub to: mpsc::Sender<(usize, News)>,
}

impl Reporter {
    pub(super) async fn tell(&self, news: News) {
        // Nobody hears it only when all of this ends.
        let _ = self.to.send((self.order, news)).await;
    }
}
