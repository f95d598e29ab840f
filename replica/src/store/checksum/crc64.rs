//! CRC-64 with the polynomial of ISO 3309, as Go's `hash/crc64` computes it (CRC-64/GO-ISO): bits reflected, begun and
//! ended with all ones. Holes cost a few multiplications whatever their length.

/// The polynomial, reflected: x^64 + x^4 + x^3 + x + 1.
const POLYNOMIAL: u64 = 0xd800_0000_0000_0000;

/// Bytes that are taken at a time ("slicing by 8").
const SLICES: usize = 8;

/// `TABLES[n][b]`: what the byte b does to the register, n zero bytes later.
static TABLES: [[u64; 256]; SLICES] = tables();

const fn tables() -> [[u64; 256]; SLICES] {
    let mut tables = [[0; 256]; SLICES];
    let mut byte = 0;
    while byte < 256 {
        let mut register = byte as u64;
        let mut bit = 0;
        while bit < 8 {
            register = times_x(register);
            bit += 1;
        }
        tables[0][byte] = register;
        byte += 1;
    }
    let mut slice = 1;
    while slice < SLICES {
        let mut byte = 0;
        while byte < 256 {
            let before = tables[slice - 1][byte];
            tables[slice][byte] = before >> 8 ^ tables[0][(before & 0xff) as usize];
            byte += 1;
        }
        slice += 1;
    }
    tables
}

/// Multiplies by x. The highest bit is the coefficient of x^0.
const fn times_x(polynomial: u64) -> u64 {
    polynomial >> 1 ^ if polynomial & 1 == 1 { POLYNOMIAL } else { 0 }
}

const fn multiply(a: u64, mut b: u64) -> u64 {
    let (mut product, mut bit) = (0, 1 << 63);
    while bit != 0 {
        if a & bit != 0 {
            product ^= b;
        }
        b = times_x(b);
        bit >>= 1;
    }
    product
}

/// `ZEROES[n]`: x^(8 * 2^n), what 2^n zero bytes multiply the register by.
static ZEROES: [u64; 64] = zeroes();

const fn zeroes() -> [u64; 64] {
    let mut powers = [0; 64];
    // x^8.
    powers[0] = 1 << 55;
    let mut n = 1;
    while n < 64 {
        powers[n] = multiply(powers[n - 1], powers[n - 1]);
        n += 1;
    }
    powers
}

/// A checksum that is being computed.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Crc64(u64);

impl Crc64 {
    pub(in super::super) const fn new() -> Self {
        Self(u64::MAX)
    }

    pub(in super::super) fn update(&mut self, bytes: &[u8]) {
        let mut register = self.0;
        let (words, rest) = bytes.as_chunks::<SLICES>();
        for word in words {
            let mixed = (register ^ u64::from_le_bytes(*word)).to_le_bytes();
            register = mixed
                .iter()
                .zip(TABLES.iter().rev())
                .fold(0, |sum, (byte, table)| sum ^ table[usize::from(*byte)]);
        }
        for byte in rest {
            register = register >> 8 ^ TABLES[0][usize::from(register.to_le_bytes()[0] ^ byte)];
        }
        self.0 = register;
    }

    /// The same as so many zero bytes.
    pub(in super::super) fn skip_zeroes(&mut self, count: u64) {
        for (n, power) in ZEROES.iter().enumerate() {
            if count >> n & 1 == 1 {
                self.0 = multiply(self.0, *power);
            }
        }
    }

    pub(in super::super) const fn finish(self) -> u64 {
        !self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn crc(bytes: &[u8]) -> u64 {
        let mut crc = Crc64::new();
        crc.update(bytes);
        crc.finish()
    }

    /// Bit by bit, from the definition.
    fn slow(bytes: &[u8]) -> u64 {
        let mut register = u64::MAX;
        for byte in bytes {
            register ^= u64::from(*byte);
            for _ in 0..8 {
                register = times_x(register);
            }
        }
        !register
    }

    #[test]
    fn known_values() {
        // The check value of CRC-64/GO-ISO, and values of the tests of Go's hash/crc64.
        assert_eq!(crc(b"123456789"), 0xb909_56c7_75a4_1001);
        assert_eq!(crc(b""), 0);
        assert_eq!(crc(b"a"), 0x3420_0000_0000_0000);
    }

    #[test]
    fn any_length_in_any_pieces() {
        let bytes: Vec<u8> = (0..1000_u32).map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()[3]).collect();
        for len in (0..40).chain([63, 64, 65, 999, 1000]) {
            assert_eq!(crc(&bytes[..len]), slow(&bytes[..len]), "{len}");
            let mut parts = Crc64::new();
            for part in bytes[..len].chunks(7) {
                parts.update(part);
            }
            assert_eq!(parts.finish(), slow(&bytes[..len]));
        }
    }

    #[test]
    fn zeroes_are_skipped() {
        for count in [0, 1, 7, 8, 4096, 100_001] {
            let mut bytes = b"head".to_vec();
            bytes.resize(4 + count, 0);
            bytes.extend_from_slice(b"tail");
            let mut crc = Crc64::new();
            crc.update(b"head");
            crc.skip_zeroes(count as u64);
            crc.update(b"tail");
            assert_eq!(crc.finish(), slow(&bytes), "{count}");
        }
        // Two to the 50 is as many as twice two to the 49.
        let (mut once, mut twice) = (Crc64::new(), Crc64::new());
        once.skip_zeroes(1 << 50);
        twice.skip_zeroes(1 << 49);
        twice.skip_zeroes(1 << 49);
        assert_eq!(once.finish(), twice.finish());
    }
}
