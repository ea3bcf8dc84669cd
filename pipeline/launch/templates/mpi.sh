#!/usr/bin/env bash
# Starts every server of this package with mpirun: run.sh HOSTFILE. The hostfile names @NODES@ host(s), one a line; the package and
# the software of the container must be at the same path on all of them (run it inside the container, with sshd in the others).
set -euo pipefail

package="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
hostfile="${1:-$package/launch/mpi/hostfile}"
mapfile -t hosts < <(awk '!/^[[:space:]]*(#|$)/ {print $1}' "$hostfile")
if [[ "${#hosts[@]}" -lt @NODES@ ]]; then
  echo "run.sh: $hostfile names ${#hosts[@]} hosts, and @NODES@ are needed" >&2
  exit 2
fi

@STOP@
# start NAME FIRST_NODE NODES RANKS
start() {
  local name="$1" first="$2" nodes="$3" ranks="$4" per_node
  per_node="$((ranks / nodes))"
  local on=("${hosts[@]:first:nodes}")
  # OpenMPI keeps ranks of one host together (ppr), which is how GPUs are counted; no binding: loading needs all cores.
  mpirun --allow-run-as-root -n "$ranks" --host "$(printf '%s\n' "${on[@]/%/:$per_node}" | paste -sd,)" \
    --map-by "ppr:$per_node:node" --bind-to none --mca orte_keep_fqdn_hostnames 1 -x PATH -x LD_LIBRARY_PATH \
    bash "$package/launch/instance.sh" "$name" ranked &
  pids+=("$!")
}

# One line a server.
@STARTS@
@ROUTER@# The first one that ends ends them all.
wait -n
