//! The manual pages. clap_mangen would join the lines of the text after a command's options. Here
//! each term in that text gets a paragraph of its own.

use std::fs;
use std::io;
use std::path::Path;

use clap::Command;
use clap_mangen::Man;

/// Maximum length of a word that is not broken after its commas.
const WORD_MAX: usize = 40;

/// Writes the page of `command` and the pages of its subcommands into `folder`.
pub(super) fn write_pages(command: Command, folder: &Path) -> io::Result<()> {
    let mut command = command.disable_help_subcommand(true);
    command.build();
    write_page(&command, folder)
}

fn write_page(command: &Command, folder: &Path) -> io::Result<()> {
    for subcommand in command.get_subcommands().filter(|subcommand| !subcommand.is_hide_set()) {
        write_page(subcommand, folder)?;
    }
    let name = Man::new(command.clone()).get_filename();
    fs::write(folder.join(name), page(command.clone())?)
}

/// The manual page of `command`.
pub(super) fn page(command: Command) -> io::Result<Vec<u8>> {
    let after = command
        .get_after_long_help()
        .or(command.get_after_help())
        .map(|text| notes(&text.to_string()));
    let has_subcommands = command.get_subcommands().any(|subcommand| !subcommand.is_hide_set());
    let has_version = command.get_version().is_some();
    let man = Man::new(command);
    let mut page = Vec::new();
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    man.render_synopsis_section(&mut page)?;
    man.render_description_section(&mut page)?;
    man.render_options_section(&mut page)?;
    if has_subcommands {
        man.render_subcommands_section(&mut page)?;
    }
    page.extend(after.unwrap_or_default().as_bytes());
    if has_version {
        man.render_version_section(&mut page)?;
    }
    Ok(with_breaks(&String::from_utf8_lossy(&page)).into_bytes())
}

/// The page, with marks in long words at which a line may end.
fn with_breaks(page: &str) -> String {
    let mut text = String::with_capacity(page.len());
    for line in page.lines() {
        let broken = line.split(' ').map(|word| match word.len() {
            len if len > WORD_MAX => word.replace(',', ",\\:"),
            _ => word.to_owned(),
        });
        text.push_str(&broken.collect::<Vec<_>>().join(" "));
        text.push('\n');
    }
    text
}

/// The section with the lines of `text`. A line that ends in a colon is a heading. An indented line
/// begins with a term, and a line that is indented further continues the previous one.
fn notes(text: &str) -> String {
    let mut roff = String::from(".SH NOTES\n");
    let (mut in_terms, mut ends) = (false, true);
    for line in text.lines() {
        let indent = line.len() - line.trim_start().len();
        let line = line.trim();
        match indent {
            _ if line.is_empty() => roff.push_str(".PP\n"),
            2 => {
                let (term, meaning) = line.split_once(' ').unwrap_or((line, ""));
                let (term, meaning) = (escaped(term), escaped(meaning.trim_start()));
                roff.push_str(&format!(".TP\n\\fB{term}\\fR\n"));
                // An empty line would also appear on the page.
                if !meaning.is_empty() {
                    roff.push_str(&format!("{meaning}\n"));
                }
                in_terms = true;
                continue;
            }
            3.. => roff.push_str(&format!("{}\n", escaped(line))),
            _ if line.ends_with(':') => {
                roff.push_str(&format!(".SS \"{}\"\n", escaped(line.trim_end_matches(':'))));
            }
            _ if in_terms => roff.push_str(&format!(".PP\n{}\n", escaped(line))),
            // A sentence that begins a line of `text` also begins a line on the page.
            _ if ends => roff.push_str(&format!(".br\n{}\n", escaped(line))),
            _ => roff.push_str(&format!("{}\n", escaped(line))),
        }
        in_terms &= indent > 2;
        ends = line.ends_with('.');
    }
    roff
}

/// `text` with roff's special characters escaped.
fn escaped(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-");
    // roff takes a line that begins with a dot or a quote as a request.
    if text.starts_with(['.', '\'']) { format!("\\&{text}") } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_term_of_the_notes_is_a_paragraph_and_sentences_stay_together() {
        let text = "Mount options:\n  umask=OCTAL        bits\n                     taken\n  \
                    a-long-name=THAT-FILLS-IT\n                     .more\nOne sentence\nends. \
                    Two\\three.\nFour.";
        let expected = ".SH NOTES\n.SS \"Mount options\"\n.TP\n\\fBumask=OCTAL\\fR\nbits\ntaken\n.TP\n\
                        \\fBa\\-long\\-name=THAT\\-FILLS\\-IT\\fR\n\\&.more\n.PP\nOne sentence\nends. \
                        Two\\ethree.\n.br\nFour.\n";
        assert_eq!(notes(text), expected);
        assert_eq!(with_breaks(".B a,b\n"), ".B a,b\n");
        let long = "a,".repeat(WORD_MAX);
        assert_eq!(with_breaks(&long), "a,\\:".repeat(WORD_MAX) + "\n");
    }
}
