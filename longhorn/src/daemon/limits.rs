//! What the system lets a process have, which it hands down from whoever starts it.

use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit, setrlimit};

/// Open files that a replica or an engine may need. A replica: three for each of 250 layers, and for each of a few readers of two
/// snapshots two more. An engine: a connection for each of 64 queues to each of 20 replicas, and the layers of those on its host.
/// Most systems begin with 1024, and one that is missing fails the replica, or keeps it out of the volume.
const FILES: u64 = 16 << 10;

/// Raises the limit of open files as far as the system lets it, and lifts that of a file's length (`ulimit -f`): a write behind it
/// ends the process (SIGXFSZ), of an engine in the memory that it shares, of a replica in a layer.
pub(super) fn raise() {
    let files = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(soft, hard)| setrlimit(Resource::RLIMIT_NOFILE, soft.max(hard.min(FILES)), hard));
    if let Err(e) = files {
        tracing::warn!("the limit of open files is as it was: {e}");
    }
    if let Err(e) = setrlimit(Resource::RLIMIT_FSIZE, RLIM_INFINITY, RLIM_INFINITY) {
        let length = getrlimit(Resource::RLIMIT_FSIZE).map_or(RLIM_INFINITY, |(soft, _)| soft);
        if length != RLIM_INFINITY {
            tracing::warn!(
                "files end at {length} bytes here (ulimit -f), and whoever writes behind that is killed: {e}"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_raised() {
        let (before, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        setrlimit(Resource::RLIMIT_NOFILE, 512, hard).unwrap();
        let (_, longest) = getrlimit(Resource::RLIMIT_FSIZE).unwrap();
        setrlimit(Resource::RLIMIT_FSIZE, (1 << 40).min(longest), longest).unwrap();
        raise();
        let raised = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        assert_eq!(raised, (hard.min(FILES), hard));
        setrlimit(Resource::RLIMIT_NOFILE, before.max(raised.0), hard).unwrap();
        if nix::unistd::geteuid().is_root() || longest == RLIM_INFINITY {
            assert_eq!(getrlimit(Resource::RLIMIT_FSIZE).unwrap(), (RLIM_INFINITY, RLIM_INFINITY));
        }
    }
}
