//! A listening socket outlives the engine that listens on it: the engine leaves a copy with its instance manager, and the
//! next engine takes it up from there. The socket is never closed in between, so whoever connects while no engine runs
//! waits in its queue and is not refused.
//!
//! ```text
//! leave NAME, a descriptor  ->  done                  in place of the one that was there
//! fetch NAME                ->  done, a descriptor    without one: nothing was left
//! withdraw NAME             ->  done                  nobody is to connect any more
//! ```
//!
//! NAME is the process's. A message is one line in one piece, and is answered before the next one is sent. No data depends
//! on any of it: without a manager an engine listens anew, and clients are refused until it does.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustix::cmsg_space;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

use crate::host::Root;
use crate::transport::connect_within;

/// Longest message: a verb and a process's name.
const MESSAGE_MAX: usize = 256;

/// How long a manager may take to answer: on a busy disk a record of its own may take seconds to be stored. Without an
/// answer an engine cannot listen where the manager still does, and is started again.
const PATIENCE: Duration = Duration::from_secs(5);

/// What a manager answers; anything else is a refusal, in words.
pub(crate) const DONE: &str = "done";

/// What a process asks of its manager.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verb {
    /// Keep this.
    Leave,
    /// A copy of what was left.
    Fetch,
    /// Close what was left.
    Withdraw,
}

impl Verb {
    const ALL: [(&str, Self); 3] =
        [("leave", Self::Leave), ("fetch", Self::Fetch), ("withdraw", Self::Withdraw)];

    fn word(self) -> &'static str {
        Self::ALL.iter().find(|(_, verb)| *verb == self).map_or("", |(word, _)| word)
    }

    /// The verb of a line, and the process's name.
    pub(crate) fn of(line: &str) -> Option<(Self, &str)> {
        let (word, name) = line.split_once(' ')?;
        let (_, verb) = Self::ALL.iter().find(|(known, _)| *known == word)?;
        Some((*verb, name))
    }
}

/// Sends a line, and a copy of the descriptor with it.
pub(crate) fn send(stream: impl AsFd, line: &str, fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let fds = fd.map(|fd| [fd]);
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if let Some(fds) = &fds {
        control.push(SendAncillaryMessage::ScmRights(fds));
    }
    let text = format!("{line}\n");
    let sent = sendmsg(stream, &[IoSlice::new(text.as_bytes())], &mut control, SendFlags::NOSIGNAL)?;
    // So few bytes are taken whole, or the peer is not one of ours.
    if sent == text.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

/// Receives a line, and the descriptor that came with it. `UnexpectedEof`: the peer has gone.
pub(crate) fn receive(stream: impl AsFd) -> io::Result<(String, Option<OwnedFd>)> {
    let mut bytes = [0; MESSAGE_MAX];
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received =
        recvmsg(stream, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let mut fd = None;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(mut fds) = message {
            fd = fds.next();
        }
    }
    if received.bytes == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let line = std::str::from_utf8(&bytes[..received.bytes]).ok().and_then(|text| text.strip_suffix('\n'));
    Ok((line.ok_or(io::ErrorKind::InvalidData)?.to_owned(), fd))
}

/// A process's deposit with its instance manager: one listening socket.
#[derive(Debug)]
pub struct Deposit {
    socket: PathBuf,
    name: String,
    /// The connection to the manager that has the copy.
    manager: Option<UnixStream>,
    /// For the next manager, if that one ends.
    left: Option<OwnedFd>,
}

impl Deposit {
    /// The deposit of the process of this name with the manager of this root.
    pub fn of(root: &Root, name: &str) -> Self {
        Self { socket: root.deposit_socket(), name: name.to_owned(), manager: None, left: None }
    }

    /// A copy of what this process, or the one before it, has left.
    ///
    /// # Errors
    /// There is no manager (`NotFound`, `ConnectionRefused`), or it does not answer within 5 s.
    pub fn fetch(&mut self) -> io::Result<Option<OwnedFd>> {
        self.ask(Verb::Fetch, None)
    }

    /// Leaves a copy, in place of the one before.
    ///
    /// # Errors
    /// As for [`Deposit::fetch`]; `PermissionDenied` if the manager does not run this process. [`Deposit::renew`] tries
    /// again.
    pub fn leave(&mut self, listener: BorrowedFd<'_>) -> io::Result<()> {
        let left = listener.try_clone_to_owned()?;
        let asked = self.ask(Verb::Leave, Some(left.as_fd())).map(drop);
        self.left = Some(left);
        asked
    }

    /// Has the copy closed.
    ///
    /// # Errors
    /// As for [`Deposit::fetch`]: then no manager has one.
    pub fn withdraw(&mut self) -> io::Result<()> {
        self.left = None;
        self.ask(Verb::Withdraw, None).map(drop)
    }

    /// Leaves the copy again if the manager that had it has ended.
    ///
    /// # Errors
    /// As for [`Deposit::leave`].
    pub fn renew(&mut self) -> io::Result<()> {
        if self.manager.as_ref().is_some_and(|stream| !is_closed(stream)) {
            return Ok(());
        }
        self.manager = None;
        let Some(left) = self.left.take() else { return Ok(()) };
        let asked = self.ask(Verb::Leave, Some(left.as_fd())).map(drop);
        self.left = Some(left);
        asked
    }

    fn ask(&mut self, verb: Verb, fd: Option<BorrowedFd<'_>>) -> io::Result<Option<OwnedFd>> {
        let stream = match self.manager.take() {
            Some(stream) => stream,
            None => connect_within(PATIENCE, &self.socket)?,
        };
        send(&stream, &format!("{} {}", verb.word(), self.name), fd)?;
        let (answer, fd) = receive(&stream)?;
        // A connection with an answer that did not come in time is not used again.
        self.manager = Some(stream);
        match answer.as_str() {
            DONE => Ok(fd),
            refused => Err(io::Error::new(io::ErrorKind::PermissionDenied, refused.to_owned())),
        }
    }
}

/// True if the peer has closed its end: it never says anything unasked.
fn is_closed(stream: &UnixStream) -> bool {
    let mut polls = [PollFd::new(stream.as_fd(), PollFlags::POLLIN)];
    poll(&mut polls, PollTimeout::ZERO).is_ok_and(|n| n > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_a_verb_and_a_name() {
        for (word, verb) in Verb::ALL {
            assert_eq!(Verb::of(&format!("{} demo-e-0", verb.word())), Some((verb, "demo-e-0")), "{word}");
        }
        assert_eq!(Verb::of("leave"), None);
        assert_eq!(Verb::of("take demo-e-0"), None);
        let longest = "n".repeat(lh_block::PROCESS_NAME_MAX);
        assert!(format!("withdraw {longest}\n").len() < MESSAGE_MAX);
    }

    #[test]
    fn what_is_no_line_is_refused() {
        let (a, b) = UnixStream::pair().unwrap();
        rustix::io::write(&a, b"leave demo").unwrap();
        assert_eq!(receive(&b).unwrap_err().kind(), io::ErrorKind::InvalidData);
        drop(a);
        assert_eq!(receive(&b).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }
}
