//! What one layer holds of a range: the payload of `ReadLayer` answers and `PutLayer` requests.
//!
//! First the bytes of the blocks that hold data, in order and without gaps; behind them the trailer: a byte per block
//! of the range ([`BlockState`]), then the layer's name. Data first keeps it aligned.

use lh_block::BLOCK;
use thiserror::Error;

/// What a layer says of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum BlockState {
    /// Nothing: a lower layer answers.
    Absent = 0,
    /// Its own bytes.
    Data = 1,
    /// Zeroes, whatever lies below.
    Zero = 2,
}

impl BlockState {
    /// The state of that number.
    pub const fn from_u8(n: u8) -> Option<Self> {
        match n {
            0 => Some(Self::Absent),
            1 => Some(Self::Data),
            2 => Some(Self::Zero),
            _ => None,
        }
    }
}

/// A decoded trailer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerTrailer<'a> {
    states: &'a [u8],
    /// Name of the layer; empty for the head.
    pub layer: &'a str,
}

/// Why bytes are no trailer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum TrailerError {
    /// The range is not made of whole blocks.
    #[error("range of {0} bytes is not made of blocks")]
    Range(u32),
    /// Shorter than a byte per block.
    #[error("trailer of {0} bytes is too short")]
    Short(usize),
    /// A byte that is no state.
    #[error("block state {0} is unknown")]
    State(u8),
    /// The name is not UTF-8.
    #[error("layer name is not UTF-8")]
    Name,
    /// As many bytes of data as blocks that hold some.
    #[error("{data} bytes of data for {blocks} blocks")]
    DataLength {
        /// Bytes before the trailer.
        data: u32,
        /// Blocks marked as data.
        blocks: u32,
    },
}

impl<'a> LayerTrailer<'a> {
    /// Reads the trailer of an image of `length` bytes of range whose data part is `data` bytes long.
    ///
    /// # Errors
    /// [`TrailerError`] for anything that does not fit together.
    pub fn decode(bytes: &'a [u8], length: u32, data: u32) -> Result<Self, TrailerError> {
        if u64::from(length) % BLOCK != 0 {
            return Err(TrailerError::Range(length));
        }
        let blocks = (u64::from(length) / BLOCK) as usize;
        let Some((states, name)) = bytes.split_at_checked(blocks) else {
            return Err(TrailerError::Short(bytes.len()));
        };
        if let Some(&bad) = states.iter().find(|s| BlockState::from_u8(**s).is_none()) {
            return Err(TrailerError::State(bad));
        }
        let layer = std::str::from_utf8(name).map_err(|_| TrailerError::Name)?;
        let trailer = Self { states, layer };
        let held = trailer.states().filter(|s| *s == BlockState::Data).count() as u64;
        if held * BLOCK != u64::from(data) {
            let blocks = u32::try_from(held).unwrap_or(u32::MAX);
            return Err(TrailerError::DataLength { data, blocks });
        }
        Ok(trailer)
    }

    /// The states of the range's blocks, in order.
    pub fn states(&self) -> impl ExactSizeIterator<Item = BlockState> + '_ {
        self.states.iter().map(|s| BlockState::from_u8(*s).unwrap_or(BlockState::Absent))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trailer_and_its_refusals() {
        let good = [1_u8, 0, 2, b's', b'1'];
        let t = LayerTrailer::decode(&good, 3 * 4096, 4096).unwrap();
        assert_eq!(t.layer, "s1");
        assert_eq!(t.states().collect::<Vec<_>>(), [BlockState::Data, BlockState::Absent, BlockState::Zero]);
        assert_eq!(LayerTrailer::decode(&good, 100, 0), Err(TrailerError::Range(100)));
        assert_eq!(LayerTrailer::decode(&good[..2], 3 * 4096, 0), Err(TrailerError::Short(2)));
        assert_eq!(LayerTrailer::decode(&[9], 4096, 0), Err(TrailerError::State(9)));
        assert_eq!(LayerTrailer::decode(&[0, 0xff], 4096, 0), Err(TrailerError::Name));
        assert!(matches!(LayerTrailer::decode(&good, 3 * 4096, 0), Err(TrailerError::DataLength { .. })));
    }
}
