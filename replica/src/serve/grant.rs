//! The engine on this host is granted the layers' files, and reads blocks itself
//! (`docs/decisions/0016-reads-on-one-host-are-the-engines-own.md`).
//!
//! A grant has a connection of its own, over which nothing goes but the grant: its end tells the engine to let go of the
//! descriptors. That the grant does not hold any more the engine sees at once in the memory that came with it. It holds as long as
//! the session does that it was made for ([`super::core::Core::may_be_granted`]) and the layers are the same
//! ([`crate::store::Store::is_granted`]); the next one is asked for anew.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use lh_ring::sys::{RIGHTS_MAX, send_with_fds_now};
use lh_wire::Grant;
use lh_wire::handshake::{Challenge, HELLO_LEN, Verdict, encode_welcome};

use super::Address;
use super::core::{ConnId, SessionHello};
use super::door::Proven;
use super::grants::Holding;
use super::server::Server;
use super::token::kind;
use crate::store::Granted;

impl Server {
    /// Grants the engine of the present session the layers' files, if nothing stands against it.
    pub(super) fn admit_grantee(
        &mut self,
        conn: ConnId,
        challenge: &Challenge,
        bytes: &[u8; HELLO_LEN],
        to: SessionHello,
    ) {
        let generation = self.core.generation();
        let is_near = matches!(self.door.address(), Address::Unix(_));
        if !is_near || !self.core.may_be_granted(&to) {
            return self.refuse(conn, Verdict::Unusable, generation);
        }
        self.end_grant();
        let granted = match self.store.grant() {
            Ok(granted) => granted,
            Err(e) => {
                tracing::warn!("nothing is granted: {e}");
                return self.refuse(conn, Verdict::Unusable, generation);
            }
        };
        let key = self.door.key(Proven::Key);
        let welcome = encode_welcome(Verdict::Welcome, generation, challenge, bytes, key);
        let Some(peer) = self.peers.remove(conn) else { return };
        let files = u16::try_from(granted.files.len()).unwrap_or(u16::MAX);
        self.grants.count = self.grants.count.wrapping_add(1);
        let grant = Grant { number: self.grants.count, files };
        self.grants.holding = Some(Holding { to, conn, fd: peer.fd.clone() });
        match send(peer.fd.as_fd(), &welcome, grant, &granted) {
            Ok(()) => tracing::info!("connection {} is granted {files} files", conn.0),
            Err(e) => {
                tracing::warn!("connection {} is not granted the layers' files: {e}", conn.0);
                self.end_grant();
            }
        }
    }

    /// Ends the grant if what it was made for is no longer so.
    pub(super) fn watch_grant(&mut self) {
        if let Some(grant) = &self.grants.holding
            && !(self.store.is_granted() && self.core.may_be_granted(&grant.to))
        {
            self.end_grant();
        }
    }

    fn end_grant(&mut self) {
        self.store.end_grant();
        if let Some(grant) = self.grants.holding.take() {
            tracing::info!("what was granted connection {} is over", grant.conn.0);
            self.ring.shutdown(grant.conn.token(kind::SHUTDOWN), &grant.fd);
        }
    }
}

/// The last word of the handshake, then the grant. A socket that was just made takes all of it at once.
fn send(socket: BorrowedFd<'_>, welcome: &[u8], grant: Grant, granted: &Granted) -> io::Result<()> {
    let files = granted.files.iter().map(|file| file.as_fd());
    let fds: Vec<BorrowedFd<'_>> = std::iter::once(granted.memory.as_fd()).chain(files).collect();
    let whole = |bytes: &[u8], fds: &[BorrowedFd<'_>]| {
        let sent = send_with_fds_now(socket, bytes, fds)?;
        if sent == bytes.len() { Ok(()) } else { Err(io::Error::from(io::ErrorKind::WriteZero)) }
    };
    whole(welcome, &[])?;
    for (n, some) in fds.chunks(RIGHTS_MAX).enumerate() {
        // Behind the message a byte for each further few of the descriptors.
        if n == 0 { whole(&grant.encode(), some)? } else { whole(&[0], some)? }
    }
    Ok(())
}
