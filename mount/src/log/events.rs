//! Turns events of `tracing` into lines of the log. A field `op` marks the error of a request. The
//! number of these lines is limited.

use std::fmt::{Debug, Write};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer};
use tracing_subscriber::registry::LookupSpan;

use super::line::Line;

/// Fields for programs that read the log. The text of the message has the same facts for people.
const FIELDS: [&str; 3] = ["op", "file", "model"];

/// The `tracing` layer that turns events into log lines.
pub(super) struct Events;

/// The fields of a span, as text.
struct SpanText(String);

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Events {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        let mut found = Found::default();
        attributes.record(&mut found);
        span.extensions_mut().insert(SpanText(found.others));
    }

    fn on_record(&self, id: &Id, record: &Record<'_>, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        let mut found = Found::default();
        record.record(&mut found);
        if let Some(text) = span.extensions_mut().get_mut::<SpanText>() {
            let separator = if text.0.is_empty() { "" } else { " " };
            let _ = write!(text.0, "{separator}{}", found.others);
        }
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let mut found = Found::default();
        event.record(&mut found);
        let level = *event.metadata().level();
        let mut message = String::new();
        for span in context.event_scope(event).into_iter().flat_map(|scope| scope.from_root()) {
            message.push_str(span.name());
            if let Some(text) =
                span.extensions().get::<SpanText>().filter(|text| !text.0.is_empty())
            {
                let _ = write!(message, "{{{}}}", text.0);
            }
            message.push(':');
        }
        if !message.is_empty() {
            message.push(' ');
        }
        message.push_str(&found.message);
        if !found.others.is_empty() {
            let separator = if found.message.is_empty() { "" } else { " " };
            let _ = write!(message, "{separator}{}", found.others);
        }
        let is_request = found.fields.iter().any(|(name, _)| *name == "op");
        let text = format!("{level:>5} {message}");
        let line = Line::new(&text, severity(level)).with_fields(&message, found.fields);
        super::send(line, is_request);
    }
}

/// The severity of a level, as a number of syslog and the journal.
pub(super) fn severity(level: Level) -> u32 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        _ => 7,
    }
}

/// The message and the fields of an event or a span.
#[derive(Default)]
struct Found {
    message: String,
    fields: Vec<(&'static str, String)>,
    others: String,
}

impl Visit for Found {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let name = field.name();
        if name == "message" {
            let _ = write!(self.message, "{value:?}");
        } else if let Some(known) = FIELDS.iter().find(|known| **known == name) {
            self.fields.push((known, format!("{value:?}")));
        } else if !name.starts_with("log.") {
            let separator = if self.others.is_empty() { "" } else { " " };
            let _ = write!(self.others, "{separator}{name}={value:?}");
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        if FIELDS.contains(&field.name()) || field.name() == "message" {
            self.record_debug(field, &format_args!("{value}"));
        } else {
            self.record_debug(field, &value);
        }
    }
}
