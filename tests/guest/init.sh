#!/bin/bash
# The guest's first process. Its root is the host's file system, read-only: it lays a tmpfs over that, mounts what a
# Linux system has, runs the command in $run/command, leaves its status in $run/status and switches the guest off.
mount -t proc proc /proc 2>/dev/null
for word in $(cat /proc/cmdline); do
  case $word in lh.run=*) run=${word#*=} ;; lh.init=*) init=${word#*=} ;; esac
done

lay_over() {
  mount -t tmpfs tmpfs /mnt && mkdir /mnt/{changes,work,root} || return
  mount -t overlay -o lowerdir=/,upperdir=/mnt/changes,workdir=/mnt/work overlay /mnt/root || return
  cd /mnt/root || return
  mount -t proc proc proc
  mount -t sysfs sysfs sys
  mount -t devtmpfs devtmpfs dev
  # The way out: through this the host sees what is written.
  mkdir -p mnt && mount -t hostfs -o "$run" none mnt
}

system() {
  mkdir -p /dev/pts /dev/shm
  mount -t devpts devpts /dev/pts
  for place in /dev/shm /run; do mount -t tmpfs tmpfs $place; done
  mount -t debugfs debugfs /sys/kernel/debug
  mount -t configfs configfs /sys/kernel/config
  ln -sfn /proc/self/fd /dev/fd
  ln -sf fd/0 /dev/stdin; ln -sf fd/1 /dev/stdout; ln -sf fd/2 /dev/stderr
  ip link set lo up 2>/dev/null || ifconfig lo up
  stty -F /dev/ttyS0 raw -echo
  stty -F /dev/ttyS1 raw -echo
}

if [ -z "${OVER:-}" ]; then
  lay_over
  OVER=1 exec chroot /mnt/root "$init"
fi
unset OVER
export TERM=dumb LANG=C.UTF-8
system
. /mnt/environment
export LH_GUEST=1
cd "$(cat /mnt/directory)" 2>/dev/null || cd /
# A child of its own that leads a session: what it leaves running does not hold the end up.
( exec </dev/null >/dev/ttyS0 2>/dev/ttyS1; exec setsid -w bash /mnt/command )
status=$?
stty -F /dev/ttyS0 raw -echo # waits until all was written
stty -F /dev/ttyS1 raw -echo
echo $status >/mnt/status
sync -f /mnt/status
echo o >/proc/sysrq-trigger
sleep 5
