//! Tests that need several parts at once. The programs of `src/bin` are clients and load generators that the end-to-end
//! scenarios of `e2e/` run; they share no code with what they test beyond the vocabulary.

pub mod dice;
pub mod nbd;
pub mod register;
