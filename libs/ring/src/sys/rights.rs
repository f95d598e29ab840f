//! Descriptors over unix sockets (unix(7), SCM_RIGHTS).

use std::io::{self, IoSlice};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};

/// Most descriptors in one message.
pub const RIGHTS_MAX: usize = 8;

/// Sends bytes, at least one, and copies of the descriptors with the first of them: how many bytes were taken.
///
/// # Errors
/// The system's; `EPIPE` if the peer is gone, without a signal.
///
/// # Panics
/// For more than [`RIGHTS_MAX`] descriptors.
pub fn send_with_fds(socket: BorrowedFd<'_>, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
    assert!(fds.len() <= RIGHTS_MAX, "{} descriptors", fds.len());
    let raw: Vec<RawFd> = fds.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&raw)];
    let control: &[ControlMessage<'_>] = if raw.is_empty() { &[] } else { &rights };
    let sent =
        sendmsg::<()>(socket.as_raw_fd(), &[IoSlice::new(bytes)], control, MsgFlags::MSG_NOSIGNAL, None)?;
    Ok(sent)
}

/// Receives bytes (0: the peer is gone), and the descriptors that came with them, closed on exec.
///
/// # Errors
/// The system's; `InvalidData` if there were more descriptors than [`RIGHTS_MAX`], which are closed then.
pub fn receive_with_fds(socket: BorrowedFd<'_>, bytes: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    receive(socket, bytes, 0)
}

/// The same without waiting.
///
/// # Errors
/// Likewise; `WouldBlock` if nothing has come.
pub fn receive_with_fds_now(socket: BorrowedFd<'_>, bytes: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    receive(socket, bytes, libc::MSG_DONTWAIT)
}

fn receive(
    socket: BorrowedFd<'_>,
    bytes: &mut [u8],
    flags: libc::c_int,
) -> io::Result<(usize, Vec<OwnedFd>)> {
    // Words, so that the headers in it are aligned.
    let mut space = [0_u64; 8 + RIGHTS_MAX];
    let mut iov = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    // SAFETY: msghdr is a plain C structure of integers and pointers, for which all-zero is a valid value.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut iov;
    message.msg_iovlen = 1;
    message.msg_control = space.as_mut_ptr().cast();
    let numbers = libc::c_uint::try_from(size_of::<[RawFd; RIGHTS_MAX]>()).unwrap_or(libc::c_uint::MAX);
    // SAFETY: computes a length; it touches no memory.
    let room = unsafe { libc::CMSG_SPACE(numbers) };
    message.msg_controllen = room as usize;
    assert!(room as usize <= size_of_val(&space), "room for {RIGHTS_MAX} descriptors");
    // SAFETY: every pointer in the message is to memory that lives here, with the length beside it.
    let done = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, flags | libc::MSG_CMSG_CLOEXEC) };
    let done = usize::try_from(done).map_err(|_| io::Error::last_os_error())?;
    // Also those that fitted when others did not: what nobody takes would stay open for ever.
    let fds = descriptors(&message);
    if message.msg_flags & libc::MSG_CTRUNC != 0 {
        return Err(io::ErrorKind::InvalidData.into());
    }
    Ok((done, fds))
}

/// The descriptors that a message just received has brought.
fn descriptors(message: &libc::msghdr) -> Vec<OwnedFd> {
    let mut fds = Vec::new();
    // SAFETY: the kernel has written whole control messages into the buffer that `message` points to, and their length
    // beside it; these calls stay within it.
    let mut next = unsafe { libc::CMSG_FIRSTHDR(message) };
    while !next.is_null() {
        // SAFETY: not null, so a whole header within the buffer.
        let header = unsafe { *next };
        if header.cmsg_level == libc::SOL_SOCKET && header.cmsg_type == libc::SCM_RIGHTS {
            // SAFETY: computes addresses and lengths within this control message.
            let (data, before) =
                unsafe { (libc::CMSG_DATA(next).cast::<RawFd>(), libc::CMSG_LEN(0) as usize) };
            for n in 0..header.cmsg_len.saturating_sub(before) / size_of::<RawFd>() {
                // SAFETY: the n-th number lies within the control message, perhaps not aligned; the kernel has just made
                // this descriptor for us, and nobody else has seen it.
                fds.push(unsafe { OwnedFd::from_raw_fd(data.add(n).read_unaligned()) });
            }
        }
        // SAFETY: as for the first.
        next = unsafe { libc::CMSG_NXTHDR(message, next) };
    }
    fds
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read, Write};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

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

    /// A pipe shows who still has a copy of its end.
    #[test]
    fn of_too_many_descriptors_none_stays_open() {
        let (a, b) = UnixStream::pair().unwrap();
        let (mut pipe_read, pipe_write) = std::io::pipe().unwrap();
        let raw = [pipe_write.as_raw_fd(); RIGHTS_MAX + 1];
        let rights = [ControlMessage::ScmRights(&raw)];
        sendmsg::<()>(a.as_raw_fd(), &[IoSlice::new(b"many")], &rights, MsgFlags::empty(), None).unwrap();
        drop(pipe_write);
        let error = receive_with_fds(b.as_fd(), &mut [0; 4]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        assert_eq!(pipe_read.read(&mut [0]).unwrap(), 0, "the last writer is gone");
    }
}
