//! The device nodes of the kernel's that the frontend stands on.

use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use nix::sys::stat::{major, minor};

/// Major number of the kernel's small devices (include/uapi/linux/major.h).
pub const MISC: u64 = 10;

/// Where FUSE connections are made (`FUSE_MINOR` of include/linux/miscdevice.h).
pub const FUSE: Needed = Needed { path: "/dev/fuse", module: "fuse", minor: 229 };

/// Where loop devices are found (`LOOP_CTRL_MINOR`).
pub const LOOP: Needed = Needed { path: "/dev/loop-control", module: "loop", minor: 237 };

/// A device node.
#[derive(Clone, Copy, Debug)]
pub struct Needed {
    /// Where it has to be.
    pub path: &'static str,
    /// The kernel module that makes it.
    pub module: &'static str,
    /// Its minor number.
    pub minor: u64,
}

/// What is at a node's place, for all that is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Present {
    /// The node.
    Here,
    /// Nothing.
    Absent,
    /// Another file: in a container that was not given the device, or where a service hides devices.
    Another,
}

impl Needed {
    /// What is at its place.
    pub fn present(&self) -> Present {
        present_at(Path::new(self.path), self.minor)
    }

    /// What is missing, in words that name it; `None` if nothing.
    pub(crate) fn missing(&self) -> Option<String> {
        let Self { path, module, minor } = self;
        match self.present() {
            Present::Here => None,
            Present::Absent => Some(format!("{path} (kernel module {module})")),
            Present::Another => Some(format!(
                "{path} as the character device {MISC}:{minor}, for which another file is there"
            )),
        }
    }
}

fn present_at(path: &Path, number: u64) -> Present {
    match path.metadata() {
        Ok(found)
            if found.file_type().is_char_device()
                && (major(found.rdev()), minor(found.rdev())) == (MISC, number) =>
        {
            Present::Here
        }
        Ok(_) => Present::Another,
        Err(e) if e.kind() == io::ErrorKind::NotFound => Present::Absent,
        // An engine that gives up for a passing want of memory is not started again.
        Err(_) => Present::Here,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_file_is_not_taken_for_the_device() {
        assert_eq!(present_at(Path::new("/dev/null"), FUSE.minor), Present::Another);
        let file = tempfile::NamedTempFile::new().unwrap();
        assert_eq!(present_at(file.path(), FUSE.minor), Present::Another);
        assert_eq!(present_at(Path::new("/dev/none"), FUSE.minor), Present::Absent);
        assert_eq!(
            present_at(&file.path().join("none"), FUSE.minor),
            Present::Here,
            "it cannot be looked at"
        );
        if Path::new("/dev/fuse").exists() {
            assert_eq!(FUSE.missing(), None);
        }
    }
}
