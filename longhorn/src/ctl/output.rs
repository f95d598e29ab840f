//! How results are printed.

use std::io::Write;

use anyhow::Result;
use comfy_table::{ContentArrangement, Table, presets};
use serde::Serialize;

/// A table without lines, no wider than the terminal.
pub(super) fn table(columns: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Dynamic);
    table.set_header(columns.iter().copied());
    table
}

/// A table's lines.
pub(super) fn table_text(table: &Table) -> String {
    table.to_string().lines().map(|line| format!("{}\n", trimmed(line))).collect()
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
    Ok(std::io::stdout().write_all(text.as_bytes())?)
}

/// Prints a value as one line of JSON.
pub(super) fn print_json_line(value: &impl Serialize) -> Result<()> {
    let mut text = serde_json::to_string(value)?;
    text.push('\n');
    Ok(std::io::stdout().write_all(text.as_bytes())?)
}

/// Prints lines of text.
pub(super) fn print(text: &str) -> Result<()> {
    Ok(std::io::stdout().write_all(text.as_bytes())?)
}
