//! Sizes on Longhorn's command lines: besides this project's own spelling, that of docker, where `1g`, `1gb` and `1gib` are 2^30
//! bytes each, in large or small letters, and a fraction may stand before the unit. People who type a size use `longhornctl`,
//! which wants the unit in full.

use lh_block::{SizeError, parse_size};

/// Letters of units, and the power of two that each stands for.
const UNITS: [(char, u32); 5] = [('k', 10), ('m', 20), ('g', 30), ('t', 40), ('p', 50)];

/// Most digits behind the point that count.
const DIGITS: usize = 9;

/// A size in either spelling.
///
/// # Errors
/// What [`parse_size`] says of it.
pub(super) fn size(text: &str) -> Result<u64, SizeError> {
    match parse_size(text) {
        Err(e @ (SizeError::Unit { .. } | SizeError::Unreadable(_))) => match as_docker(text) {
            // What is wrong with so many bytes is said as of any others.
            Some(bytes) => parse_size(&bytes.to_string()),
            None => Err(e),
        },
        other => other,
    }
}

/// A size that may be 0, which stands for none.
///
/// # Errors
/// It is neither 0 nor a size.
pub(super) fn size_or_none(text: &str) -> Result<u64, SizeError> {
    if text == "0" { Ok(0) } else { size(text) }
}

/// Bytes of a number with a unit of docker's; like there, a fraction of a byte is left out.
fn as_docker(text: &str) -> Option<u128> {
    let text = text.trim().to_ascii_lowercase();
    let end = text.find(|c: char| c.is_ascii_alphabetic())?;
    let (number, unit) = text.split_at(end);
    let number = number.strip_suffix(' ').unwrap_or(number);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let is_digits = |text: &str| text.bytes().all(|b| b.is_ascii_digit());
    if whole.is_empty() || !is_digits(whole) || !is_digits(fraction) {
        return None;
    }
    let shift = match unit {
        "b" => 0,
        _ => {
            let (_, shift) = UNITS.into_iter().find(|(letter, _)| unit.starts_with(*letter))?;
            matches!(&unit[1..], "" | "b" | "ib").then_some(shift)?
        }
    };
    let digits = &fraction[..fraction.len().min(DIGITS)];
    let parts: u128 = format!("0{digits}").parse().ok()?;
    let scale = 10_u128.pow(u32::try_from(digits.len()).ok()?);
    let whole: u128 = whole.parse::<u64>().ok()?.into();
    Some((whole << shift) + (parts << shift) / scale)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_taken_as_docker_writes_them() {
        for (text, bytes) in [
            ("1g", 1 << 30),
            ("1G", 1 << 30),
            ("1gb", 1 << 30),
            ("1GiB", 1 << 30),
            ("1 g", 1 << 30),
            ("1.5g", 3 << 29),
            ("16m", 16 << 20),
            ("4K", 4096),
            ("2t", 2 << 40),
            ("1p", 1 << 50),
            ("4096b", 4096),
            ("4096", 4096),
            ("10 Gi", 10 << 30),
        ] {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        assert_eq!(size_or_none("0"), Ok(0));
        assert_eq!(size_or_none("1g"), Ok(1 << 30));
    }

    #[test]
    fn what_is_no_size_in_either_spelling_is_refused() {
        for (text, says) in [
            ("1k", "multiple of 4096"),
            ("0.3m", "multiple of 4096"),
            ("0g", "smallest is 4096"),
            ("9999999p", "too large"),
            ("99999999999999999999g", "too large"),
            ("1gx", "GiB"),
            ("1x", "not a size"),
            ("g", "not a size"),
            (".5g", "not a size"),
            ("1.2.3g", "not a size"),
            ("-1g", "not a size"),
            ("1  g", "GiB"),
            ("", "not a size"),
        ] {
            let said = size(text).unwrap_err().to_string();
            assert!(said.contains(says), "{text}: {said}");
        }
    }
}
