//! What the system lets a process have, as whoever starts it hands it down.

use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit, setrlimit};

use crate::tell::tell;

/// Open files that a replica or an engine may need. A replica: three for each of 250 layers, and for each of a few readers of two
/// snapshots two more. An engine: a connection for each of 64 queues to each of 20 replicas, and the layers of those on its host.
/// Most systems begin with 1024, and one that is missing fails the replica, or keeps it out of the volume.
const FILES: u64 = 16 << 10;

/// Raises the limit of open files, as far as the system lets it.
pub(crate) fn raise_open_files() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(soft, hard)| setrlimit(Resource::RLIMIT_NOFILE, soft.max(hard.min(FILES)), hard));
    if let Err(e) = raised {
        tracing::warn!("the limit of open files is as it was: {e}");
    }
}

/// Lifts the limit of a file's length (`ulimit -f`), for what this process starts, too. Whoever writes behind it is killed (SIGXFSZ): an
/// engine in the memory that it shares, a replica in a layer, and who makes a replica at its length.
pub(crate) fn lift_file_length() {
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_FSIZE) else { return };
    if soft == RLIM_INFINITY || setrlimit(Resource::RLIMIT_FSIZE, RLIM_INFINITY, RLIM_INFINITY).is_ok() {
        return;
    }
    let end = setrlimit(Resource::RLIMIT_FSIZE, hard, hard).map_or(soft, |()| hard);
    if end != RLIM_INFINITY {
        tell!("warning: files end at {end} bytes here (ulimit -H -f), and who writes behind that is killed");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_of_open_files_is_raised() {
        let (before, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        setrlimit(Resource::RLIMIT_NOFILE, 512, hard).unwrap();
        raise_open_files();
        let raised = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        assert_eq!(raised, (hard.min(FILES), hard));
        setrlimit(Resource::RLIMIT_NOFILE, before.max(raised.0), hard).unwrap();
    }
}
