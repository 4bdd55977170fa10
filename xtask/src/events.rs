//! Shows tracing events of the libraries: warnings and errors, and with `-v` the commands that they run.

use std::fmt::{Debug, Write};

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};

use crate::ui::Ui;

/// The target of `hearth_qemu`'s commands.
const COMMAND: &str = "hearth_qemu::command";

/// Starts showing events.
pub(crate) fn show(ui: &Ui) {
    let subscriber = tracing_subscriber::registry().with(Lines(ui.clone()));
    // Only a second call fails, and then the first subscriber remains.
    let _ = tracing::subscriber::set_global_default(subscriber);
}

struct Lines(Ui);

impl<S: Subscriber> Layer<S> for Lines {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let metadata = event.metadata();
        if metadata.target() == COMMAND {
            self.0.detail(format_args!("$ {}", Text::of(event)));
        } else if metadata.target().starts_with("hearth") && *metadata.level() <= Level::WARN {
            self.0.say(format_args!("warning: {}", Text::of(event)));
        }
    }
}

/// The message, then the fields.
#[derive(Default)]
struct Text {
    message: String,
    fields: String,
}

impl Text {
    fn of(event: &Event<'_>) -> String {
        let mut text = Text::default();
        event.record(&mut text);
        text.message + &text.fields
    }
}

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        // Writing to a string does not fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " ({name}: {value:?})"),
        };
    }
}
