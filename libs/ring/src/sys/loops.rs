//! Loop devices (include/uapi/linux/loop.h).

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

const LOOP_CLR_FD: libc::Ioctl = 0x4c01;
const LOOP_SET_STATUS64: libc::Ioctl = 0x4c04;
const LOOP_SET_CAPACITY: libc::Ioctl = 0x4c07;
const LOOP_CONFIGURE: libc::Ioctl = 0x4c0a;
const LOOP_CTL_GET_FREE: libc::Ioctl = 0x4c82;

const LO_FLAGS_DIRECT_IO: u32 = 16;

const LO_NAME_SIZE: usize = 64;

/// struct loop_info64.
#[repr(C)]
#[derive(Clone, Copy)]
struct LoopInfo64 {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    size_limit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; LO_NAME_SIZE],
    crypt_name: [u8; LO_NAME_SIZE],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

const _: () = assert!(size_of::<LoopInfo64>() == 232);

impl LoopInfo64 {
    const NOTHING: Self = Self {
        device: 0,
        inode: 0,
        rdevice: 0,
        offset: 0,
        size_limit: 0,
        number: 0,
        encrypt_type: 0,
        encrypt_key_size: 0,
        flags: 0,
        file_name: [0; LO_NAME_SIZE],
        crypt_name: [0; LO_NAME_SIZE],
        encrypt_key: [0; 32],
        init: [0; 2],
    };

    /// The settings of all devices here: the whole file, direct I/O, not unbound at the last close.
    fn named(name: &str) -> Self {
        let mut info = Self { flags: LO_FLAGS_DIRECT_IO, ..Self::NOTHING };
        let len = name.len().min(LO_NAME_SIZE - 1);
        info.file_name[..len].copy_from_slice(&name.as_bytes()[..len]);
        info
    }
}

/// struct loop_config.
#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    info: LoopInfo64,
    reserved: [u64; 8],
}

const _: () = assert!(size_of::<LoopConfig>() == 304);

/// The number of a loop device that is not bound, made if there is none. Another process may bind it first.
///
/// # Errors
/// The system's; `NotFound` without /dev/loop-control.
pub fn get_free() -> io::Result<u32> {
    let control = File::options().read(true).write(true).open("/dev/loop-control")?;
    // SAFETY: the command takes no argument.
    let number = check(unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE) })?;
    u32::try_from(number).map_err(|_| io::ErrorKind::InvalidData.into())
}

/// Binds `file` to the loop device with direct I/O and logical blocks of `block_size` bytes (Linux 5.8). `name`
/// is for people, cut to 63 bytes. Asks the file's server, if it has one. What somebody who had the device before has set is
/// taken back ([`super::as_new`]).
///
/// # Errors
/// The system's; `ResourceBusy` if the device is bound.
pub fn configure(
    device: BorrowedFd<'_>,
    file: BorrowedFd<'_>,
    block_size: u32,
    name: &str,
) -> io::Result<()> {
    let fd = file.as_raw_fd().cast_unsigned();
    let config = LoopConfig { fd, block_size, info: LoopInfo64::named(name), reserved: [0; 8] };
    // SAFETY: the command reads one loop_config, which lives until the call returns.
    check(unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE, &raw const config) })?;
    let usable = super::as_new(device);
    if usable.is_err() {
        // Whoever hears of an error takes the device for one that is not bound.
        let _ = clear(device);
    }
    usable
}

/// Unbinds the loop device when the last descriptor of it is closed: the caller's own, if no other is open. An opener
/// that comes before the caller's close is refused by the kernel.
///
/// # Errors
/// `ENXIO` if it is not bound.
pub fn clear(device: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: the command takes no argument.
    check(unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CLR_FD) }).map(drop)
}

/// Takes [`clear`] back on a device that others still have open, and that was configured with that name. (Asking the
/// driver for its settings would ask the file's server.)
///
/// # Errors
/// `ENXIO` if they have closed it meanwhile.
pub fn keep_after_last_close(device: BorrowedFd<'_>, name: &str) -> io::Result<()> {
    let info = LoopInfo64::named(name);
    // SAFETY: the command reads one loop_info64, which lives until the call returns.
    check(unsafe { libc::ioctl(device.as_raw_fd(), LOOP_SET_STATUS64, &raw const info) }).map(drop)
}

/// Takes the file's size over to the device. Asks the file's server, if it has one.
///
/// # Errors
/// The system's.
pub fn set_capacity(device: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: the command takes no pointer.
    check(unsafe { libc::ioctl(device.as_raw_fd(), LOOP_SET_CAPACITY, 0) }).map(drop)
}

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileExt;

    use super::*;

    /// Opens /dev/loopN read-write; `None` after a line of explanation where this machine has none to give.
    fn bound(file: &File, name: &str, block_size: u32) -> Option<(u32, File)> {
        for _ in 0..16 {
            let number = match get_free() {
                Ok(number) => number,
                Err(e) => {
                    println!("SKIP {name}: no loop devices here: {e}");
                    return None;
                }
            };
            let device = File::options().read(true).write(true).open(format!("/dev/loop{number}")).unwrap();
            match configure(device.as_fd(), file.as_fd(), block_size, name) {
                Ok(()) => return Some((number, device)),
                Err(e) => assert_eq!(e.kind(), io::ErrorKind::ResourceBusy),
            }
        }
        panic!("no free loop device")
    }

    fn sectors(number: u32) -> u64 {
        let size = std::fs::read_to_string(format!("/sys/block/loop{number}/size")).unwrap();
        size.trim().parse().unwrap()
    }

    /// What the device is bound to, by a name that no other file has while that one is open.
    fn backing_file(number: u32) -> Option<String> {
        std::fs::read_to_string(format!("/sys/block/loop{number}/loop/backing_file")).ok()
    }

    #[test]
    fn a_loop_device_from_binding_to_its_end() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 20).unwrap();
        let name = format!("ring-test:{}", std::process::id());
        let Some((number, device)) = bound(&file, &name, 4096) else { return };
        let autoclear = || {
            let text = std::fs::read_to_string(format!("/sys/block/loop{number}/loop/autoclear")).unwrap();
            text.trim() == "1"
        };
        assert!(!autoclear());
        assert_eq!(sectors(number), 2048);
        file.set_len(2 << 20).unwrap();
        set_capacity(device.as_fd()).unwrap();
        assert_eq!(sectors(number), 4096);

        // Somebody else has it open: it stays, and stays bound after that one's close if it is kept.
        let other = File::open(format!("/dev/loop{number}")).unwrap();
        clear(device.as_fd()).unwrap();
        assert!(autoclear());
        keep_after_last_close(device.as_fd(), &name).unwrap();
        assert!(!autoclear());
        drop(other);
        let ours = backing_file(number).expect("bound");
        clear(device.as_fd()).unwrap();
        drop(device);
        // Another process may have bound the same number to a file of its own meanwhile.
        assert_ne!(backing_file(number), Some(ours));
    }

    #[test]
    fn who_had_it_before_forbids_no_write_swallows_no_flush_and_cuts_nothing_short() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 20).unwrap();
        let name = format!("ring-test-ro:{}", std::process::id());
        let Some((number, device)) = bound(&file, &name, 4096) else { return };
        let path = format!("/dev/loop{number}");
        let setting = |name: &str| format!("/sys/block/loop{number}/queue/{name}");
        let set = |name: &str| std::fs::read_to_string(setting(name)).unwrap().trim().to_owned();
        let longest = set("max_sectors_kb");
        assert_eq!(set("write_cache"), "write back");
        let done = std::process::Command::new("blockdev").args(["--setro", &path]).status();
        assert!(done.expect("blockdev").success());
        std::fs::write(setting("write_cache"), "write through").unwrap();
        std::fs::write(setting("max_sectors_kb"), "8").unwrap();
        device.write_all_at(&[1; 4096], 0).expect_err("written though that is forbidden");
        clear(device.as_fd()).unwrap();
        drop(device);
        let device = File::options().read(true).write(true).open(&path).unwrap();
        if let Err(e) = configure(device.as_fd(), file.as_fd(), 4096, &name) {
            // Another process has bound it meanwhile, and may write to it.
            assert_eq!(e.kind(), io::ErrorKind::ResourceBusy);
            return;
        }
        device.write_all_at(&[1; 4096], 0).unwrap();
        assert_eq!((set("write_cache").as_str(), set("max_sectors_kb")), ("write back", longest));
        clear(device.as_fd()).unwrap();
    }
}
