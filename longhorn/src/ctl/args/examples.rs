//! What help says behind the options: examples first. Lines fit 80 columns, since clap breaks longer ones.

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
  longhornctl -o json snapshot ls demo \\
    | jq -r '.[] | select(.removed | not).name'";

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
Examples:
  longhornctl install manifests --image HOST/longhorn:0.1.0 \\
    | kubectl apply --server-side -f -
  longhornctl install systemd --write";

pub(super) const SYSTEMD_HELP: &str = "\
Examples:
  longhornctl install systemd            what would be written, and where
  longhornctl install systemd --write
  systemctl daemon-reload && udevadm control --reload
  systemctl enable --now longhorn-volumes

The files name this program where it lies now, and the root. To mount from a
volume when the host starts, in /etc/fstab:

  /dev/longhorn/demo  /mnt/demo  ext4  OPTIONS  0  2

where OPTIONS are, without spaces,

  _netdev,nofail,x-systemd.requires=longhorn-volume@demo.service";

pub(super) const AFTER_HELP: &str = "\
Examples:
  longhornctl up demo --size 10GiB      a volume with 3 replicas, and its device
  mkfs.ext4 /dev/longhorn/demo          use it like any disk
  longhornctl status demo               see how it fares
  longhornctl down demo                 stop it; its data stays

Each command has its own examples: longhornctl COMMAND --help";

pub(super) const UP_HELP: &str = "\
Examples:
  longhornctl up demo --size 10GiB    3 replicas, and /dev/longhorn/demo
  longhornctl up demo                 start it again
  longhornctl up vm --size 1TiB --replicas 2 --frontend nbd-server
                                      no device: an NBD export for QEMU
  longhornctl up --all                after a reboot: all that were up

On a volume that is up this changes nothing but the limits for snapshots, and
succeeds. Of a stopped one, --frontend, --listen, --io-timeout and --checksum
may change, too.";

pub(super) const DOWN_HELP: &str = "\
Example:
  umount /mnt/demo && longhornctl down demo

A device that is in use is not stopped; who uses it is named. Stopping a
stopped volume succeeds. A volume that was stopped is not started by
`up --all` any more, but with --for-now it is.";

pub(super) const STATUS_HELP: &str = "\
Examples:
  longhornctl status demo
  longhornctl status demo --watch
  longhornctl -o json status demo | jq -r .endpoint

Modes: RW takes writes and answers reads; WO is being brought in sync; ERR is
left out.";

pub(super) const RM_HELP: &str = "\
Example:
  longhornctl down demo && longhornctl rm demo

All replica directories are deleted, imported ones too. This cannot be undone.";

pub(super) const IMPORT_HELP: &str = "\
Examples:
  longhornctl import old /mnt/disk1/replicas/old-0a1b2c3d \\
    /mnt/disk2/replicas/old-4e5f6a7b
  longhornctl up old

Where the record of a volume was lost, give the --quorum and the --block-size
that it had: both are for ever.

Nothing in the directories changes before `up`. If they differ, the first one
counts and the others are brought in line with it; one of these that is half
rebuilt is left out. One that has fewer writes
than another by Longhorn's own counters is refused in the first place; where
there are none, it is said if another one was written later.";

pub(super) const SALVAGE_HELP: &str = "\
Examples:
  longhornctl salvage demo
  longhornctl salvage demo --replica demo-r-0a1b2c3d --force

A replica is sure if it is a member of the epoch that counts: then it holds
every write that was acknowledged and flushed. Others were left out earlier and
lack what was written since. The volume is started from the one that is sure,
or with --force from the best guess, and the others are rebuilt from it.";

pub(super) const RELEASE_HELP: &str = "\
Examples:
  longhornctl down demo && longhornctl release demo
  longhornctl release --dir /var/lib/longhorn/replicas/pvc-0a1b2c3d-*

The directories stay where they are and are then Longhorn's: those that hold
everything are named, and those that do not, which are left as they are. The
volume is forgotten; `longhornctl import` takes it back. If this is
interrupted, give the command again.

With --dir nothing says which replicas a volume has but the directories. One
that is in use, half rebuilt or not closed cleanly is refused, and so is one
that has an older epoch than another one here of its volume; then none is
changed. Each epoch is printed with its members: of the replicas of a volume,
on all nodes, those with the youngest are whole.";

pub(super) const SNAPSHOT_CREATE_HELP: &str = "\
Examples:
  longhornctl snapshot create demo before-upgrade
  name=$(longhornctl snapshot create demo)

  longhornctl snapshot create demo --label why=upgrade --freeze

The bytes are those of one moment, as after a power cut. With --freeze a file
system is clean in it: programs that write to it wait meanwhile, 6 seconds at
most.";

pub(super) const SNAPSHOT_RM_HELP: &str = "\
Example:
  longhornctl snapshot rm demo before-upgrade

Its space comes back with `longhornctl snapshot purge`.";

pub(super) const SNAPSHOT_PURGE_HELP: &str = "\
Example:
  longhornctl snapshot rm demo before-upgrade
  longhornctl snapshot purge demo

I/O goes on meanwhile. A removed snapshot that several others stand on stays
until one does.";

pub(super) const SNAPSHOT_REVERT_HELP: &str = "\
Example:
  umount /mnt/demo
  longhornctl snapshot revert demo before-upgrade

What the volume had since then is gone, unless another snapshot has it.";

pub(super) const RESIZE_HELP: &str = "\
Examples:
  longhornctl resize demo 20GiB && resize2fs /dev/longhorn/demo
  longhornctl resize demo 20GiB && xfs_growfs /mnt/demo

A volume never shrinks.";

pub(super) const TRIM_HELP: &str = "\
Examples:
  longhornctl trim volume demo
  KUBECONFIG=~/.kube/config longhornctl trim volume pvc-0a1b2c3d";

pub(super) const UPGRADE_HELP: &str = "\
Examples:
  longhornctl upgrade demo
  longhornctl upgrade demo --binary ./longhorn

Whatever uses the device goes on: its requests wait for the new engine, as
after a crash. A program that does not start is exchanged for the one before.
The next `up` after a `down` starts the instance manager's own program again.";

pub(super) const SNAPSHOT_DIFF_HELP: &str = "\
Examples:
  longhornctl snapshot diff demo monday tuesday
  longhornctl -o json snapshot diff demo monday

Ranges are found by what the layers hold; a block that was written with the
bytes it had is among them.";

pub(super) const SCRUB_HELP: &str = "\
Examples:
  longhornctl scrub demo --wait               what is rotten, and where
  longhornctl scrub demo --repair --wait      and copy sound blocks over it
  longhornctl scrub demo --limit 50MiB        in the background (see --status)

I/O goes on meanwhile. Without --repair nothing is changed, except that
replicas take the checksums of snapshots that have none. Exit status 1 with
--wait or --status: something is wrong and stays so.";

pub(super) const CLONE_HELP: &str = "\
Examples:
  longhornctl clone demo@before-upgrade demo-old
  longhornctl clone demo copy && longhornctl up copy

On XFS and btrfs a clone takes the space that it will differ by; elsewhere its
data is copied. Of a volume that is up and no snapshot, one is taken first,
which stays.";

pub(super) const SNAPSHOT_EXPORT_HELP: &str = "\
Examples:
  longhornctl snapshot export demo before-upgrade demo.img
  longhornctl snapshot export demo before-upgrade demo.qcow2";

pub(super) const REPLICA_ADD_HELP: &str = "\
Examples:
  longhornctl replica add demo
  longhornctl replica add demo --dir /mnt/disk2/demo

I/O goes on meanwhile. Interrupting this command does not stop the rebuild.";

pub(super) const REPLICA_RM_HELP: &str = "\
Example:
  longhornctl replica rm demo demo-r-0a1b2c3d

The last replica in sync is never taken out.";

pub(super) const REPLICA_EXPORT_HELP: &str = "\
Examples:
  longhornctl replica export /mnt/disk1/replicas/old-0a1b2c3d old.img
  longhornctl replica export --snapshot monday \\
    /mnt/disk1/replicas/old-0a1b2c3d old.img

What can be read of the only directory that is left, though it is damaged, or
half rebuilt; a new volume of that size is written from it, on its device:
  longhornctl replica export --rescue /mnt/disk1/replicas/old-0a1b2c3d old.img
  longhornctl up new --size 10GiB
  dd if=old.img of=/dev/longhorn/new bs=1M conv=sparse,fsync";

pub(super) const CHECK_HELP: &str = "\
Example:
  kubectl get volumes.longhorn.io,nodes.longhorn.io -n longhorn-system -o json \\
    | longhornctl check move -";

pub(super) const MOVE_HELP: &str = "\
Examples:
  kubectl get volumes.longhorn.io,nodes.longhorn.io -n longhorn-system -o json \\
    | longhornctl check move -
  longhornctl -o json check move moving.json | jq -r '.volumes[].volume'

To be asked before Longhorn is taken away; nothing is changed. Exit status 1:
something of it cannot be moved. docs/install.md says how the rest is.";

pub(super) const MANIFESTS_HELP: &str = "\
Examples:
  longhornctl install manifests > longhorn.yaml
  longhornctl install manifests --image HOST/longhorn:0.1.0 \\
    --disk /mnt/disk1 --disk /mnt/disk2 | kubectl apply --server-side -f -

Pods have --data-path and what is mounted below; a Node's disk elsewhere has to
be given. Where a node has no such disk, make an empty directory: its pods do
not start without.

This command itself does nothing to a cluster. Where Longhorn runs already,
managers and drivers do not begin, and say what to do.";

pub(super) const COMPLETION_HELP: &str = "\
Examples:
  longhornctl completion bash > /etc/bash_completion.d/longhornctl
  longhornctl completion zsh > \"${fpath[1]}/_longhornctl\"
  longhornctl completion fish > ~/.config/fish/completions/longhornctl.fish";
