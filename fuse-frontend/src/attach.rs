//! An engine's way to its FUSE connection: through the keeper that has it, or a new one.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use thiserror::Error;

use crate::init::Agreement;
use crate::keeper::{Info, Keeper, KeeperError};
use crate::proto;

/// How long a keeper may take from its start to its first connection: a second on a busy machine.
const START: Duration = Duration::from_secs(15);

/// Between two looks whether a new keeper listens.
const LOOK: Duration = Duration::from_millis(5);

/// Where a volume's keeper is, and how one is started.
#[derive(Clone, Debug)]
pub struct Attach {
    /// The keeper's socket.
    pub socket: PathBuf,
    /// The root whose volume it is.
    pub owner: String,
    /// The program and its arguments that become the keeper, and call [`crate::keeper::run`] with the same socket and
    /// owner.
    pub command: Vec<OsString>,
    /// Where its standard error is appended to; `None`: to the engine's own. The keeper outlives whoever reads a pipe,
    /// so this is a file wherever that matters.
    pub log: Option<PathBuf>,
}

/// A FUSE connection that is ready to be served.
#[derive(Debug)]
pub struct Attached {
    /// /dev/fuse, for [`crate::Server`]: each queue clones it (`try_clone`).
    pub fuse: OwnedFd,
    /// What the keeper told last.
    pub info: Info,
    /// What was agreed with the kernel.
    pub agreement: Agreement,
    /// An engine before may have left requests unanswered, and this kernel cannot hand them out again (before Linux
    /// 6.9): whoever waits for them waits for ever, unless the connection is aborted.
    pub may_have_lost: bool,
    /// Its end is the engine's death, to the keeper.
    keeper: Keeper,
    /// Of the volume, in bytes, as was told last.
    size: u64,
}

/// Why there is no connection.
#[derive(Debug, Error)]
pub enum AttachError {
    /// The keeper's command cannot be run.
    #[error("cannot start the keeper {program:?}: {source}")]
    Spawn {
        /// The program.
        program: OsString,
        /// Why not.
        source: io::Error,
    },
    /// It ended at once; what it says is on standard error.
    #[error("the keeper ended at once with {0}")]
    Ended(std::process::ExitStatus),
    /// It does not listen.
    #[error("the keeper does not listen on {0}")]
    Silent(PathBuf),
    /// It refused.
    #[error(transparent)]
    Keeper(#[from] KeeperError),
    /// The kernel refused to hand requests out again.
    #[error("the kernel does not hand out the unanswered requests again: {0}")]
    Resend(io::Error),
}

/// Attaches this process to the volume's FUSE connection, starting a keeper if none lives. If there was an engine before,
/// the kernel has been told to hand its unanswered requests out again when this returns.
///
/// # Errors
/// [`AttachError`].
pub fn attach(options: &Attach) -> Result<Attached, AttachError> {
    let deadline = Instant::now() + START;
    let (keeper, fuse, info) = loop {
        let mut keeper = reach(options)?;
        match keeper.attach(&options.owner) {
            Ok((fuse, info)) => break (keeper, fuse, info),
            // The last one is on its way out.
            Err(KeeperError::Ending(_) | KeeperError::Lost(_)) if Instant::now() < deadline => {
                std::thread::sleep(LOOK);
            }
            Err(e) => return Err(e.into()),
        }
    };
    let agreement = info
        .agreement
        .ok_or_else(|| KeeperError::Failed("the keeper did not tell what was agreed".into()))?;
    if info.served_before && agreement.can_resend() {
        let notification = proto::resend_notification();
        nix::unistd::write(&fuse, &notification).map_err(|errno| AttachError::Resend(errno.into()))?;
    }
    let may_have_lost = info.served_before && !agreement.can_resend();
    Ok(Attached { fuse, info, agreement, may_have_lost, keeper, size: 0 })
}

impl Attached {
    /// Says that queues serve the descriptor now, a volume of `size` bytes, and waits for the device and its node: [`Info::node`].
    ///
    /// # Errors
    /// [`KeeperError::Node`] or in words.
    pub fn serve(&mut self, block_size: u32, size: u64) -> Result<&Info, KeeperError> {
        self.tell_size(size)?;
        self.info = self.keeper.serve(block_size)?;
        Ok(&self.info)
    }

    /// Has the kernel know how large the file is, before the loop device is as large: a read ends where the inode does, and the loop
    /// driver makes an I/O error of that.
    fn tell_size(&mut self, size: u64) -> Result<(), KeeperError> {
        self.size = size;
        let told = nix::unistd::write(&self.fuse, &proto::size_notification(size));
        told.map(drop)
            .map_err(|e| KeeperError::Failed(format!("the kernel does not take the size {size} over: {e}")))
    }

    /// The numbers of the loop device, as long as it is there.
    pub fn rdev(&self) -> Option<u64> {
        self.info.rdev()
    }

    /// Binds another loop device if somebody else has unbound the one that there was, as `losetup -D` does to every device that nobody
    /// has open: its number goes to whoever asks next, and the node must not name that one's device. True if there is
    /// another. Queues must serve.
    ///
    /// # Errors
    /// As [`Attached::serve`].
    pub fn replace_lost_device(&mut self, block_size: u32) -> Result<bool, KeeperError> {
        if self.info.is_bound() {
            return Ok(false);
        }
        self.serve(block_size, self.size)?;
        Ok(true)
    }

    /// Takes the volume's new size in bytes, which the queues' devices tell already, over to the device.
    ///
    /// # Errors
    /// In words.
    pub fn resize(&mut self, size: u64) -> Result<(), KeeperError> {
        self.tell_size(size)?;
        self.keeper.resize()
    }

    /// Removes device and node and ends the keeper, while the queues still serve. Afterwards they see the connection's
    /// end ([`crate::Server::is_gone`]).
    ///
    /// # Errors
    /// [`KeeperError::InUse`]: nothing has changed; [`crate::users_of`] tells by whom.
    pub fn stop(&mut self) -> Result<(), KeeperError> {
        self.keeper.stop()
    }

    /// Starts a new keeper if the old one has died, and gives it the connection. True if there is a new one.
    ///
    /// # Errors
    /// [`AttachError`]; the engine serves on, and the device ends with it.
    pub fn replace_dead_keeper(&mut self, options: &Attach) -> Result<bool, AttachError> {
        if self.keeper.is_alive() {
            return Ok(false);
        }
        let mut keeper = reach(options)?;
        self.info = keeper.adopt(&options.owner, &self.fuse, &self.info)?;
        self.keeper = keeper;
        Ok(true)
    }
}

/// A connection to the living keeper, or to a new one.
fn reach(options: &Attach) -> Result<Keeper, AttachError> {
    if let Some(keeper) = connect(&options.socket)? {
        return Ok(keeper);
    }
    let mut child = spawn(options)?;
    let deadline = Instant::now() + START;
    loop {
        if let Some(keeper) = connect(&options.socket)? {
            reap_when_it_ends(child);
            return Ok(keeper);
        }
        // One that finds another keeper in its place ends, and that other one is as good.
        if let Ok(Some(status)) = child.try_wait() {
            return connect(&options.socket)?.ok_or(AttachError::Ended(status));
        }
        if Instant::now() > deadline {
            let _ = child.kill();
            let _ = child.wait();
            return Err(AttachError::Silent(options.socket.clone()));
        }
        std::thread::sleep(LOOK);
    }
}

/// `None` if nobody listens.
fn connect(socket: &Path) -> Result<Option<Keeper>, AttachError> {
    match Keeper::connect(socket) {
        Ok(keeper) => Ok(Some(keeper)),
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => Ok(None),
        Err(e) => Err(KeeperError::Lost(e).into()),
    }
}

fn spawn(options: &Attach) -> Result<Child, AttachError> {
    let failed = |program: &OsString, source| AttachError::Spawn { program: program.clone(), source };
    let Some((program, arguments)) = options.command.split_first() else {
        return Err(failed(&OsString::new(), io::ErrorKind::InvalidInput.into()));
    };
    let log = match &options.log {
        Some(path) => {
            let file = File::options().create(true).append(true).mode(0o600).open(path);
            Stdio::from(file.map_err(|e| failed(program, e))?)
        }
        None => Stdio::inherit(),
    };
    Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .map_err(|e| failed(program, e))
}

/// A keeper that ends before its engine must not stay as a zombie.
fn reap_when_it_ends(mut child: Child) {
    const STACK: usize = 64 << 10;
    let waiting = std::thread::Builder::new().name("keeper".into()).stack_size(STACK);
    if let Err(e) = waiting.spawn(move || child.wait()) {
        tracing::debug!("the keeper will not be waited for: {e}");
    }
}
