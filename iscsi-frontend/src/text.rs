//! Text: `key=value` pairs, each ended by a zero byte (RFC 7143, 6.1).

/// Longest text of one negotiation, however many PDUs it comes in: a login carries some 20 keys of at most 255 bytes, and
/// a CHAP challenge or response of 2 KiB.
pub(crate) const TEXT_MAX: usize = 8192;

/// Longest name of a key (6.1).
const KEY_MAX: usize = 63;

/// Text that is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("malformed text")]
pub(crate) struct Malformed;

/// The pairs of a text.
///
/// # Errors
/// [`Malformed`] for a pair without a `=`, with an empty or too long key or one that is not ASCII, or what is not UTF-8.
pub(crate) fn pairs(text: &[u8]) -> Result<Vec<(&str, &str)>, Malformed> {
    let text = std::str::from_utf8(text).map_err(|_| Malformed)?;
    text.split('\0')
        .filter(|pair| !pair.is_empty())
        .map(|pair| {
            let (key, value) = pair.split_once('=').ok_or(Malformed)?;
            let good = !key.is_empty() && key.len() <= KEY_MAX && key.is_ascii();
            if good { Ok((key, value)) } else { Err(Malformed) }
        })
        .collect()
}

/// Appends a pair.
pub(crate) fn push(out: &mut Vec<u8>, key: &str, value: &str) {
    out.extend_from_slice(key.as_bytes());
    out.push(b'=');
    out.extend_from_slice(value.as_bytes());
    out.push(0);
}

/// A number: decimal, or hexadecimal after `0x` (6.1).
pub(crate) fn number(value: &str) -> Option<u32> {
    if !value.bytes().all(|digit| digit.is_ascii_alphanumeric()) {
        // A sign is none of them.
        return None;
    }
    match value.strip_prefix("0x").or_else(|| value.strip_prefix("0X")) {
        Some(hex) => u32::from_str_radix(hex, 16).ok(),
        None => value.parse().ok(),
    }
}

/// Bytes written in hexadecimal after `0x`, or in base64 after `0b` (6.1), at most `max` of them.
pub(crate) fn binary(value: &str, max: usize) -> Option<Vec<u8>> {
    let (kind, digits) = value.split_at_checked(2)?;
    let bytes = match kind {
        "0x" | "0X" => unhex(digits)?,
        "0b" | "0B" => unbase64(digits)?,
        _ => return None,
    };
    (bytes.len() <= max).then_some(bytes)
}

/// Bytes in hexadecimal, with `0x`.
pub(crate) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold("0x".to_owned(), |mut text, byte| {
        // Writing to a string does not fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn unhex(digits: &str) -> Option<Vec<u8>> {
    let digits = digits.as_bytes();
    let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|d| u8::try_from(d).ok());
    // An odd number of digits lacks a leading zero.
    let (first, rest) = digits.split_at(digits.len() % 2);
    let mut bytes = first.iter().map(|byte| digit(*byte)).collect::<Option<Vec<u8>>>()?;
    for pair in rest.chunks(2) {
        bytes.push(digit(pair[0])? << 4 | digit(pair[1])?);
    }
    Some(bytes)
}

fn unbase64(digits: &str) -> Option<Vec<u8>> {
    let digits = digits.trim_end_matches('=').as_bytes();
    let mut bytes = Vec::with_capacity(digits.len() * 3 / 4);
    let (mut held, mut bits) = (0_u32, 0);
    for byte in digits {
        let value = match byte {
            b'A'..=b'Z' => byte - b'A',
            b'a'..=b'z' => byte - b'a' + 26,
            b'0'..=b'9' => byte - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        held = held << 6 | u32::from(value);
        bits += 6;
        if bits >= 8 {
            bits -= 8;
            bytes.push((held >> bits & 0xff) as u8);
        }
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_split_at_zero_bytes_and_the_first_equals_sign() {
        assert_eq!(pairs(b"A=1\0B=x=y\0C=\0"), Ok(vec![("A", "1"), ("B", "x=y"), ("C", "")]));
        assert_eq!(pairs(b"\0\0"), Ok(vec![]));
        // RFC 7143, 13.7: an alias is what its owner calls it.
        assert_eq!(pairs("InitiatorAlias=Büro\0".as_bytes()), Ok(vec![("InitiatorAlias", "Büro")]));
        for bad in [&b"A\0"[..], b"=1\0", b"A=\xff\0", "Ä=1\0".as_bytes()] {
            assert_eq!(pairs(bad), Err(Malformed));
        }
        assert_eq!(pairs(format!("{}=1", "k".repeat(64)).as_bytes()), Err(Malformed));
    }

    #[test]
    fn numbers_and_bytes_in_all_their_notations() {
        assert_eq!(
            (number("262144"), number("0x1F"), number("-1"), number("")),
            (Some(262_144), Some(31), None, None)
        );
        assert_eq!((number("+1"), number("0x+1"), number("0x")), (None, None, None));
        assert_eq!(binary("0x0aFF", 9), Some(vec![10, 255]));
        assert_eq!(binary("0xabc", 9), Some(vec![0xa, 0xbc]));
        assert_eq!(binary("0bAQIDBA==", 9), Some(vec![1, 2, 3, 4]));
        assert_eq!(
            (binary("0x0102", 1), binary("12", 9), binary("0xzz", 9), binary("é0", 9)),
            (None, None, None, None)
        );
        assert_eq!(hex(&[0, 0xab]), "0x00ab");
    }
}
