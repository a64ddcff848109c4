#!/usr/bin/env bash
# Run `cpkit run` over several machines under torchrun: start this on each of them, with the same arguments.
#
#   launch/torchrun_nodes.sh NODES RANKS_PER_NODE HOST:PORT [arguments of cpkit run]
#   launch/torchrun_nodes.sh 2 8 node0:29500 --prompt-lens 4096 -tp 8 -pcp 2 -dcp 16 --device cuda
#
# HOST:PORT is where the machines find each other: a name of any one of them, and a port that is free there. Machines
# may be started in any order; each waits for the others. Two on one machine work as well: start it twice.
set -euo pipefail

if [[ ! ${1:-} =~ ^[1-9][0-9]*$ || ! ${2:-} =~ ^[1-9][0-9]*$ || ! ${3:-} =~ ^[^:]+:[0-9]+$ ]]; then
    echo "usage: $0 NODES RANKS_PER_NODE HOST:PORT [arguments of cpkit run]" >&2
    exit 2
fi
nodes=$1 ranks=$2 meet=$3
shift 3

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "${PYTHON:-python}" -m torch.distributed.run \
    --nnodes "$nodes" --nproc-per-node "$ranks" \
    --rdzv-backend c10d --rdzv-endpoint "$meet" --rdzv-id "${RUN_ID:-cpkit}" \
    -m cpkit run "$@"
