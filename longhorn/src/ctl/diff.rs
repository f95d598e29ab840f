//! `snapshot diff`: where two snapshots differ, by what their layers hold; no byte is read.

use anyhow::Result;
use control::host::VolumeRecord;
use lh_block::format_size;
use replica::store::{ChangeKind, SnapshotView};
use serde::Serialize;

use super::Context;
use super::args::Output;
use super::observe::observe;
use super::output::{counted, print_json, print_table, table};
use super::snapshot::{check_known, directory_in_sync, opener};
use crate::tell::tell;

/// A range, as `snapshot diff -o json` prints it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) struct DiffView {
    /// Bytes from the volume's begin.
    offset: u64,
    /// Bytes.
    length: u64,
    /// "data" or "zero": what is there now.
    kind: &'static str,
}

pub(super) async fn run(context: &Context, volume: &str, from: Option<&str>, to: &str) -> Result<()> {
    let root = &context.root;
    let record = VolumeRecord::load(root, volume)?;
    for name in from.into_iter().chain([to]) {
        check_known(context, &record, name).await?;
    }
    let directory = directory_in_sync(root, &record, &observe(root, &record).await?)?;
    let open = opener(root, &record, &directory)?;
    // The older first: what is folded between the two looks counts as changed then.
    let from = from.map(&open).transpose()?;
    let to = open(to)?;
    let changes: Vec<DiffView> = to
        .diff(from.as_ref(), 0)?
        .map(|change| DiffView {
            offset: change.extent.offset,
            length: change.extent.len,
            kind: match change.kind {
                ChangeKind::Data => "data",
                ChangeKind::Zero => "zero",
            },
        })
        .collect();
    from.iter().chain([&to]).try_for_each(SnapshotView::check_lasting)?;
    if context.output == Output::Json {
        return print_json(&changes);
    }
    let mut rows = table(&["OFFSET", "LENGTH", "NOW"]);
    for change in &changes {
        rows.add_row([change.offset.to_string(), change.length.to_string(), change.kind.to_owned()]);
    }
    print_table(&rows)?;
    let sum = changes.iter().map(|c| c.length).sum();
    tell!("{} in {}", format_size(sum), counted(changes.len(), "range"));
    Ok(())
}
