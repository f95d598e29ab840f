//! `status --watch`: what a volume is and does, every second, until somebody has seen enough.
//!
//! On a terminal one page is drawn again in its place; elsewhere there is a line for every change, and one for every
//! second in which something was asked; with `-o json` the same moments give an object each.

use std::io::IsTerminal;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use anyhow::Result;
use comfy_table::{ContentArrangement, Table};
use control::host::VolumeRecord;
use lh_block::format_size;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde::Serialize;

use super::Context;
use super::activity::{ActivityView, RebuildView, Rebuilds, RequestsView, ask_activity};
use super::args::Output;
use super::observe::{Robustness, VolumeView, observe};
use super::output::{print, print_json_line, table, table_text};
use super::show::describe;

/// Between two looks: the shortest time over which an engine tells rates.
const PERIOD: Duration = Duration::from_secs(1);

/// Erases the screen (ECMA-48: ED 2).
const ERASE: &str = "\x1b[2J";
/// To the upper left corner (CUP).
const HOME: &str = "\x1b[H";
/// Erases the rest of a line (EL), of the screen (ED).
const REST_OF_LINE: &str = "\x1b[K";
const REST_OF_SCREEN: &str = "\x1b[J";

/// A volume at one moment.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Moment {
    #[serde(flatten)]
    volume: VolumeView,
    /// Null if its engine does not answer.
    activity: Option<ActivityView>,
}

impl Moment {
    /// True if somebody who saw `last` learns nothing.
    fn is_no_news(&self, last: &Self) -> bool {
        let idle = |m: &Self| m.activity.as_ref().is_none_or(ActivityView::is_idle);
        self.volume == last.volume && idle(self) && idle(last)
    }
}

/// Watches until the process is ended, or the volume is no more.
pub(super) async fn watch(context: &Context, volume: &str) -> Result<()> {
    let screen = context.output == Output::Table && std::io::stdout().is_terminal();
    let (begin, mut rebuilds, mut last) = (Instant::now(), Rebuilds::default(), None);
    loop {
        let moment = look(context, volume, &mut rebuilds).await?;
        if !last.as_ref().is_some_and(|last| moment.is_no_news(last)) {
            match context.output {
                Output::Json => print_json_line(&moment)?,
                Output::Table if screen => print(&drawn(&page(&moment), last.is_none()))?,
                Output::Table => print(&line(&moment, begin.elapsed()))?,
            }
        }
        last = Some(moment);
        // Slept in full: an engine that is asked sooner tells of two periods.
        tokio::time::sleep(PERIOD).await;
        if nobody_reads(std::io::stdout().as_fd()) {
            return Ok(());
        }
    }
}

/// True if what is written goes to a pipe or a socket whose reader is gone: of an idle volume nothing may be written for hours.
fn nobody_reads(output: BorrowedFd<'_>) -> bool {
    let mut asked = [PollFd::new(output, PollFlags::empty())];
    let answered = poll(&mut asked, PollTimeout::ZERO).is_ok_and(|n| n > 0);
    let gone = PollFlags::POLLERR | PollFlags::POLLHUP;
    answered && asked[0].revents().is_some_and(|events| events.intersects(gone))
}

async fn look(context: &Context, volume: &str, rebuilds: &mut Rebuilds) -> Result<Moment> {
    let record = VolumeRecord::load(&context.root, volume)?;
    let volume = observe(&context.root, &record).await?;
    let mut activity = match volume.engine_pid {
        Some(_) => ask_activity(&context.root, &record.name).await,
        None => None,
    };
    if let Some(activity) = &mut activity {
        rebuilds.follow(Instant::now(), &volume.replicas, activity);
    }
    Ok(Moment { volume, activity })
}

/// A page over what the terminal shows of the one before.
fn drawn(page: &str, first: bool) -> String {
    let lines: String = page.lines().map(|line| format!("{line}{REST_OF_LINE}\n")).collect();
    format!("{}{HOME}{lines}{REST_OF_SCREEN}", if first { ERASE } else { "" })
}

/// Everything, for a terminal.
fn page(moment: &Moment) -> String {
    let mut text = describe(&moment.volume);
    if let Some(activity) = &moment.activity {
        text += &format!("  in flight   {}", activity.in_queue);
        if activity.parked > 0 {
            text += &format!(", {} of them waiting", activity.parked);
        }
        text += &format!("\n\n{}", requests_table(activity));
    }
    text += &format!("\n{}", replicas_table(moment));
    text
}

fn requests_table(activity: &ActivityView) -> String {
    let head = format!("LAST {:.1} s", activity.seconds);
    let mut rows = page_table(&[&head, "IOPS", "MiB/s", "P50", "P90", "P99", "P99.9", "ERRORS"]);
    let mut row = |name: &str, r: &RequestsView| {
        let [p50, p90, p99, p999] = [r.p50, r.p90, r.p99, r.p999].map(time_text);
        let (name, rate) = (name.to_owned(), mib_text(r.bytes_per_second));
        rows.add_row([name, r.iops.to_string(), rate, p50, p90, p99, p999, r.errors.to_string()]);
    };
    row("reads", &activity.reads);
    row("writes", &activity.writes);
    row("unmaps", &activity.unmaps);
    row("flushes", &activity.flushes);
    table_text(&rows)
}

/// Of each replica its mode, what it was asked, and how long it took; below it how its rebuild fares, or what is wrong.
fn replicas_table(moment: &Moment) -> String {
    let mut rows = page_table(&["REPLICA", "MODE", "READS", "MiB/s", "P99", "WRITES", "MiB/s", "P99"]);
    let activity = |name: &str| moment.activity.iter().flat_map(|a| &a.replicas).find(|a| a.name == name);
    for replica in &moment.volume.replicas {
        let mut row = vec![replica.name.clone(), replica.mode.to_string()];
        let (reads, writes) = activity(&replica.name).map(|a| (a.reads, a.writes)).unwrap_or_default();
        for r in [reads, writes] {
            row.extend([r.iops.to_string(), mib_text(r.bytes_per_second), time_text(r.p99)]);
        }
        rows.add_row(row);
    }
    let table = table_text(&rows);
    let mut lines = table.lines();
    let mut text = lines.next().map(|head| format!("{head}\n")).unwrap_or_default();
    for (line, replica) in lines.zip(&moment.volume.replicas) {
        let remark = match activity(&replica.name).and_then(|a| a.rebuild) {
            Some(rebuild) => rebuild_text(&rebuild),
            None => replica.remark.clone(),
        };
        text += &format!("{line}\n");
        if !remark.is_empty() {
            text += &format!("  {remark}\n");
        }
    }
    text
}

/// A table that is never folded: a line that is too long for the terminal is better than a page that jumps.
fn page_table(columns: &[&str]) -> Table {
    let mut rows = table(columns);
    rows.set_content_arrangement(ContentArrangement::Disabled);
    rows
}

/// Everything that matters, in a line.
fn line(moment: &Moment, since: Duration) -> String {
    let view = &moment.volume;
    let mut text = format!("{:>5} s  {} {}", since.as_secs(), view.name, view.state);
    if view.robustness != Robustness::Unknown {
        text += &format!(" {}", view.robustness);
    }
    if let Some(activity) = &moment.activity {
        for (name, r) in [("read", &activity.reads), ("write", &activity.writes)] {
            text += &format!("  {name} {} IOPS {}", r.iops, rate_text(r.bytes_per_second));
            if !r.is_empty() {
                text += &format!(" p50 {} p99 {}", time_text(r.p50), time_text(r.p99));
            }
        }
    }
    for replica in &view.replicas {
        text += &format!("  {} {}", replica.name, replica.mode);
        let activity = moment.activity.iter().flat_map(|a| &a.replicas).find(|a| a.name == replica.name);
        if let Some(rebuild) = activity.and_then(|a| a.rebuild) {
            text += &format!(" ({})", rebuild_text(&rebuild));
        }
    }
    if !view.remark.is_empty() {
        text += &format!("  {}", view.remark);
    }
    text + "\n"
}

fn rebuild_text(rebuild: &RebuildView) -> String {
    let RebuildView { done, total, bytes_per_second, seconds_left } = *rebuild;
    let percent = done.saturating_mul(100) / total.max(1);
    let mut text = format!("{percent} % of {} in sync", format_size(total));
    if let (Some(rate), Some(left)) = (bytes_per_second, seconds_left) {
        text += &format!(", {}, {} left", rate_text(rate), left_text(left));
    }
    text
}

/// Seconds as a person says them.
fn left_text(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        _ => format!("{} h {} min", seconds / 3600, seconds / 60 % 60),
    }
}

/// Bytes per second in MiB/s, which is what disks are compared in.
fn rate_text(bytes: u64) -> String {
    mib_text(bytes) + " MiB/s"
}

/// Bytes in MiB.
fn mib_text(bytes: u64) -> String {
    let tenths = bytes.saturating_mul(10) >> 20;
    format!("{}.{}", tenths / 10, tenths % 10)
}

/// Nanoseconds with three digits or so.
fn time_text(ns: u64) -> String {
    match ns {
        0 => "-".to_owned(),
        1..1_000_000 => format!("{} us", ns.div_ceil(1000)),
        1_000_000..1_000_000_000 => format!("{}.{} ms", ns / 1_000_000, ns / 100_000 % 10),
        _ => format!("{}.{} s", ns / 1_000_000_000, ns / 100_000_000 % 10),
    }
}

#[cfg(test)]
mod tests {
    use super::super::activity::ReplicaActivityView;
    use super::super::observe::{Attachment, Mode, ReplicaView};
    use super::*;

    fn moment(iops: u64) -> Moment {
        let replica = ReplicaView {
            name: "demo-r-1".into(),
            mode: Mode::Wo,
            address: "unix:/r/1.sock".into(),
            path: "/r/demo-1".into(),
            pid: Some(3),
            rebuild: Some((400 << 20, 1000 << 20)),
            remark: "40 % in sync".into(),
            ..ReplicaView::default()
        };
        let volume = VolumeView {
            name: "demo".into(),
            size: 1 << 30,
            state: Attachment::Attached,
            robustness: Robustness::Degraded,
            frontend: "nbd-server".into(),
            endpoint: "nbd+unix:///demo".into(),
            device: None,
            uri: Some("nbd+unix:///demo".into()),
            generation: 1 << 32,
            replicas: vec![replica],
            engine_pid: Some(2),
            ..VolumeView::default()
        };
        let rebuild = RebuildView {
            done: 400 << 20,
            total: 1000 << 20,
            bytes_per_second: Some(100 << 20),
            seconds_left: Some(6),
        };
        let writes = RequestsView {
            iops,
            bytes_per_second: iops * 4096,
            p50: 90_000,
            p99: 1_250_000,
            ..Default::default()
        };
        let replica = ReplicaActivityView {
            name: "demo-r-1".into(),
            writes,
            rebuild: Some(rebuild),
            ..Default::default()
        };
        let activity = ActivityView { seconds: 1.0, writes, replicas: vec![replica], ..Default::default() };
        Moment { volume, activity: Some(activity) }
    }

    #[test]
    fn a_line_says_what_matters() {
        let text = line(&moment(25_600), Duration::from_secs(7));
        assert_eq!(
            text,
            "    7 s  demo attached degraded  read 0 IOPS 0.0 MiB/s  write 25600 IOPS 100.0 MiB/s p50 90 us \
             p99 1.2 ms  demo-r-1 WO (40 % of 1000 MiB in sync, 100.0 MiB/s, 6 s left)\n"
        );
    }

    #[test]
    fn a_page_has_volume_and_replicas_and_is_drawn_in_place() {
        let page = page(&moment(25_600));
        for word in ["demo: attached, degraded", "LAST 1.0 s", "demo-r-1", "25600", "1.2 ms", "6 s left"] {
            assert!(page.contains(word), "{word}: {page}");
        }
        let (first, second) = (drawn(&page, true), drawn(&page, false));
        assert!(first.starts_with("\x1b[2J\x1b[H") && second.starts_with("\x1b[Hdemo"));
        assert!(second.lines().all(|l| l.ends_with("\x1b[K") || l == "\x1b[J"), "{second:?}");
    }

    #[test]
    fn a_busy_page_fits_80_columns() {
        let mut busy = moment(123_456);
        let replica = &mut busy.volume.replicas[0];
        replica.name = "demo-r-0a1b2c3d".into();
        let slow = RequestsView {
            iops: 123_456,
            bytes_per_second: 1234 << 20,
            p50: 12_300_000,
            p90: 123_400_000,
            p99: 123_400_000,
            p999: 999_900_000,
            ..Default::default()
        };
        if let Some(activity) = &mut busy.activity {
            activity.seconds = 32.5;
            (activity.reads, activity.writes) = (slow, slow);
            let replica = &mut activity.replicas[0];
            replica.name = "demo-r-0a1b2c3d".into();
            (replica.reads, replica.writes) = (slow, slow);
        }
        let page = page(&busy);
        assert!(page.lines().all(|line| line.chars().count() <= 80), "{page}");
        assert!(page.lines().any(|line| line.starts_with("  40 % of 1000 MiB in sync")), "{page}");
    }

    #[test]
    fn a_reader_that_is_gone_is_noticed() {
        let (reader, writer) = std::io::pipe().unwrap();
        assert!(!nobody_reads(writer.as_fd()));
        drop(reader);
        assert!(nobody_reads(writer.as_fd()));
        assert!(!nobody_reads(tempfile::tempfile().unwrap().as_fd()));
        let (reader, writer) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(!nobody_reads(writer.as_fd()));
        drop(reader);
        assert!(nobody_reads(writer.as_fd()));
    }

    #[test]
    fn only_news_is_told() {
        let (busy, mut idle) = (moment(1), moment(0));
        for replica in &mut idle.activity.as_mut().unwrap().replicas {
            replica.rebuild = None;
        }
        assert!(!busy.is_no_news(&busy), "every second with requests is news");
        assert!(!idle.is_no_news(&busy), "that it has become quiet is news");
        assert!(idle.is_no_news(&idle));
        let mut healthy = idle.clone();
        healthy.volume.robustness = Robustness::Healthy;
        assert!(!healthy.is_no_news(&idle));
    }

    /// Else nobody would see that each takes seconds.
    #[test]
    fn requests_that_are_too_few_for_a_rate_are_told_with_their_times() {
        let mut slow = moment(0);
        let activity = slow.activity.as_mut().unwrap();
        activity.replicas.clear();
        assert!(slow.is_no_news(&slow));
        let activity = slow.activity.as_mut().unwrap();
        activity.writes.count = 1;
        assert!(!slow.is_no_news(&slow));
        let text = line(&slow, Duration::from_secs(7));
        assert!(text.contains("write 0 IOPS 0.0 MiB/s p50 90 us p99 1.2 ms  demo"), "{text}");
    }

    #[test]
    fn an_object_has_the_status_and_the_activity() {
        let json = serde_json::to_value(moment(5)).unwrap();
        assert_eq!(json["name"], "demo");
        assert_eq!(json["activity"]["writes"]["iops"], 5);
        assert_eq!(json["activity"]["replicas"][0]["rebuild"]["seconds_left"], 6);
    }

    #[test]
    fn times_and_rates_are_readable() {
        assert_eq!(
            [0, 999, 85_000, 1_240_000, 2_100_000_000].map(time_text),
            ["-", "1 us", "85 us", "1.2 ms", "2.1 s"]
        );
        assert_eq!([5, 600, 9000].map(left_text), ["5 s", "10 min", "2 h 30 min"]);
    }
}
