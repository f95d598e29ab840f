//! The address of a replica that is to be added.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use lh_block::Address;
use tonic::Status;

/// Refuses what is no address of a replica's. One that no replica can ever answer at would be a member of the volume that is waited for,
/// and that no record of the host names: no command would show it, or take it out.
///
/// A socket that is not there yet is a replica's that is only opening its directory.
///
/// # Errors
/// `InvalidArgument`.
pub(super) fn check(address: &str) -> Result<(), Status> {
    let path = match address.parse().map_err(Status::invalid_argument)? {
        Address::Unix(path) => path,
        Address::Tcp(_) => return Ok(()),
    };
    let refused = |why: &str| {
        Status::invalid_argument(format!(
            "{} {why}: give unix:PATH of a replica's data socket",
            path.display()
        ))
    };
    if name_of(&path).is_none() {
        return Err(refused("has not the form FOLDER/NAME.sock"));
    }
    match fs::metadata(&path) {
        Ok(found) if found.file_type().is_socket() => Ok(()),
        Ok(_) => Err(refused("is no socket")),
        Err(e) if e.kind() == ErrorKind::NotFound && path.parent().is_some_and(Path::is_dir) => Ok(()),
        Err(e) => Err(refused(&format!("cannot be looked at ({e})"))),
    }
}

/// The name of the replica whose data socket this is: it is named after it.
pub(super) fn name_of(socket: &Path) -> Option<&str> {
    // A volume's name may have points of its own.
    socket.file_name()?.to_str()?.strip_suffix(".sock").filter(|name| !name.is_empty())
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use tonic::Code;

    use super::*;

    #[test]
    fn a_replica_has_the_name_of_its_socket_points_and_all() {
        for name in ["demo-r-0a1b2c3d", "my.volume-r-0a1b2c3d"] {
            assert_eq!(name_of(Path::new(&format!("/r/run/{name}.sock"))), Some(name));
        }
        for none in ["/r/run/.sock", "/", "/etc/passwd", "/nope"] {
            assert_eq!(name_of(Path::new(none)), None, "{none}");
        }
    }

    #[test]
    fn what_no_replica_can_answer_at_is_no_address() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| format!("unix:{}", dir.path().join(name).display());
        let _listener = UnixListener::bind(dir.path().join("demo-r-1.sock")).unwrap();
        fs::write(dir.path().join("demo-r-2.sock"), "").unwrap();
        for good in [at("demo-r-1.sock"), at("demo-r-3.sock"), "tcp:10.0.0.1:10000".to_owned()] {
            check(&good).unwrap_or_else(|e| panic!("{good}: {e}"));
        }
        let bad = [
            "unix:/etc/passwd",
            "unix:/nope",
            "unix:/",
            "unix:r.sock",
            "/r.sock",
            "tcp://10.0.0.1:10000",
            "",
        ];
        let bad = bad.map(str::to_owned).into_iter().chain([at("demo-r-2.sock"), at("none/demo-r-3.sock")]);
        for bad in bad {
            assert_eq!(check(&bad).unwrap_err().code(), Code::InvalidArgument, "{bad}");
        }
    }
}
