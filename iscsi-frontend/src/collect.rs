//! The bytes of a command, put together from the PDUs that carry them, where they lie.

use lh_ring::{Payload, Pool};

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

    /// Appends bytes; all together will be at most `total`.
    ///
    /// # Errors
    /// [`NoMemory`], where they have to be copied.
    pub(crate) fn push(&mut self, piece: Payload, total: usize, pool: &Pool) -> Result<(), NoMemory> {
        if piece.is_empty() {
            return Ok(());
        }
        let piece = match self.copied {
            Some(_) => piece,
            None => match self.bytes.append(piece) {
                Ok(()) => return Ok(()),
                Err(piece) => {
                    let len = u32::try_from(total).map_err(|_| NoMemory)?;
                    let mut copy = pool.alloc(len, 512).ok_or(NoMemory)?;
                    copy.write_payload(0, &self.bytes);
                    self.copied = Some(self.bytes.len());
                    self.bytes = copy;
                    piece
                }
            },
        };
        let at = self.len();
        self.bytes.write_payload(at, &piece);
        self.copied = Some(at + piece.len());
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

#[cfg(test)]
mod tests {
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
        collected.push(piece(&pool, 1000, 1), 3000, &pool).unwrap();
        collected.push(piece(&pool, 2000, 2), 3000, &pool).unwrap();
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
            collected.push(piece(&pool, 512, i), 64 * 512, &pool).unwrap();
        }
        assert!(collected.copied.is_some());
        let bytes = collected.take(usize::MAX).unwrap().to_vec();
        assert_eq!(bytes.len(), 64 * 512);
        assert!(bytes.chunks(512).enumerate().all(|(i, chunk)| chunk.iter().all(|b| usize::from(*b) == i)));
    }

    #[test]
    fn no_memory_to_copy_is_told() {
        let pool = Pool::new(0, 128 << 10).unwrap();
        let mut collected = Collected::default();
        let full = (0..13).find(|i| {
            let _gap = pool.alloc(48, 1);
            collected.push(piece(&pool, 512, *i), 1 << 20, &pool) == Err(NoMemory)
        });
        assert_eq!(full, Some(12));
    }
}
