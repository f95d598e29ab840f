//! Opening what is to be a plain file, wherever somebody may have put something else.

use std::error::Error;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// What has the name is no plain file.
#[derive(Debug)]
pub struct NotPlain;

impl fmt::Display for NotPlain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("it is not a plain file: put the file itself there")
    }
}

impl Error for NotPlain {}

impl NotPlain {
    /// True for the error with which [`open_plain`] refuses something else.
    pub fn is(error: &io::Error) -> bool {
        error.get_ref().is_some_and(|inner| inner.is::<Self>())
    }
}

/// Opens a plain file with these options and flags (`O_*`), and nothing else: a FIFO would wait for whoever has its other end, and a
/// device for what it stands for.
///
/// # Errors
/// [`NotPlain`], or the system's.
pub fn open_plain(path: &Path, options: &mut OpenOptions, flags: i32) -> io::Result<File> {
    let open = options.custom_flags(flags | libc::O_NONBLOCK).open(path);
    let file = open.map_err(|error| match error.raw_os_error() {
        // open(2): a FIFO that nobody reads, a socket, or a device that is not there.
        Some(libc::ENXIO) => refused(),
        _ => error,
    })?;
    if !file.metadata()?.is_file() {
        return Err(refused());
    }
    // On file systems that cannot tell whether they would wait, io_uring fails requests of a non-blocking file with EAGAIN.
    wait_again(&file)?;
    Ok(file)
}

fn refused() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, NotPlain)
}

fn wait_again(file: impl AsFd) -> io::Result<()> {
    let fd = file.as_fd().as_raw_fd();
    // SAFETY: F_GETFL takes numbers only.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    if flags < 0 {
        return Err(io::Error::last_os_error());
    }
    super::retry(|| {
        // SAFETY: F_SETFL takes numbers only.
        unsafe { libc::fcntl(fd, libc::F_SETFL, flags & !libc::O_NONBLOCK) }
    })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::net::UnixListener;
    use std::sync::mpsc;
    use std::time::Duration;

    use nix::sys::stat::Mode;

    use super::*;

    #[test]
    fn what_is_not_a_plain_file_is_refused_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let [fifo, socket, directory] = ["fifo", "socket", "directory"].map(|name| dir.path().join(name));
        nix::unistd::mkfifo(&fifo, Mode::S_IRWXU).unwrap();
        let _listener = UnixListener::bind(&socket).unwrap();
        fs::create_dir(&directory).unwrap();
        let (tell, told) = mpsc::channel();
        std::thread::spawn(move || {
            for path in [&fifo, &socket, &directory, Path::new("/dev/null")] {
                tell.send(open_plain(path, File::options().read(true), 0)).unwrap();
            }
            tell.send(open_plain(&fifo, File::options().write(true), 0)).unwrap();
        });
        for _ in 0..5 {
            let opened = told.recv_timeout(Duration::from_secs(10)).expect("it waits for somebody");
            assert!(NotPlain::is(&opened.unwrap_err()));
        }
    }

    #[test]
    fn a_plain_file_is_opened_as_without_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        assert!(
            open_plain(&path, File::options().read(true), 0).unwrap_err().kind() == io::ErrorKind::NotFound
        );
        let flags = libc::O_NOFOLLOW | libc::O_APPEND;
        let file =
            open_plain(&path, File::options().read(true).write(true).create(true).truncate(false), flags);
        let file = file.unwrap();
        // SAFETY: F_GETFL takes numbers only.
        let found = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) };
        assert_eq!(
            found & (libc::O_NONBLOCK | libc::O_APPEND | libc::O_ACCMODE),
            libc::O_APPEND | libc::O_RDWR
        );
    }
}
