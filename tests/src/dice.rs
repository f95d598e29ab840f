//! The seeded source of every choice of the simulation and of the load generators.

/// splitmix64: small, repeatable on every machine, good enough for choices.
#[derive(Clone, Debug)]
pub struct Dice(u64);

impl Dice {
    /// All choices follow from the seed.
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n`, which is not 0.
    pub fn below(&mut self, n: u64) -> u64 {
        self.number() % n
    }

    /// A number of the range.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low)
    }

    /// True in `per_mille` of 1000 cases.
    pub fn chance(&mut self, per_mille: u64) -> bool {
        self.below(1000) < per_mille
    }

    /// One of the slice, if it has any.
    pub fn pick<T: Copy>(&mut self, of: &[T]) -> Option<T> {
        let i = usize::try_from(self.below(of.len().max(1) as u64)).ok()?;
        of.get(i).copied()
    }
}
