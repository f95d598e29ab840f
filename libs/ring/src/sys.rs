//! System calls that no crate wraps safely: each file one part of the kernel.

use std::io;

pub mod loops;
pub mod mounts;

mod absent;
mod allocation;
mod block_device;
mod clock;
mod extents;
mod file_systems;
mod freeze;
mod locks;
mod memory_pressure;
mod plain_files;
mod random;
mod rights;
mod shortage;
mod sockets;
mod stream;
mod xattr;

pub use absent::if_there;
pub use allocation::{clone_range, fallocate, forget_cached, punch_hole};
pub use block_device::{as_new, remove_partitions};
pub use clock::since_boot;
pub use extents::{FileExtent, fiemap, seek_data, seek_hole};
pub use file_systems::{FileSystem, dio_align, file_system};
pub use freeze::{freeze, thaw};
pub use locks::{lock, lock_until};
pub use memory_pressure::{
    Class, PressureTrigger, class, lock_memory_on_fault, set_class, set_io_flusher, set_oom_score,
};
pub use plain_files::{NotPlain, open_plain};
pub use random::random;
pub use rights::{RIGHTS_MAX, receive_with_fds, receive_with_fds_now, send_with_fds, send_with_fds_now};
pub use shortage::is_shortage;
pub use sockets::set_socket_buffers;
pub use stream::Stream;
pub use xattr::{get_xattr, remove_xattr, set_xattr};

/// Makes a call that returns -1 on error, again if a signal interrupts it.
fn retry(mut call: impl FnMut() -> libc::c_int) -> io::Result<()> {
    loop {
        if call() >= 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}
