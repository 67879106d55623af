//! One mount option: its name, parser, value for `status`, and help text.

use std::path::Path;

use serde_json::Value;
use tensorfs::internal::open_options::HUB;
use tensorfs::internal::size::option_size;
use tensorfs::internal::source::read_option_file;

use super::Options;

/// The purpose of an option for commands other than `mount`. Each command accepts the options of
/// certain purposes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    /// How the source is found and proved.
    Source,
    /// Which tensors a view has.
    View,
    /// The format of the files of the view.
    Format,
    /// The number of files of the view.
    Layout,
    /// Which files without tensors the view shows.
    Files,
    /// Several views.
    Views,
    /// `layout=hub`.
    Hub,
    /// How tensors are read.
    Reads,
}

/// Stores the value of an option. The error text lists the expected values.
type SetValue = fn(&mut Options, &str) -> Result<(), String>;

/// Sets the option `key` of the view.
pub(super) fn set_view(options: &mut Options, key: &str, value: &str) -> Result<(), String> {
    options.has_view = true;
    let set = options.open.view.set(key, value, &mut read_option_file);
    set.unwrap_or_else(|| Err("another option".to_owned()))
}

/// How an option is applied.
enum Effect {
    /// The option takes a value.
    Value(SetValue),
    /// The option takes a value and belongs to the view.
    View,
    /// The option takes no value.
    Flag(fn(&mut Options)),
}

/// Options on one subject.
pub(super) struct OptionGroup {
    pub(super) title: &'static str,
    pub(super) rows: &'static [OptionRow],
}

/// One option.
pub(super) struct OptionRow {
    pub(super) name: &'static str,
    /// Whether the option may be given more than once.
    pub(super) repeats: bool,
    /// The purpose that makes other commands accept the option.
    commands: Option<Use>,
    effect: Effect,
    /// The function that returns the value for `tensorfs status`. `None` if `status` does not show
    /// the option.
    pub(super) shown: Option<fn(&Options) -> Value>,
    /// Lines `SYNTAX: explanation` about the values. For a flag, the explanation alone. Empty if the
    /// help does not have the option.
    pub(super) help: &'static str,
}

/// Rows that all have the purpose `commands`.
pub(super) const fn for_all<const N: usize>(
    commands: Use,
    mut rows: [OptionRow; N],
) -> [OptionRow; N] {
    let mut index = 0;
    while index < N {
        rows[index].commands = Some(commands);
        index += 1;
    }
    rows
}

impl OptionRow {
    pub(super) const fn value(name: &'static str, set: SetValue, help: &'static str) -> OptionRow {
        let effect = Effect::Value(set);
        OptionRow { name, repeats: false, commands: None, effect, shown: None, help }
    }

    /// An option of the view. The view parses it and shows its value.
    pub(super) const fn view(name: &'static str, help: &'static str) -> OptionRow {
        OptionRow { effect: Effect::View, ..OptionRow::value(name, |_, _| Ok(()), help) }
    }

    pub(super) const fn flag(
        name: &'static str,
        set: fn(&mut Options),
        help: &'static str,
    ) -> OptionRow {
        OptionRow { effect: Effect::Flag(set), ..OptionRow::value(name, |_, _| Ok(()), help) }
    }

    pub(super) const fn repeats(mut self) -> OptionRow {
        self.repeats = true;
        self
    }

    pub(super) const fn for_commands(mut self, commands: Use) -> OptionRow {
        self.commands = Some(commands);
        self
    }

    pub(super) const fn shown(mut self, value: fn(&Options) -> Value) -> OptionRow {
        self.shown = Some(value);
        self
    }

    /// The option in the form of `-o`, with the value that `shown` returned. `None` if the value
    /// means that the option was not given.
    pub(super) fn word(&self, value: &Value) -> Option<String> {
        let text = match (value, value.as_u64().filter(|_| self.help.starts_with("SIZE: "))) {
            (Value::Null | Value::Bool(false), _) => return None,
            (Value::Bool(true), _) => return Some(self.name.to_owned()),
            (_, Some(bytes)) => option_size(bytes),
            (Value::String(text), _) => text.clone(),
            (value, _) => value.as_f64().map_or(value.to_string(), |number| number.to_string()),
        };
        Some(format!("{}={text}", self.name))
    }

    pub(super) fn takes_value(&self) -> bool {
        !matches!(self.effect, Effect::Flag(_))
    }

    /// The lines of the help: syntax and explanation of the values.
    pub(super) fn help(&self) -> impl Iterator<Item = (&'static str, &'static str)> {
        let syntax = self.takes_value();
        let parts = move |line: &'static str| line.split_once(": ").filter(|_| syntax);
        self.help.lines().map(move |line| parts(line).unwrap_or(("", line)))
    }

    /// The purpose of the option with this value, for commands other than `mount`.
    pub(super) fn commands(&self, value: &str) -> Option<Use> {
        match self.commands {
            Some(Use::Layout) if value == HUB => Some(Use::Hub),
            commands => commands,
        }
    }

    /// Whether a command with these uses accepts the option with this value.
    pub(super) fn is_for(&self, uses: &[Use], value: &str) -> bool {
        self.commands(value).is_some_and(|own| uses.contains(&own))
    }

    /// The path in `value`, for an option that takes the path of a file or folder of this machine.
    pub(super) fn path_in<'a>(&self, value: &'a str) -> Option<&'a Path> {
        let mut forms = self.values().filter(|form| ["FILE", "DIR"].contains(&form.chosen));
        forms.find_map(|form| value.strip_prefix(form.text)).map(Path::new)
    }

    /// Applies the option. `value` is used if the option takes a value.
    pub(super) fn apply(&self, options: &mut Options, value: &str) -> Result<(), String> {
        match self.effect {
            Effect::Value(set) => set(options, value),
            Effect::View => set_view(options, self.name, value),
            Effect::Flag(set) => {
                set(options);
                Ok(())
            }
        }
    }

    /// The forms of the option's value: a word, or a prefix and a placeholder, such as `map=` and
    /// `FILE`.
    pub(super) fn values(&self) -> impl Iterator<Item = ValueSyntax> {
        self.help().flat_map(|(syntax, explanation)| {
            let explanation = if syntax.contains('|') { "" } else { explanation };
            syntax.split('|').map(move |syntax| {
                let chosen = syntax.find(|c: char| c.is_ascii_uppercase()).unwrap_or(syntax.len());
                let (text, chosen) = syntax.split_at(chosen);
                ValueSyntax { text, chosen, explanation }
            })
        })
    }
}

/// One form of the value of an option.
#[derive(Clone, Copy, Debug)]
pub(super) struct ValueSyntax {
    /// The part with which every value of this form begins.
    pub(super) text: &'static str,
    /// The placeholder for the part that the user chooses, such as `FILE`. Empty if the value is a
    /// word.
    pub(super) chosen: &'static str,
    pub(super) explanation: &'static str,
}
