//! The protocol between engine and replica: its header, its handshake, and the control messages that need the order
//! of the data stream. No I/O: bytes in, structures out, and back. `docs/formats/wire.md` is the same for people.
//!
//! A connection begins with the handshake ([`handshake`]), then carries messages: a [`Header`] of 64 bytes, up to 511
//! bytes of padding, a payload. The engine pads the header of a message with data so that the payload begins at a
//! multiple of [`PAYLOAD_ALIGN`] of its stream, counted from the first byte behind the handshake: a receiver that
//! keeps its buffers congruent to the stream can hand the payload to O_DIRECT where it lies.

mod control;
mod digest;
mod grant;
pub mod handshake;
mod header;
mod layer;
mod lent;
mod reader;

pub use control::{
    ChainOp, Control, FoldState, HashState, Keep, Kept, LayerInfo, MapPage, Outsider, PowerSince,
    ReplicaState, UNASKED_HASH_RATE, expansion_snapshot,
};
pub use digest::{
    BlockDigest, COMPARE_MAX, LayerDigest, VERIFY_MAX, Verified, block_hash, differing, part_bit, part_len,
};
pub use grant::{
    COUNTERS, FILES_MAX, GRANT_LEN, Grant, GrantError, PIECE, PIECE_BLOCKS, Place, Places, PlacesError,
    counter_of, piece_of, pieces_of,
};
pub use header::{
    DecodeError, HEADER_LEN, Header, IN_PART, MAGIC, MAX_DATA, MAX_PAYLOAD, MERGED, OpCode, PAYLOAD_ALIGN,
    Status, VERSION, done_of, flags, in_part, padding,
};
pub use layer::{BlockState, LayerTrailer, TrailerError};
pub use lent::{Pieces, PiecesError};
pub use reader::{Ask, Looked, Opened};

/// Writes of one connection that a replica remembers as possibly unfinished elsewhere, and that an engine may run
/// beyond its oldest one not complete on every member (`docs/invariants.md`, 4).
pub const WRITE_WINDOW: usize = 256;

/// Bytes of writes that an engine may run beyond its oldest incomplete one: what a new engine has to make equal.
pub const WRITE_WINDOW_BYTES: u64 = 16 << 20;

/// Smallest chunk of the intent bitmap, in bytes: below it, marks cost more syncs than they save comparisons.
pub const INTENT_CHUNK_MIN: u64 = 4 << 20;

/// Most chunks of a new volume's intent bitmap, which stays within 64 KiB: it is kept in memory, and read whole by a starting
/// engine.
pub const INTENT_CHUNKS_MAX: u64 = (64 << 10) * 8;

/// Bytes in a chunk of the intent bitmap of a volume of `size` bytes: a power of two.
pub const fn intent_chunk(size: u64) -> u64 {
    let chunk = size.div_ceil(INTENT_CHUNKS_MAX).next_power_of_two();
    if chunk < INTENT_CHUNK_MIN { INTENT_CHUNK_MIN } else { chunk }
}
