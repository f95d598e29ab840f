//! Sizes as people write them.

use thiserror::Error;

use crate::BLOCK;

/// Binary units, largest first. Decimal units are refused: nobody agrees what a volume of "1 GB" holds.
const UNITS: [(&str, &str, u64); 4] =
    [("TiB", "Ti", 1 << 40), ("GiB", "Gi", 1 << 30), ("MiB", "Mi", 1 << 20), ("KiB", "Ki", 1 << 10)];

/// Why a size was refused. The text names what to write instead.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum SizeError {
    /// Not a number with a known unit.
    #[error("{0:?} is not a size: write bytes, or a number with KiB, MiB, GiB or TiB, for example 10GiB")]
    Unreadable(String),
    /// A unit that means powers of ten, or nothing certain.
    #[error("unit {unit:?} is not used here: write {suggestion:?} (powers of 1024)")]
    Unit {
        /// What was written.
        unit: String,
        /// What was probably meant.
        suggestion: String,
    },
    /// Zero bytes.
    #[error("a size of 0 is not allowed: the smallest is 4096 bytes")]
    Zero,
    /// Not a multiple of the block.
    #[error("{0} bytes is not a multiple of 4096: the next larger size is {1}")]
    Unaligned(u64, u64),
    /// Beyond the number range.
    #[error("{0:?} is too large")]
    TooLarge(String),
}

/// Reads a size: bytes, or a whole number with KiB, MiB, GiB, TiB (or Ki, Mi, Gi, Ti), with or without a space between.
///
/// # Errors
/// [`SizeError`], whose text tells a person the right spelling.
pub fn parse_size(text: &str) -> Result<u64, SizeError> {
    let trimmed = text.trim();
    let digits = trimmed.len() - trimmed.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = trimmed.split_at(digits);
    let unit = unit.trim_start();
    if number.is_empty() {
        return Err(SizeError::Unreadable(text.into()));
    }
    let number: u64 = number.parse().map_err(|_| SizeError::TooLarge(text.into()))?;
    let scale = match unit {
        "" => 1,
        _ => match UNITS.iter().find(|(long, short, _)| unit == *long || unit == *short) {
            Some(&(_, _, scale)) => scale,
            None => return Err(unknown_unit(text, number, unit)),
        },
    };
    let size = number.checked_mul(scale).ok_or_else(|| SizeError::TooLarge(text.into()))?;
    if size == 0 {
        return Err(SizeError::Zero);
    }
    if size > i64::MAX as u64 {
        // volume.meta and the gRPC messages keep sizes as int64.
        return Err(SizeError::TooLarge(text.into()));
    }
    if size % BLOCK != 0 {
        let next = size.next_multiple_of(BLOCK);
        // The next larger one may be one too many.
        let refused = if next > i64::MAX as u64 {
            SizeError::TooLarge(text.into())
        } else {
            SizeError::Unaligned(size, next)
        };
        return Err(refused);
    }
    Ok(size)
}

/// Turns `10G`, `10gb` and their like into the error that names the right spelling.
fn unknown_unit(text: &str, number: u64, unit: &str) -> SizeError {
    let first = unit.chars().next().map(|c| c.to_ascii_uppercase());
    let meant = UNITS.iter().find(|(long, _, _)| long.chars().next() == first && unit.len() <= 3);
    match meant {
        Some((long, _, _)) => SizeError::Unit { unit: unit.into(), suggestion: format!("{number}{long}") },
        None => SizeError::Unreadable(text.into()),
    }
}

/// Writes a size with the largest unit that keeps it readable: `1 GiB`, `1.5 GiB`, `512 B`.
pub fn format_size(bytes: u64) -> String {
    for (long, _, scale) in UNITS {
        if bytes >= scale {
            let whole = bytes / scale;
            // One decimal, rounded down, so that nothing looks larger than it is.
            let tenth = u128::from(bytes % scale) * 10 / u128::from(scale);
            return if tenth == 0 { format!("{whole} {long}") } else { format!("{whole}.{tenth} {long}") };
        }
    }
    format!("{bytes} B")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_as_people_write_them() {
        assert_eq!(parse_size("4096"), Ok(4096));
        assert_eq!(parse_size("10GiB"), Ok(10 << 30));
        assert_eq!(parse_size("10 Gi"), Ok(10 << 30));
        assert_eq!(parse_size(" 64TiB "), Ok(64 << 40));
    }

    #[test]
    fn refusals_name_the_right_spelling() {
        let text = |s: &str| parse_size(s).unwrap_err().to_string();
        assert!(text("10G").contains("\"10GiB\""));
        assert!(text("10gb").contains("\"10GiB\""));
        assert!(text("5000").contains("8192"));
        assert!(text("-1").contains("not a size"));
        assert!(text("99999999TiB").contains("too large"));
        assert!(text("9223372036854775807").contains("too large"));
        assert!(text("9223372036854771711").ends_with("9223372036854771712"));
        assert!(text("").contains("not a size"));
        assert!(text("0").contains("4096"));
    }

    #[test]
    fn printing_rounds_down() {
        assert_eq!(format_size(1 << 30), "1 GiB");
        assert_eq!(format_size((1 << 30) + (1 << 29)), "1.5 GiB");
        assert_eq!(format_size((1 << 40) - 1), "1023.9 GiB");
        assert_eq!(format_size(12), "12 B");
    }
}
