//! Staging and publishing: what has to be mounted where, made so from whatever is there.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::stat::{major, minor};

use super::filesystem::{self, Content, Growth, must, text};
use super::lost;
use super::mounts::{Mount, block_numbers, is_gone, mount_at, mounts};
use crate::Refused;
use crate::capability::{Access, Use, check_file_system};

/// How long a device may take to become as large as its volume.
const DEVICE_GROWTH: Duration = Duration::from_secs(30);

/// Between two looks at that.
const LOOK: Duration = Duration::from_millis(200);

/// The file system where nobody names one.
const DEFAULT: &str = "ext4";

/// A volume to stage.
#[derive(Debug)]
pub(super) struct Staging {
    /// Its device.
    pub(super) device: PathBuf,
    /// Nothing is written.
    pub(super) read_only: bool,
    /// It was staged before: a device that seems empty is not formatted.
    pub(super) again: bool,
    /// As what.
    pub(super) used: Use,
    /// Parameters of its StorageClass.
    pub(super) context: HashMap<String, String>,
}

impl Staging {
    /// True if its file system takes no writes: options of its class say so, too.
    fn is_for_reading(&self) -> bool {
        let flags = match &self.used.access {
            Access::Mount { flags, .. } => flags.as_slice(),
            Access::Block => &[],
        };
        self.read_only || flags.iter().any(|flag| flag == "ro")
    }
}

/// Mounts the volume's file system at the staging path, and makes it first if the device is empty. A device that is used
/// as such is only looked for.
pub(super) async fn stage(wish: &Staging, staging: &Path) -> Result<(), Refused> {
    let Access::Mount { fs_type, flags } = &wish.used.access else {
        // While a pod has it, it stays as that pod found it.
        return match bound(&wish.device)? {
            Some(_) if !wish.read_only => Ok(()),
            _ => write_protect(&wish.device, wish.read_only).await,
        };
    };
    let device = &wish.device;
    // The kernel's number may have served a volume that nobody unstaged, and which only was to be read as a device. Who only reads needs
    // it, too: a file system that was not unmounted has its journal replayed first.
    write_protect(device, false).await?;
    if lost::left_at(staging, device)? {
        // It stays until a file system is there again: whoever asks again would have one made.
        file_system_on(wish, fs_type, true).await?;
    }
    lost::clear(staging, device).await?;
    clear_stopped(staging, device).await?;
    if let Some(there) = mount_at(staging)? {
        if is_of(&there, device) {
            same_stage(&there, wish.is_for_reading(), fs_type, staging)?;
            // One that is mounted may have been kept from growing.
            return if wish.is_for_reading() {
                Ok(())
            } else {
                grow_mounted(device, staging, &there.kind).await
            };
        }
        return Err(Refused::Precondition(format!(
            "{} is mounted already, and not from {}: unmount it",
            staging.display(),
            device.display()
        )));
    }
    let kind = file_system_on(wish, fs_type, wish.again).await?;
    if !fs_type.is_empty() && *fs_type != kind {
        return Err(Refused::Precondition(format!(
            "{} holds {kind}, not {fs_type}: ask for fsType {kind}",
            device.display()
        )));
    }
    if !wish.read_only {
        filesystem::check(device, &kind).await?;
    }
    make_directory(staging)?;
    filesystem::mount(device, staging, &kind, flags, wish.read_only).await?;
    if wish.is_for_reading() {
        return Ok(());
    }
    let grown = grow_unused(device, staging, &kind, flags).await;
    // To the kubelet what was refused is staged nowhere, so that nobody would unstage it, and the device be in use for ever.
    if grown.is_err()
        && let Err(e) = unmount(staging).await
    {
        tracing::warn!(path = %staging.display(), error = %e, "what was not staged stays mounted");
    }
    grown
}

/// Grows a file system that was mounted just now, and that nobody uses yet.
async fn grow_unused(device: &Path, staging: &Path, kind: &str, flags: &[String]) -> Result<(), Refused> {
    if let Growth::NotMounted(_) = filesystem::grow(device, staging, kind).await? {
        unmount(staging).await?;
        filesystem::grow_unmounted(device).await?;
        filesystem::mount(device, staging, kind, flags, false).await?;
    }
    Ok(())
}

/// The kind of file system that a device holds; one is made where there is none, if one may be. `again`: there was one.
async fn file_system_on(wish: &Staging, fs_type: &str, again: bool) -> Result<String, Refused> {
    let device = &wish.device;
    let class = wish.context.get("fsType").map_or("", String::as_str);
    let wanted = [fs_type, class, DEFAULT].into_iter().find(|k| !k.is_empty()).unwrap_or(DEFAULT);
    check_file_system(wanted)?;
    Ok(match filesystem::look(device).await? {
        Content::FileSystem(kind) => kind,
        Content::Nothing | Content::Begun(_) if wish.read_only || again => {
            return Err(Refused::Precondition(format!(
                "{} holds no file system, and none is made {}",
                device.display(),
                not_made(wish.read_only)
            )));
        }
        Content::Nothing => {
            let options = wish.context.get("mkfsParams").map_or("", String::as_str);
            filesystem::make(device, wanted, options, false).await?;
            wanted.to_owned()
        }
        Content::Begun(kind) => {
            tracing::warn!(device = %device.display(), kind, "a file system that was never finished is made anew");
            let options = wish.context.get("mkfsParams").map_or("", String::as_str);
            filesystem::make(device, wanted, options, true).await?;
            wanted.to_owned()
        }
        Content::Other(what) => {
            return Err(Refused::Precondition(format!(
                "{} holds {what} and no file system: it is not formatted over: fsck may get a damaged one back; if nobody needs that, blkdiscard removes it",
                device.display()
            )));
        }
    })
}

/// Why no file system is made, and what to do.
fn not_made(read_only: bool) -> &'static str {
    if read_only {
        "for reading only: let a pod write to the volume first"
    } else {
        "where there was one: restore a snapshot, or make one yourself with mkfs"
    }
}

/// Refuses to take what is staged for what it is not: a pod that writes would find a file system that takes nothing.
fn same_stage(there: &Mount, read_only: bool, fs_type: &str, staging: &Path) -> Result<(), Refused> {
    // The mount's own flag: a kernel that stops a file system for its errors leaves that alone.
    if there.read_only == read_only && (fs_type.is_empty() || there.kind == *fs_type) {
        return Ok(());
    }
    Err(Refused::Different(format!(
        "{} holds the volume already, as {} {}: unstage it first",
        staging.display(),
        there.kind,
        words(there.read_only)
    )))
}

/// Grows what is in use.
async fn grow_mounted(device: &Path, point: &Path, kind: &str) -> Result<(), Refused> {
    match filesystem::grow(device, point, kind).await? {
        Growth::Done => Ok(()),
        Growth::NotMounted(why) => Err(why),
    }
}

fn is_of(mount: &Mount, device: &Path) -> bool {
    block_numbers(device) == Some(mount.device)
}

fn make_directory(path: &Path) -> Result<(), Refused> {
    fs::create_dir_all(path).map_err(|e| failed(path, &e))
}

fn failed(path: &Path, e: &io::Error) -> Refused {
    Refused::Failed(format!("{}: {e}", path.display()))
}

/// Unmounts what is staged if its kernel has stopped it and no pod has it: mounted anew it is whole, with what it had flushed.
async fn clear_stopped(staging: &Path, device: &Path) -> Result<(), Refused> {
    let stopped = mount_at(staging)?.is_some_and(|m| is_of(&m, device) && m.has_stopped());
    if !stopped || !elsewhere(device, staging)?.is_empty() {
        return Ok(());
    }
    tracing::warn!(path = %staging.display(), "a file system that has stopped is mounted anew");
    unmount(staging).await
}

/// Binds the staged file system where a pod sees it. Where the volume has another device since it was staged, or its file system has
/// stopped, it is staged anew: whoever staged it once does not do so again for the next pod.
pub(super) async fn publish_mount(
    wish: &Staging,
    staging: &Path,
    target: &Path,
    read_only: bool,
) -> Result<(), Refused> {
    let device = &wish.device;
    clear_stopped(staging, device).await?;
    let there = mount_at(staging)?;
    if there.as_ref().is_none_or(|m| !is_of(m, device)) {
        // Whoever stages makes the directory, and removes it when nobody needs it any more.
        if there.is_none() && !staging.is_dir() {
            return Err(Refused::Precondition(format!("the volume is not staged at {}", staging.display())));
        }
        stage(wish, staging).await?;
    }
    lost::clear(target, device).await?;
    discard(&beside(target)).await?;
    // What is bound there is as what is staged.
    let read_only = read_only || wish.is_for_reading();
    if let Some(there) = mount_at(target)? {
        return same_or_refused(&there, device, target, read_only);
    }
    if wish.used.one_pod {
        no_other_pod(device, staging)?;
    }
    make_directory(target)?;
    bind(staging, target, read_only).await
}

/// Refuses a second place where a pod would see what one pod alone may have (CSI, NodePublishVolume). Parts of the file system that
/// the kubelet binds for the pod that has it are no such place, nor is the staged one, by whatever path it is seen.
fn no_other_pod(device: &Path, staging: &Path) -> Result<(), Refused> {
    let there = elsewhere(device, staging)?;
    there.iter().find(|m| m.root == Path::new("/")).map_or(Ok(()), |there| Err(taken(there)))
}

/// Where a device's file system is mounted beside the place where it is staged.
fn elsewhere(device: &Path, staging: &Path) -> Result<Vec<Mount>, Refused> {
    let staged = fs::canonicalize(staging).unwrap_or_else(|_| staging.to_owned());
    let tail = |path: &Path| -> Vec<OsString> {
        path.components().rev().take(2).map(|part| part.as_os_str().to_owned()).collect()
    };
    let is_other = |m: &Mount| is_of(m, device) && tail(&m.point) != tail(&staged);
    Ok(mounts()?.into_iter().filter(is_other).collect())
}

fn taken(there: &Mount) -> Refused {
    Refused::Precondition(format!(
        "the volume is for one pod alone (ReadWriteOncePod), and is published at {} already",
        there.point.display()
    ))
}

/// Binds a device where a pod sees it, as a file. Only the device itself can refuse writes, everywhere on this node at
/// once: so no two pods have it at a time of which one reads and the other one writes.
pub(super) async fn publish_device(
    device: &Path,
    target: &Path,
    read_only: bool,
    one_pod: bool,
) -> Result<(), Refused> {
    let ours = block_numbers(device);
    discard(&beside(target)).await?;
    if mount_at(target)?.is_some() && block_numbers(target).is_some_and(is_gone) {
        unmount(target).await?;
    }
    if mount_at(target)?.is_some() {
        if block_numbers(target) != ours {
            return Err(Refused::Different(format!(
                "{} holds another device than the volume's: unpublish it first",
                target.display()
            )));
        }
        if filesystem::is_read_only(device)? != read_only {
            return Err(Refused::Different(format!(
                "{} is published already, and not {}: unpublish it first",
                target.display(),
                words(read_only)
            )));
        }
        return Ok(());
    }
    match bound(device)? {
        Some(there) if one_pod => return Err(taken(&there)),
        Some(there) if filesystem::is_read_only(device)? != read_only => {
            return Err(Refused::Precondition(format!(
                "the device is published {} at {}: it cannot be had {} meanwhile",
                words(!read_only),
                there.point.display(),
                words(read_only)
            )));
        }
        Some(_) => {}
        None => write_protect(device, read_only).await?,
    }
    if let Some(parent) = target.parent() {
        make_directory(parent)?;
    }
    match fs::OpenOptions::new().write(true).create_new(true).open(target) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(failed(target, &e)),
        _ => {}
    }
    bind(device, target, read_only).await
}

/// Where the device is bound for a pod: there, or where the kubelet has bound it again.
pub(super) fn bound(device: &Path) -> Result<Option<Mount>, Refused> {
    let found = fs::metadata(device).map_err(|e| failed(device, &e))?;
    let (ours, home) = (block_numbers(device), (major(found.dev()), minor(found.dev())));
    // Of the file system that has the node. Others are not looked at: a server that does not answer would keep us.
    let mut bound = mounts()?.into_iter().filter(|m| m.device == home && m.root != Path::new("/"));
    Ok(bound.find(|m| block_numbers(&m.point) == ours))
}

/// Lets the device itself refuse writes, or take them again: a bind mount keeps nobody from writing to a device. The
/// kernel's number may serve another volume next, and would refuse for that one, too.
///
/// A device that is so already is not opened: where it is lost, whoever opens it may wait for ever.
pub(super) async fn write_protect(device: &Path, protect: bool) -> Result<(), Refused> {
    if filesystem::is_read_only(device).is_ok_and(|is| is == protect) {
        return Ok(());
    }
    let how = if protect { "--setro" } else { "--setrw" };
    must("blockdev", &[how, text(device)?]).await.map(drop)
}

/// Has a device that is let go of take writes again. One that goes meanwhile, since the volume is detached, is as good: whoever stages
/// the next one of that number for writing sees to it.
pub(super) async fn take_writes(device: &Path) -> Result<(), Refused> {
    let is_gone = || matches!(fs::metadata(device), Err(e) if e.kind() == io::ErrorKind::NotFound);
    match write_protect(device, false).await {
        Err(_) if is_gone() => Ok(()),
        other => other,
    }
}

fn words(read_only: bool) -> &'static str {
    if read_only { "for reading only" } else { "for writing" }
}

fn same_or_refused(there: &Mount, device: &Path, target: &Path, read_only: bool) -> Result<(), Refused> {
    if is_of(there, device) && there.read_only == read_only {
        return Ok(());
    }
    Err(Refused::Different(format!(
        "{} is mounted already, from another volume or {}: unpublish it first",
        target.display(),
        words(there.read_only)
    )))
}

/// Binds something where a pod sees it. For reading only that takes two steps, of which the first alone would take writes: they
/// are done in a place beside, and what is bound from there takes none from its first moment on, whenever whoever does this is
/// ended.
async fn bind(from: &Path, to: &Path, read_only: bool) -> Result<(), Refused> {
    if !read_only {
        return must("mount", &["--bind", text(from)?, text(to)?]).await.map(drop);
    }
    let beside = beside(to);
    discard(&beside).await?;
    let made = if from.is_dir() { fs::create_dir(&beside) } else { fs::write(&beside, "") };
    made.map_err(|e| failed(&beside, &e))?;
    let bound = bind_by(from, &beside, to).await;
    let discarded = discard(&beside).await;
    bound.and(discarded)
}

async fn bind_by(from: &Path, beside: &Path, to: &Path) -> Result<(), Refused> {
    must("mount", &["--bind", text(from)?, text(beside)?]).await?;
    must("mount", &["-o", "remount,bind,ro", text(beside)?]).await?;
    must("mount", &["--bind", text(beside)?, text(to)?]).await.map(drop)
}

/// The place beside a pod's where it is made what it is to be.
fn beside(target: &Path) -> PathBuf {
    let name = target.file_name().unwrap_or_default().to_string_lossy();
    target.with_file_name(format!(".{name}.readonly"))
}

/// Removes such a place, and what is mounted there.
async fn discard(beside: &Path) -> Result<(), Refused> {
    if at(beside).is_ok_and(|found| found.is_none()) { Ok(()) } else { remove(beside).await }
}

/// What is at a path itself; `None`: nothing. Of a file system that has shut down nobody can say, and something is there.
fn at(path: &Path) -> Result<Option<fs::Metadata>, Refused> {
    match fs::symlink_metadata(path) {
        Ok(found) => Ok(Some(found)),
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => Ok(None),
        Err(e) => Err(failed(path, &e)),
    }
}

/// Unmounts whatever is at a path, all of it.
pub(super) async fn unmount(path: &Path) -> Result<(), Refused> {
    while mount_at(path)?.is_some() {
        must("umount", &[text(path)?]).await?;
    }
    Ok(())
}

/// Unmounts what a pod saw, and removes the place.
pub(super) async fn unpublish(target: &Path) -> Result<(), Refused> {
    discard(&beside(target)).await?;
    remove(target).await
}

async fn remove(target: &Path) -> Result<(), Refused> {
    unmount(target).await?;
    let Some(found) = at(target)? else { return Ok(()) };
    // Never with what is in it: a directory that holds something is somebody's.
    let removed = if found.is_dir() { fs::remove_dir(target) } else { fs::remove_file(target) };
    match removed {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(failed(target, &e)),
        _ => Ok(()),
    }
}

/// Waits until the device has so many bytes, and grows the file system on it, if it is mounted there. Gives back the
/// device's bytes.
pub(super) async fn grow(device: &Path, path: &Path, wanted: u64) -> Result<i64, Refused> {
    let deadline = tokio::time::Instant::now() + DEVICE_GROWTH;
    let size = loop {
        let size = filesystem::size(device)?;
        if size >= wanted {
            break size;
        }
        if tokio::time::Instant::now() >= deadline {
            return Err(Refused::NotYet(format!("{} has {size} bytes, not yet {wanted}", device.display())));
        }
        tokio::time::sleep(LOOK).await;
    };
    let bytes = i64::try_from(size).unwrap_or(i64::MAX);
    if block_numbers(path) == block_numbers(device) {
        return Ok(bytes);
    }
    let all: Vec<Mount> = mounts()?.into_iter().filter(|m| is_of(m, device)).collect();
    let Some(there) = all.iter().rfind(|m| at_or_above(&m.point, path)) else {
        return Err(Refused::Missing(format!("the volume is not mounted at {}", path.display())));
    };
    if !there.super_read_only {
        // Through the mount of a pod that only reads, XFS is not grown.
        let writable = all.iter().find(|m| !m.read_only).unwrap_or(there);
        grow_mounted(device, &writable.point, &writable.kind).await?;
    }
    Ok(bytes)
}

fn at_or_above(point: &Path, path: &Path) -> bool {
    fs::canonicalize(path).is_ok_and(|real| real.starts_with(point))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_a_pod_left_is_removed_and_what_is_somebodys_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("mount");
        unpublish(&target).await.unwrap();
        fs::create_dir(&target).unwrap();
        unpublish(&target).await.unwrap();
        assert!(!target.exists());
        fs::write(&target, "").unwrap();
        unpublish(&target).await.unwrap();
        assert!(!target.exists());
        fs::create_dir(&target).unwrap();
        fs::write(target.join("data"), "x").unwrap();
        assert!(unpublish(&target).await.is_err());
        assert!(target.join("data").exists());
    }

    #[tokio::test]
    async fn a_device_that_goes_while_it_is_let_go_of_is_as_good() {
        let dir = tempfile::tempdir().unwrap();
        take_writes(&dir.path().join("gone")).await.unwrap();
        let no_device = dir.path().join("file");
        fs::write(&no_device, "").unwrap();
        take_writes(&no_device).await.unwrap_err();
    }

    /// A node of our own for a device that is there anyway: nobody else opens that.
    #[tokio::test]
    async fn a_device_that_is_as_it_should_be_is_not_opened() {
        use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
        use nix::sys::stat::{Mode, SFlag, makedev, mknod};
        let dir = tempfile::tempdir().unwrap();
        let node = dir.path().join("disk");
        let is_here = mknod(&node, SFlag::S_IFBLK, Mode::S_IRUSR | Mode::S_IWUSR, makedev(7, 0)).is_ok();
        if !is_here || filesystem::is_read_only(&node).is_err() || fs::File::open(&node).is_err() {
            eprintln!(
                "SKIP a_device_that_is_as_it_should_be_is_not_opened: no loop device, or no rights to one"
            );
            return;
        }
        let opened = Inotify::init(InitFlags::IN_NONBLOCK).unwrap();
        opened.add_watch(&node, AddWatchFlags::IN_OPEN).unwrap();
        let is = filesystem::is_read_only(&node).unwrap();
        write_protect(&node, is).await.unwrap();
        filesystem::size(&node).unwrap();
        assert!(opened.read_events().is_err(), "it was opened");
        fs::File::open(&node).unwrap();
        assert_eq!(opened.read_events().unwrap().len(), 1);
    }
}
