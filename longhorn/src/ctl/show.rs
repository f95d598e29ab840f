//! `ls` and `status`.

use anyhow::{Result, bail};
use control::host::{Root, VolumeRecord};
use lh_block::{Generation, format_size};

use super::Context;
use super::args::Output;
use super::observe::{Mode, Robustness, VolumeView, is_for_this_host, observe};
use super::output::{print, print_json, print_table, table, table_with_prose};
use crate::arguments::Checksum;
use crate::sentence::sentence;
use crate::tell::tell;

pub(super) async fn list(context: &Context) -> Result<()> {
    let (mut records, mut broken) = (Vec::new(), 0);
    for name in VolumeRecord::list(&context.root)? {
        match VolumeRecord::load(&context.root, &name) {
            Ok(record) => records.push(record),
            Err(e) => {
                tell!("error: {e}");
                broken += 1;
            }
        }
    }
    let mut views = Vec::new();
    for looked_at in observe_all(&context.root, records).await? {
        match looked_at {
            Ok(view) => views.push(view),
            Err((name, e)) => {
                tell!("error: volume {name}: {}", sentence(&e));
                broken += 1;
            }
        }
    }
    match context.output {
        Output::Json => print_json(&views)?,
        Output::Table if views.is_empty() && broken == 0 => {
            tell!(
                "no volumes under {}: longhornctl up NAME --size SIZE makes one",
                context.root.path().display()
            );
        }
        Output::Table => print_list(&views)?,
    }
    if broken > 0 {
        bail!("{broken} of {} volumes cannot be read", views.len() + broken);
    }
    Ok(())
}

/// What each of these volumes is like, or its name and why that cannot be told, looked at all at once: however many engines do not
/// answer, they are waited for once.
async fn observe_all(
    root: &Root,
    records: Vec<VolumeRecord>,
) -> Result<Vec<Result<VolumeView, (String, anyhow::Error)>>> {
    let look = |record: VolumeRecord| {
        let root = root.clone();
        tokio::spawn(async move { observe(&root, &record).await.map_err(|e| (record.name, e)) })
    };
    let looks: Vec<_> = records.into_iter().map(look).collect();
    let mut views = Vec::new();
    for look in looks {
        views.push(look.await?);
    }
    Ok(views)
}

fn print_list(views: &[VolumeView]) -> Result<()> {
    let mut rows = table(&["NAME", "STATE", "ROBUSTNESS", "SIZE", "REPLICAS", "ENDPOINT"]);
    for view in views {
        let serving = view.replicas.iter().filter(|r| r.mode == Mode::Rw).count();
        rows.add_row([
            view.name.clone(),
            view.state.to_string(),
            view.robustness.to_string(),
            format_size(view.size),
            format!("{serving}/{}", view.replicas.len()),
            view.endpoint.clone(),
        ]);
    }
    print_table(&rows)
}

pub(super) async fn status(context: &Context, volume: &str) -> Result<()> {
    let record = VolumeRecord::load(&context.root, volume)?;
    let view = observe(&context.root, &record).await?;
    match context.output {
        Output::Json => print_json(&view),
        Output::Table => print_status(&view),
    }
}

/// The volume without its replicas, as lines.
pub(super) fn describe(view: &VolumeView) -> String {
    let mut text = format!("{}: {}", view.name, view.state);
    if view.robustness != Robustness::Unknown {
        text += &format!(", {}", view.robustness);
    }
    text += "\n";
    if !view.remark.is_empty() {
        text += &format!("  {}\n", view.remark);
    }
    if !view.endpoint.is_empty() {
        text += &format!("  endpoint    {}\n", view.endpoint);
    }
    if view.device.is_none() && view.uri.as_deref().is_some_and(is_for_this_host) {
        text += "  reached by  this host alone; `up --listen ADDRESS` on a stopped volume lets others\n";
    }
    if let (Some(_), Some(uri)) = (&view.device, &view.uri) {
        text += &format!("  uri         {uri}\n");
    }
    text += &format!("  frontend    {}\n  size        {}\n", view.frontend, format_size(view.size));
    let generation = Generation::from(view.generation);
    text += &format!(
        "  generation  {generation} (attachment {}, restart {})\n",
        generation.attachment, generation.restart
    );
    if !view.insecure.is_empty() {
        text += &format!("  insecure    {}\n", view.insecure.join(", "));
    }
    if let Some(pid) = view.engine_pid {
        text += &format!("  engine      process {pid}\n");
    }
    text
}

/// What `up` made of the volume, as it takes it; what is nothing special is left out.
fn options(view: &VolumeView) -> String {
    let mut text = format!("--quorum {} --io-timeout {}", view.quorum, view.io_timeout_seconds);
    let mut option = |name: &str, value: String| text += &format!(" --{name} {value}");
    if view.block_size != 512 {
        option("block-size", view.block_size.to_string());
    }
    if view.checksum != Checksum::Snapshots {
        option("checksum", view.checksum.to_string());
    }
    if view.snapshot_max_count != control::host::SNAPSHOT_COUNT {
        option("snapshot-max-count", view.snapshot_max_count.to_string());
    }
    if view.snapshot_max_size != 0 {
        option("snapshot-max-size", view.snapshot_max_size.to_string());
    }
    text
}

fn print_status(view: &VolumeView) -> Result<()> {
    print(&describe(view))?;
    let logs = view.log_directory.display();
    print(&format!("  options     {}\n  logs        {logs}/{}-*.log\n\n", options(view), view.name))?;
    print_replicas(view)
}

/// Prints the replicas as a table.
pub(super) fn print_replicas(view: &VolumeView) -> Result<()> {
    let mut rows = table_with_prose(&["REPLICA", "MODE", "PID", "PATH", ""], &[4]);
    for replica in &view.replicas {
        rows.add_row([
            replica.name.clone(),
            replica.mode.to_string(),
            replica.pid.map_or("-".to_owned(), |pid| pid.to_string()),
            replica.path.display().to_string(),
            replica.remark.clone(),
        ]);
    }
    print_table(&rows)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::time::Instant;

    use control::host::engine_name;
    use control::manager::ProcessId;

    use super::super::observe::{ANSWER_PATIENCE, Attachment};
    use super::*;

    /// Engines that hang: they are there, and say nothing.
    #[tokio::test]
    async fn many_engines_that_do_not_answer_are_waited_for_once() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path()).unwrap();
        root.create().unwrap();
        let own = serde_json::to_value(ProcessId::of(std::process::id()).unwrap().unwrap()).unwrap();
        let (mut records, mut listeners) = (Vec::new(), Vec::new());
        for name in ["a", "b", "c", "d", "e"] {
            let (mut record, engine) = (VolumeRecord::new(name, 1 << 30), engine_name(name));
            record.add_replica(&root).unwrap();
            record.create(&root).unwrap();
            let process = serde_json::json!({"format": 1, "name": engine, "binary": "", "args": [], "uuid": "1",
                "state": "running", "process": own});
            std::fs::write(root.process(&engine), process.to_string()).unwrap();
            listeners.push(UnixListener::bind(root.control_socket(&engine)).unwrap());
            records.push(record);
        }
        let begun = Instant::now();
        let views: Vec<VolumeView> =
            observe_all(&root, records).await.unwrap().into_iter().map(Result::unwrap).collect();
        let took = begun.elapsed();
        assert_eq!(views.iter().map(|v| v.name.as_str()).collect::<Vec<_>>(), ["a", "b", "c", "d", "e"]);
        assert!(views.iter().all(|v| v.state == Attachment::Attaching && !v.remark.is_empty()), "{views:#?}");
        assert!(took >= ANSWER_PATIENCE && took < ANSWER_PATIENCE * 4, "{took:?}");
    }

    #[test]
    fn options_are_told_as_up_takes_them() {
        let mut view = VolumeView {
            io_timeout_seconds: 300,
            block_size: 512,
            snapshot_max_count: control::host::SNAPSHOT_COUNT,
            ..VolumeView::default()
        };
        assert_eq!(options(&view), "--quorum any --io-timeout 300");
        (view.block_size, view.checksum) = (4096, Checksum::Full);
        (view.snapshot_max_count, view.snapshot_max_size) = (7, 1 << 30);
        assert_eq!(
            options(&view),
            "--quorum any --io-timeout 300 --block-size 4096 --checksum full --snapshot-max-count 7 --snapshot-max-size 1073741824"
        );
    }
}
