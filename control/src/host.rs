//! What a host knows of its volumes without any process running: the root directory's layout, each volume's record,
//! key and authority, and which root a volume is live under.
//!
//! Every file is replaced as a whole (new file, fsync, rename, fsync of the directory), so that a crash at any point
//! leaves the old or the new content. Every file is 0600 and every directory 0700: the key in there opens the data.
//! `docs/formats/host.md` describes the files.

mod authority;
#[cfg(test)]
pub(crate) mod document;
mod durable;
pub(crate) mod format;
mod key;
mod live;
mod lock;
mod mark;
mod places;
mod record;
mod root;

pub use lh_block::{Quorum, REPLICAS_MAX};

pub use authority::{Authority, AuthorityError};
pub use durable::{
    create_dir_durably, remove_with_room, replace_file, replace_file_in_its_room, store_program, sync_dir,
};
pub use key::{MapKey, read_key};
pub(crate) use live::is_at;
pub use live::{LiveDirs, LiveError, LiveLock};
pub use lock::{LockError, VolumeLock};
pub use places::{DEVICES, RUN};
pub use record::{
    IO_TIMEOUT_SECONDS, RecordError, ReplicaRecord, SNAPSHOT_COUNT, VolumeRecord, VolumeState, engine_name,
    new_replica_suffix, replica_name,
};
pub use root::{Root, RootError, control_socket_beside, make_socket_directory, unfinished_copy};
