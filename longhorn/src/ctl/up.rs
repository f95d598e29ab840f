//! `up`: from a name to a usable endpoint.
//!
//! The volume's lock is held while record and processes change, not while the engine makes itself ready: `down` can
//! always come in between. A volume that this command made and that did not come up is taken back. Before its processes are
//! started it is noted that the volume is to be up, which `down` takes back (`up --all`).

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail};
use control::host::{LiveDirs, Root, VolumeRecord, engine_name};
use control::manager::ProcessRecord;
use control::proto::ptypes;
use lh_block::format_size;

use super::Context;
use super::args::{Output, UpArgs};
use super::device::{self, Users};
use super::interrupt::written_size;
use super::manager::Manager;
use super::observe::{Robustness, VolumeView, ask_engine, connect_engine, is_for_this_host};
use super::output::{counted, exact_size, print, print_json};
use super::start::{frontend_of, start, wait_until_usable};
use super::{delete, engine, grown, interrupt, lock, room, stop};
use crate::arguments::{Checksum, Frontend};
use crate::daemon::can_be_had;
use crate::device_names::device_of;
use crate::kernel;
use crate::progress::Progress;
use crate::tell::tell;

/// How long an engine that has just ended may still have an address: its ring outlives it for some milliseconds.
const FREED: Duration = Duration::from_secs(1);

/// Between two tries.
const AGAIN: Duration = Duration::from_millis(20);

pub(super) async fn run(context: &Context, volume: &str, options: UpArgs) -> Result<()> {
    let (view, is_new) = bring_up(context, volume, options, &mut Progress::new()).await?;
    announce(context, &view, is_new)
}

/// Starts a volume that exists, as it is.
pub(super) async fn again(context: &Context, volume: &str, progress: &mut Progress) -> Result<VolumeView> {
    // One that has gone meanwhile is not to be made.
    VolumeRecord::load(&context.root, volume)?;
    Ok(bring_up(context, volume, UpArgs::default(), progress).await?.0)
}

/// The volume once it is up, and whether it was made now.
async fn bring_up(
    context: &Context,
    volume: &str,
    args: UpArgs,
    progress: &mut Progress,
) -> Result<(VolumeView, bool)> {
    let root = &context.root;
    root.create()?;
    let lock = lock::name_to_start(root, volume, progress).await?;
    LiveDirs::default().check_free(volume, root)?;
    if let Some(record) = lock::found(root, volume)?
        && (engine::is_left_over(root, &record)? || engine::is_ending(root, &record).await)
    {
        stop::stop(context, &record, progress, || ()).await?;
    }
    if let Some(engine) = ask_engine(root, volume).await {
        grown::note_size(root, volume, &engine.volume)?;
    }
    let (record, is_new) = record_of(root, volume, &args)?;
    if is_new {
        room::check(root, record.replicas.len())?;
    }
    let mut manager = Manager::ensure(root).await?;
    let held = is_new.then(interrupt::hold);
    if is_new {
        record.create(root)?;
    } else if !super::observe::has_processes(root, &record)? && record.mend_key(root)? {
        progress.say("the volume's key was lost: it has a new one");
    }
    if let Err(e) = record.note_up(root) {
        progress.say(&format!("it cannot be noted that it is up ({e}): a later `up --all` leaves it out"));
    }
    let mut lock = Some(lock);
    let coming_up = async {
        start(root, &record, &mut manager, is_new, progress).await?;
        // Nothing but waiting is left, unless a new volume may have to be taken back.
        lock = lock.take().filter(|_| is_new);
        let view = wait_until_usable(root, &record, &mut manager, progress).await?;
        if let Some(limits) = limits_of(&args, &record) {
            tell_limits(root, &record, limits).await?;
        }
        Ok(view)
    };
    let ready = tokio::select! {
        ready = coming_up => ready,
        () = interrupt::wait(held.as_ref()) => Err(anyhow!("interrupted")),
    };
    let Some(held) = held else { return Ok((ready?, false)) };
    let e = match ready {
        Ok(view) => {
            held.let_go();
            return Ok((view, true));
        }
        Err(e) => e,
    };
    progress.say("taking back what was begun");
    if let Err(left) = take_back(root, &record).await {
        return Err(e.context(format!("(and the new volume {volume} could not be taken back: {left:#})")));
    }
    interrupt::leaves(format!("there is no volume {volume}"));
    held.let_go();
    Err(e)
}

/// The volume's record, and whether it is yet to be created.
fn record_of(root: &Root, volume: &str, args: &UpArgs) -> Result<(VolumeRecord, bool)> {
    Ok(match lock::found(root, volume)? {
        Some(record) => (changed_record(root, args, record)?, false),
        None => (new_record(root, volume, args)?, true),
    })
}

fn new_record(root: &Root, volume: &str, args: &UpArgs) -> Result<VolumeRecord> {
    let Some(size) = args.size else {
        bail!("there is no volume {volume} yet: give it a size to create it, for example --size 10GiB");
    };
    let frontend = args.frontend.unwrap_or(Frontend::Auto);
    kernel::check(frontend)?;
    let mut record = VolumeRecord::new(volume, size);
    record.block_size = args.block_size.unwrap_or(record.block_size);
    record.quorum = args.quorum.unwrap_or_default();
    record.frontend = frontend.to_string();
    record.listen = listen(args, frontend)?;
    if let Some(address) = record.listen.or(frontend.usual_address()) {
        check_free(address)?;
    }
    record.io_timeout_seconds = args.io_timeout.unwrap_or(record.io_timeout_seconds);
    record.snapshot_max_count = args.snapshot_max_count.unwrap_or(record.snapshot_max_count);
    record.snapshot_max_size = args.snapshot_max_size.unwrap_or(record.snapshot_max_size);
    record.checksum_full = args.checksum == Some(Checksum::Full);
    for _ in 0..args.replicas.unwrap_or(3) {
        record.add_replica(root)?;
    }
    Ok(record)
}

/// Where the frontend is to listen on TCP, if that was asked for.
fn listen(args: &UpArgs, frontend: Frontend) -> Result<Option<SocketAddr>> {
    match (args.listen, frontend.port()) {
        (None, _) => Ok(None),
        (Some(listen), Some(port)) => Ok(Some(listen.with_default(port))),
        (Some(_), None) => bail!(
            "--listen is for --frontend nbd-server and iscsi-target: frontend {frontend} serves nothing over TCP"
        ),
    }
}

/// Refuses an address that somebody else has, before anything is made there.
fn check_free(address: SocketAddr) -> Result<()> {
    let deadline = Instant::now() + FREED;
    loop {
        match can_be_had(address) {
            Err(_) if Instant::now() < deadline => std::thread::sleep(AGAIN),
            had => return had,
        }
    }
}

/// The record of a volume that exists, with the options that may change while it is stopped.
fn changed_record(root: &Root, args: &UpArgs, mut record: VolumeRecord) -> Result<VolumeRecord> {
    let volume = &record.name.clone();
    record.check_ready()?;
    match args.size {
        Some(size) if size > record.size => bail!(
            "volume {volume} has {}: `longhornctl resize {volume} {}` makes it larger",
            exact_size(record.size),
            written_size(size)
        ),
        Some(size) if size < record.size => bail!(
            "volume {volume} has {} and never shrinks: leave --size out to start it, or make another volume",
            exact_size(record.size)
        ),
        _ => {}
    }
    let replicas = record.replicas.len();
    if args.replicas.is_some_and(|n| usize::from(n) != replicas) {
        bail!(
            "volume {volume} has {}: change that with `longhornctl replica add {volume}` or `longhornctl replica rm {volume} REPLICA`",
            counted(replicas, "replica")
        );
    }
    if args.block_size.is_some_and(|b| b != record.block_size) {
        bail!("volume {volume} has blocks of {} bytes for ever: make another volume", record.block_size);
    }
    if args.quorum.is_some_and(|quorum| quorum != record.quorum) {
        bail!("volume {volume} has the quorum {} for ever: make another volume", record.quorum);
    }
    let asked = match args.frontend {
        Some(frontend) if is_shown_by(root, &record, frontend)? => None,
        asked => asked,
    };
    let frontend = asked.map_or_else(|| record.frontend.clone(), |f| f.to_string());
    let (before, wanted) = (frontend_of(&record.frontend)?, frontend_of(&frontend)?);
    let is_up = super::observe::has_processes(root, &record)?;
    // A frontend that is named is told where to listen, or listens where it does by itself; one that is there already stays where
    // it is.
    let listen = match (listen(args, wanted)?, asked) {
        (None, None) => record.listen,
        (None, Some(_)) if is_up && frontend == record.frontend => record.listen,
        (listen, _) => listen,
    };
    let io_timeout = args.io_timeout.unwrap_or(record.io_timeout_seconds);
    let checksum_full = args.checksum.map_or(record.checksum_full, |c| c == Checksum::Full);
    let as_before = (&record.frontend, record.listen, record.io_timeout_seconds, record.checksum_full);
    if is_up && (&frontend, listen, io_timeout, checksum_full) != as_before {
        bail!(
            "volume {volume} is up with --frontend {}{}, --io-timeout {} and --checksum {}: stop it with `longhornctl down {volume}`, then start it with other options",
            record.frontend,
            record.listen.map(|address| format!(" --listen {address}")).unwrap_or_default(),
            record.io_timeout_seconds,
            if record.checksum_full { Checksum::Full } else { Checksum::Snapshots }
        );
    }
    kernel::check(wanted)?;
    // A server's volume has left none, and a session of this host with it is its user's.
    if !is_up && before.gives_a_device() && !wanted.gives_a_device() {
        device::release_unused(volume, root)?;
    }
    // The record would keep it, whatever becomes of the engine. One that it has already may be there again soon, as when a host has just
    // begun: its engine tries again.
    let address = listen.or(wanted.usual_address());
    let is_as_before = wanted == before && address == record.listen.or(before.usual_address());
    if let Some(address) = address.filter(|_| !is_as_before) {
        check_free(address)?;
    }
    let before = record.clone();
    (record.frontend, record.listen, record.io_timeout_seconds) = (frontend, listen, io_timeout);
    record.checksum_full = checksum_full;
    if let Some((count, size)) = limits_of(args, &record) {
        (record.snapshot_max_count, record.snapshot_max_size) = (count, size);
    }
    // All of it or nothing: what is refused together with another option is not half done.
    if record != before {
        record.store(root)?;
    }
    Ok(record)
}

/// True if the volume is up and `auto` has come to this frontend.
fn is_shown_by(root: &Root, record: &VolumeRecord, frontend: Frontend) -> Result<bool> {
    if record.frontend != Frontend::Auto.to_string() || frontend == Frontend::Auto {
        return Ok(false);
    }
    let engine = ProcessRecord::load(root, &engine_name(&record.name))?;
    let words = engine.map(|e| e.args).unwrap_or_default();
    Ok(words.windows(2).any(|pair| pair[0] == "--frontend" && pair[1] == frontend.to_string()))
}

/// The limits for snapshots, if any was named.
fn limits_of(args: &UpArgs, record: &VolumeRecord) -> Option<(u32, u64)> {
    let (count, size) = (args.snapshot_max_count, args.snapshot_max_size);
    (count.is_some() || size.is_some())
        .then(|| (count.unwrap_or(record.snapshot_max_count), size.unwrap_or(record.snapshot_max_size)))
}

/// Tells an engine that runs already what the record says now.
async fn tell_limits(root: &Root, record: &VolumeRecord, (count, size): (u32, u64)) -> Result<()> {
    let Some(mut engine) = connect_engine(root, &record.name).await else { return Ok(()) };
    let (count, size) = (i32::try_from(count)?, i64::try_from(size)?);
    engine.volume_snapshot_max_count_set(ptypes::VolumeSnapshotMaxCountSetRequest { count }).await?;
    engine.volume_snapshot_max_size_set(ptypes::VolumeSnapshotMaxSizeSetRequest { size }).await?;
    Ok(())
}

/// Has the kernel load what the volume's device needs.
pub(super) fn load_modules(record: &VolumeRecord) {
    if let Ok(frontend) = frontend_of(&record.frontend) {
        kernel::load(frontend);
    }
}

/// Makes a volume that never came up not exist. Its device may have been there all the same: who has it in use by then keeps it, and
/// the volume.
async fn take_back(root: &Root, record: &VolumeRecord) -> Result<()> {
    // A volume of this name that has come up under another root meanwhile has a device of its own.
    let is_elsewhere = stop::is_elsewhere(root, &record.name);
    if !is_elsewhere {
        device::check_unused(&device_of(&record.name))?;
    }
    // It may be the instance manager that was lost.
    let mut manager = Manager::ensure(root).await?;
    let engine = engine_name(&record.name);
    manager.end(&[engine]).await?;
    let replicas: Vec<String> = record.replicas.iter().map(|r| r.name.clone()).collect();
    manager.end(&replicas).await?;
    // An engine that could not end by itself has left its device, and somebody may have come to that.
    if !is_elsewhere {
        device::release(&record.name, root, Users::Keep)?;
    }
    LiveDirs::default().forget(&record.name, root);
    delete::everything(root, record)
}

/// Says where the volume is. Only of a new one it is said how to put a file system on it: another one may have one.
pub(super) fn announce(context: &Context, view: &VolumeView, is_new: bool) -> Result<()> {
    if context.output == Output::Json {
        return print_json(view);
    }
    let size = format_size(view.size);
    let replicas = counted(view.replicas.len(), "replica");
    tell!("{} is up: {size}, {replicas}, {}", view.name, view.robustness);
    if view.robustness != Robustness::Healthy {
        tell!("`longhornctl status {}` says why it is {}", view.name, view.robustness);
    }
    if !view.endpoint.is_empty() {
        print(&format!("{}\n", view.endpoint))?;
    }
    tell!("\n{}", what_next(view, is_new));
    Ok(())
}

/// How the volume is used and stopped.
fn what_next(view: &VolumeView, is_new: bool) -> String {
    let volume = &view.name;
    if let Some(device) = &view.device {
        let make = if is_new { format!("mkfs.ext4 {device} && ") } else { String::new() };
        return format!(
            "To use it:   {make}mkdir -p /mnt/{volume} && mount {device} /mnt/{volume}\nTo stop it:  umount /mnt/{volume} && longhornctl down {volume}"
        );
    }
    let stop = format!("To stop it:  longhornctl down {volume}");
    let Some(uri) = &view.uri else { return stop };
    let with = if uri.starts_with("iscsi:") { "iscsi-inq" } else { "nbdinfo" };
    let others = match is_for_this_host(uri) {
        true => format!(
            "For others:  longhornctl down {volume} && longhornctl up {volume} --listen ADDRESS (no other host reaches it as it is)\n"
        ),
        false => String::new(),
    };
    format!("To use it:   {with} '{uri}'\n{others}{stop}")
}

#[cfg(test)]
mod tests {
    use super::super::observe::Attachment;
    use super::*;
    use crate::arguments::listen_address;

    /// A volume under a root of its own.
    fn volume(dir: &tempfile::TempDir) -> (Root, VolumeRecord) {
        let root = Root::at(dir.path()).unwrap();
        root.create().unwrap();
        let mut record = VolumeRecord::new("demo", 1 << 30);
        record.frontend = Frontend::None.to_string();
        record.add_replica(&root).unwrap();
        record.create(&root).unwrap();
        (root, record)
    }

    #[test]
    fn options_of_which_one_is_refused_change_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let (root, record) = volume(&dir);
        let limited = UpArgs { snapshot_max_count: Some(5), ..UpArgs::default() };
        let listens = UpArgs { listen: Some(listen_address("127.0.0.1").unwrap()), ..limited.clone() };
        assert!(changed_record(&root, &listens, record.clone()).is_err());
        let engine = r#"{"format":1,"name":"demo-e-0","binary":"","args":[],"uuid":"1","state":"running"}"#;
        std::fs::write(root.process("demo-e-0"), engine).unwrap();
        let waits = UpArgs { io_timeout: Some(7), ..limited.clone() };
        assert!(changed_record(&root, &waits, record.clone()).is_err());
        assert_eq!(VolumeRecord::load(&root, "demo").unwrap(), record);
        // Alone it may change while the volume is up.
        changed_record(&root, &limited, record).unwrap();
        assert_eq!(VolumeRecord::load(&root, "demo").unwrap().snapshot_max_count, 5);
    }

    #[test]
    fn nobody_is_told_to_make_a_file_system_on_what_may_have_one() {
        let mut view = VolumeView {
            name: "demo".into(),
            size: 1 << 30,
            state: Attachment::Attached,
            robustness: Robustness::Healthy,
            frontend: "ublk".into(),
            endpoint: "/dev/longhorn/demo".into(),
            device: Some("/dev/longhorn/demo".into()),
            uri: None,
            generation: 1 << 32,
            ..VolumeView::default()
        };
        assert!(what_next(&view, true).starts_with("To use it:   mkfs.ext4 /dev/longhorn/demo && mkdir"));
        assert!(what_next(&view, false).starts_with("To use it:   mkdir -p /mnt/demo && mount"));
        (view.device, view.uri) = (None, Some("iscsi://127.0.0.1:3260/iqn:demo/1".into()));
        let told = what_next(&view, true);
        assert!(told.contains("iscsi-inq") && told.contains("--listen ADDRESS"), "{told}");
        view.uri = Some("iscsi://10.1.2.3:3260/iqn:demo/1".into());
        assert!(!what_next(&view, true).contains("--listen"));
    }
}
