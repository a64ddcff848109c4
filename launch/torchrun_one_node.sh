#!/usr/bin/env bash
# Run `cpkit run` with one process a rank on this machine, under torchrun.
#
#   launch/torchrun_one_node.sh RANKS [arguments of cpkit run]
#   launch/torchrun_one_node.sh 4 --prompt-lens 700,33,5,1 -tp 2 -pcp 2 -dcp 4 --heads 16
#
# Ranks talk through gloo on CPUs; with --device cuda through NCCL, one GPU each.
set -euo pipefail

[[ ${1:-} =~ ^[1-9][0-9]*$ ]] || { echo "usage: $0 RANKS [arguments of cpkit run]" >&2; exit 2; }
ranks=$1
shift

# one thread a rank unless asked otherwise: ranks of one machine share its cores
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# --standalone: torchrun picks a free port itself
exec "${PYTHON:-python}" -m torch.distributed.run --standalone --nproc-per-node "$ranks" -m cpkit run "$@"
