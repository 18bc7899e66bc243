#!/bin/bash
# Replicas of a script on this machine, with their lighthouse; one that ends with an error is started again.
#
#     OF=2 RANKS=2 examples/replicas.sh train.py --epochs 3
#
# OF: replicas; RANKS: processes of each; HEARTBEAT_MS: the silence that means that a replica is dead; PORT: the
# lighthouse's; PYTHON: of an environment with megastrategy[replicas].
set -um # each job is a process group of its own
PYTHON="${PYTHON:-$(command -v python)}" PORT="${PORT:-29510}"
export TORCHFT_LIGHTHOUSE="http://localhost:$PORT" NUM_REPLICA_GROUPS="${OF:-2}" RUST_LOG=warn
finished=$(mktemp -u)

end_all() {
    local code=$?
    for job in $(jobs -p); do kill -- "-$job"; done
    wait
    rm -f "$finished"
    exit "$code"
} 2>/dev/null
trap end_all EXIT
trap exit INT TERM

replica() {
    export REPLICA_GROUP_ID=$1
    for _ in $(seq 11); do
        "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "${RANKS:-1}" "${@:2}" && touch "$finished"
        [ ! -e "$finished" ] || return 0 # one that came back now would begin anew, without the others
        echo "replica $1 ended with an error, and is started again" >&2
    done
}

"$(dirname "$PYTHON")/torchft_lighthouse" --bind "[::]:$PORT" --min_replicas 1 --join_timeout_ms 60000 \
    --heartbeat_timeout_ms "${HEARTBEAT_MS:-5000}" &
replicas=()
for ((slot = 0; slot < NUM_REPLICA_GROUPS; slot++)); do
    replica "$slot" "$@" &
    replicas+=($!)
done
waits_left=600 # tenths of a second, when one has come to the end, for the others
while kill -0 "${replicas[@]}" 2>/dev/null && ((waits_left > 0)); do
    sleep 0.1
    [ ! -e "$finished" ] || waits_left=$((waits_left - 1))
done
[ -e "$finished" ]
