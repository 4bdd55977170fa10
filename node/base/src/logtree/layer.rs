//! Stores `tracing` events in the log tree.

use std::fmt::{self, Write as _};
use std::sync::Arc;

use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Subscriber};
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;

use super::{LogTree, Severity};

/// The field of spans and events that holds the dotted name.
const DN: &str = "dn";

/// The layer that [`LogTree::layer`] returns.
#[derive(Debug, Clone)]
pub struct LogLayer {
    pub(super) log_tree: LogTree,
}

/// Extension of a span that has a `dn` field.
struct SpanDn(Arc<str>);

impl<S: Subscriber + for<'a> LookupSpan<'a>> tracing_subscriber::Layer<S> for LogLayer {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        if attributes.metadata().fields().field(DN).is_none() {
            return;
        }
        let mut visitor = DnVisitor(None);
        attributes.record(&mut visitor);
        if let (Some(dn), Some(span)) = (visitor.0, context.span(id)) {
            span.extensions_mut().replace(SpanDn(dn.into()));
        }
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        let mut visitor = DnVisitor(None);
        values.record(&mut visitor);
        if let (Some(dn), Some(span)) = (visitor.0, context.span(id)) {
            span.extensions_mut().replace(SpanDn(dn.into()));
        }
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let metadata = event.metadata();
        let severity = Severity::from(metadata.level());
        if severity < self.log_tree.keeps() {
            return;
        }
        let mut visitor = EventVisitor::default();
        event.record(&mut visitor);
        let dn = visitor.dn.take().map(Arc::from).or_else(|| {
            // From the event's span outwards: the nearest name counts.
            let mut scope = context.event_scope(event)?;
            scope.find_map(|span| Some(span.extensions().get::<SpanDn>()?.0.clone()))
        });
        let place = metadata.file().zip(metadata.line());
        self.log_tree.append(dn, severity, place, &visitor.text());
    }

    /// Events below the kept severity need not be created. In a stack of layers the most verbose
    /// one decides.
    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(match self.log_tree.keeps() {
            Severity::Trace => LevelFilter::TRACE,
            Severity::Debug => LevelFilter::DEBUG,
            Severity::Info => LevelFilter::INFO,
            Severity::Warning => LevelFilter::WARN,
            Severity::Error => LevelFilter::ERROR,
        })
    }
}

struct DnVisitor(Option<String>);

impl Visit for DnVisitor {
    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == DN {
            self.0 = Some(value.to_owned());
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == DN {
            self.0 = Some(format!("{value:?}"));
        }
    }
}

/// Collects the message, the name, and the other fields as `key=value`.
#[derive(Default)]
struct EventVisitor {
    dn: Option<String>,
    message: String,
    fields: String,
}

impl EventVisitor {
    fn text(mut self) -> String {
        if self.message.is_empty() {
            self.fields.trim_start().to_owned()
        } else {
            self.message.push_str(&self.fields);
            self.message
        }
    }

    fn add(&mut self, field: &Field, value: fmt::Arguments<'_>) {
        // Writing to a string cannot fail; a value whose own formatting fails is cut off there.
        let _ = match field.name() {
            "message" => self.message.write_fmt(value),
            DN => self.dn.insert(String::new()).write_fmt(value),
            name => write!(self.fields, " {name}={value}"),
        };
    }
}

impl Visit for EventVisitor {
    /// Bare if it is one word, quoted if its end would be ambiguous.
    fn record_str(&mut self, field: &Field, value: &str) {
        let plain = |c: char| !c.is_whitespace() && !c.is_control() && c != '"' && c != '=';
        if matches!(field.name(), "message" | DN) || !value.is_empty() && value.chars().all(plain) {
            self.add(field, format_args!("{value}"));
        } else {
            self.add(field, format_args!("{value:?}"));
        }
    }

    fn record_error(&mut self, field: &Field, value: &(dyn std::error::Error + 'static)) {
        self.record_str(field, &value.to_string());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.add(field, format_args!("{value:?}"));
    }
}
