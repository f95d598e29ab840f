//! `doctor`: what this host has and lacks, each line with the next step.

mod discard;
mod fuse_timeout;
mod multipath;
mod node;
mod swap;

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use anyhow::{Result, bail};
use control::host::Root;
use fuse_frontend::{Needed, Present};
use iscsi_frontend::initiator;
use lh_block::format_size;
use lh_ring::sys::{Class, PressureTrigger, set_class};
use nix::sys::resource::{Resource, getrlimit};
use nix::sys::statfs::{FsType, statfs};
use serde::Serialize;

use super::Context;
use super::args::Output;
use super::output::{print_json, print_table, table_with_prose};
use crate::arguments::Frontend;
use crate::{kernel, next_step};

/// Below this much space a warning is due.
const SPACE_MIN: u64 = 1 << 30;

/// What a process locks at most: 256 MiB of buffers (`POOL_HARD` of a replica), its code, its index.
const MEMLOCK_MIN: u64 = 512 << 20;

/// What is right and what is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "UPPERCASE")]
enum Verdict {
    /// As it should be.
    Ok,
    /// Volumes run, with the disadvantage that the text names.
    Warn,
    /// No volume runs.
    Fail,
}

impl Verdict {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "OK",
            Self::Warn => "WARN",
            Self::Fail => "FAIL",
        }
    }
}

#[derive(Debug, Serialize)]
struct Finding {
    check: &'static str,
    verdict: Verdict,
    detail: String,
    /// What to do; empty if nothing.
    next: String,
}

impl Finding {
    fn ok(check: &'static str, detail: impl Into<String>) -> Self {
        let detail = next_step::complete(&detail.into()).into_owned();
        Self { check, verdict: Verdict::Ok, detail, next: String::new() }
    }

    fn warn(check: &'static str, detail: impl Into<String>, next: impl Into<String>) -> Self {
        Self { check, verdict: Verdict::Warn, detail: detail.into(), next: next.into() }
    }

    fn fail(check: &'static str, detail: impl Into<String>, next: impl Into<String>) -> Self {
        Self { check, verdict: Verdict::Fail, detail: detail.into(), next: next.into() }
    }
}

pub(super) fn run(context: &Context) -> Result<()> {
    let mut findings = vec![
        user(),
        kernel_version(&fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default()),
        io_uring(),
        frontend("ublk", Frontend::Ublk),
        frontend("nbd", Frontend::Nbd),
        frontend("iscsi", Frontend::Iscsi),
        fuse(),
        module("loop", &fuse_frontend::LOOP),
        first_choice(),
        devices(),
        io_flusher(),
        memlock(),
        realtime(),
        root_directory(&context.root),
        file_system(&context.root),
        discard::finding(existing(&context.root)),
        swap::on_volumes(Path::new(crate::device_names::DEVICES), kind_below(&context.root)),
        manager(&context.root),
    ];
    findings.extend(node::findings());
    match context.output {
        Output::Json => print_json(&findings)?,
        Output::Table => {
            let mut rows = table_with_prose(&["CHECK", "", "FOUND", "NEXT STEP"], &[2, 3]);
            for f in &findings {
                rows.add_row([f.check, f.verdict.as_str(), &f.detail, &f.next]);
            }
            print_table(&rows)?;
        }
    }
    match findings.iter().filter(|f| f.verdict == Verdict::Fail).count() {
        0 => Ok(()),
        n => bail!("{n} of {} checks failed: mend that before this host keeps volumes", findings.len()),
    }
}

fn user() -> Finding {
    if nix::unistd::geteuid().is_root() {
        Finding::ok("user", "root")
    } else {
        Finding::fail("user", "not root", "run it again with sudo")
    }
}

/// Older kernels lack what rings are made of, piece by piece; volumes are tried from this one on.
fn kernel_version(release: &str) -> Finding {
    const CHECK: &str = "kernel";
    const OLDEST: (u32, u32) = (5, 19);
    let release = release.trim();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map_while(|number| number.parse().ok());
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    if version >= OLDEST {
        return Finding::ok(CHECK, format!("Linux {release}"));
    }
    Finding::warn(
        CHECK,
        format!("Linux {release}: volumes are not tried before {}.{}", OLDEST.0, OLDEST.1),
        "use a newer kernel",
    )
}

fn io_uring() -> Finding {
    match lh_ring::Ring::new(8) {
        Ok(_) => Finding::ok("io_uring", "works"),
        Err(e) => {
            let disabled = fs::read_to_string("/proc/sys/kernel/io_uring_disabled").unwrap_or_default();
            let next = if matches!(disabled.trim(), "1" | "2") {
                "sysctl kernel.io_uring_disabled=0"
            } else {
                "use Linux 5.19 or newer; in a container, allow io_uring in its seccomp profile"
            };
            Finding::fail("io_uring", e.to_string(), next)
        }
    }
}

/// FUSE itself; and whether the kernel gives up whoever waits.
fn fuse() -> Finding {
    let found = module("fuse", &fuse_frontend::FUSE);
    let limited = || fuse_timeout::finding("fuse", Path::new("/proc/sys/fs/fuse"));
    if found.verdict == Verdict::Ok { limited().unwrap_or(found) } else { found }
}

/// What volumes survive a dead engine by everywhere, also in containers.
fn module(check: &'static str, needed: &Needed) -> Finding {
    let Needed { path, minor, .. } = needed;
    match needed.present() {
        Present::Here => Finding::ok(check, *path),
        Present::Absent => {
            Finding::warn(check, format!("no {path}: no --frontend fuse"), format!("modprobe {check}"))
        }
        Present::Another => Finding::warn(
            check,
            format!("{path} is another file: no --frontend fuse"),
            format!("take away what is there, then mknod {path} c {} {minor}", fuse_frontend::MISC),
        ),
    }
}

/// A frontend that not every host has, and how long its requests wait.
fn frontend(check: &'static str, frontend: Frontend) -> Finding {
    let waits = match frontend {
        Frontend::Ublk => "requests wait for the next engine as long as it takes",
        Frontend::Nbd => "requests wait 7 days for the next engine, and up to 3 s longer than it takes",
        _ => "requests wait 7 days for the next engine, one command --io-timeout and 60 s",
    };
    match kernel::missing(frontend) {
        None if kernel::is_fragile(frontend) => Finding::warn(
            check,
            "here, in a version that may crash the kernel or lose the device when an engine is killed",
            "leave the choice to --frontend auto, or use Linux 6.16 or newer",
        ),
        None => Finding::ok(check, format!("here; {waits}")),
        Some(_) if frontend == Frontend::Iscsi && initiator::missing_but_daemon().is_none() => {
            Finding::warn(check, "open-iscsi is here, and nobody answers it", initiator::START_DAEMON)
        }
        // Another one takes its place.
        Some(missing) => Finding::ok(check, format!("not here: it needs {missing}")),
    }
}

/// What `--frontend auto` takes.
fn first_choice() -> Finding {
    const CHECK: &str = "device";
    match kernel::first() {
        Some(frontend) => Finding::ok(CHECK, format!("--frontend auto is {frontend} here")),
        None => Finding::warn(
            CHECK,
            "no frontend that makes a block device works here",
            "modprobe ublk_drv, nbd, or fuse and loop; or use --frontend nbd-server",
        ),
    }
}

/// Nodes are made in /dev/longhorn, on a file system that lets them be devices.
fn devices() -> Finding {
    match statfs("/dev") {
        Ok(stat) if stat.flags().contains(nix::sys::statvfs::FsFlags::ST_NODEV) => Finding::warn(
            "/dev",
            "mounted with nodev: no block devices",
            "mount it without nodev, or use --frontend nbd-server",
        ),
        Ok(stat) if stat.flags().contains(nix::sys::statvfs::FsFlags::ST_RDONLY) => Finding::warn(
            "/dev",
            "read-only: no block devices",
            "mount it writable, or use --frontend nbd-server",
        ),
        Ok(_) => Finding::ok("/dev", "takes device nodes"),
        Err(e) => Finding::warn("/dev", e.to_string(), "mount it"),
    }
}

fn io_flusher() -> Finding {
    match lh_ring::sys::set_io_flusher() {
        Ok(()) => Finding::ok("io flusher", "allowed"),
        Err(e) => Finding::warn(
            "io flusher",
            format!("{e}: under memory pressure a volume may wait for itself"),
            "give CAP_SYS_RESOURCE",
        ),
    }
}

fn memlock() -> Finding {
    match getrlimit(Resource::RLIMIT_MEMLOCK) {
        // CAP_IPC_LOCK lifts the limit (capabilities(7)).
        _ if has_capability(14) => Finding::ok("memlock", "unlimited"),
        Ok((limit, _)) if limit >= MEMLOCK_MIN => Finding::ok("memlock", format_size(limit)),
        Ok((limit, _)) => Finding::warn(
            "memlock",
            format!("{}: memory of volumes may be swapped out", format_size(limit)),
            format!("give CAP_IPC_LOCK, or ulimit -l {}", MEMLOCK_MIN >> 10),
        ),
        Err(e) => Finding::warn("memlock", e.to_string(), "give CAP_IPC_LOCK"),
    }
}

/// What the daemons do when memory is short, tried once.
fn realtime() -> Finding {
    const CHECK: &str = "real time";
    const HARM: &str = "when memory is short a volume of this host may wait for itself";
    if let Err(e) = PressureTrigger::new() {
        let next = "give CAP_SYS_RESOURCE, and start the kernel with psi=1";
        return Finding::warn(CHECK, format!("/proc/pressure/memory: {e}: {HARM}"), next);
    }
    // A thread of its own: this one stays as it is.
    match std::thread::spawn(|| set_class(0, Class::Realtime)).join() {
        Ok(Ok(())) => Finding::ok(CHECK, "allowed while memory is short"),
        Ok(Err(e)) => Finding::warn(CHECK, format!("{e}: {HARM}"), "give CAP_SYS_NICE"),
        Err(_) => Finding::warn(CHECK, "not tried", "run it again"),
    }
}

/// True if this process has the capability of that number in effect.
fn has_capability(number: u32) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let set = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    set.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).is_some_and(|set| set >> number & 1 == 1)
}

fn root_directory(root: &Root) -> Finding {
    const CHECK: &str = "root";
    let path = root.path().display().to_string();
    match fs::metadata(root.path()) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            Finding::ok(CHECK, format!("{path} will be made by the first `longhornctl up`"))
        }
        Err(e) => Finding::fail(CHECK, format!("{path}: {e}"), "choose another with --root"),
        Ok(meta) if !meta.is_dir() => {
            Finding::fail(CHECK, format!("{path} is no directory"), "choose another with --root")
        }
        Ok(_) if root.is_read_only() => Finding::fail(
            CHECK,
            format!("{path}: its file system is read-only"),
            "mount it so that it can be written, or choose another with --root",
        ),
        Ok(meta) if meta.uid() != 0 || meta.mode() & 0o022 != 0 => Finding::fail(
            CHECK,
            format!(
                "{path} (mode {:03o}, user {}) can be changed by others than root",
                meta.mode() & 0o777,
                meta.uid()
            ),
            format!("chown root {path} && chmod 700 {path}"),
        ),
        Ok(_) => Finding::ok(CHECK, path),
    }
}

/// Where the root is, or will be.
fn existing(root: &Root) -> &Path {
    root.path().ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"))
}

/// The kind of file system that replicas lie on.
fn kind_below(root: &Root) -> &'static str {
    statfs(existing(root)).map_or("another file system", |stat| file_system_name(stat.filesystem_type()))
}

fn file_system(root: &Root) -> Finding {
    const CHECK: &str = "disk";
    let existing = existing(root);
    let stat = match statfs(existing) {
        Ok(stat) => stat,
        Err(e) => {
            return Finding::fail(
                CHECK,
                format!("{}: {e}", existing.display()),
                "choose another with --root",
            );
        }
    };
    let block = u64::try_from(stat.block_size()).unwrap_or(0);
    let (free, all) = (stat.blocks_available() * block, stat.blocks() * block);
    let kind = file_system_name(stat.filesystem_type());
    let found = format!("{kind}, {} of {} free", format_size(free), format_size(all));
    match kind {
        "tmpfs" => Finding::warn(CHECK, format!("{found}: gone after a reboot"), "put the root on a disk"),
        _ if free < SPACE_MIN => {
            Finding::warn(CHECK, found, "make space: writes wait when all replicas are full")
        }
        "another file system" => Finding::warn(CHECK, found, "ext4 and XFS are what volumes are tested on"),
        _ => Finding::ok(CHECK, found),
    }
}

fn file_system_name(kind: FsType) -> &'static str {
    use nix::sys::statfs::{EXT4_SUPER_MAGIC, TMPFS_MAGIC, XFS_SUPER_MAGIC};
    match kind {
        EXT4_SUPER_MAGIC => "ext4",
        XFS_SUPER_MAGIC => "xfs",
        TMPFS_MAGIC => "tmpfs",
        _ => "another file system",
    }
}

fn manager(root: &Root) -> Finding {
    match std::os::unix::net::UnixStream::connect(root.manager_socket()) {
        Ok(_) => Finding::ok("instance manager", "runs"),
        Err(_) => Finding::ok("instance manager", "does not run; the first `longhornctl up` starts it"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_is_judged_by_its_first_two_numbers() {
        for (release, verdict) in [
            ("5.19.0-41-generic\n", Verdict::Ok),
            ("6.1.0-18-amd64", Verdict::Ok),
            ("10.0", Verdict::Ok),
            ("5.15.0-91-generic", Verdict::Warn),
            ("4.18.0-553.el8.x86_64", Verdict::Warn),
            ("", Verdict::Warn),
        ] {
            assert_eq!(kernel_version(release).verdict, verdict, "{release}");
        }
    }
}
