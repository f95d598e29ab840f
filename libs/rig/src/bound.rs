//! A loop device for a test's image.

use std::fs::File;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use lh_ring::sys::loops;

/// How long a free one is looked for: another process may always be faster.
const PATIENCE: Duration = Duration::from_secs(10);

/// Binds an image to a free loop device with blocks of 512 bytes; its number and the device. `name` is what the device says of its
/// file.
///
/// # Errors
/// In words: a test says with them why it is skipped.
pub fn bind_loop(image: &File, name: &str) -> Result<(u32, File), String> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let number = loops::get_free().map_err(|e| format!("loop devices: {e}"))?;
        let device = File::options().read(true).write(true).open(format!("/dev/loop{number}"));
        let device = device.map_err(|e| format!("/dev/loop{number}: {e}"))?;
        match loops::configure(device.as_fd(), image.as_fd(), 512, name) {
            Ok(()) => return Ok((number, device)),
            Err(e) if Instant::now() > deadline => return Err(e.to_string()),
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}
