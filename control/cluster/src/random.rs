//! Random numbers from the kernel.

use std::io;

/// Fills the buffer with random bytes (`getrandom(2)`).
///
/// # Errors
/// The kernel has none.
pub(crate) fn fill(buffer: &mut [u8]) -> io::Result<()> {
    let mut filled = 0;
    while filled < buffer.len() {
        filled += rustix::rand::getrandom(&mut buffer[filled..], rustix::rand::GetRandomFlags::empty())?;
    }
    Ok(())
}
