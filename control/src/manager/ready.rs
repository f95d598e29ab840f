//! Telling whoever started the manager that it is ready, where that wants to know (`sd_notify(3)`).

use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// The variable that names the socket on which it listens: a path, or behind an `@` an abstract name.
pub(super) const SOCKET: &str = "NOTIFY_SOCKET";

/// Says it, if somebody asked for it.
pub(super) fn announce() {
    let Some(socket) = std::env::var_os(SOCKET) else { return };
    if let Err(e) = tell(&socket) {
        tracing::warn!(socket = %socket.display(), error = %e, "nobody is told that the instance manager is ready");
    }
}

fn tell(socket: &OsStr) -> io::Result<()> {
    let address = match socket.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(socket)?,
    };
    UnixDatagram::unbound()?.send_to_addr(b"READY=1", &address).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heard(socket: &UnixDatagram) -> Vec<u8> {
        let mut bytes = [0; 64];
        let len = socket.recv(&mut bytes).unwrap();
        bytes[..len].to_vec()
    }

    #[test]
    fn both_kinds_of_sockets_hear_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let by_path = UnixDatagram::bind(&path).unwrap();
        tell(path.as_os_str()).unwrap();
        assert_eq!(heard(&by_path), b"READY=1");
        let name = format!("longhorn-test-{}", std::process::id());
        let abstractly = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        tell(OsStr::new(&format!("@{name}"))).unwrap();
        assert_eq!(heard(&abstractly), b"READY=1");
        assert!(tell(dir.path().join("none").as_os_str()).is_err());
    }
}
