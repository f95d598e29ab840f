//! Whoever listens to the kernel's events, as udev does, hears when a device has a node of a volume's, and when it has none.

use std::fs;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;

use fuse_frontend::node;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, setsockopt, socket,
    sockopt,
};
use nix::sys::time::TimeVal;

/// What the kernel itself sends, before udev has looked at it (libudev, `UDEV_MONITOR_KERNEL`).
const FROM_THE_KERNEL: u32 = 1;

/// How long an event may take. The kernel sends it before the write that asks for it returns.
const PATIENCE_S: i64 = 1;

struct Events(OwnedFd);

impl Events {
    fn new() -> nix::Result<Self> {
        let protocol = SockProtocol::NetlinkKObjectUEvent;
        let socket = socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, protocol)?;
        bind(socket.as_raw_fd(), &NetlinkAddr::new(0, FROM_THE_KERNEL))?;
        setsockopt(&socket, sockopt::ReceiveTimeout, &TimeVal::new(PATIENCE_S, 0))?;
        Ok(Self(socket))
    }

    /// True if a change of the device has been told since the last look, or is now.
    fn has_heard(&self, device: &str) -> bool {
        let mut event = [0; 8192];
        while let Ok(len) = recv(self.0.as_raw_fd(), &mut event, MsgFlags::empty()) {
            let mut lines = event[..len].split(|byte| *byte == 0);
            let head = String::from_utf8_lossy(lines.next().unwrap_or_default()).into_owned();
            if head.starts_with("change@") && head.ends_with(&format!("/block/{device}")) {
                return true;
            }
        }
        false
    }
}

/// A loop device of this test's own: what others do with theirs meanwhile is told of those.
struct Device {
    name: String,
    rdev: u64,
    _file: tempfile::NamedTempFile,
}

impl Device {
    fn new() -> Option<Self> {
        let file = tempfile::NamedTempFile::new().ok()?;
        file.as_file().set_len(1 << 20).ok()?;
        let done = Command::new("losetup").args(["--find", "--show"]).arg(file.path()).output().ok()?;
        let path = String::from_utf8(done.stdout).ok().filter(|_| done.status.success())?;
        let rdev = fs::metadata(path.trim()).ok()?.rdev();
        Some(Self { name: path.trim().strip_prefix("/dev/")?.to_owned(), rdev, _file: file })
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["--detach", &format!("/dev/{}", self.name)]).status();
    }
}

#[test]
fn udev_hears_of_a_node_and_of_its_end() {
    let skip = |reason: &str| eprintln!("SKIP udev_hears_of_a_node_and_of_its_end: {reason}");
    let Some(device) = Device::new() else { return skip("no loop device") };
    let (name, rdev) = (device.name.as_str(), device.rdev);
    let Ok(events) = Events::new() else { return skip("no kernel events") };
    let asks = Path::new("/sys/block").join(name).join("uevent");
    if fs::write(asks, "change").is_err() || !events.has_heard(name) {
        return skip("events of devices are not heard here");
    }
    // Where there is a udev it tells once more of a device that somebody has closed who could write, as losetup has.
    while events.has_heard(name) {}
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("demo");
    node::place(&path, rdev, &[rdev]).unwrap();
    assert!(events.has_heard(name), "nobody hears of the node");
    node::remove(&path, rdev).unwrap();
    assert!(events.has_heard(name), "nobody hears that it is gone");
    node::remove(&path, rdev).unwrap();
    assert!(!events.has_heard(name), "there was nothing to be told");
}
