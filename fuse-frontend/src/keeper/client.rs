//! An engine's, or a person's, end of a keeper's socket.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use nix::poll::{PollFd, PollFlags, poll};
use thiserror::Error;

use super::loop_device::LoopDevice;
use super::message::Message;
use super::refusal::kind;
use super::socket::{receive, send};
use crate::init::Agreement;

/// What a keeper tells of itself and its connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Info {
    /// The volume's name.
    pub volume: String,
    /// Whose it is: a root's path.
    pub owner: String,
    /// The device node, there or not yet there.
    pub node: PathBuf,
    /// The keeper.
    pub pid: i32,
    /// The engine that is attached.
    pub engine: Option<i32>,
    /// An engine was attached before: there may be requests that it read and never answered.
    pub served_before: bool,
    /// Device number of the FUSE file system, also its directory's name in fusectl. `None` before the first engine.
    pub connection: Option<u64>,
    /// What was agreed with the kernel. `None` before the first engine.
    pub agreement: Option<Agreement>,
    /// N of /dev/loopN, once the device is there.
    pub loop_number: Option<u32>,
    /// The kernel's number of that binding (`/sys/block/loopN/diskseq`).
    pub loop_sequence: Option<u64>,
}

impl Info {
    /// The loop device, once there.
    pub fn device(&self) -> Option<PathBuf> {
        self.loop_number.map(|number| PathBuf::from(format!("/dev/loop{number}")))
    }

    /// True while that binding lasts; also where there is none yet.
    pub(crate) fn is_bound(&self) -> bool {
        self.bound().is_none_or(LoopDevice::is_bound)
    }

    /// The numbers of the loop device while that binding lasts.
    pub(crate) fn rdev(&self) -> Option<u64> {
        self.bound().filter(|device| device.is_bound())?.rdev().ok()
    }

    fn bound(&self) -> Option<LoopDevice> {
        let (number, sequence) = self.loop_number.zip(self.loop_sequence)?;
        Some(LoopDevice { number, sequence })
    }

    fn read(message: &Message) -> Option<Self> {
        Some(Self {
            volume: message.get("volume")?.into(),
            owner: message.get("owner")?.into(),
            node: message.get("node")?.into(),
            pid: message.number("pid")?,
            engine: message.number("engine"),
            served_before: message.get("served") == Some("1"),
            connection: message.number("connection"),
            agreement: (|| {
                Some(Agreement {
                    minor: message.number("minor")?,
                    flags: message.number("flags")?,
                    max_write: message.number("max_write")?,
                })
            })(),
            loop_number: message.number("loop"),
            loop_sequence: message.number("sequence"),
        })
    }
}

/// Why a keeper did not do what it was asked for.
#[derive(Debug, Error)]
pub enum KeeperError {
    /// It could not be reached, or was lost.
    #[error("the keeper does not answer: {0}")]
    Lost(#[from] io::Error),
    /// The volume is another root's.
    #[error("{0}")]
    Owner(String),
    /// Another engine serves the volume.
    #[error("{0}")]
    Busy(String),
    /// It has been stopped and is about to end; a new one can be started then.
    #[error("{0}")]
    Ending(String),
    /// The device is open or mounted somewhere: [`crate::users_of`] tells where.
    #[error("{0}")]
    InUse(String),
    /// Something stands where the device node should.
    #[error("{0}")]
    Node(String),
    /// The device that the last engine left behind has other blocks, which a device in use cannot change.
    #[error("{0}")]
    Blocks(String),
    /// Anything else, in words.
    #[error("{0}")]
    Failed(String),
}

/// A connection to a keeper. The one that has attached is the engine's: the keeper takes its end for the engine's death.
#[derive(Debug)]
pub struct Keeper {
    stream: UnixStream,
}

impl Keeper {
    /// Connects to the keeper at a socket.
    ///
    /// # Errors
    /// `NotFound` and `ConnectionRefused`: there is no keeper.
    pub fn connect(socket: &Path) -> io::Result<Self> {
        Ok(Self { stream: UnixStream::connect(socket)? })
    }

    /// What the keeper has. Never waits for an engine.
    ///
    /// # Errors
    /// [`KeeperError::Lost`].
    pub fn info(&mut self) -> Result<Info, KeeperError> {
        let answer = self.ask(&Message::new("info"))?;
        info(&answer)
    }

    /// Becomes the volume's engine: the /dev/fuse descriptor (non-blocking, shared with the keeper), and what is known
    /// of its connection. Waits up to 10 s for an engine before to be gone.
    ///
    /// # Errors
    /// [`KeeperError::Busy`] if it stays, [`KeeperError::Owner`], [`KeeperError::Node`] or in words.
    pub fn attach(&mut self, owner: &str) -> Result<(OwnedFd, Info), KeeperError> {
        send(&self.stream, &Message::new("attach").with("owner", owner), None)?;
        let (answer, descriptor) = receive(&self.stream)?;
        let info = info(&accepted(answer)?)?;
        let descriptor =
            descriptor.ok_or_else(|| KeeperError::Failed("the keeper gave no descriptor".into()))?;
        Ok((descriptor, info))
    }

    /// Gives a keeper that has no connection yet the one of a keeper that died, and becomes its engine.
    ///
    /// # Errors
    /// [`KeeperError::Owner`] or in words.
    pub fn adopt(&mut self, owner: &str, fuse: &OwnedFd, known: &Info) -> Result<Info, KeeperError> {
        let agreement = known.agreement;
        let request = Message::new("adopt")
            .with("owner", owner)
            .with_option("connection", known.connection)
            .with_option("loop", known.loop_number)
            .with_option("sequence", known.loop_sequence)
            .with_option("minor", agreement.map(|a| a.minor))
            .with_option("flags", agreement.map(|a| a.flags))
            .with_option("max_write", agreement.map(|a| a.max_write));
        send(&self.stream, &request, Some(fuse.as_fd()))?;
        let (answer, _) = receive(&self.stream)?;
        info(&accepted(answer)?)
    }

    /// Says that requests are being answered now: the loop device and its node are made, if they are not there.
    /// Other threads must serve the descriptor while this waits.
    ///
    /// # Errors
    /// [`KeeperError::Node`], [`KeeperError::Blocks`] or in words.
    pub fn serve(&mut self, block_size: u32) -> Result<Info, KeeperError> {
        let answer = self.ask(&Message::new("serve").with("block_size", block_size))?;
        info(&answer)
    }

    /// Takes the volume's new size over to the device. Other threads must serve.
    ///
    /// # Errors
    /// In words.
    pub fn resize(&mut self) -> Result<(), KeeperError> {
        self.ask(&Message::new("resize")).map(drop)
    }

    /// Removes device, node and connection, and ends the keeper. Other threads must serve until it returns; the
    /// connection is gone when they have closed the descriptor.
    ///
    /// # Errors
    /// [`KeeperError::InUse`]: nothing has changed.
    pub fn stop(&mut self) -> Result<(), KeeperError> {
        self.ask(&Message::new("stop"))?;
        self.wait_gone();
        Ok(())
    }

    /// The same while no engine is attached. Every request that waits for one fails.
    ///
    /// # Errors
    /// [`KeeperError::Busy`] if an engine is there, [`KeeperError::InUse`]: the device stays, and fails every request.
    pub fn stop_by_force(&mut self) -> Result<(), KeeperError> {
        self.ask(&Message::new("stop").with("force", 1))?;
        self.wait_gone();
        Ok(())
    }

    /// The same whoever has the device open: for them it fails, and is gone when the last one closes it.
    ///
    /// # Errors
    /// [`KeeperError::Busy`] if an engine is there.
    pub fn abandon(&mut self) -> Result<(), KeeperError> {
        self.ask(&Message::new("stop").with("force", 1).with("abandon", 1))?;
        self.wait_gone();
        Ok(())
    }

    /// False once the keeper has died.
    pub fn is_alive(&self) -> bool {
        !self.hung_up(0)
    }

    /// The keeper ends right after its last answer.
    fn wait_gone(&self) {
        const PATIENCE_MS: u16 = 5_000;
        if !self.hung_up(PATIENCE_MS) {
            tracing::warn!("the keeper takes its time to end");
        }
    }

    fn hung_up(&self, millis: u16) -> bool {
        let mut watched = [PollFd::new(self.stream.as_fd(), PollFlags::empty())];
        poll(&mut watched, millis).is_ok_and(|ready| ready > 0)
    }

    fn ask(&mut self, request: &Message) -> Result<Message, KeeperError> {
        send(&self.stream, request, None)?;
        let (answer, _) = receive(&self.stream)?;
        accepted(answer)
    }
}

fn info(answer: &Message) -> Result<Info, KeeperError> {
    Info::read(answer).ok_or_else(|| KeeperError::Failed("the keeper's answer lacks a field".into()))
}

/// Turns a refusal into its error.
fn accepted(answer: Message) -> Result<Message, KeeperError> {
    if answer.word == "ok" {
        return Ok(answer);
    }
    let text = answer.get("text").unwrap_or("the keeper refused").to_owned();
    Err(match answer.get("kind") {
        Some(kind::OWNER) => KeeperError::Owner(text),
        Some(kind::BUSY) => KeeperError::Busy(text),
        Some(kind::ENDING) => KeeperError::Ending(text),
        Some(kind::IN_USE) => KeeperError::InUse(text),
        Some(kind::NODE) => KeeperError::Node(text),
        Some(kind::BLOCKS) => KeeperError::Blocks(text),
        _ => KeeperError::Failed(text),
    })
}
