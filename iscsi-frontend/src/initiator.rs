//! The host's own initiator: open-iscsi logs in to a target, and the kernel makes a disk of it.
//!
//! - What the kernel has is read in sysfs: which session belongs to a target, where it logged in, which disk it made.
//!   Nothing is kept here that could be out of date.
//! - What is to be done is `iscsiadm`'s work, which asks `iscsid`. That one also logs in again when the target was away.

use std::fs;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use thiserror::Error;

use crate::scsi::DISK_LUN;

const PROGRAM: &str = "iscsiadm";

/// What it asks, and what logs in again.
const DAEMON: &str = "iscsid";

const CONFIGURATION: &str = "/etc/iscsi/iscsid.conf";

/// systemd runs this host if this is there (`sd_booted(3)`).
const SYSTEMD: &str = "/run/systemd/system";

/// Where programs for root are, whatever this process's own path says.
const PROGRAM_PATHS: [&str; 4] = ["/usr/sbin", "/sbin", "/usr/bin", "/bin"];

const SESSIONS: &str = "/sys/class/iscsi_session";
const CONNECTIONS: &str = "/sys/class/iscsi_connection";

/// How long the kernel and udev may take from a login to the disk, and from a logout to the session's end.
const DISK: Duration = Duration::from_secs(30);

/// What the kernel says of a disk whose session has a connection (`sdev_states` of drivers/scsi/scsi_sysfs.c).
const RUNNING: &str = "running";

/// Between two looks.
const LOOK: Duration = Duration::from_millis(20);

/// Why the host's initiator has no disk of a target.
#[derive(Debug, Error)]
pub enum InitiatorError {
    /// Not installed.
    #[error(
        "open-iscsi is not installed (there is no iscsiadm): apt-get install open-iscsi, or use another frontend"
    )]
    Missing,
    /// `iscsiadm` says no.
    #[error("iscsiadm cannot {what}: {said}; is iscsid running? (systemctl start iscsid)")]
    Refused {
        /// What it was asked for.
        what: &'static str,
        /// Its own words.
        said: String,
    },
    /// It logged in, and no disk came.
    #[error("the initiator has logged in to {0}, but the kernel makes no disk of it: see dmesg")]
    NoDisk(String),
    /// It logged out, and the kernel keeps the session.
    #[error("the initiator has logged out of {0}, but the kernel does not end the session: see dmesg")]
    NoEnd(String),
    /// A system call.
    #[error("{what}: {source}")]
    Io {
        /// What was tried, with its path.
        what: String,
        /// Why not.
        source: io::Error,
    },
}

/// How long the initiator is patient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// With one command, before it is aborted: longer than the engine's own `ioTimeout`.
    pub command: Duration,
    /// With a target that is away, before commands fail.
    pub away: Duration,
}

/// A session of the host's initiator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Session {
    /// Its directory in sysfs.
    directory: PathBuf,
    /// The target's name.
    target: String,
    /// Where it logs in, and will log in again: the next target has to listen there.
    pub portal: SocketAddr,
}

/// What this host lacks for it, in words that name it; `None` if nothing.
pub fn missing() -> Option<String> {
    missing_but_daemon().or_else(|| is_idle().then(|| format!("a running {DAEMON} ({START_DAEMON})")))
}

/// The same of a host whose initiator is to look after a session that it has: one that nobody serves now is served
/// again whenever `iscsid` is.
pub fn missing_but_daemon() -> Option<String> {
    if program(PROGRAM).is_none() {
        return Some("open-iscsi (iscsiadm, package open-iscsi)".to_owned());
    }
    // iscsiadm has the kernel load it; where there are no modules to load it has to be there.
    let has_modules = fs::read_to_string("/proc/sys/kernel/osrelease")
        .map_or(true, |release| Path::new("/lib/modules").join(release.trim()).is_dir());
    let has_tcp = Path::new("/sys/class/iscsi_transport/tcp").exists();
    (!has_tcp && !has_modules).then(|| "the kernel's iSCSI initiator (kernel module iscsi_tcp)".to_owned())
}

/// What starts `iscsid`, for people.
pub const START_DAEMON: &str = "systemctl enable --now iscsid.socket, or iscsid as root";

/// True if nobody will answer `iscsiadm`.
fn is_idle() -> bool {
    let text = |path: &str| Ok(lh_ring::sys::if_there(fs::read_to_string(path))?.unwrap_or_default());
    is_idle_by(&text("/proc/net/unix"), &text(CONFIGURATION))
}

/// The same by the host's sockets and the daemon's configuration. What cannot be read, for want of descriptors perhaps, says nothing.
fn is_idle_by(sockets: &io::Result<String>, configuration: &io::Result<String>) -> bool {
    let nobody_listens = sockets.as_ref().is_ok_and(|sockets| !daemon_listens(sockets));
    nobody_listens && configuration.as_ref().is_ok_and(|configuration| !starts_daemon(configuration))
}

/// Whether somebody answers `iscsiadm`: `iscsid`, or systemd, which starts it then. Its socket has an abstract name, which
/// is this network namespace's.
fn daemon_listens(sockets: &str) -> bool {
    sockets.lines().any(|line| line.ends_with("@ISCSIADM_ABSTRACT_NAMESPACE"))
}

/// Whether `iscsiadm` starts it by itself, by the command that its configuration names.
fn starts_daemon(configuration: &str) -> bool {
    let command = configuration.lines().find_map(|line| {
        let (name, value) = line.split_once('=')?;
        (name.trim() == "iscsid.startup").then(|| value.trim())
    });
    let Some(program) = command.and_then(|command| command.split_whitespace().next()) else { return false };
    // systemctl starts nothing where systemd does not run the host.
    let is_systemctl = Path::new(program).file_name().is_some_and(|name| name == "systemctl");
    Path::new(program).exists() && (!is_systemctl || Path::new(SYSTEMD).is_dir())
}

fn program(name: &str) -> Option<PathBuf> {
    PROGRAM_PATHS.iter().map(|path| Path::new(path).join(name)).find(|path| path.exists())
}

/// The session of this host's own target of that name, if the initiator has one. Targets of this host are reached at its loopback
/// addresses: a session that leads elsewhere is of another host's volume, which may have the same name.
///
/// # Errors
/// The system's: it could not be looked, which does not say that there is none.
pub fn find(target: &str) -> io::Result<Option<Session>> {
    let Some(entries) = lh_ring::sys::if_there(fs::read_dir(SESSIONS))? else { return Ok(None) };
    for entry in entries {
        if let Some(session) = session_at(&entry?.path(), Path::new(CONNECTIONS), target)? {
            return Ok(Some(session));
        }
    }
    Ok(None)
}

fn session_at(directory: &Path, connections: &Path, target: &str) -> io::Result<Option<Session>> {
    let text = |path: PathBuf| lh_ring::sys::if_there(fs::read_to_string(path));
    let Some(name) = text(directory.join("targetname"))?.filter(|name| name.trim() == target) else {
        return Ok(None);
    };
    // Session 3 has connection 3:0.
    let number = directory.file_name().and_then(|name| name.to_str()?.strip_prefix("session"));
    let connection = connections.join(format!("connection{}:0", number.unwrap_or_default()));
    let address = text(connection.join("persistent_address"))?.and_then(|t| t.trim().parse::<IpAddr>().ok());
    let port = text(connection.join("persistent_port"))?.and_then(|t| t.trim().parse().ok());
    let portal = address.zip(port).map(|(address, port)| SocketAddr::new(address, port));
    let portal = portal.filter(|portal| portal.ip().is_loopback());
    let target = name.trim().to_owned();
    Ok(portal.map(|portal| Session { directory: directory.to_owned(), target, portal }))
}

fn line(path: &Path) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim().to_owned())
}

/// Logs the host's initiator in, with these patiences, and nothing of it is kept for the next boot.
///
/// # Errors
/// [`InitiatorError`]; then the initiator knows nothing of the target.
pub fn login(target: &str, portal: SocketAddr, patience: Patience) -> Result<Session, InitiatorError> {
    let logged_in = record(target, portal, patience)
        .and_then(|()| iscsiadm("log in", &node(target, portal, &["--login"])))
        .and_then(|()| {
            let look = |source| InitiatorError::Io { what: SESSIONS.to_owned(), source };
            let found = find(target).map_err(look)?;
            let session = found.ok_or_else(|| InitiatorError::NoDisk(target.to_owned()))?;
            session.be_patient(patience)?;
            Ok(session)
        });
    if logged_in.is_err() {
        for last in ["--logout", "--op=delete"] {
            // It may have come to neither.
            let _ = iscsiadm("forget the target", &node(target, portal, &[last]));
        }
    }
    logged_in
}

/// How a target is treated, whatever the host's configuration (`iscsid.conf`) has for others.
const SETTINGS: [(&str, &str); 5] = [
    ("node.startup", "manual"),
    // A new engine is asked for the session at once.
    ("node.session.iscsi.DefaultTime2Wait", "0"),
    // An engine that does not answer is not replaced by asking again; the end of one shows at once.
    ("node.conn[0].timeo.noop_out_interval", "0"),
    ("node.conn[0].timeo.noop_out_timeout", "0"),
    ("node.session.auth.authmethod", "None"),
];

/// The same of what older versions of open-iscsi do not know, and then do as is wanted here.
const NEWER_SETTINGS: [(&str, &str); 3] = [
    // The disk is looked for behind each login; `manual` leaves that to an administrator, who does not know of it.
    ("node.session.scan", "auto"),
    // Each further session would have a disk of its own, beside the one that has the volume's name.
    ("node.session.nr_sessions", "1"),
    // So many logins in vain, and the session is given up with all that waits on it. 0: never. An engine may be away for long.
    ("node.session.reopen_max", "0"),
];

/// Tells the initiator of the target, and how to treat it.
fn record(target: &str, portal: SocketAddr, patience: Patience) -> Result<(), InitiatorError> {
    iscsiadm("take the target", &node(target, portal, &["--op=new"]))?;
    let set = |name: &str, value: &str| {
        let update = ["--op=update", "--name", name, "--value", value];
        iscsiadm("take a setting", &node(target, portal, &update))
    };
    set("node.session.timeo.replacement_timeout", &patience.away.as_secs().to_string())?;
    SETTINGS.iter().try_for_each(|(name, value)| set(name, value))?;
    for (name, value) in NEWER_SETTINGS {
        match set(name, value) {
            Err(InitiatorError::Refused { said, .. }) => tracing::debug!("{name} is not set: {said}"),
            done => done?,
        }
    }
    Ok(())
}

fn node(target: &str, portal: SocketAddr, rest: &[&str]) -> Vec<String> {
    let words = ["--mode=node", &format!("--targetname={target}"), &format!("--portal={portal}")]
        .map(str::to_owned)
        .into_iter();
    words.chain(rest.iter().map(|word| (*word).to_owned())).collect()
}

fn iscsiadm(what: &'static str, arguments: &[String]) -> Result<(), InitiatorError> {
    let program = program(PROGRAM).ok_or(InitiatorError::Missing)?;
    let done = Command::new(program).args(arguments).output();
    let done = done.map_err(|source| InitiatorError::Io { what: PROGRAM.to_owned(), source })?;
    if done.status.success() { Ok(()) } else { Err(InitiatorError::Refused { what, said: words(&done) }) }
}

/// The last line of what a program said.
fn words(done: &Output) -> String {
    let said = String::from_utf8_lossy(&done.stderr);
    let last = said.lines().rev().find(|line| !line.trim().is_empty());
    last.map_or_else(
        || done.status.to_string(),
        |line| line.trim().trim_start_matches("iscsiadm: ").to_owned(),
    )
}

impl Session {
    /// The disk's directory in sysfs, once it is there.
    fn disk(&self) -> Result<PathBuf, InitiatorError> {
        within(DISK, || self.try_disk()).ok_or_else(|| InitiatorError::NoDisk(self.target.clone()))
    }

    /// Waits until this node of the disk can be opened. The kernel tells of a disk in sysfs first, and lets it be opened
    /// later (`device_add_disk`): until then an open fails with ENXIO.
    ///
    /// # Errors
    /// [`InitiatorError::NoDisk`] if it never can, or the open's own.
    pub fn wait_for_node(&self, node: &Path) -> Result<(), InitiatorError> {
        let opened = within(DISK, || match fs::File::open(node) {
            Err(e) if Errno::from_io_error(&e) == Some(Errno::NXIO) => None,
            other => Some(other),
        });
        let opened = opened.ok_or_else(|| InitiatorError::NoDisk(self.target.clone()))?;
        let what = node.display().to_string();
        opened.map(drop).map_err(|source| InitiatorError::Io { what, source })
    }

    /// `session3/device/target2:0:0/2:0:0:1/block/sdb`.
    fn try_disk(&self) -> Option<PathBuf> {
        let lun = format!(":{DISK_LUN}");
        let children = |path: &Path| {
            let entries = fs::read_dir(path).into_iter().flatten();
            entries.filter_map(|entry| Some(entry.ok()?.path())).collect::<Vec<_>>()
        };
        let named = |path: &PathBuf, end: &str| path.to_string_lossy().ends_with(end);
        children(&self.directory.join("device"))
            .iter()
            .flat_map(|target| children(target))
            .filter(|unit| named(unit, &lun))
            .flat_map(|unit| children(&unit.join("block")))
            .find(|disk| disk.join("dev").exists())
    }

    /// Major and minor number of the disk.
    ///
    /// # Errors
    /// [`InitiatorError::NoDisk`], the system's.
    pub fn numbers(&self) -> Result<(u64, u64), InitiatorError> {
        let disk = self.disk()?;
        numbers_of(&disk).ok_or_else(|| InitiatorError::NoDisk(self.target.clone()))
    }

    /// True while the session has a disk with these numbers. When somebody has logged out, or has taken the disk away, they go to
    /// whatever disk comes next.
    pub fn has_disk(&self, numbers: (u64, u64)) -> bool {
        self.try_disk().and_then(|disk| numbers_of(&disk)) == Some(numbers)
    }

    /// Sees to it that the disk gives up no command earlier than so. Also for a session that was found: whoever logged in may
    /// have died before it had said so, and then it is the kernel's 30 s. True if it was less.
    ///
    /// # Errors
    /// [`InitiatorError`].
    pub fn be_patient(&self, patience: Patience) -> Result<bool, InitiatorError> {
        let setting = self.disk()?.join("device/timeout");
        let least = patience.command.as_secs();
        // One that says nothing of it is told.
        let is_less = line(&setting).and_then(|now| now.parse::<u64>().ok()).is_none_or(|now| now < least);
        if is_less {
            write(&setting, &least.to_string())?;
        }
        Ok(is_less)
    }

    /// Bytes that the disk has with this directory in sysfs.
    fn size_of(&self, disk: &Path) -> Result<u64, InitiatorError> {
        let sectors = line(&disk.join("size")).and_then(|text| text.parse::<u64>().ok());
        sectors.map(|n| n * lh_block::SECTOR).ok_or_else(|| InitiatorError::NoDisk(self.target.clone()))
    }

    /// Has the kernel ask for the disk's size anew, in use or not, until it is `size`, which the target tells already. False if it is not
    /// after this patience: the kernel asks no disk whose initiator has not logged in again yet, and whoever wants it to is told that all
    /// is well (`scsi_rescan_device` of drivers/scsi/scsi_scan.c, `store_rescan_field` of drivers/scsi/scsi_sysfs.c).
    ///
    /// # Errors
    /// [`InitiatorError`].
    pub fn grow(&self, size: u64, patience: Duration) -> Result<bool, InitiatorError> {
        let disk = self.disk()?;
        let deadline = Instant::now() + patience;
        loop {
            if self.size_of(&disk)? == size {
                return Ok(true);
            }
            if line(&disk.join("device/state")).as_deref() == Some(RUNNING) {
                write(&disk.join("device/rescan"), "1")?;
                if self.size_of(&disk)? == size {
                    return Ok(true);
                }
            }
            if Instant::now() > deadline {
                return Ok(false);
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Logs out, forgets the target, and waits until the kernel has ended the session: it does so by and by after
    /// `iscsiadm` has returned (`ISCSI_UEVENT_DESTROY_SESSION_ASYNC`), and whoever looks meanwhile takes the session, and a
    /// disk that is about to go, for a living one. The caller has made sure that the disk is not in use.
    ///
    /// # Errors
    /// [`InitiatorError`].
    pub fn logout(&self) -> Result<(), InitiatorError> {
        if !self.directory.exists() {
            // Somebody else has logged out, and perhaps forgotten the target.
            let _ = iscsiadm("forget the target", &node(&self.target, self.portal, &["--op=delete"]));
            return Ok(());
        }
        iscsiadm("log out", &node(&self.target, self.portal, &["--logout"]))?;
        iscsiadm("forget the target", &node(&self.target, self.portal, &["--op=delete"]))?;
        self.wait_for_end(DISK)
    }

    fn wait_for_end(&self, patience: Duration) -> Result<(), InitiatorError> {
        within(patience, || (!self.directory.exists()).then_some(()))
            .ok_or_else(|| InitiatorError::NoEnd(self.target.clone()))
    }

    /// The same where the target will not come back: what waits for it fails.
    ///
    /// # Errors
    /// [`InitiatorError`].
    pub fn abandon(self) -> Result<(), InitiatorError> {
        match write(&self.directory.join("recovery_tmo"), "1") {
            // The kernel takes no other time for a session whose connection it has lost already, whose target is away that is
            // (`iscsi_session_attr` of drivers/scsi/scsi_transport_iscsi.c). Nor has it to: logging out ends what waits there.
            Err(InitiatorError::Io { source, .. }) if Errno::from_io_error(&source) == Some(Errno::BUSY) => {}
            written => written?,
        }
        self.logout()
    }
}

/// The numbers of a disk with this directory in sysfs.
fn numbers_of(disk: &Path) -> Option<(u64, u64)> {
    let text = line(&disk.join("dev"))?;
    let (major, minor) = text.split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// What `look` finds, looked for again and again; `None` if it finds nothing in this time.
fn within<T>(time: Duration, mut look: impl FnMut() -> Option<T>) -> Option<T> {
    let deadline = Instant::now() + time;
    loop {
        let found = look();
        if found.is_some() || Instant::now() > deadline {
            return found;
        }
        std::thread::sleep(LOOK);
    }
}

fn write(path: &Path, text: &str) -> Result<(), InitiatorError> {
    fs::write(path, text).map_err(|source| InitiatorError::Io { what: path.display().to_string(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An engine that gives up for that is not started again.
    #[test]
    fn a_daemon_that_cannot_be_looked_for_is_not_taken_for_absent() {
        let (short, nothing) = (|| Err(io::Error::from(Errno::MFILE)), || Ok(String::new()));
        assert!(is_idle_by(&nothing(), &nothing()));
        assert!(!is_idle_by(&short(), &nothing()) && !is_idle_by(&nothing(), &short()));
    }

    #[test]
    fn the_daemon_is_found_by_its_socket() {
        let head = "Num       RefCount Protocol Flags    Type St Inode Path\n";
        let daemon =
            "0000000000000000: 00000002 00000000 00010000 0001 01 20817 @ISCSIADM_ABSTRACT_NAMESPACE\n";
        assert!(daemon_listens(&format!("{head}{daemon}")));
        assert!(!daemon_listens(head));
    }

    #[test]
    fn a_daemon_that_is_started_when_it_is_asked_is_none_that_is_missing() {
        let here = std::env::current_exe().unwrap();
        let here = here.display();
        assert!(starts_daemon(&format!("# comment\niscsid.startup = {here} start\nnode.startup = manual\n")));
        assert!(!starts_daemon(&format!("#iscsid.startup = {here}\n")));
        assert!(!starts_daemon("iscsid.startup = /no/such/program\n"));
        assert!(!starts_daemon("node.startup = manual\n"));
        let systemctl = "iscsid.startup = /bin/systemctl start iscsid.socket\n";
        let runs = Path::new(SYSTEMD).is_dir() && Path::new("/bin/systemctl").exists();
        assert_eq!(starts_daemon(systemctl), runs);
    }

    #[test]
    fn a_target_is_named_as_iscsiadm_wants_it() {
        let words = node("iqn.2019-10.io.longhorn:db", "127.0.0.1:3261".parse().unwrap(), &["--login"]);
        assert_eq!(
            words.join(" "),
            "--mode=node --targetname=iqn.2019-10.io.longhorn:db --portal=127.0.0.1:3261 --login"
        );
    }

    #[test]
    fn a_session_is_its_targets_alone() {
        let top = tempfile::tempdir().unwrap();
        let session = top.path().join("session7");
        fs::create_dir(&session).unwrap();
        fs::write(session.join("targetname"), "iqn.2019-10.io.longhorn:db\n").unwrap();
        let connections = top.path().join("connections");
        let connection = connections.join("connection7:0");
        fs::create_dir_all(&connection).unwrap();
        fs::write(connection.join("persistent_port"), "3261\n").unwrap();
        let at = |address: &str, target: &str| {
            fs::write(connection.join("persistent_address"), format!("{address}\n")).unwrap();
            let found = session_at(&session, &connections, target).unwrap();
            found.map(|found| found.portal.to_string())
        };
        let (own, other) = ("iqn.2019-10.io.longhorn:db", "iqn.2019-10.io.longhorn:d");
        assert_eq!(at("127.0.0.1", other), None);
        assert_eq!(at("127.0.0.1", own).as_deref(), Some("127.0.0.1:3261"));
        // Another host's volume of that name.
        assert_eq!(at("192.0.2.7", own), None);
        // A directory of that name stands for what cannot be read just now.
        let unread = top.path().join("session8");
        fs::create_dir_all(unread.join("targetname")).unwrap();
        assert!(session_at(&unread, &connections, own).is_err(), "it may be the one");
        assert!(session_at(&top.path().join("session9"), &connections, own).unwrap().is_none(), "it is gone");
        let disk = session.join("device/target2:0:0/2:0:0:1/block/sdb");
        let other = session.join("device/target2:0:0/2:0:0:11/block/sdc");
        for path in [&disk, &other] {
            fs::create_dir_all(path).unwrap();
        }
        fs::write(other.join("dev"), "8:32\n").unwrap();
        let found =
            Session { directory: session, target: "t".into(), portal: "127.0.0.1:3260".parse().unwrap() };
        assert_eq!(found.try_disk(), None, "another unit, and a disk that is not ready");
        fs::write(disk.join("dev"), "8:16\n").unwrap();
        fs::write(disk.join("size"), "2048\n").unwrap();
        assert_eq!(found.try_disk(), Some(disk.clone()));
        assert_eq!(found.numbers().unwrap(), (8, 16));
        assert!(found.has_disk((8, 16)) && !found.has_disk((8, 32)));
        assert_eq!(found.size_of(&disk).unwrap(), 1 << 20);
        // As the kernel makes it; as it is then; and as somebody has set it who wants more.
        let patience = Patience { command: Duration::from_secs(360), away: Duration::from_secs(3600) };
        fs::create_dir(disk.join("device")).unwrap();
        for (before, was_less, after) in
            [("30\n", true, "360"), ("360\n", false, "360\n"), ("500\n", false, "500\n")]
        {
            fs::write(disk.join("device/timeout"), before).unwrap();
            assert_eq!(found.be_patient(patience).unwrap(), was_less);
            assert_eq!(fs::read_to_string(disk.join("device/timeout")).unwrap(), after);
        }
    }

    /// As the kernel does it: it takes what is written at any time, and asks the target only while the session has a connection.
    #[test]
    fn a_disk_grows_once_its_initiator_has_logged_in_again() {
        let top = tempfile::tempdir().unwrap();
        let disk = top.path().join("device/target2:0:0/2:0:0:1/block/sdb");
        let device = disk.join("device");
        fs::create_dir_all(&device).unwrap();
        for (file, text) in
            [("dev", "8:16\n"), ("size", "2048\n"), ("device/state", "blocked\n"), ("device/rescan", "")]
        {
            fs::write(disk.join(file), text).unwrap();
        }
        let portal = "127.0.0.1:3260".parse().unwrap();
        let session = Session { directory: top.path().into(), target: "t".into(), portal };
        let asked = || fs::read_to_string(device.join("rescan")).unwrap() == "1";
        assert!(!session.grow(2 << 20, Duration::ZERO).unwrap() && !asked(), "it is asked while it is away");
        std::thread::scope(|scope| {
            let growing = scope.spawn(|| session.grow(2 << 20, Duration::from_secs(60)));
            std::thread::sleep(Duration::from_millis(50));
            assert!(!asked() && !growing.is_finished());
            fs::write(device.join("state"), "running\n").unwrap();
            while !asked() {
                std::thread::sleep(Duration::from_millis(1));
            }
            assert!(!growing.is_finished(), "it has the size that it had");
            let beside = top.path().join("size");
            fs::write(&beside, "4096\n").unwrap();
            fs::rename(beside, disk.join("size")).unwrap();
            assert!(growing.join().unwrap().unwrap());
        });
        // Nobody is asked for what is there.
        fs::write(device.join("rescan"), "").unwrap();
        assert!(session.grow(2 << 20, Duration::ZERO).unwrap() && !asked());
    }

    #[test]
    fn a_session_has_ended_when_the_kernel_has_it_no_more() {
        let top = tempfile::tempdir().unwrap();
        let directory = top.path().join("session3");
        fs::create_dir(&directory).unwrap();
        let portal = "127.0.0.1:3260".parse().unwrap();
        let session = Session { directory: directory.clone(), target: "t".into(), portal };
        let kept = session.wait_for_end(Duration::from_millis(1)).unwrap_err();
        assert!(matches!(kept, InitiatorError::NoEnd(target) if target == "t"));
        let ending = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            fs::remove_dir(directory).unwrap();
        });
        session.wait_for_end(Duration::from_secs(60)).unwrap();
        assert!(!session.directory.exists());
        ending.join().unwrap();
    }

    #[test]
    fn a_node_is_waited_for_until_it_can_be_opened() {
        let top = tempfile::tempdir().unwrap();
        let node = top.path().join("disk");
        let portal = "127.0.0.1:3260".parse().unwrap();
        let session = Session { directory: top.path().into(), target: "t".into(), portal };
        assert!(matches!(session.wait_for_node(&node), Err(InitiatorError::Io { .. })), "no node at all");
        // Opening a socket fails with ENXIO too.
        let socket = std::os::unix::net::UnixListener::bind(&node).unwrap();
        let later = node.clone();
        let coming = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            drop(socket);
            let beside = later.with_extension("new");
            fs::write(&beside, "").unwrap();
            fs::rename(beside, later).unwrap();
        });
        session.wait_for_node(&node).unwrap();
        coming.join().unwrap();
    }
}
