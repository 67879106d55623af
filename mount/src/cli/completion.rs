//! `tensorfs completions`: the script of clap, which completes commands and flags, with two additions.
//! It also completes the options after `-o`, and mounts for commands that take a mount. Mounts are read
//! from /proc/mounts. No mount is accessed, because a mount that hangs would block the shell.

use std::fmt::Write as _;

use clap::{Command, CommandFactory};
use clap_complete::Shell;

use super::args::{Cli, SOURCE_COMMANDS};
use super::output::{Outcome, print_bytes};
use crate::options::{self, Completion};

const BASH: &str = include_str!("completion/tensorfs.bash");
const ZSH: &str = include_str!("completion/tensorfs.zsh");
const FISH: &str = include_str!("completion/tensorfs.fish");

/// The value name of arguments that are mounts.
const MOUNT_POINT: &str = "MNT";

/// The command whose source is a mount or any other path.
const WARM: &str = "warm";

pub(super) fn run(shell: Shell) -> Outcome {
    let mut generated = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "tensorfs", &mut generated);
    let mut script = String::from_utf8_lossy(&generated).into_owned();
    match shell {
        Shell::Bash => script.push_str(&bash()),
        Shell::Fish => script.push_str(&fish()),
        Shell::Zsh => script = zsh(&script),
        _ => {}
    }
    print_bytes(script.as_bytes())
}

/// The commands that accept `-o`, each with the options that it offers.
fn commands_with_options() -> Vec<(String, Vec<Completion>)> {
    let cli = Cli::command();
    let takes_options =
        |command: &&Command| command.get_arguments().any(|arg| arg.get_id() == "options");
    let commands = cli.get_subcommands().filter(takes_options).map(|command| {
        let source = SOURCE_COMMANDS.iter().find(|it| it.name == command.get_name());
        (command.get_name().to_owned(), options::completions(source.map(|it| it.uses)))
    });
    commands.collect()
}

/// The commands whose argument is a mount.
fn commands_with_mounts() -> Vec<String> {
    let cli = Cli::command();
    let takes_mounts = |command: &&Command| {
        let mut names = command.get_positionals().filter_map(|arg| arg.get_value_names());
        names.any(|names| names.iter().any(|name| name == MOUNT_POINT))
    };
    cli.get_subcommands().filter(takes_mounts).map(|it| it.get_name().to_owned()).collect()
}

/// The flags of these commands that need a value.
fn flags_with_values(commands: &[String]) -> Vec<String> {
    let cli = Cli::command();
    let commands = commands.iter().filter_map(|name| cli.find_subcommand(name));
    let mut flags: Vec<String> = commands
        .flat_map(|command| command.get_opts())
        .filter(|flag| flag.get_action().takes_values())
        .flat_map(|flag| {
            let long = flag.get_long().map(|long| format!("--{long}"));
            long.into_iter().chain(flag.get_short().map(|short| format!("-{short}")))
        })
        .collect();
    flags.sort();
    flags.dedup();
    flags
}

fn bash() -> String {
    let mut options = String::new();
    for (command, all) in commands_with_options() {
        let texts = all.iter().map(|one| {
            let mark = if one.is_path { "@" } else { "" };
            format!("{}{mark}", one.text)
        });
        let words = texts.collect::<Vec<_>>().join(" ");
        let _ = writeln!(options, "        {command}) echo '{words}' ;;");
    }
    let mounts = [commands_with_mounts(), vec![WARM.to_owned()]].concat();
    let flags = format!("@({})", flags_with_values(&mounts).join("|"));
    BASH.replace("@OPTIONS@\n", &options)
        .replace("@MOUNTS@", &mounts.join("|"))
        .replace("@VALUES@", &flags)
}

fn zsh(generated: &str) -> String {
    let mut options = String::new();
    for (command, all) in commands_with_options() {
        let _ = writeln!(options, "        {command}) _values -s , 'mount option' \\");
        for of_key in all.chunk_by(|a, b| a.key() == b.key()) {
            let _ = writeln!(options, "            '{}' \\", zsh_value(of_key));
        }
        options.push_str("            ;;\n");
    }
    let mut script = generated.replace(":OPTIONS:_default", ":OPTIONS:_tensorfs_options");
    let mounts = commands_with_mounts().into_iter().map(|name| (name, "_tensorfs_mounts"));
    for (command, action) in mounts.chain([(WARM.to_owned(), "_tensorfs_mounts_or_files")]) {
        complete_last_path(&mut script, &command, action);
    }
    let functions = ZSH.replace("@OPTIONS@\n", &options);
    script.replacen("\n_tensorfs() {", &format!("\n{functions}\n_tensorfs() {{"), 1)
}

/// An option in the format of zsh's `_values`, made from the rows of all its values.
fn zsh_value(rows: &[Completion]) -> String {
    let first = &rows[0];
    let words: Vec<&str> =
        rows.iter().map(|one| one.value()).filter(|value| !value.is_empty()).collect();
    let action = match words.as_slice() {
        _ if !first.text.contains('=') => String::new(),
        [] if first.is_path => ":value:_files".to_owned(),
        [] => ":value: ".to_owned(),
        words => format!(":value:({})", words.join(" ")),
    };
    let explanation = if rows.len() == 1 { first.explanation } else { "" };
    let about = explanation.replace('\'', "").replace(['[', ']', ':'], " ");
    format!("*{}[{about}]{action}", first.key().trim_end_matches('='))
}

/// Changes a zsh script so that `action` completes the paths of `command`. The paths are the last
/// argument of the command.
fn complete_last_path(script: &mut String, command: &str, action: &str) {
    let Some(start) = script.find(&format!("\n({command})\n")) else { return };
    let Some(len) = script[start..].find("&& ret=0") else { return };
    let Some(offset) = script[start..start + len].rfind(":_files'") else { return };
    let place = start + offset + 1;
    script.replace_range(place..place + "_files".len(), action);
}

fn fish() -> String {
    let mut options = String::new();
    let mut commands = Vec::new();
    for (command, all) in commands_with_options() {
        let _ = writeln!(options, "        case {command}");
        for Completion { text, explanation, .. } in &all {
            let about = explanation.replace('\\', "\\\\").replace('\'', "\\'");
            let _ = writeln!(options, "            printf '%s\\t%s\\n' '{text}' '{about}'");
        }
        commands.push(command);
    }
    FISH.replace("@OPTIONS@\n", &options)
        .replace("@COMMANDS@", &commands.join(" "))
        .replace("@MOUNTS@", &commands_with_mounts().join(" "))
}

#[cfg(test)]
mod tests {
    use super::super::args::SourceCommand;
    use super::*;

    #[test]
    fn each_command_offers_the_options_that_it_takes() {
        let all = commands_with_options();
        let texts = |name: &str| -> Vec<&str> {
            let (_, options) = all.iter().find(|(command, _)| command == name).unwrap();
            options.iter().map(|one| one.text.as_str()).collect()
        };
        assert!(texts("mount").contains(&"allow_other"));
        assert!(texts("ls").contains(&"layout=hub") && !texts("ls").contains(&"layout=single"));
        assert!(!texts("verify").contains(&"cache="));
        for SourceCommand { name, .. } in SOURCE_COMMANDS {
            assert!(all.iter().any(|(command, _)| command == name), "{name}");
        }
        let own = ["mount", "run", "bench"];
        let is_known = |name: &str| {
            own.contains(&name) || SOURCE_COMMANDS.iter().any(|command| command.name == name)
        };
        for (name, _) in &all {
            assert!(is_known(name), "{name} takes -o and is not in SOURCE_COMMANDS");
        }
    }

    #[test]
    fn commands_that_take_a_mount_offer_mounts() {
        let commands = commands_with_mounts();
        for name in ["umount", "status", "top", "heat"] {
            assert!(commands.iter().any(|command| command == name), "{name} in {commands:?}");
        }
        assert_eq!(flags_with_values(&["heat".to_owned()]), ["--lines", "-n"]);
    }
}
