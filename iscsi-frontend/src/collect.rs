//! The bytes of a command, put together from the PDUs that carry them, where they lie.
//!
//! A few bytes that lie where they came keep a whole chunk of the pool from being used again. An initiator that sends such
//! crumbs, and much else between them, would have all of it for itself. So what is small, and has to wait for more, is
//! moved together with what others have of that kind.

use lh_ring::{CHUNK, Payload, Pool};

/// Shorter pieces do not stay where they are while more is to come: what waits takes four times its own bytes at most.
const STAYS_MIN: usize = CHUNK / 4;

/// No memory is free now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NoMemory;

/// Bytes received so far, in order.
#[derive(Debug, Default)]
pub(crate) struct Collected {
    bytes: Payload,
    /// Bytes are copied: the initiator sends so small pieces that one payload cannot name them all.
    copied: Option<usize>,
}

impl Collected {
    /// Bytes so far.
    pub(crate) fn len(&self) -> usize {
        self.copied.unwrap_or(self.bytes.len())
    }

    /// Appends bytes. All together will be `total`, of which there is memory for the first `room`, at least for these.
    ///
    /// # Errors
    /// [`NoMemory`], where they have to be copied.
    pub(crate) fn push(
        &mut self,
        piece: Payload,
        total: usize,
        room: usize,
        pool: &Pool,
    ) -> Result<(), NoMemory> {
        if piece.is_empty() {
            return Ok(());
        }
        if let Some(at) = self.copied {
            if at + piece.len() <= self.bytes.len() {
                self.bytes.write_payload(at, &piece);
                self.copied = Some(at + piece.len());
                return Ok(());
            }
            self.bytes.truncate(at);
            self.copied = None;
        }
        let waits = self.bytes.len() + piece.len() < total;
        let piece = if waits && piece.len() < STAYS_MIN { copy(&piece, piece.len(), pool)? } else { piece };
        if let Err(piece) = self.bytes.append(piece) {
            let at = self.bytes.len();
            let mut whole = copy(&self.bytes, room.max(at + piece.len()), pool)?;
            whole.write_payload(at, &piece);
            (self.bytes, self.copied) = (whole, Some(at + piece.len()));
        }
        Ok(())
    }

    /// The first `len` bytes; `None` for none.
    pub(crate) fn take(&mut self, len: usize) -> Option<Payload> {
        let have = self.len().min(len);
        self.copied = None;
        let mut bytes = std::mem::take(&mut self.bytes);
        bytes.truncate(have);
        (have > 0).then_some(bytes)
    }
}

/// The same bytes at the begin of `len` others.
fn copy(bytes: &Payload, len: usize, pool: &Pool) -> Result<Payload, NoMemory> {
    let len = u32::try_from(len).map_err(|_| NoMemory)?;
    let mut copy = pool.alloc(len, 512).ok_or(NoMemory)?;
    copy.write_payload(0, bytes);
    Ok(copy)
}

#[cfg(test)]
mod tests {
    use lh_ring::Rx;

    use super::*;

    fn piece(pool: &Pool, len: u32, byte: u8) -> Payload {
        let mut piece = pool.alloc(len, 1).unwrap();
        piece.write_at(0, &vec![byte; len as usize]);
        piece
    }

    #[test]
    fn few_pieces_stay_where_they_are() {
        let pool = Pool::new(1 << 20, 4 << 20).unwrap();
        let mut collected = Collected::default();
        collected.push(piece(&pool, 1000, 1), 3000, 3000, &pool).unwrap();
        collected.push(piece(&pool, 2000, 2), 3000, 3000, &pool).unwrap();
        assert_eq!((collected.len(), collected.copied), (3000, None));
        let bytes = collected.take(1500).unwrap().to_vec();
        assert_eq!((bytes.len(), bytes[999], bytes[1000]), (1500, 1, 2));
        assert!(collected.take(10).is_none());
    }

    #[test]
    fn many_pieces_are_copied_together() {
        let pool = Pool::new(1 << 20, 4 << 20).unwrap();
        let mut collected = Collected::default();
        for i in 0..64 {
            // Something between two pieces, as headers are in a stream.
            let _gap = pool.alloc(48, 1);
            collected.push(piece(&pool, 512, i), 64 * 512, 64 * 512, &pool).unwrap();
        }
        assert!(collected.copied.is_some());
        let bytes = collected.take(usize::MAX).unwrap().to_vec();
        assert_eq!(bytes.len(), 64 * 512);
        assert!(bytes.chunks(512).enumerate().all(|(i, chunk)| chunk.iter().all(|b| usize::from(*b) == i)));
    }

    #[test]
    fn crumbs_do_not_keep_the_memory_between_them() {
        let pool = Pool::new(1 << 20, 64 << 20).unwrap();
        let mut stream = Rx::new(&pool, 1);
        let mut crumb = || {
            assert!(stream.feed(&[7]));
            let crumb = stream.take(1);
            // What comes between two crumbs is not kept.
            assert!(stream.feed(&[0; CHUNK]));
            stream.skip(CHUNK);
            crumb
        };
        let mut waiting: Vec<_> = (0..64).map(|_| Collected::default()).collect();
        for _ in 0..8 {
            waiting.iter_mut().for_each(|c| c.push(crumb(), 1 << 20, 1 << 20, &pool).unwrap());
        }
        assert!(pool.used_bytes() <= 1 << 20, "{} bytes are kept", pool.used_bytes());
        // More crumbs than a payload names, of which there is to be no more than 4 KiB here.
        for _ in 0..8 {
            waiting.iter_mut().for_each(|c| c.push(crumb(), 1 << 20, 4096, &pool).unwrap());
        }
        assert!(pool.used_bytes() <= 1 << 20, "{} bytes are kept", pool.used_bytes());
        // The rest comes in pieces that stay where they are.
        let mut one = waiting.pop().unwrap();
        for _ in 0..4 {
            one.push(piece(&pool, 100_000, 8), 1 << 20, 1 << 20, &pool).unwrap();
        }
        let bytes = one.take(usize::MAX).unwrap().to_vec();
        assert!(bytes.len() == 400_016 && bytes[..16] == [7; 16] && bytes[16..].iter().all(|b| *b == 8));
    }

    #[test]
    fn no_memory_to_copy_is_told() {
        let pool = Pool::new(0, 128 << 10).unwrap();
        let mut collected = Collected::default();
        let full = (0..13).find(|i| {
            let _gap = pool.alloc(48, 1);
            collected.push(piece(&pool, 512, *i), 1 << 20, 1 << 20, &pool) == Err(NoMemory)
        });
        assert_eq!(full, Some(12));
    }
}
