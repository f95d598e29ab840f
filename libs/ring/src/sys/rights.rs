//! Descriptors over unix sockets (unix(7), SCM_RIGHTS).

use std::io::{self, IoSlice};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};

/// Most descriptors in one message.
pub const RIGHTS_MAX: usize = 8;

/// Bytes of a control message with that many.
#[expect(clippy::cast_possible_truncation, reason = "a few descriptors")]
// SAFETY: the macro's function only computes.
const CONTROL: usize = unsafe { libc::CMSG_SPACE((RIGHTS_MAX * size_of::<RawFd>()) as u32) } as usize;

/// Sends bytes, at least one, and copies of the descriptors with the first of them: how many bytes were taken.
///
/// # Errors
/// The system's; `EPIPE` if the peer is gone, without a signal.
///
/// # Panics
/// For more than [`RIGHTS_MAX`] descriptors.
pub fn send_with_fds(socket: BorrowedFd<'_>, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
    send(socket, bytes, fds, MsgFlags::empty())
}

/// The same without waiting.
///
/// # Errors
/// Likewise; `WouldBlock` if nothing can be taken.
///
/// # Panics
/// Likewise.
pub fn send_with_fds_now(socket: BorrowedFd<'_>, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
    send(socket, bytes, fds, MsgFlags::MSG_DONTWAIT)
}

fn send(socket: BorrowedFd<'_>, bytes: &[u8], fds: &[BorrowedFd<'_>], flags: MsgFlags) -> io::Result<usize> {
    assert!(fds.len() <= RIGHTS_MAX, "{} descriptors", fds.len());
    let raw: Vec<RawFd> = fds.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&raw)];
    let control: &[ControlMessage<'_>] = if raw.is_empty() { &[] } else { &rights };
    let flags = flags | MsgFlags::MSG_NOSIGNAL;
    Ok(sendmsg::<()>(socket.as_raw_fd(), &[IoSlice::new(bytes)], control, flags, None)?)
}

/// Receives bytes (0: the peer is gone), and the descriptors that came with them, closed on exec.
///
/// # Errors
/// The system's; `InvalidData` if there were more descriptors than [`RIGHTS_MAX`], or than this process may have. Those that
/// have come are closed then.
pub fn receive_with_fds(socket: BorrowedFd<'_>, bytes: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    receive(socket, bytes, libc::MSG_CMSG_CLOEXEC)
}

/// The same without waiting.
///
/// # Errors
/// Likewise; `WouldBlock` if nothing has come.
pub fn receive_with_fds_now(socket: BorrowedFd<'_>, bytes: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    receive(socket, bytes, libc::MSG_CMSG_CLOEXEC | libc::MSG_DONTWAIT)
}

fn receive(
    socket: BorrowedFd<'_>,
    bytes: &mut [u8],
    flags: libc::c_int,
) -> io::Result<(usize, Vec<OwnedFd>)> {
    // Aligned as a control message is.
    let mut space = [0_u64; CONTROL / size_of::<u64>()];
    let mut into = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    // SAFETY: msghdr is a plain C structure of integers and pointers, for which all-zero is a valid value.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut into;
    message.msg_iovlen = 1;
    message.msg_control = space.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&space);
    let received = loop {
        // SAFETY: the call writes into `bytes` and `space`, no more than their lengths say, and both outlive it.
        let received = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, flags) };
        match usize::try_from(received) {
            Ok(received) => break received,
            Err(_) => match io::Error::last_os_error() {
                e if e.kind() == io::ErrorKind::Interrupted => {}
                e => return Err(e),
            },
        }
    };
    // Before anything else, so that whatever has come is closed by whoever drops it.
    let fds = rights_in(&message);
    if message.msg_flags & libc::MSG_CTRUNC != 0 {
        return Err(io::ErrorKind::InvalidData.into());
    }
    Ok((received, fds))
}

/// The descriptors in what `recvmsg` has just filled in, of a message that was cut short, too.
fn rights_in(message: &libc::msghdr) -> Vec<OwnedFd> {
    let mut fds = Vec::new();
    // SAFETY: `message` was filled in by the kernel, and its control space is where it was. CMSG_FIRSTHDR and CMSG_NXTHDR
    // give headers that lie wholly inside of it, or null; the data of SCM_RIGHTS are descriptors, as many as the header's
    // length says, which the kernel cuts to what it has made. It made them for us, and nobody else has seen their numbers.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(message);
        while let Some(control) = header.as_ref() {
            if (control.cmsg_level, control.cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
                let data = libc::CMSG_DATA(header).cast::<RawFd>();
                let count = (control.cmsg_len - libc::CMSG_LEN(0) as usize) / size_of::<RawFd>();
                fds.extend((0..count).map(|i| OwnedFd::from_raw_fd(data.add(i).read_unaligned())));
            }
            header = libc::CMSG_NXTHDR(message, header);
        }
    }
    fds
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read, Write};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use nix::poll::{PollFd, PollFlags, poll};

    use super::*;

    #[test]
    fn a_descriptor_travels_with_its_bytes() {
        let (a, b) = UnixStream::pair().unwrap();
        let (mut pipe_read, pipe_write) = std::io::pipe().unwrap();
        assert_eq!(send_with_fds(a.as_fd(), b"take", &[pipe_write.as_fd()]).unwrap(), 4);
        drop(pipe_write);
        let mut bytes = [0; 2];
        let (len, mut fds) = receive_with_fds(b.as_fd(), &mut bytes).unwrap();
        assert_eq!((len, &bytes, fds.len()), (2, b"ta", 1));
        File::from(fds.pop().unwrap()).write_all(b"through").unwrap();
        let mut text = String::new();
        pipe_read.read_to_string(&mut text).unwrap();
        assert_eq!(text, "through");

        // The rest comes without, and then the end.
        assert_eq!(receive_with_fds(b.as_fd(), &mut bytes).unwrap().1.len(), 0);
        drop(a);
        assert_eq!(receive_with_fds(b.as_fd(), &mut bytes).unwrap().0, 0);
        assert_eq!(send_with_fds(b.as_fd(), b"x", &[]).unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }

    #[test]
    fn who_does_not_wait_is_told_that_nothing_has_come() {
        let (a, b) = UnixStream::pair().unwrap();
        let mut bytes = [0; 2];
        let nothing = receive_with_fds_now(b.as_fd(), &mut bytes).unwrap_err();
        assert_eq!(nothing.kind(), io::ErrorKind::WouldBlock);
        send_with_fds(a.as_fd(), b"x", &[a.as_fd()]).unwrap();
        let (len, fds) = receive_with_fds_now(b.as_fd(), &mut bytes).unwrap();
        assert_eq!((len, fds.len()), (1, 1));
    }

    #[test]
    fn of_too_many_descriptors_none_stays_open() {
        let (a, b) = UnixStream::pair().unwrap();
        let (pipe_read, pipe_write) = std::io::pipe().unwrap();
        let rights = [ControlMessage::ScmRights(&[pipe_write.as_raw_fd(); RIGHTS_MAX + 1])];
        let bytes = [IoSlice::new(b"x")];
        sendmsg::<()>(a.as_raw_fd(), &bytes, &rights, MsgFlags::MSG_NOSIGNAL, None).unwrap();
        let refused = receive_with_fds(b.as_fd(), &mut [0; 2]).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::InvalidData);
        drop(pipe_write);
        // The end of a pipe comes when its last writer is gone.
        let mut polls = [PollFd::new(pipe_read.as_fd(), PollFlags::empty())];
        assert_eq!(poll(&mut polls, 5_000_u16), Ok(1), "a copy is open still");
        // As many as there may be.
        let most = [b.as_fd(); RIGHTS_MAX];
        send_with_fds(a.as_fd(), b"x", &most).unwrap();
        assert_eq!(receive_with_fds(b.as_fd(), &mut [0; 2]).unwrap().1.len(), RIGHTS_MAX);
    }
}
