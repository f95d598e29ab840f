//! Examples behind the help of groups, and of commands that only look.

pub(super) const LS_HELP: &str = "\
Examples:
  longhornctl ls
  longhornctl ls -o json | jq -r '.[].name'";

pub(super) const SNAPSHOT_HELP: &str = "\
Examples:
  longhornctl snapshot create demo before-upgrade
  longhornctl snapshot ls demo
  longhornctl snapshot rm demo before-upgrade && longhornctl snapshot purge demo";

pub(super) const SNAPSHOT_LS_HELP: &str = "\
Examples:
  longhornctl snapshot ls demo
  longhornctl -o json snapshot ls demo | jq -r '.[] | select(.removed | not).name'";

pub(super) const SNAPSHOT_TREE_HELP: &str = "\
Example:
  longhornctl snapshot tree demo

Where the volume was reverted, several snapshots stand on one.";

pub(super) const REPLICA_HELP: &str = "\
Examples:
  longhornctl replica ls demo
  longhornctl replica add demo --dir /mnt/disk2/demo
  longhornctl replica rm demo demo-r-0a1b2c3d";

pub(super) const REPLICA_LS_HELP: &str = "\
Examples:
  longhornctl replica ls demo
  longhornctl -o json replica ls demo | jq -r '.[].path'";

pub(super) const REPLICA_REBUILD_HELP: &str = "\
Example:
  longhornctl replica rebuild demo demo-r-0a1b2c3d

I/O goes on meanwhile; the volume has one member less until it is done.";

pub(super) const DOCTOR_HELP: &str = "\
Examples:
  longhornctl doctor
  longhornctl doctor -o json | jq -r '.[] | select(.verdict != \"OK\").check'

Exit status 1: no volume runs here.";

pub(super) const INSTALL_HELP: &str = "\
Example:
  longhornctl install manifests --image HOST/longhorn:0.1.0 | kubectl apply --server-side -f -";
