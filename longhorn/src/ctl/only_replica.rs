//! What is said of a damaged directory that is its volume's only replica: there is none that it could be rebuilt from.

use control::host::VolumeRecord;

/// What is to be done about one of several, as the errors of the replica's store have it.
const REBUILD: &str =
    "take this replica out of the volume and let it be rebuilt, or restore the file from a copy";

/// What was said of a replica's directory, with what can be done about it where the volume has no other one.
pub(super) fn advice(record: &VolumeRecord, said: &str) -> String {
    let [only] = record.replicas.as_slice() else { return said.to_owned() };
    let alone = format!(
        "no other replica has what it holds: restore the file from a copy, or take what can be read with `longhornctl replica export \
         --rescue {} FILE`",
        only.directory.display()
    );
    said.replace(REBUILD, &alone)
}
