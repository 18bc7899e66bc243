#!/bin/bash
# Runs a command on each of two hosts, whose network is as people have them; as root, with iproute2:
#
#     campaigns/many_machines/hosts.sh KIND COMMAND...     # with HOST=0 or 1 and FIRST, an address of host 0 that both reach
#
#   names       each host's name leads to an address that the other reaches
#   debian      each host's own name leads to 127.0.1.1, as Debian's installer writes it
#   dead-end    each host has a second interface that leads nowhere, and its name leads there
#   ipv6        no host has an IPv4 address
#
# A host is a namespace of networks, names and mounts, all in one namespace of processes, which the kernel empties when the
# commands have ended. Where one fails the other is ended, and its status is the whole's. Ends with status 75 where that
# cannot be had here.
set -eu
kind=$1
shift

if [ -z "${HOSTS_ROOM:-}" ]; then
  HOSTS_ROOM=$(mktemp -d "${TMPDIR:-/tmp}/hosts-XXXXXX")
  export HOSTS_ROOM
  trap 'rm -rf "$HOSTS_ROOM"' EXIT
  unshare --net --mount --uts true || exit 75
  unshare --net --mount --pid --fork --kill-child --mount-proc "$0" "$kind" "$@"
  exit
fi

room=$HOSTS_ROOM
unset HOSTS_ROOM
mount -t tmpfs tmpfs /run # for ip's names of namespaces
echo 'hosts: files' >"$room/nsswitch.conf"
for host in 0 1; do
  ip netns add "host$host"
  ip -n "host$host" link set lo up
done
ip -n host0 link add eth0 type veth peer name eth0 netns host1
for host in 0 1; do
  address=10.77.0.$((host + 1)) own=10.77.0.$((host + 1)) other=$((1 - host))
  case $kind in
  names) ;;
  debian) own=127.0.1.1 ;;
  dead-end)
    own=10.88.0.$((host + 1))
    ip -n "host$host" link add eth1 type veth peer name nowhere
    ip -n "host$host" link set eth1 up
    ip -n "host$host" link set nowhere up
    ip -n "host$host" address add "$own/24" dev eth1
    ;;
  ipv6)
    address=fd00::$((host + 1)) own=fd00::$((host + 1))
    ip -n "host$host" address del 127.0.0.1/8 dev lo
    ;;
  *)
    echo "no such kind: $kind" >&2
    exit 2
    ;;
  esac
  prefix=24
  [ "$kind" = ipv6 ] && prefix="64 nodad"
  # shellcheck disable=SC2086 - two words
  ip -n "host$host" address add "$address"/$prefix dev eth0
  ip -n "host$host" link set eth0 up
  printf '%s host%s\n' "$own" "$host" >"$room/hosts$host"
  [ "$kind" = ipv6 ] && echo '::1 localhost' >>"$room/hosts$host" || echo '127.0.0.1 localhost' >>"$room/hosts$host"
  eval "address$host=$address"
done
# the other's name leads to where it is reached, whatever its own leads to there
echo "$address1 host1" >>"$room/hosts0"
echo "$address0 host0" >>"$room/hosts1"

export FIRST=$address0
for host in 0 1; do
  HOST=$host ip netns exec "host$host" unshare --mount --uts bash -c '
    mount --bind "$0/hosts$HOST" /etc/hosts
    mount --bind "$0/nsswitch.conf" /etc/nsswitch.conf
    hostname "host$HOST"
    exec "$@"' "$room" "$@" &
done
for _ in 0 1; do wait -n; done
