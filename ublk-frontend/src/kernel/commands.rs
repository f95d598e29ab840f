//! The two commands of a queue, on the queue's own ring.

use lh_ring::{Fd, Payload, Ring, Token};
use zerocopy::IntoBytes;

use crate::abi::{IoCommand, io_op};

/// Asks for a first request with this tag.
pub(crate) fn fetch(ring: &mut Ring, token: Token, fd: &Fd, queue: u16, tag: u16) {
    command(ring, token, fd, io_op::FETCH_REQ, IoCommand { q_id: queue, tag, result: 0, addr: 0 });
}

/// Answers the request with this tag, and asks for the next.
pub(crate) fn commit(ring: &mut Ring, token: Token, fd: &Fd, queue: u16, tag: u16, result: i32) {
    command(ring, token, fd, io_op::COMMIT_AND_FETCH_REQ, IoCommand { q_id: queue, tag, result, addr: 0 });
}

fn command(ring: &mut Ring, token: Token, fd: &Fd, op: u32, command: IoCommand) {
    let mut bytes = [0; size_of::<IoCommand>()];
    bytes.copy_from_slice(command.as_bytes());
    // SAFETY: the command names no memory: its address is 0, and the driver of a device with UBLK_F_USER_COPY, which all
    // devices here have (`attach` refuses others), refuses any other. Nothing is to be kept.
    unsafe { ring.command(token, fd, op, bytes, 0, Payload::default()) };
}
