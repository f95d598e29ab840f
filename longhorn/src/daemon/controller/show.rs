//! How the volume is shown: what is made before the engine is open, what then, and how it is taken away.

mod door;
mod initiator;
mod iscsi;
mod nbd;
mod nbd_server;
mod ublk;

use std::fs::OpenOptions;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use control::host::Root;
use control::manager::STOP_PATIENCE;
use crossbeam_channel::RecvTimeoutError;
use fuse_frontend::keeper::KeeperError;
use fuse_frontend::{Attach, AttachError, Attached, NodeError, attach, node};
use nix::fcntl::OFlag;

use door::Door;
use initiator::Initiator;
use iscsi::Iscsi;
use nbd::Nbd;
use nbd_server::NbdServer;
use ublk::Ublk;

use super::ControllerArgs;
use super::queues::{DEPTH, Memory, Notice, Order, Queues, SOCKETS};
use crate::arguments::Frontend;
use crate::daemon::{GivesUp, keeper};
use crate::kernel;

/// How long what was in flight when the frontend ends may take, and clients to take their answers, until whoever asked is told
/// that it is not over yet. It goes on, and is over once all of that is.
const HIDING: Duration = Duration::from_secs(15);

/// An engine that its manager ends has so much of the manager's patience left to flush and to close its replicas, and to say why it
/// does not end: behind that it is killed.
const FLUSHING: Duration = Duration::from_secs(10);

const _: () = {
    let hidden = GLANCE.as_secs() + HIDING.as_secs() + ublk::REMOVED.as_secs();
    assert!(hidden + FLUSHING.as_secs() < STOP_PATIENCE.as_secs());
};

/// How long the kernel may take to notice that the engine before is dead: its ring outlives it, on a busy machine with
/// O_DIRECT in flight by seconds.
const PREDECESSOR: Duration = Duration::from_secs(10);

/// How long a device that is to go may still be open by somebody who only looks at it (partition tables, udev).
const GLANCE: Duration = Duration::from_secs(2);

/// Between two looks at it.
const AGAIN: Duration = Duration::from_millis(10);

/// Between two looks at what the volume is shown by.
pub(super) const CARE: Duration = Duration::from_secs(5);

/// Where the volume can be reached.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Endpoint {
    pub(super) device: Option<PathBuf>,
    pub(super) uri: Option<String>,
}

/// The frontend on its way from chosen to shown.
pub(super) enum Show {
    Nothing,
    NbdServer(Box<NbdServer>),
    Nbd(Box<Nbd>),
    Initiator(Box<Initiator>),
    Fuse { options: Attach, block_size: u32, attached: Option<Box<Attached>> },
    Ublk(Box<Ublk>),
    Iscsi(Box<Iscsi>),
}

/// What the volume is to be shown by.
pub(super) struct Wish<'a> {
    pub(super) frontend: Frontend,
    pub(super) volume: &'a str,
    pub(super) root: &'a Root,
    /// This engine's name.
    pub(super) engine: &'a str,
    /// Where an iSCSI target keeps its reservations, if there is a place.
    pub(super) reservations: Option<PathBuf>,
    pub(super) block_size: u32,
    pub(super) ublk_queue_depth: u16,
    pub(super) listen: Option<SocketAddr>,
    /// How long the engine itself waits for replicas; zero: for ever.
    pub(super) io_timeout: Duration,
}

impl<'a> Wish<'a> {
    /// What a command line asks for; `engine` is the process's name.
    pub(super) fn of(args: &'a ControllerArgs, engine: &'a str, root: &'a Root) -> Self {
        Self {
            frontend: args.frontend,
            volume: &args.volume,
            root,
            engine,
            reservations: kept_in(args, root).as_deref().map(Root::reservations),
            block_size: args.block_size,
            ublk_queue_depth: args.ublk_queue_depth.unwrap_or(DEPTH),
            listen: args.frontend_listen,
            io_timeout: Duration::from_secs(args.io_timeout),
        }
    }
}

/// The directory of the volume's record. In a cluster the authority is a socket, and this node has a directory of the volume all the
/// same, with its key. An engine without an authority has neither.
fn kept_in(args: &ControllerArgs, root: &Root) -> Option<PathBuf> {
    let authority = args.authority.as_ref()?;
    let directories = [authority.clone(), root.volume(&args.volume)];
    directories.into_iter().find(|directory| directory.is_dir())
}

/// Why a frontend is not taken away.
pub(super) enum HideError {
    /// Somebody uses the device; nothing has changed.
    InUse(String),
    /// It failed.
    Failed(anyhow::Error),
}

impl Show {
    /// Takes what can be missing or taken before anything is started.
    pub(super) fn prepare(wish: &Wish<'_>) -> Result<Self> {
        let Wish { volume, block_size, .. } = *wish;
        let (root, door) = (wish.root.path(), Door::of(wish.root, wish.engine));
        let frontend = match wish.frontend {
            Frontend::Auto => kernel::choose(volume, root)?,
            frontend => frontend,
        };
        match frontend {
            Frontend::None => Ok(Self::Nothing),
            Frontend::NbdServer => {
                Ok(Self::NbdServer(Box::new(NbdServer::prepare(volume, wish.listen, door)?)))
            }
            Frontend::IscsiTarget => Ok(Self::Iscsi(Box::new(Iscsi::prepare(
                volume,
                wish.reservations.clone(),
                wish.listen,
                door,
            )?))),
            Frontend::Ublk => {
                let ublk = Ublk::prepare(volume, root, block_size, wish.ublk_queue_depth)?;
                Ok(Self::Ublk(Box::new(ublk)))
            }
            Frontend::Nbd => Ok(Self::Nbd(Box::new(Nbd::prepare(volume, root)?))),
            Frontend::Iscsi => {
                let initiator = Initiator::prepare(volume, wish.reservations.clone(), wish.io_timeout, door)?;
                Ok(Self::Initiator(Box::new(initiator)))
            }
            Frontend::Auto | Frontend::Fuse => {
                if let Some(missing) = fuse_frontend::missing() {
                    let text = format!("frontend fuse needs {missing}: load it, or use nbd-server");
                    return Err(GivesUp(text).into());
                }
                let options = keeper::attach_options(volume, root)?;
                Ok(Self::Fuse { options, block_size, attached: None })
            }
        }
    }

    /// The memory that a queue needs for it.
    pub(super) const fn memory(&self) -> Memory {
        match self {
            // Eight reads of /dev/fuse in flight take 3 MiB, used or not, and as much is left for what replicas answer; the
            // rest is 128 requests of 128 KiB, or fewer larger ones: the others wait in the kernel. None of it may be
            // given back: the kernel's copy into a page that is not there makes a killed engine lose the request.
            Self::Fuse { .. } => Memory { soft: 24 << 20, hard: 24 << 20, resident: true },
            Self::NbdServer(_) | Self::Iscsi(_) | Self::Nothing => SOCKETS,
            // 128 requests of 128 KiB, and none given back: as for FUSE, a request must not wait for memory.
            Self::Ublk(_) | Self::Nbd(_) | Self::Initiator(_) => {
                Memory { soft: 24 << 20, hard: 24 << 20, resident: true }
            }
        }
    }

    /// The frontend's name.
    pub(super) const fn name(&self) -> &'static str {
        match self {
            Self::Nothing => "none",
            Self::NbdServer(_) => "nbd-server",
            Self::Nbd(_) => "nbd",
            Self::Initiator(_) => "iscsi",
            Self::Fuse { .. } => "fuse",
            Self::Ublk(_) => "ublk",
            Self::Iscsi(_) => "iscsi-target",
        }
    }

    /// The kernel keeps requests that nobody answers for the next server, and takes any answer for the last word.
    pub(super) const fn keeps_requests(&self) -> bool {
        matches!(self, Self::Nbd(_) | Self::Initiator(_))
    }

    /// Why this process ends: its queues show nothing any more, and nobody here has wanted that. It ends as if it had been killed, since the
    /// device still has requests of clients that are gone, which no new server of this process would know. The next engine shows the volume
    /// by another device: at once, and later the more often that happens.
    pub(super) fn taken_away(&self) -> anyhow::Error {
        let (device, how) = match self {
            Self::Fuse { attached, .. } => (
                attached.as_ref().map(|fuse| fuse.info.node.clone()),
                "its FUSE connection was aborted (/sys/fs/fuse/connections) or unmounted",
            ),
            Self::Ublk(ublk) => (ublk.node(), "the ublk device was stopped or deleted"),
            _ => (None, "its server has ended"),
        };
        let device = device.map_or_else(|| "the device".to_owned(), |device| device.display().to_string());
        anyhow!(
            "{device} was taken away by somebody else, and fails who has it open ({how}): the next engine shows the volume by another device"
        )
    }

    /// Shows the volume, which is open and has so many bytes.
    pub(super) fn show(&mut self, queues: &Queues, size: u64) -> Result<Endpoint> {
        match self {
            Self::Nothing => Ok(Endpoint::default()),
            Self::Ublk(ublk) => ublk.show(queues, size),
            Self::Iscsi(iscsi) => {
                iscsi.show(queues)?;
                Ok(Endpoint { device: None, uri: Some(iscsi.uri()) })
            }
            Self::Nbd(nbd) => nbd.show(queues),
            Self::Initiator(initiator) => initiator.show(queues, size),
            Self::NbdServer(server) => Ok(Endpoint { device: None, uri: Some(server.show(queues)?) }),
            Self::Fuse { options, block_size, attached } => {
                let mut fuse = attach(options).map_err(attach_error)?;
                if fuse.may_have_lost {
                    tracing::warn!(
                        "this kernel does not hand out again what the engine before had read (Linux 6.9 does): a program that waits for that waits until the device is stopped"
                    );
                }
                if fuse.info.served_before {
                    queues.clients_have_stayed();
                }
                let agreement = fuse.agreement;
                queues.order(|_| Ok(Order::Fuse(fuse.fuse.try_clone()?, agreement)))?;
                let node = fuse.serve(*block_size, size).map_err(keeper_error)?.node.clone();
                *attached = Some(Box::new(fuse));
                Ok(Endpoint { device: Some(node), uri: None })
            }
        }
    }

    /// The volume has grown: the device grows, too. Clients of a server see it when they connect again.
    pub(super) fn resize(&mut self, size: u64) -> Result<()> {
        match self {
            Self::Fuse { options, attached: Some(attached), .. } => {
                replace_dead_keeper(attached, options);
                attached.resize(size).map_err(keeper_error)
            }
            Self::Ublk(ublk) => ublk.resize(size),
            Self::Nbd(nbd) => nbd.resize(size),
            Self::Initiator(initiator) => initiator.resize(size),
            Self::Fuse { attached: None, .. } | Self::Nothing | Self::NbdServer(_) | Self::Iscsi(_) => Ok(()),
        }
    }

    /// Looks after what the volume is shown by.
    pub(super) fn look_after(&mut self, queues: &Queues) {
        match self {
            Self::Fuse { options, block_size, attached: Some(attached) } => {
                replace_dead_keeper(attached, options);
                match attached.replace_lost_device(*block_size) {
                    Ok(false) => {
                        if let Some(rdev) = attached.rdev() {
                            look_after_node(&attached.info.node, rdev);
                        }
                    }
                    Ok(true) => tracing::warn!("somebody else had unbound the loop device; there is another"),
                    Err(e) => {
                        tracing::error!(
                            "somebody else has unbound the loop device, and there is no other: {e}"
                        );
                    }
                }
            }
            Self::Nbd(nbd) => {
                if let Err(e) = nbd.look_after(queues) {
                    tracing::error!("{e:#}");
                }
            }
            Self::Ublk(ublk) => ublk.look_after(),
            Self::NbdServer(server) => server.look_after(),
            Self::Iscsi(iscsi) => iscsi.look_after(),
            Self::Initiator(initiator) => initiator.look_after(),
            Self::Fuse { attached: None, .. } | Self::Nothing => {}
        }
    }

    /// Takes the volume away from its users, who have none of it in use. Where that takes too long it fails, goes on, and is to be
    /// asked for again.
    pub(super) fn hide(&mut self, queues: &Queues) -> Result<(), HideError> {
        match self {
            Self::Nothing => return Ok(()),
            Self::Ublk(ublk) => return ublk.hide(queues),
            Self::Iscsi(iscsi) => return iscsi.hide(queues),
            Self::Nbd(nbd) => return nbd.hide(queues),
            Self::Initiator(initiator) => return initiator.hide(queues),
            Self::NbdServer(server) => return server.hide(queues),
            Self::Fuse { options, attached, .. } => {
                let Some(fuse) = attached else { return wait_until_hidden(queues) };
                replace_dead_keeper(fuse, options);
                // Who has the device open is found by its node.
                if let Some(rdev) = fuse.rdev() {
                    look_after_node(&fuse.info.node, rdev);
                }
                match fuse.stop() {
                    Ok(()) => {}
                    Err(KeeperError::InUse(_)) => return Err(HideError::InUse(users(&fuse.info.node))),
                    Err(e) => return Err(HideError::Failed(e.into())),
                }
                // Its descriptor is one of those that keep the connection.
                *attached = None;
                queues.leave(queues.len());
            }
        }
        wait_until_hidden(queues)
    }
}

/// One that has died is missed at the next look only, and wanted by whoever is to change or to end the device before.
fn replace_dead_keeper(attached: &mut Attached, options: &Attach) {
    match attached.replace_dead_keeper(options) {
        Ok(false) => {}
        Ok(true) => tracing::warn!("the keeper had died; there is a new one"),
        Err(e) => tracing::error!("the keeper has died and there is no new one: {e}"),
    }
}

/// Waits until no queue shows anything any more of what it was told to end. Asked again after it has failed, it waits for the rest.
fn wait_until_hidden(queues: &Queues) -> Result<(), HideError> {
    wait_until_hidden_by(queues, Instant::now() + HIDING)
}

/// The same of what began to end before, and has until then.
fn wait_until_hidden_by(queues: &Queues, deadline: Instant) -> Result<(), HideError> {
    while queues.leaving() > 0 {
        match queues.notices.recv_deadline(deadline) {
            Ok(Notice::Hidden) => {
                queues.has_left();
            }
            Ok(Notice::Ended(result)) => {
                result.context("a queue has failed").map_err(HideError::Failed)?;
                queues.has_left();
            }
            Err(RecvTimeoutError::Timeout) => {
                return Err(HideError::Failed(anyhow!(
                    "what was in flight is not done after {} s, and the volume is hidden once it is: `longhornctl status` says what it waits for",
                    HIDING.as_secs()
                )));
            }
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
        }
    }
    Ok(())
}

/// Refuses to take a device away that somebody uses, where its own driver would not refuse. It is looked at by the volume's node, which is
/// made to be the device's, whatever somebody has done to it.
fn refuse_in_use(device: &Path, rdev: u64) -> Result<(), HideError> {
    keep_node(device, rdev).map_err(|e| HideError::Failed(e.into()))?;
    check_unused(device)
}

/// Refuses while somebody has the device open for longer than to look at it.
pub(super) fn check_unused(device: &Path) -> Result<(), HideError> {
    let deadline = Instant::now() + GLANCE;
    loop {
        match has_users(device) {
            Err(e) => {
                let text = format!("{} cannot be looked at: {e}", device.display());
                return Err(HideError::Failed(anyhow!(text)));
            }
            Ok(false) => return Ok(()),
            Ok(true) if Instant::now() > deadline => return Err(HideError::InUse(users(device))),
            Ok(true) => std::thread::sleep(AGAIN),
        }
    }
}

/// Makes the volume's node anew where it is gone, or another device's that is dead.
fn keep_node(place: &Path, rdev: u64) -> Result<(), NodeError> {
    if node::rdev(place) == Some(rdev) {
        return Ok(());
    }
    node::place(place, rdev, &[rdev])?;
    tracing::warn!("{} was gone, or another device's: it is made anew", place.display());
    Ok(())
}

/// The same now and then, while the volume is shown by a device that is there.
fn look_after_node(place: &Path, rdev: u64) {
    if let Err(e) = keep_node(place, rdev) {
        tracing::error!("the volume has no node: {e}");
    }
}

/// Somebody has the device open or mounted; so it is taken for where that cannot be told.
pub(super) fn is_in_use(device: &Path) -> bool {
    has_users(device).unwrap_or(true)
}

/// Why the device is in somebody's hands; `None` if it is in nobody's.
pub(super) fn in_whose_hands(device: &Path) -> Option<String> {
    match has_users(device) {
        Ok(false) => None,
        Ok(true) => Some(users(device)),
        Err(e) => Some(format!("{} cannot be looked at: {e}", device.display())),
    }
}

fn has_users(device: &Path) -> io::Result<bool> {
    // A mount, swap, or a device on top hold it exclusively.
    match OpenOptions::new().read(true).custom_flags(OFlag::O_EXCL.bits()).open(device) {
        Ok(own) => {
            drop(own);
            Ok(!fuse_frontend::users_of(device).is_empty())
        }
        Err(e) if e.kind() == io::ErrorKind::ResourceBusy => Ok(true),
        Err(e) => Err(e),
    }
}

/// Who uses a device, as one sentence.
fn users(device: &Path) -> String {
    let users: Vec<String> = fuse_frontend::users_of(device).iter().map(ToString::to_string).collect();
    let by = if users.is_empty() { "by a process that was not found".to_owned() } else { users.join(", ") };
    format!("{} is in use ({by}): unmount or close it first", device.display())
}

/// The address as others write it: this host's name where the server listens on all addresses.
fn host_of(address: SocketAddr) -> String {
    if !address.ip().is_unspecified() {
        return address.to_string();
    }
    format!("{}:{}", rustix::system::uname().nodename().to_string_lossy(), address.port())
}

fn attach_error(e: AttachError) -> anyhow::Error {
    match e {
        AttachError::Keeper(e) => keeper_error(e),
        e => e.into(),
    }
}

/// What stands in the way will stand there at the next start, too.
fn keeper_error(e: KeeperError) -> anyhow::Error {
    match e {
        KeeperError::Owner(text) | KeeperError::Node(text) | KeeperError::Blocks(text) => {
            GivesUp(text).into()
        }
        e => e.into(),
    }
}

/// The same of a volume's node; but what the system has too little of it may have again then.
fn node_error(e: NodeError) -> anyhow::Error {
    match e {
        NodeError::Live { .. } | NodeError::Foreign { .. } => GivesUp(e.to_string()).into(),
        NodeError::Io { .. } => e.into(),
    }
}

#[cfg(test)]
mod tests {
    use nix::sys::stat::{Mode, SFlag, makedev, mknod};

    use super::*;

    /// Loop devices without a file, those first that the kernel gives away last.
    fn dead_devices() -> Vec<u64> {
        let entries = std::fs::read_dir("/sys/block").into_iter().flatten().filter_map(Result::ok);
        let loops = entries.filter(|e| e.file_name().to_string_lossy().starts_with("loop"));
        let text = |path: PathBuf| std::fs::read_to_string(path).unwrap_or_default().trim().to_owned();
        let dead = loops.filter(|e| text(e.path().join("size")) == "0");
        let mut numbers: Vec<u64> =
            dead.filter_map(|e| text(e.path().join("dev")).strip_prefix("7:")?.parse().ok()).collect();
        numbers.sort_unstable_by(|a, b| b.cmp(a));
        numbers.into_iter().map(|number| makedev(7, number)).collect()
    }

    #[test]
    fn a_device_whose_node_is_gone_or_anothers_is_looked_at_all_the_same() {
        let test = "a_device_whose_node_is_gone_or_anothers_is_looked_at_all_the_same";
        let (dead, is_root) = (dead_devices(), nix::unistd::geteuid().is_root());
        let (&[own, other, ..], true) = (&dead[..], is_root) else {
            println!("SKIP {test}: needs root, and two loop devices without a file");
            return;
        };
        let directory = PathBuf::from(format!("/dev/.longhorn-test-{}", std::process::id()));
        let place = directory.join("vol");
        assert!(refuse_in_use(&place, own).is_ok(), "gone");
        assert_eq!(node::rdev(&place), Some(own));
        std::fs::remove_file(&place).unwrap();
        mknod(&place, SFlag::S_IFBLK, Mode::S_IRUSR, other).unwrap();
        assert!(refuse_in_use(&place, own).is_ok(), "another's");
        assert_eq!(node::rdev(&place), Some(own));
        std::fs::remove_file(&place).unwrap();
        std::fs::write(&place, "").unwrap();
        let refused = refuse_in_use(&place, own);
        assert!(matches!(refused, Err(HideError::Failed(e)) if e.to_string().contains("no block device")));
        std::fs::remove_dir_all(directory).unwrap();
    }

    /// An engine that gives up is not started again, and whoever has its device open waits for ever.
    #[test]
    fn an_engine_does_not_give_up_for_what_passes() {
        let gives_up = |e: &anyhow::Error| e.downcast_ref::<GivesUp>().is_some();
        let path = PathBuf::from("/dev/longhorn/vol");
        let short = || io::Error::from_raw_os_error(nix::errno::Errno::ENOMEM as i32);
        assert!(!gives_up(&node_error(NodeError::Io { path: path.clone(), source: short() })));
        assert!(gives_up(&node_error(NodeError::Foreign { path: path.clone() })));
        assert!(gives_up(&node_error(NodeError::Live { path, device: "sda".into() })));
        let refused = ublk_frontend::AttachError::Kernel { what: "the driver".into(), source: short() };
        assert!(!gives_up(&ublk::attach_error(refused)));
        assert!(gives_up(&ublk::attach_error(ublk_frontend::AttachError::Missing("the driver".into()))));
    }

    #[test]
    fn an_address_that_stands_for_all_is_told_by_the_hosts_name() {
        let host = |text: &str| host_of(text.parse().unwrap());
        assert_eq!(host("127.0.0.1:10809"), "127.0.0.1:10809");
        assert_eq!(host("[::1]:10809"), "[::1]:10809");
        assert!(!host("0.0.0.0:10809").starts_with("0.0.0.0"));
    }
}
