//! Where an engine or a replica answers (gRPC), and who is obeyed there.
//!
//! On TCP nobody is by accident: what whoever reaches a port may end, fill and delete needs to be told whom it trusts.

use std::fs::File;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Result;
use control::front::{Front, Trust};
use control::host::make_socket_directory;
use control::tls::TlsFiles;
use control::transport::not_listening;
use lh_block::Address;

use super::GivesUp;
use super::as_longhorn::wrong;

/// How long an address may still be taken by the process before, whose descriptors the kernel closes one after the other: by the lock that
/// is free the next one knows that it ends, which its sockets may outlive.
const FREED: Duration = Duration::from_secs(2);

/// Between two tries.
const AGAIN: Duration = Duration::from_millis(10);

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
) -> Result<Vec<Front>> {
    let address = match listen {
        Address::Unix(path) => {
            has_a_folder(path)?;
            return Ok(vec![Front::Unix(path.clone())]);
        }
        Address::Tcp(address) => *address,
    };
    is_freed(address)?;
    tls_dir.map_or(Ok(()), can_be_read)?;
    let usual = usual.filter(|path| path.parent().is_some_and(Path::is_dir));
    let tcp = trust(tls_dir, insecure).map(|trust| Front::Tcp(address, trust));
    Ok(usual.map(Front::Unix).into_iter().chain(tcp).collect())
}

/// One that cannot be made later would leave a process that nobody can ask anything, and a line in its log.
fn has_a_folder(socket: &Path) -> Result<()> {
    let shown = socket.display();
    make_socket_directory(socket)
        .map_err(|e| GivesUp::unless_short(format!("--listen unix:{shown}: {e}"), &e))?;
    match socket.parent().filter(|folder| !folder.is_dir()) {
        Some(folder) => Err(GivesUp(format!(
            "--listen unix:{shown}: the folder {} is not there: make it, for root alone",
            folder.display()
        ))
        .into()),
        None => Ok(()),
    }
}

/// What is wrong in the files the server says in the log; that there are none is said at once.
fn can_be_read(tls_dir: &Path) -> Result<()> {
    for name in ["ca.crt", "tls.crt", "tls.key"] {
        let path = tls_dir.join(name);
        let refused = |e: io::Error| GivesUp::unless_short(format!("--tls-dir: {}: {e}", path.display()), &e);
        File::open(&path).map_err(refused)?;
    }
    Ok(())
}

/// Tried before anything else is begun; the server takes it a moment later.
pub(crate) fn can_be_had(address: SocketAddr) -> Result<()> {
    TcpListener::bind(address).map(drop).map_err(|e| not_had(address, e))
}

/// The same once the process before has let go of it.
fn is_freed(address: SocketAddr) -> Result<()> {
    let deadline = Instant::now() + FREED;
    loop {
        match TcpListener::bind(address) {
            Err(e) if e.kind() == io::ErrorKind::AddrInUse && Instant::now() < deadline => {
                std::thread::sleep(AGAIN);
            }
            bound => return bound.map(drop).map_err(|e| not_had(address, e)),
        }
    }
}

fn not_had(address: SocketAddr, e: io::Error) -> anyhow::Error {
    let e = not_listening(e);
    GivesUp::unless_short(format!("--listen {address}: {e}"), &e)
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

    #[test]
    fn a_shortage_is_not_given_up_for_and_what_stays_in_the_way_is() {
        let gives_up = |errno: nix::errno::Errno| {
            let e = not_had(([127, 0, 0, 1], 1).into(), io::Error::from_raw_os_error(errno as i32));
            e.downcast_ref::<GivesUp>().is_some()
        };
        use nix::errno::Errno::{EACCES, EADDRINUSE, EMFILE, ENFILE, ENOBUFS, ENOMEM};
        assert!(![EMFILE, ENFILE, ENOMEM, ENOBUFS].into_iter().any(gives_up));
        assert!([EADDRINUSE, EACCES].into_iter().all(gives_up));
    }

    #[test]
    fn an_address_that_the_process_before_is_just_letting_go_of_is_waited_for() {
        let before = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = before.local_addr().unwrap();
        let lets_go = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(200));
            drop(before);
        });
        let found = fronts(&Address::Tcp(address), None, None, true);
        lets_go.join().unwrap();
        assert_eq!(found.unwrap().len(), 1);
    }
}
