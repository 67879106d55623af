//! `tensorfs doctor FILE`: reports the kind of a file with pickles, the names that its pickles ask
//! for, and whether a mount would show the file.

use std::fmt::Write;
use std::path::Path;
use std::sync::Arc;

use serde_json::{Value, json};
use tensorfs::internal::checkpoint::scan_pickles;
use tensorfs::internal::error::{counted, shown, shown_path};
use tensorfs::internal::format::pickle::{NameRisk, PickleForm, PickleScan};
use tensorfs::{Checkpoint, Error, ErrorKind};

use super::super::output::{Failure, Outcome, print_json, print_text};

/// Maximum number of names on one line of the report.
const NAMED_MAX: usize = 12;

/// The file opened as a checkpoint, or the reason why it is not one.
type Opened = Result<Arc<Checkpoint>, Error>;

pub(super) fn run(file: &Path, as_json: bool) -> Outcome {
    let scan = scan_pickles(file)?;
    let opened = Checkpoint::open(file);
    let outcome = scan.as_ref().map_or(Ok(()), |scan| verdict(file, scan));
    if as_json {
        print_json(&report(file, scan.as_ref(), &opened, outcome.as_ref().err()))?;
    } else {
        print_text(&lines(file, scan.as_ref(), &opened))?;
    }
    outcome
}

/// Fails if the file is hostile or was not scanned completely.
fn verdict(file: &Path, scan: &PickleScan) -> Outcome {
    let hostile = scan.names_of(NameRisk::Hostile).count();
    let message = if hostile > 0 {
        let names = counted(hostile, "name");
        format!("its pickles ask for {names} that may run code: do not load it with Python")
    } else if scan.form == PickleForm::TorchScript {
        "is an archive of TorchScript, which holds a program".to_owned()
    } else if let Some(why) = &scan.flaw {
        format!("was not scanned to its end, there may be more names: {why}")
    } else {
        return Ok(());
    };
    let fault = ErrorKind::HeaderDecode.fault(message);
    Err(Failure::Error(Error::refused(file, fault)))
}

fn form(scan: Option<&PickleScan>) -> &'static str {
    match scan.map(|scan| scan.form) {
        None => "no file with pickles",
        Some(PickleForm::Zip) => "a file of torch.save, a zip archive",
        Some(PickleForm::TorchScript) => "a file of TorchScript, a zip archive with a program",
        Some(PickleForm::Legacy) => "a file of torch.save in its form before torch 1.6",
        Some(PickleForm::Items) => "items of a distributed checkpoint, each a file of torch.save",
        Some(PickleForm::Metadata) => {
            "the `.metadata` of a distributed checkpoint of torch, a pickle"
        }
        Some(PickleForm::OtherZip) => "a zip archive that torch.save has not written",
        Some(PickleForm::Plain) => "a pickle that torch.save has not written",
    }
}

fn lines(file: &Path, scan: Option<&PickleScan>, opened: &Opened) -> String {
    let mut text = format!("{}: {}\n", shown_path(file), form(scan));
    let mut line = |name: &str, found: &str| {
        let _ = writeln!(text, "{name:<8}  {found}");
    };
    if let Some(scan) = scan {
        if let Some(holds) = &scan.holds {
            line("holds", &shown(holds));
        }
        for risk in [NameRisk::Safe, NameRisk::Unknown, NameRisk::Hostile] {
            let names: Vec<&str> = scan.names_of(risk).collect();
            let mut found = match names.len() {
                0 => "no names".to_owned(),
                count => format!("{}: ", counted(count, "name")),
            };
            // Only safe names are cut to `NAMED_MAX`. All other names are listed.
            let most = if risk == NameRisk::Safe { NAMED_MAX } else { names.len() };
            found.push_str(
                &names.iter().take(most).map(|name| shown(name)).collect::<Vec<_>>().join(", "),
            );
            if names.len() > most {
                let _ = write!(found, " and {} more", names.len() - most);
            }
            line(risk.as_str(), &found);
        }
        if let Some(flaw) = &scan.flaw {
            line("stopped", &shown(flaw));
        }
    }
    match opened {
        Ok(checkpoint) => {
            let catalog = checkpoint.catalog();
            let tensors = counted(catalog.len(), "tensor");
            let bytes = counted(usize::try_from(catalog.data_len()).unwrap_or(usize::MAX), "byte");
            line("shown", &format!("{tensors} of {bytes}, as {}", shown(&checkpoint.name)));
            catalog.notes.iter().for_each(|note| line("", &shown(note)));
        }
        Err(error) => line("refused", &error.to_string()),
    }
    text
}

fn report(
    file: &Path,
    scan: Option<&PickleScan>,
    opened: &Opened,
    failure: Option<&Failure>,
) -> Value {
    let names = |risk| scan.map(|scan| scan.names_of(risk).collect::<Vec<_>>()).unwrap_or_default();
    let shown_as = opened.as_ref().ok().map(|checkpoint| {
        let catalog = checkpoint.catalog();
        json!({
            "name": checkpoint.name,
            "kind": checkpoint.kind.as_str(),
            "tensors": catalog.len(),
            "bytes": catalog.data_len(),
            "notes": catalog.notes,
        })
    });
    let refused = opened
        .as_ref()
        .err()
        .map(|error| json!({ "class": error.kind().as_str(), "error": error.to_string() }));
    json!({
        "ok": failure.is_none(),
        "class": failure.map(|failure| failure.kind().as_str()),
        "error": failure.map(Failure::message),
        "file": file.to_string_lossy(),
        "form": scan.map(|scan| scan.form.as_str()),
        "holds": scan.and_then(|scan| scan.holds.as_deref()),
        "pickles": scan.map(|scan| scan.pickles),
        "names": {
            "safe": names(NameRisk::Safe),
            "unknown": names(NameRisk::Unknown),
            "hostile": names(NameRisk::Hostile),
        },
        "stopped": scan.and_then(|scan| scan.flaw.as_deref()),
        "shown": shown_as,
        "refused": refused,
    })
}
