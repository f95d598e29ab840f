//! Descriptors over unix sockets (unix(7), SCM_RIGHTS).

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};

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
    let mut space = nix::cmsg_space!([RawFd; RIGHTS_MAX]);
    let mut iov = [IoSliceMut::new(bytes)];
    let message = recvmsg::<()>(socket.as_raw_fd(), &mut iov, Some(&mut space), MsgFlags::MSG_CMSG_CLOEXEC)?;
    let mut fds = Vec::new();
    for control in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(raw) = control {
            // SAFETY: the kernel has just made these descriptors for us, and nobody else has seen their numbers.
            fds.extend(raw.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
        }
    }
    if message.flags.contains(MsgFlags::MSG_CTRUNC) {
        return Err(io::ErrorKind::InvalidData.into());
    }
    Ok((message.bytes, fds))
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
}
