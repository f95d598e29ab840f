//! Where an engine or a replica answers (gRPC), and who is obeyed there.
//!
//! On TCP nobody is by accident: what whoever reaches a port may end, fill and delete needs to be told whom it trusts.

use std::fs::File;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};

use control::front::{Front, Trust};
use control::host::make_socket_directory;
use control::tls::TlsFiles;
use control::transport::not_listening;
use lh_block::Address;

use super::GivesUp;
use super::as_longhorn::wrong;

/// Ends the process, as for a wrong command line, if it is to answer on TCP and is not told to whom.
pub(super) fn check(command: &str, listen: &Address, tls_dir: Option<&Path>, insecure: bool) {
    if let Address::Tcp(address) = listen
        && trust(tls_dir, insecure).is_none()
    {
        let text = format!(
            "--listen {address} would obey whoever reaches it: give --tls-dir DIR with ca.crt, tls.crt and tls.key, or --insecure \
             if nobody else can reach it, or listen for this host's root alone: --listen unix:PATH"
        );
        wrong(command, &text);
    }
}

/// Certificates where there are any: `--insecure` may be given for the data, which is not encrypted yet.
fn trust(tls_dir: Option<&Path>, insecure: bool) -> Option<Trust> {
    let files = tls_dir.map(TlsFiles::below).or_else(TlsFiles::in_longhorns_place);
    files.map(Trust::Certificates).or(insecure.then_some(Trust::Everybody))
}

/// Where to answer. Who listens on TCP answers at its usual socket besides, where there is a place for it: commands of this host
/// look there.
///
/// # Errors
/// The address cannot be had.
pub(super) fn fronts(
    listen: &Address,
    usual: Option<PathBuf>,
    tls_dir: Option<&Path>,
    insecure: bool,
) -> Result<Vec<Front>, GivesUp> {
    let address = match listen {
        Address::Unix(path) => {
            has_a_folder(path)?;
            return Ok(vec![Front::Unix(path.clone())]);
        }
        Address::Tcp(address) => *address,
    };
    can_be_had(address)?;
    tls_dir.map_or(Ok(()), can_be_read)?;
    let usual = usual.filter(|path| path.parent().is_some_and(Path::is_dir));
    let tcp = trust(tls_dir, insecure).map(|trust| Front::Tcp(address, trust));
    Ok(usual.map(Front::Unix).into_iter().chain(tcp).collect())
}

/// One that cannot be made later would leave a process that nobody can ask anything, and a line in its log.
fn has_a_folder(socket: &Path) -> Result<(), GivesUp> {
    let shown = socket.display();
    make_socket_directory(socket).map_err(|e| GivesUp(format!("--listen unix:{shown}: {e}")))?;
    match socket.parent().filter(|folder| !folder.is_dir()) {
        Some(folder) => Err(GivesUp(format!(
            "--listen unix:{shown}: the folder {} is not there: make it, for root alone",
            folder.display()
        ))),
        None => Ok(()),
    }
}

/// What is wrong in the files the server says in the log; that there are none is said at once.
fn can_be_read(tls_dir: &Path) -> Result<(), GivesUp> {
    for name in ["ca.crt", "tls.crt", "tls.key"] {
        let path = tls_dir.join(name);
        File::open(&path).map_err(|e| GivesUp(format!("--tls-dir: {}: {e}", path.display())))?;
    }
    Ok(())
}

/// Tried before anything else is begun; the server takes it a moment later.
pub(crate) fn can_be_had(address: SocketAddr) -> Result<(), GivesUp> {
    match TcpListener::bind(address) {
        Ok(_) => Ok(()),
        Err(e) => Err(GivesUp(format!("--listen {address}: {}", not_listening(e)))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_whose_folder_is_not_there_is_refused_at_once_and_the_folder_is_named() {
        let place = tempfile::tempdir().unwrap();
        let at = |name: &str| fronts(&Address::Unix(place.path().join(name)), None, None, false);
        assert_eq!(at("e.sock").unwrap().len(), 1);
        let refused = at("run/e.sock").unwrap_err().to_string();
        let folder = format!("the folder {}/run is not there", place.path().display());
        assert!(refused.starts_with("--listen unix:") && refused.contains(&folder), "{refused}");
    }
}
