//! `mount.tensorfs SRC MNT [-sfnv] [-o OPTIONS]`: the helper that mount(8) calls, so that
//! `mount -t tensorfs` and lines in fstab work.
//!
//! The exit status is as mount(8) defines it: 1 for wrong usage, 2 for a system error, 32 for a
//! failed mount.

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;

use super::output::print_text;
use crate::daemon::{background, session};
use crate::log;
use crate::options::Options;

const HELP: &str = "\
Usage: mount.tensorfs SOURCE TARGET [-sfnv] [-o OPTIONS]

The helper of mount(8) for the type tensorfs: `mount -t tensorfs SOURCE TARGET`, and lines of /etc/fstab.

  -o OPTIONS  mount options, separated by commas: `tensorfs mount --help` lists them
  -s          ignore unknown options
  -f          check everything, but do not mount
  -n          accepted: there is no mtab
  -v          log more
  -h, --help     print this
  -V, --version  print the version
";

const USAGE: u8 = 1;
const FAILURE: u8 = 32;

/// The parsed command line.
#[derive(Debug, Default, PartialEq, Eq)]
struct Call {
    operands: Vec<OsString>,
    options: Vec<String>,
    fake: bool,
    sloppy: bool,
    verbose: u8,
    /// Help or version text to print instead of mounting.
    text: Option<String>,
}

pub(crate) fn main(args: impl Iterator<Item = OsString>) -> ExitCode {
    match run(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err((status, message)) => {
            log::say_as("mount.tensorfs", &message);
            ExitCode::from(status)
        }
    }
}

fn run(args: impl Iterator<Item = OsString>) -> Result<(), (u8, String)> {
    let usage = |message: String| (USAGE, message);
    log::never_wait().map_err(|e| (FAILURE, format!("cannot start a thread: {e}")))?;
    let call = parse(args).map_err(usage)?;
    if let Some(text) = call.text {
        return print_text(&text).map_err(|e| (FAILURE, e.message().to_owned()));
    }
    let [source, target] = call.operands.as_slice() else {
        let usage = "usage: mount.tensorfs SOURCE TARGET [-sfnv] [-o OPTIONS]";
        return Err((USAGE, usage.to_owned()));
    };
    let mut options = Options::parse(&call.options, call.sloppy).map_err(usage)?;
    log::start(call.verbose);
    let failure = |message: String| (FAILURE, message);
    if call.fake {
        options.make_absolute().map_err(|e| failure(e.to_string()))?;
        let planned = session::plan(Path::new(source), Path::new(target), options);
        return planned.map(|_| ()).map_err(failure);
    }
    let (source, target) = (Path::new(source), Path::new(target));
    background::run_in_background(source, target, &call.options, call.sloppy, call.verbose, None)
        .map_err(failure)
}

fn parse(mut args: impl Iterator<Item = OsString>) -> Result<Call, String> {
    let mut call = Call::default();
    let mut operands_only = false;
    while let Some(arg) = args.next() {
        // An argument that is not UTF-8 is not a flag, so it is a path.
        let flags = match arg.to_str().and_then(|arg| arg.strip_prefix('-')) {
            Some(flags) if !operands_only && !flags.is_empty() => flags,
            _ => {
                call.operands.push(arg);
                continue;
            }
        };
        if flags == "-" {
            operands_only = true;
            continue;
        }
        call.text = match flags {
            "h" | "-help" => Some(HELP.to_owned()),
            "V" | "-version" => Some(format!("mount.tensorfs {}\n", env!("CARGO_PKG_VERSION"))),
            _ => None,
        };
        if call.text.is_some() {
            break;
        }
        take_flags(&mut call, flags, &mut args)?;
    }
    Ok(call)
}

/// Reads the flags in one word. The value of a flag is the rest of the word, or the next word in
/// `args`.
fn take_flags(
    call: &mut Call,
    flags: &str,
    args: &mut impl Iterator<Item = OsString>,
) -> Result<(), String> {
    let mut letters = flags.chars();
    while let Some(flag) = letters.next() {
        match flag {
            's' => call.sloppy = true,
            'f' => call.fake = true,
            // `-n` asks not to write mtab. The helper never writes it.
            'n' => {}
            'v' => call.verbose += 1,
            'o' | 't' | 'N' => {
                let given = match letters.as_str() {
                    "" => args.next().and_then(|next| next.into_string().ok()),
                    attached => Some(attached.to_owned()),
                };
                let value = given.ok_or_else(|| format!("-{flag} needs a value"))?;
                match flag {
                    'o' => call.options.push(value),
                    'N' => return Err("mounting in another namespace (-N) is not supported".into()),
                    // `-t` gives the type of the file system. Its subtype makes no difference here.
                    _ => {}
                }
                return Ok(());
            }
            _ => return Err(format!("unknown flag -{flag}")),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Call, String> {
        parse(line.split(' ').map(OsString::from))
    }

    #[test]
    fn the_calls_of_mount_8_are_understood() {
        let call = parsed("/src /mnt -sfnv -o rw,nofail -t tensorfs").unwrap();
        assert_eq!(call.operands, ["/src", "/mnt"]);
        assert_eq!(call.options, ["rw,nofail"]);
        assert!(call.sloppy && call.fake && call.verbose == 1);
        assert_eq!(parsed("-v -- -src /mnt -o").unwrap().operands, ["-src", "/mnt", "-o"]);
    }

    #[test]
    fn what_cannot_be_done_is_said() {
        assert!(parsed("/src /mnt -N 12").unwrap_err().contains("namespace"));
        assert!(parsed("/src /mnt -x").unwrap_err().contains("-x"));
        assert!(parsed("/src /mnt -o").unwrap_err().contains("needs a value"));
    }
}
