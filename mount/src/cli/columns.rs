//! Tables: aligned and cut to the width of a terminal, or separated by tabs for programs.

use console::{Alignment, measure_text_width, pad_str, truncate_str};

use tensorfs::internal::size::shown_size;

use super::output::{Outcome, print_bytes, print_text, terminal_width};

/// Number of spaces between two columns.
const GAP: usize = 2;

/// Minimum width of a column with names, if a name is longer.
const NAME_MIN: usize = 16;

/// A column.
#[derive(Clone, Copy, Debug)]
pub(super) struct Column {
    pub title: &'static str,
    /// Minimum width. It keeps the position of columns in a table that is redrawn.
    pub min: usize,
    /// If not all columns fit, the column with the largest number is left out first.
    pub rank: u8,
    pub kind: ColumnKind,
}

/// The content of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ColumnKind {
    /// Numbers, aligned to the right.
    Number,
    /// Words, aligned to the left.
    Word,
    /// Names. If a name is too long, its beginning is cut off.
    Name,
}

/// A row.
#[derive(Clone, Debug)]
pub(super) enum TableRow {
    /// One cell for each column.
    Cells(Vec<String>),
    /// The first cell, and a remark that replaces all other cells.
    Remark(String, String),
}

/// A table. Its first column is never left out.
pub(super) struct TextTable {
    pub columns: Vec<Column>,
    pub rows: Vec<TableRow>,
}

impl TextTable {
    /// Prints the table. On a terminal, it is aligned and cut to the width. Otherwise, cells are
    /// separated by tabs.
    pub(super) fn print(&self) -> Outcome {
        match terminal_width() {
            Some(width) => print_text(&(self.lines(Some(width)).join("\n") + "\n")),
            // `print_text` would escape the tabs. The cells are escaped already.
            None => print_bytes((self.tabbed().join("\n") + "\n").as_bytes()),
        }
    }

    /// The titles and all cells, separated by tabs.
    fn tabbed(&self) -> Vec<String> {
        let titles = self.columns.iter().map(|column| column.title).collect::<Vec<_>>().join("\t");
        let row = |row: &TableRow| match row {
            TableRow::Cells(cells) => cells.join("\t"),
            TableRow::Remark(name, remark) => format!("{name}\t{remark}"),
        };
        std::iter::once(titles).chain(self.rows.iter().map(row)).collect()
    }

    /// The titles and rows as aligned lines. With `width`, columns are left out and names are cut
    /// until the lines fit.
    pub(super) fn lines(&self, width: Option<usize>) -> Vec<String> {
        let widths = self.widths(width);
        let line = |row: &TableRow| match row {
            TableRow::Cells(cells) => self.line(&widths, |index| &cells[index]),
            TableRow::Remark(name, remark) => {
                format!("{}{:GAP$}{remark}", pad(name, widths[0].unwrap_or(0), Alignment::Left), "")
            }
        };
        let titles = self.line(&widths, |index| self.columns[index].title);
        let lines = std::iter::once(titles).chain(self.rows.iter().map(line));
        let cut = |line: String| match width {
            Some(width) => truncate_str(line.trim_end(), width, "").into_owned(),
            None => line.trim_end().to_owned(),
        };
        lines.map(cut).collect()
    }

    fn line<'a>(&self, widths: &[Option<usize>], cell: impl Fn(usize) -> &'a str) -> String {
        let kept = widths.iter().zip(&self.columns).enumerate();
        let cells = kept.filter_map(|(index, (width, column))| {
            let side = match column.kind {
                ColumnKind::Number => Alignment::Right,
                _ => Alignment::Left,
            };
            Some(pad(cell(index), (*width)?, side))
        });
        cells.collect::<Vec<_>>().join(&" ".repeat(GAP))
    }

    /// The width of each column. `None` for a column that is left out.
    fn widths(&self, width: Option<usize>) -> Vec<Option<usize>> {
        let wanted: Vec<usize> = (0..self.columns.len()).map(|index| self.wanted(index)).collect();
        let Some(width) = width else { return wanted.into_iter().map(Some).collect() };
        let least = |index: usize| match self.columns[index].kind {
            ColumnKind::Name => wanted[index].min(NAME_MIN.max(width / 3)),
            _ => wanted[index],
        };
        let mut kept: Vec<usize> = (0..self.columns.len()).collect();
        let sum = |kept: &[usize]| {
            kept.iter().map(|&index| least(index)).sum::<usize>() + GAP * (kept.len() - 1)
        };
        while sum(&kept) > width && kept.len() > 1 {
            let last = (1..kept.len()).max_by_key(|&place| self.columns[kept[place]].rank);
            kept.remove(last.unwrap_or(1));
        }
        let mut spare = width.saturating_sub(sum(&kept));
        let mut widths = vec![None; self.columns.len()];
        for index in kept {
            let more = spare.min(wanted[index] - least(index));
            spare -= more;
            widths[index] = Some((least(index) + more).min(width));
        }
        widths
    }

    /// The width at which no cell of the column is cut.
    fn wanted(&self, index: usize) -> usize {
        let Column { title, min, .. } = self.columns[index];
        let cells = self.rows.iter().filter_map(|row| match row {
            TableRow::Cells(cells) => Some(&cells[index]),
            TableRow::Remark(name, _) => (index == 0).then_some(name),
        });
        let widest = cells.map(|cell| measure_text_width(cell)).max().unwrap_or(0);
        widest.max(title.len()).max(min)
    }
}

/// `text` in `width` columns of a terminal. If it is longer, its beginning is cut off, because the end
/// of a path is more specific.
fn pad(text: &str, width: usize, side: Alignment) -> String {
    pad_str(&end_of(text, width), width, side, None).into_owned()
}

/// As much of the end of `text` as fits into `width` columns of a terminal.
pub(super) fn end_of(text: &str, width: usize) -> String {
    if measure_text_width(text) <= width {
        return text.to_owned();
    }
    let starts = text.char_indices().map(|(start, _)| start);
    let mut ends = starts.map(|start| &text[start..]);
    let end = ends.find(|end| measure_text_width(end) + 2 <= width).unwrap_or_default();
    format!("..{end}")
}

/// A cell with a number of bytes. On a terminal it has a unit, and for programs it has all digits.
pub(super) fn bytes_cell(bytes: u64) -> String {
    if terminal_width().is_some() { shown_size(bytes) } else { bytes.to_string() }
}

/// `part` as a percentage of the sum of both numbers.
pub(super) fn percent(part: Option<u64>, other: Option<u64>) -> String {
    match (part, other) {
        (Some(part), Some(other)) if part + other > 0 => {
            format!("{:.0}%", 100.0 * part as f64 / (part + other) as f64)
        }
        _ => "-".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> TextTable {
        let number = |title, rank| Column { title, min: 0, rank, kind: ColumnKind::Number };
        let name = |title, rank| Column { title, min: 0, rank, kind: ColumnKind::Name };
        TextTable {
            columns: vec![name("MOUNT", 0), number("A", 1), number("LARGE", 3), number("B", 2)],
            rows: vec![
                TableRow::Cells(
                    ["/srv/models/llama-7b-instruct", "1", "2", "3"].map(str::to_owned).into(),
                ),
                TableRow::Remark("/srv/b".to_owned(), "dead: its daemon is gone".to_owned()),
            ],
        }
    }

    #[test]
    fn columns_go_by_rank_and_names_are_cut_in_front_until_the_lines_fit() {
        let wide = table().lines(None);
        assert_eq!(wide[0], "MOUNT                          A  LARGE  B");
        assert_eq!(wide[1], "/srv/models/llama-7b-instruct  1      2  3");
        assert_eq!(wide[2], "/srv/b                         dead: its daemon is gone");
        assert_eq!(table().lines(Some(100)), wide);
        let narrow = table().lines(Some(27));
        assert_eq!(narrow[0], "MOUNT                  A  B");
        assert_eq!(narrow[1], "..s/llama-7b-instruct  1  3");
        for width in 1..60 {
            let lines = table().lines(Some(width));
            assert!(lines.iter().all(|line| measure_text_width(line) <= width), "{lines:?}");
        }
    }

    #[test]
    fn programs_get_tabs() {
        assert_eq!(table().tabbed()[1], "/srv/models/llama-7b-instruct\t1\t2\t3");
    }
}
