//! `tensorfs doctor`: reports the features of this machine for mounting and reading, and which are
//! missing. With a file, it reports the names that the file's pickles ask for. With a URL, it
//! reports how the server can be read.
//!
//! Every line comes from a test that has just been run. If a test has no clear result, the state is
//! `unknown`.

mod machine;
mod mounting;
mod pickles;
mod remote;

use std::fmt::Write;
use std::io::IsTerminal;

use clap::builder::styling::{AnsiColor, Style};
use serde::Serialize;
use serde_json::json;
use tensorfs::internal::error::{is_url, shown};
use tensorfs::words;

use super::args;
use super::output::{Failure, Outcome, print_bytes, print_json, print_text};
use super::stopping::{clean_up_on_signals, take_signals};

words! {
    /// The result of a check.
    enum Health {
        /// The checked feature works at full speed.
        Ok = "ok",
        /// The checked feature works, but worse than it could.
        Degraded = "degraded",
        /// The checked feature is absent.
        Missing = "missing",
        /// The check has no clear result.
        Unknown = "unknown",
    }
}

/// One line of the report.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Check {
    name: &'static str,
    state: Health,
    /// The finding and its consequence.
    found: String,
    /// How to improve it.
    advice: Option<String>,
}

impl Check {
    fn ok(name: &'static str, found: impl Into<String>) -> Check {
        Check { name, state: Health::Ok, found: found.into(), advice: None }
    }

    fn degraded(name: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Check {
        Check { state: Health::Degraded, advice: Some(advice.into()), ..Check::ok(name, found) }
    }

    fn missing(name: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Check {
        Check { state: Health::Missing, advice: Some(advice.into()), ..Check::ok(name, found) }
    }

    fn unknown(name: &'static str, found: impl Into<String>) -> Check {
        Check { state: Health::Unknown, ..Check::ok(name, found) }
    }
}

impl Health {
    fn style(self) -> Style {
        match self {
            Health::Ok => AnsiColor::Green.on_default(),
            Health::Degraded => AnsiColor::Yellow.on_default(),
            Health::Missing => AnsiColor::Red.on_default(),
            Health::Unknown => Style::new().dimmed(),
        }
    }
}

pub(super) fn run(args: &args::DoctorArgs) -> Outcome {
    match &args.file {
        Some(url) if is_url(url) => return remote::run(url, &args.options, args.json),
        _ if !args.options.is_empty() => {
            return Err(Failure::Usage("doctor takes -o with a URL only".to_owned()));
        }
        Some(file) => return pickles::run(file, args.json),
        None => {}
    }
    take_signals();
    clean_up_on_signals();
    let trial = mounting::trial();
    let mut checks = mounting::checks(&trial);
    checks.extend(machine::checks());
    let outcome = match trial {
        Ok(_) => Ok(()),
        Err(why) => Err(Failure::Failed(format!("mounting does not work here: {why}"))),
    };
    if args.json {
        let failure = outcome.as_ref().err();
        print_json(&json!({
            "ok": failure.is_none(),
            "class": failure.map(|failure| failure.kind().as_str()),
            "error": failure.map(Failure::message),
            "checks": checks,
        }))?;
    } else {
        print_bytes(table(&checks, in_colour()).as_bytes())?;
        if outcome.is_ok() {
            print_text("\nMounting works here.\n")?;
        }
    }
    outcome
}

/// Whether the output has colours: standard output is a terminal, and neither `NO_COLOR` nor `TERM`
/// turns colours off.
fn in_colour() -> bool {
    let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let dumb = std::env::var_os("TERM").is_none_or(|value| value == "dumb");
    std::io::stdout().is_terminal() && !plain && !dumb
}

/// One line for each check, with its advice on a line below.
fn table(checks: &[Check], colour: bool) -> String {
    let width = checks.iter().map(|check| check.name.len()).max().unwrap_or(0);
    let mut text = String::new();
    for Check { name, state, found, advice } in checks {
        let style = if colour { state.style() } else { Style::new() };
        let (state, found) = (state.as_str(), shown(found));
        let _ = writeln!(text, "{style}{state:<8}{style:#}  {name:<width$}  {found}");
        if let Some(advice) = advice {
            let _ = writeln!(text, "{:8}  {:width$}  -> {}", "", "", shown(advice));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_aligned_and_says_what_to_do() {
        let checks = [Check::ok("a", "is there"), Check::missing("long", "is not", "get it")];
        let lines = "ok        a     is there\nmissing   long  is not\n                -> get it\n";
        assert_eq!(table(&checks, false), lines);
        assert!(table(&checks, true).starts_with("\u{1b}[32mok      \u{1b}[0m  a"));
    }
}
