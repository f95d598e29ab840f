//! How results are printed.

use std::io::{self, Write};

use anyhow::{Context as _, Result};
use comfy_table::{ColumnConstraint, ContentArrangement, Table, Width, presets};
use serde::Serialize;

/// The least width of a column of prose, in characters.
const PROSE_MIN: u16 = 24;

/// A table without lines. What is in it is a name, a path or a number each, which is told in one piece however narrow the
/// terminal is: it may be copied from there.
pub(super) fn table(columns: &[&str]) -> Table {
    table_with_prose(columns, &[])
}

/// The same with columns of sentences, by their places, which take the room that the terminal has left.
pub(super) fn table_with_prose(columns: &[&str], prose: &[usize]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Dynamic);
    table.set_header(columns.iter().copied());
    table.set_constraints((0..columns.len()).map(|place| match prose.contains(&place) {
        true => ColumnConstraint::LowerBoundary(Width::Fixed(PROSE_MIN)),
        false => ColumnConstraint::ContentWidth,
    }));
    table
}

/// A table's lines.
pub(super) fn table_text(table: &Table) -> String {
    table.to_string().lines().map(|line| format!("{}\n", trimmed(line))).collect()
}

/// So many of something.
pub(super) fn counted(number: usize, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}

/// A size with nothing left out, in the largest unit in which it is a whole number: `1028 MiB`. For what is compared, or asked for:
/// one that is rounded may say that a volume has the size that it has not.
pub(super) fn exact_size(bytes: u64) -> String {
    let units = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    let whole = units.into_iter().find(|(_, shift)| bytes != 0 && bytes.is_multiple_of(1 << shift));
    whole.map_or_else(|| format!("{bytes} B"), |(unit, shift)| format!("{} {unit}", bytes >> shift))
}

/// Prints a table.
pub(super) fn print_table(table: &Table) -> Result<()> {
    print(&table_text(table))
}

/// Without the padding that the table's borders would have stood in.
fn trimmed(line: &str) -> &str {
    line.strip_prefix(' ').unwrap_or(line).trim_end()
}

/// Prints a value as JSON over several lines.
pub(super) fn print_json(value: &impl Serialize) -> Result<()> {
    let mut text = serde_json::to_string_pretty(value)?;
    text.push('\n');
    print(&text)
}

/// Prints a value as one line of JSON.
pub(super) fn print_json_line(value: &impl Serialize) -> Result<()> {
    let mut text = serde_json::to_string(value)?;
    text.push('\n');
    print(&text)
}

/// Prints lines of text.
pub(super) fn print(text: &str) -> Result<()> {
    written(std::io::stdout().write_all(text.as_bytes()))
}

/// Whoever stops reading (`| head -1`) has seen enough: what is being done goes on, and its exit status says how it ended.
fn written(printed: io::Result<()>) -> Result<()> {
    match printed {
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other.context("standard output takes nothing"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_that_goes_away_is_no_error_and_a_full_disk_is_one() {
        let failed = |kind: io::ErrorKind| written(Err(kind.into()));
        assert!(failed(io::ErrorKind::BrokenPipe).is_ok());
        assert!(failed(io::ErrorKind::StorageFull).is_err());
    }

    #[test]
    fn a_size_that_is_compared_is_not_rounded() {
        let told: Vec<String> = [1 << 30, 1028 << 20, 3 << 29, 1 << 40, 4096, 512, 0].map(exact_size).into();
        assert_eq!(told, ["1 GiB", "1028 MiB", "1536 MiB", "1 TiB", "4 KiB", "512 B", "0 B"]);
        for size in [4096, 1028 << 20, (1 << 40) + 4096] {
            assert_eq!(lh_block::parse_size(&exact_size(size)), Ok(size), "as the command line takes it");
        }
    }

    #[test]
    fn names_are_told_in_one_piece_and_sentences_take_what_is_left() {
        let mut rows = table_with_prose(&["REPLICA", "PATH", "WHY"], &[2]);
        rows.set_width(40);
        let (name, path) = ("demo-r-0a1b2c3d", "/var/lib/longhorn/replicas/demo-0a1b2c3d");
        rows.add_row([name, path, "it is being brought in sync"]);
        let text = table_text(&rows);
        assert!(text.contains(name) && text.contains(path), "{text}");
        assert!(text.lines().count() > 2, "{text}");
    }
}
