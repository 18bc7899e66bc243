#!/bin/bash
# Runs a command on a machine with a Slurm of two nodes, node0 and node1, which ends with the command:
#
#     campaigns/slurm/cluster.sh python -m campaigns.slurm        # as root, on Debian or Ubuntu
#
# The packages are installed into layers over /etc, /usr and /var that only the command and its children see, and the
# daemons live in namespaces of process ids and networks that the kernel empties when the command has ended. So nothing
# is left: no srun on the PATH (Lightning behaves differently where there is one), no daemon, no file. Ends with status 75
# where that cannot be had here.
set -eu

CPUS=2 NODES="node0 node1"

case "${CLUSTER_STAGE:-}" in
"")
  room=$(mktemp -d "${TMPDIR:-/tmp}/slurm-XXXXXX")
  trap 'rm -rf "$room"' EXIT
  unshare --mount --propagation private true || exit 75
  CLUSTER_STAGE=packages CLUSTER_ROOM=$room unshare --mount --propagation private "$0" "$@"
  ;;
packages)
  trap 'exit 75' ERR
  for folder in etc usr var; do
    mkdir -p "$CLUSTER_ROOM/$folder/upper" "$CLUSTER_ROOM/$folder/work"
    options="lowerdir=/$folder,upperdir=$CLUSTER_ROOM/$folder/upper,workdir=$CLUSTER_ROOM/$folder/work"
    mount -t overlay overlay -o "$options" "/$folder"
  done
  mount -t tmpfs tmpfs /run
  printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d # no package starts its daemon
  chmod +x /usr/sbin/policy-rc.d
  export DEBIAN_FRONTEND=noninteractive
  { apt-get update && apt-get install -y --no-install-recommends slurmd slurmctld slurm-client munge; } \
    >"$CLUSTER_ROOM/apt.log" 2>&1 || { tail -n 3 "$CLUSTER_ROOM/apt.log" >&2; exit 75; }
  CLUSTER_STAGE=daemons exec unshare --pid --fork --kill-child --mount-proc --net --uts "$0" "$@"
  ;;
daemons)
  unset CLUSTER_STAGE
  ip link set lo up
  # no name resolves where loopback is the only interface (getaddrinfo's AI_ADDRCONFIG)
  ip link add eth0 type veth peer name eth1
  ip link set eth0 up
  ip link set eth1 up
  hostname head
  mkdir -p /run/munge /etc/slurm /var/lib/slurm-state /var/log/slurm
  echo 'hosts: files' >/etc/nsswitch.conf
  echo '127.0.0.1 localhost' >/etc/hosts
  number=1
  for address in head $NODES; do
    ip address add "10.0.0.$number/24" dev eth0
    echo "10.0.0.$number $address" >>/etc/hosts
    number=$((number + 1))
  done
  head -c 1024 /dev/urandom >/etc/munge/munge.key
  chown munge /etc/munge/munge.key /run/munge
  chmod 400 /etc/munge/munge.key
  runuser -u munge -- /usr/sbin/munged
  # SlurmdTimeout: after so many seconds without a word from it a node is down
  cat >/etc/slurm/slurm.conf <<CONF
ClusterName=here
SlurmctldHost=head
AuthType=auth/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation=/var/lib/slurm-state
SlurmdSpoolDir=/var/lib/slurm-%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd-%n.pid
SlurmctldLogFile=/var/log/slurm/slurmctld.log
SlurmdLogFile=/var/log/slurm/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1
ReturnToService=2
SlurmdTimeout=10
NodeName=node0 NodeHostname=head Port=7001 CPUs=$CPUS
NodeName=node1 NodeHostname=head Port=7002 CPUs=$CPUS
PartitionName=main Nodes=node0,node1 Default=YES State=UP
CONF
  slurmctld -c
  for node in $NODES; do
    mkdir -p "/var/lib/slurm-$node"
    slurmd -N "$node"
  done
  for _ in $(seq 60); do
    [ "$(sinfo --noheader --states=idle --format=%D)" = 2 ] && break
    sleep 0.5
  done
  "$@"
  ;;
esac
