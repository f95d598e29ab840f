//! A conversation with the kernel's NBD client: one request, its answer.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, send, setsockopt,
    socket, sockopt,
};
use nix::sys::time::TimeVal;

use super::message::{Reply, Request, find, number, replies, u16_at};

/// The family's name (NBD_GENL_FAMILY_NAME).
const FAMILY: &str = "nbd";

/// Longest answer: the list of devices is the longest, 20 bytes each, and a machine has 16 of them, or some hundreds.
const ANSWER: usize = 64 << 10;

/// How long the kernel may take. A disconnect waits for the client's threads, which wait for nobody else.
const PATIENCE_S: i64 = 30;

/// A socket to the kernel's NBD client.
#[derive(Debug)]
pub(super) struct Netlink {
    socket: OwnedFd,
    family: u16,
    sequence: u32,
}

impl Netlink {
    /// Finds the kernel's NBD client.
    ///
    /// # Errors
    /// `NotFound` if the kernel has none; otherwise the system's.
    pub(super) fn open() -> io::Result<Self> {
        let protocol = SockProtocol::NetlinkGeneric;
        let socket = socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, protocol)?;
        bind(socket.as_raw_fd(), &NetlinkAddr::new(0, 0))?;
        setsockopt(&socket, sockopt::ReceiveTimeout, &TimeVal::new(PATIENCE_S, 0))?;
        let mut netlink = Self { socket, family: number::CONTROL_FAMILY, sequence: 0 };
        let mut request = netlink.request(number::GET_FAMILY);
        request.text(number::FAMILY_NAME, FAMILY);
        let mut family = None;
        netlink
            .converse(request, |data| family = find(data, number::FAMILY_ID).and_then(|v| u16_at(v, 0)))?;
        netlink.family = family.ok_or(io::ErrorKind::NotFound)?;
        Ok(netlink)
    }

    /// A request to fill in.
    pub(super) fn request(&mut self, command: u8) -> Request {
        self.sequence = self.sequence.wrapping_add(1);
        Request::new(self.family, command, self.sequence)
    }

    /// Sends the request made last and shows what comes back.
    ///
    /// # Errors
    /// The kernel's errno; `TimedOut`.
    pub(super) fn converse(&mut self, request: Request, mut show: impl FnMut(&[u8])) -> io::Result<()> {
        let bytes = request.finish();
        send(self.socket.as_raw_fd(), &bytes, MsgFlags::empty())?;
        let mut answer = vec![0; ANSWER];
        loop {
            let len = match recv(self.socket.as_raw_fd(), &mut answer, MsgFlags::empty()) {
                Err(nix::errno::Errno::EINTR) => continue,
                Err(nix::errno::Errno::EAGAIN) => return Err(io::ErrorKind::TimedOut.into()),
                other => other?,
            };
            for reply in replies(&answer[..len]) {
                match reply {
                    Reply::End(sequence, result) if sequence == self.sequence => {
                        return result.map_err(io::Error::from_raw_os_error);
                    }
                    Reply::Data(sequence, data) if sequence == self.sequence => show(data),
                    // Of a conversation that was given up.
                    Reply::End(..) | Reply::Data(..) => {}
                }
            }
        }
    }
}
