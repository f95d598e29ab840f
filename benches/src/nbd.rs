//! A client's requests as they come from a socket.

use lh_block::{Geometry, Op};
use nbd_frontend::transmit::{Call, Decision, Session};
use nbd_frontend::{Agreed, Framing};

/// One connection's requests: bytes in, decisions out.
#[derive(Debug)]
pub struct NbdStream {
    session: Session,
    geometry: Geometry,
}

impl NbdStream {
    /// A connection with this framing to a volume of 1 TiB.
    pub const fn new(framing: Framing) -> Self {
        Self {
            session: Session {
                agreed: Agreed { framing, allocation: true, block_sizes: true },
                read_only: false,
            },
            geometry: Geometry {
                size: 1 << 40,
                logical_block: 512,
                physical_block: 4096,
                max_transfer: 1 << 20,
                depth: 128,
            },
        }
    }

    /// The header of a write of 4 KiB as a client sends it ("Request message", "Extended request message").
    pub fn write_header(&self, offset: u64) -> Vec<u8> {
        const MAGIC: u32 = nbd_frontend::proto::REQUEST_MAGIC;
        const EXTENDED: u32 = nbd_frontend::proto::EXTENDED_REQUEST_MAGIC;
        let extended = self.session.agreed.framing == Framing::Extended;
        let (magic, flags) =
            if extended { (EXTENDED, nbd_frontend::proto::command_flag::PAYLOAD_LEN) } else { (MAGIC, 0) };
        let mut bytes = Vec::new();
        bytes.extend(magic.to_be_bytes());
        bytes.extend(flags.to_be_bytes());
        bytes.extend(nbd_frontend::proto::command::WRITE.to_be_bytes());
        bytes.extend(7_u64.to_be_bytes());
        bytes.extend(offset.to_be_bytes());
        if extended {
            bytes.extend(4096_u64.to_be_bytes())
        } else {
            bytes.extend(4096_u32.to_be_bytes())
        }
        bytes
    }

    /// Reads a header and decides what to do.
    ///
    /// # Panics
    /// If it is not a good write.
    pub fn take(&self, header: &[u8]) -> Call {
        let call = match self.session.decode(header) {
            Ok(call) => call,
            Err(broken) => panic!("{broken}"),
        };
        let decision = self.session.decide(&call, &self.geometry);
        assert!(matches!(decision, Decision::Device { op: Op::Write { fua: false }, .. }), "{decision:?}");
        call
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_headers_are_what_the_server_takes_for_a_write() {
        for framing in [Framing::Simple, Framing::Structured, Framing::Extended] {
            let stream = NbdStream::new(framing);
            let call = stream.take(&stream.write_header(1 << 30));
            assert_eq!((call.offset, call.length, call.payload, call.cookie), (1 << 30, 4096, 4096, 7));
        }
    }
}
