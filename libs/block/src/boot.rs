//! Which boot of the host this is.

use std::io;
use std::sync::OnceLock;

/// A random UUID that the kernel makes at each boot (`/proc/sys/kernel/random/boot_id`, proc_sys_kernel(5)).
///
/// # Errors
/// There is no such file: the kernel tells no boot from another.
pub fn boot() -> io::Result<&'static str> {
    static BOOT: OnceLock<String> = OnceLock::new();
    if let Some(boot) = BOOT.get() {
        return Ok(boot);
    }
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    Ok(BOOT.get_or_init(|| boot.trim().to_owned()))
}
