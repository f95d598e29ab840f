//! Words for people, on standard error.

use std::fmt::Arguments;
use std::io::Write;

use crate::next_step;

/// Says a line, as `eprintln!` does. Whoever stops reading (`2>&1 | head -1`) misses it, and what is being done goes on: half
/// a volume would be the price of a panic here.
macro_rules! tell {
    ($($words:tt)*) => { $crate::tell::line(format_args!($($words)*)) };
}

pub(crate) use tell;

/// Says a line in one piece, with every next step in it as it is to be given.
pub(crate) fn line(words: Arguments<'_>) {
    let _ = std::io::stderr().write_all(next_step::complete(&format!("{words}\n")).as_bytes());
}
