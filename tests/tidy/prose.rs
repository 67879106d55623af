//! Finds sentences in comments, docs and messages that are hard to read, by the words in them.

use super::SourceFile;

/// Phrases that stand in for a fact.
const RIDDLES: &[&str] = &[
    "to be had",
    "for want of",
    "none as long as",
    "so often",
    "so many",
    "likewise",
    "no such file of ours",
];

/// Openings of sentences whose subject is missing or is a clause.
const OPENINGS: &[&str] = &[
    "What ",
    "Whatever ",
    "Whoever ",
    "Who ",
    "Likewise",
    "That of ",
    "That they ",
    "Those of ",
    "The same.",
    "The same;",
    "The same,",
    "The same as ",
    "The same by ",
    "The same where ",
    "The same while ",
    "The same with ",
    "The same within ",
    "Of ",
    "Nor ",
    "So that ",
];

/// First words of fragments: a sentence of `FRAGMENT_WORDS` or fewer that begins so has no subject.
const FRAGMENTS: &[&str] = &[
    "After", "As", "At", "Because", "Before", "By", "Else", "For", "From", "If", "In", "Not", "On",
    "Once", "Only", "Since", "To", "Until", "When", "Where", "With", "Without",
];

const FRAGMENT_WORDS: usize = 4;

/// References to another safety note, in place of facts.
const REFERENCES: &[&str] = &["as above", "see above", "the one above", "same as", "like the"];

/// One paragraph of prose and the line at which it begins.
struct Paragraph {
    line: usize,
    text: String,
}

/// Sentences in comments, docs and messages of `files` that break the rules, but for files below
/// `unpolished`.
pub(crate) fn prose_violations(files: &[SourceFile], unpolished: &[&str]) -> Vec<String> {
    let mut violations = Vec::new();
    for file in files.iter().filter(|file| !file.is_under(unpolished)) {
        let paragraphs = match file.path.rsplit('.').next() {
            Some("rs") => commented(&file.text, &["//!", "///", "//"]),
            Some("py" | "pyi") => python(&file.text),
            Some("md") => markdown(&file.text),
            _ => continue,
        };
        for paragraph in paragraphs {
            for sentence in sentences(&paragraph.text) {
                if let Some(why) = fault(sentence) {
                    let start: String = sentence.chars().take(400).collect();
                    violations.push(file.violation(paragraph.line, &format!("{why}: {start}")));
                }
            }
        }
        // The rules themselves, and their samples, hold the phrases.
        if file.path.ends_with(".rs") && !file.path.starts_with("tests/tidy/") {
            for (index, line) in file.text.lines().enumerate() {
                if let Some(phrase) = quoted_riddle(line) {
                    let what = format!("`{phrase}` in a message stands in for a fact");
                    violations.push(file.violation(index + 1, &what));
                }
            }
        }
    }
    violations
}

/// Why `sentence` is not plain, if it is not.
fn fault(sentence: &str) -> Option<String> {
    let lower = sentence.to_lowercase();
    if let Some(phrase) = RIDDLES.iter().find(|phrase| has_words(&lower, phrase)) {
        return Some(format!("`{phrase}` stands in for a fact"));
    }
    if let Some(note) = lower.strip_prefix("safety:")
        && let Some(phrase) = REFERENCES.iter().find(|phrase| has_words(note, phrase))
    {
        return Some(format!("`{phrase}`: a safety note states its own facts"));
    }
    if sentence.ends_with('?') {
        return None;
    }
    if let Some(opening) = OPENINGS.iter().find(|opening| sentence.starts_with(**opening)) {
        return Some(format!("`{}` is no subject", opening.trim()));
    }
    let words: Vec<&str> = sentence.split_whitespace().collect();
    let fragment = words.first().is_some_and(|first| FRAGMENTS.contains(first));
    (fragment && words.len() <= FRAGMENT_WORDS && sentence.ends_with('.'))
        .then(|| "no subject".to_owned())
}

/// Whether `text` holds `phrase` as whole words.
fn has_words(text: &str, phrase: &str) -> bool {
    text.match_indices(phrase).any(|(start, _)| {
        let letter = |c: Option<char>| c.is_some_and(char::is_alphanumeric);
        !letter(text[..start].chars().next_back())
            && !letter(text[start + phrase.len()..].chars().next())
    })
}

/// A riddle between the quotes of one line.
fn quoted_riddle(line: &str) -> Option<&'static str> {
    let code = line.trim_start();
    if code.starts_with("//") {
        return None;
    }
    let inside = code.split('"').skip(1).step_by(2);
    inside.flat_map(|text| RIDDLES.iter().find(|phrase| has_words(text, phrase))).next().copied()
}

/// Splits a paragraph after `. `, `? ` and `! ` where a capital or code follows.
fn sentences(text: &str) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut start = 0;
    for (index, pair) in text.as_bytes().windows(3).enumerate() {
        let ends = matches!(pair[0], b'.' | b'?' | b'!') && pair[1] == b' ';
        if ends && (pair[2].is_ascii_uppercase() || pair[2] == b'`') {
            parts.push(text[start..=index].trim());
            start = index + 2;
        }
    }
    parts.push(text[start..].trim());
    parts
}

/// Joins lines of prose to paragraphs: `None` and list marks end one.
fn paragraphs<'a>(lines: impl Iterator<Item = Option<&'a str>>) -> Vec<Paragraph> {
    let mut found: Vec<Paragraph> = Vec::new();
    let mut open = false;
    for (index, line) in lines.enumerate() {
        let Some(body) = line.map(str::trim).filter(|body| !body.is_empty()) else {
            open = false;
            continue;
        };
        let item = body.trim_start_matches(['-', '*', '>', '#', ' ']);
        match found.last_mut() {
            Some(last) if open && item == body => {
                last.text.push(' ');
                last.text.push_str(body);
            }
            _ => found.push(Paragraph { line: index + 1, text: item.to_owned() }),
        }
        // A heading is a paragraph of one line.
        open = !body.starts_with('#');
    }
    found
}

/// The comments that begin a line with one of `marks`, without code blocks in them.
fn commented(text: &str, marks: &[&str]) -> Vec<Paragraph> {
    let mut code = false;
    paragraphs(text.lines().map(|line| {
        let line = line.trim_start();
        let body = marks.iter().find_map(|mark| line.strip_prefix(mark))?;
        if body.trim_start().starts_with("```") {
            code = !code;
            return None;
        }
        (!code && !body.trim_start().starts_with("---")).then_some(body)
    }))
}

/// Comments and docstrings.
fn python(text: &str) -> Vec<Paragraph> {
    let mut inside = false;
    let docs = paragraphs(text.lines().map(|line| {
        let body = line.trim_start();
        if inside {
            inside = !body.contains("\"\"\"");
            return Some(body.trim_end_matches("\"\"\""));
        }
        let body = body.strip_prefix("\"\"\"")?;
        inside = !body.contains("\"\"\"");
        Some(body.split("\"\"\"").next().unwrap_or(body))
    }));
    let mut found = commented(text, &["# "]);
    found.extend(docs);
    found
}

/// Prose of a page: no code blocks, no tables.
fn markdown(text: &str) -> Vec<Paragraph> {
    let mut code = false;
    paragraphs(text.lines().map(|line| {
        if line.trim_start().starts_with("```") {
            code = !code;
            return None;
        }
        (!code && !line.starts_with(['|', '#'])).then_some(line)
    }))
}
