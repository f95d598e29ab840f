//! What of HPACK's Huffman code (RFC 7541, appendix B) is needed to put one symbol in place of another where it stands.
//!
//! The code is canonical: codes of one length are consecutive numbers, so that a table of lengths is enough to step from one
//! symbol to the next.

/// Bits of a code, the first and the last code of so many bits: those of printable ASCII, but for the backslash.
const CODES: [(usize, u32, u32); 10] = [
    (5, 0x0, 0x9),
    (6, 0x14, 0x2d),
    (7, 0x5c, 0x7b),
    (8, 0xf8, 0xfd),
    (10, 0x3f8, 0x3fc),
    (11, 0x7fa, 0x7fc),
    (12, 0xffa, 0xffb),
    (13, 0x1ff8, 0x1ffd),
    (14, 0x3ffc, 0x3ffd),
    (15, 0x7ffc, 0x7ffe),
];

/// Codes of this many bits can be exchanged for each other: all that [`replace`] knows of.
const LENGTH: usize = 6;
/// The codes of space, `%`, `/`, and `-`, which takes their place.
const REPLACED: [u32; 3] = [0x14, 0x15, 0x18];
const HYPHEN: u32 = 0x16;

/// Puts `-` in place of each space, `%` and `/` of a coded text; its length stays. It ends at what it does not understand, the
/// padding for one.
pub(super) fn replace(coded: &mut [u8]) {
    let mut at = 0;
    while let Some((length, code)) = next(coded, at) {
        if length == LENGTH && REPLACED.contains(&code) {
            put(coded, at, HYPHEN);
        }
        at += length;
    }
}

/// The code that begins at this bit, and its length.
fn next(coded: &[u8], at: usize) -> Option<(usize, u32)> {
    let (mut code, mut read) = (0, 0);
    for (length, first, last) in CODES {
        for bit in at + read..at + length {
            code = code << 1 | u32::from(coded.get(bit / 8)? >> (7 - bit % 8) & 1);
        }
        read = length;
        if (first..=last).contains(&code) {
            return Some((length, code));
        }
    }
    None
}

/// Writes a code of [`LENGTH`] bits over one of the same length.
fn put(coded: &mut [u8], at: usize, code: u32) {
    for number in 0..LENGTH {
        let (bit, is_set) = (at + number, code >> (LENGTH - 1 - number) & 1 == 1);
        let mask = 0x80 >> (bit % 8);
        let Some(byte) = coded.get_mut(bit / 8) else { return };
        *byte = if is_set { *byte | mask } else { *byte & !mask };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What golang.org/x/net makes of texts, as grpc-go sends them.
    #[test]
    fn what_no_host_may_hold_is_replaced_where_it_stands() {
        let escaped: [u8; 14] =
            [0x54, 0x58, 0x53, 0x4d, 0x6a, 0x8b, 0x08, 0xd5, 0x16, 0x14, 0x2e, 0x83, 0x93, 0xaf];
        let plain: [u8; 10] = [0x61, 0x34, 0xd6, 0xc0, 0xd8, 0x42, 0xe8, 0x39, 0x3a, 0xff];
        for (mut coded, before, after) in [
            (escaped.to_vec(), "%2Ftmp%2Fa%2Fs.sock", "-2Ftmp-2Fa-2Fs.sock"),
            (plain.to_vec(), "/tmp/a/s.sock", "-tmp-a-s.sock"),
        ] {
            assert_eq!(decoded(&coded), before);
            replace(&mut coded);
            assert_eq!(decoded(&coded), after);
        }
    }

    #[test]
    fn it_steps_over_long_codes_and_ends_at_longer_ones() {
        // `a~+/`: 5, 13, 11 and 6 bits (appendix B), and padding.
        let mut coded = bits("00011 1111111111101 11111111011 011000 11111");
        replace(&mut coded);
        assert_eq!(coded, bits("00011 1111111111101 11111111011 010110 11111"));
        // A backslash has 19 bits: what is behind it stays, and so does what is cut off.
        for as_it_is in ["1111111111111110000 011000 1111111", "11111111 111", ""] {
            let mut coded = bits(as_it_is);
            replace(&mut coded);
            assert_eq!(coded, bits(as_it_is), "{as_it_is}");
        }
    }

    fn bits(text: &str) -> Vec<u8> {
        let bits: Vec<u8> = text.bytes().filter(|b| *b != b' ').map(|b| b - b'0').collect();
        bits.chunks(8).map(|byte| byte.iter().enumerate().map(|(n, bit)| bit << (7 - n)).sum()).collect()
    }

    /// A text of symbols that a socket's path has, by their codes.
    fn decoded(coded: &[u8]) -> String {
        let symbol = |(length, code)| match (length, code) {
            (5, n) => b"012aceiost"[n as usize],
            (6, n) => b" %-./3456789=A_bdfghlmnpru"[n as usize - 0x14],
            (7, n) => b":BCDEFGHIJKLMNOPQRSTUVWYjkqvwxyz"[n as usize - 0x5c],
            other => panic!("{other:?}"),
        };
        let (mut at, mut text) = (0, String::new());
        while let Some(found) = next(coded, at) {
            text.push(symbol(found).into());
            at += found.0;
        }
        text
    }
}
