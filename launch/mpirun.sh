#!/usr/bin/env bash
# Run `cpkit run` with one process a rank under MPI.
#
#   launch/mpirun.sh RANKS [arguments of cpkit run]
#   launch/mpirun.sh 4 --prompt-lens 700,33,5,1 -tp 2 -pcp 2 -dcp 4 --heads 16
#
# MPIRUN names the launcher with its own flags, for instance:
#   MPIRUN="mpirun --hostfile hosts --map-by ppr:8:node" launch/mpirun.sh 16 ...
#   MPIRUN="mpirun --oversubscribe" launch/mpirun.sh 4 ...           more ranks than cores (Open MPI)
#   MPIRUN="mpirun --allow-run-as-root" launch/mpirun.sh 4 ...       as root, in a container (Open MPI)
# Tensors travel through host memory, also with --device cuda.
set -euo pipefail

[[ ${1:-} =~ ^[1-9][0-9]*$ ]] || { echo "usage: $0 RANKS [arguments of cpkit run]" >&2; exit 2; }
ranks=$1
shift

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
read -ra launcher <<<"${MPIRUN:-mpirun}"
exec "${launcher[@]}" -n "$ranks" "${PYTHON:-python}" -m cpkit run "$@"
