#!/usr/bin/env bash
# One rank of one server: instance.sh NAME [ranked]. All launchers here end in this script, inside the container.
# With `ranked` every rank is a task of Slurm or MPI; without it the server starts its own ranks (one node).
set -euo pipefail

package="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
name="${1:?give the name of an instance}"
how="${2:-}"

# Name of the instance: GPUs of each of its nodes in rank order, ranks, ports, prefix of its regions in /dev/shm.
case "$name" in
@INSTANCES@
*)
  echo "instance.sh: there is no instance $name" >&2
  exit 2
  ;;
esac

# The rank and the number of ranks, from Slurm or Open MPI; 0 of 1 where the server starts its own.
rank="${SLURM_PROCID:-${OMPI_COMM_WORLD_RANK:-0}}"
size="${SLURM_NTASKS:-${OMPI_COMM_WORLD_SIZE:-1}}"
if [[ "$how" == ranked && "$size" -ne "$ranks" ]]; then
  echo "instance.sh: $name needs $ranks ranks, but was started with $size: start it with $ranks tasks" >&2
  exit 2
fi
if [[ "$package" == *[[:space:]]* ]]; then
  echo "instance.sh: Triton and trtllm-llmapi-launch split words, and $package has a space: move the package" >&2
  exit 2
fi

# Every rank must see all GPUs of its node: it picks its own by its number. KEEP_GPUS=1: the container holds just these.
if [[ -z "${KEEP_GPUS:-}" ]]; then
  export CUDA_VISIBLE_DEVICES="$gpus"
fi
# Pinned memory for RDMA and NCCL; where the limit cannot be raised, the container's own has to do.
ulimit -l unlimited 2>/dev/null || true
if [[ "$(ulimit -l)" != unlimited && "${SLURM_LOCALID:-${OMPI_COMM_WORLD_LOCAL_RANK:-0}}" -eq 0 ]]; then
  echo "instance.sh: locked memory is limited to $(ulimit -l) KiB: start the container with memlock=-1 (IPC_LOCK)" >&2
fi
@ENVIRONMENT@@IMEX@
# What a killed run left in /dev/shm under this prefix.
rm -f "/dev/shm/${prefix}${rank}_"*

@SERVER@
@BIND@
if [[ "$how" == ranked ]]; then
  # Rank 0 runs the server, the others serve it; trtllm-llmapi-launch takes Slurm's and MPI's variables from the server.
  exec "${bind[@]}" trtllm-llmapi-launch "${server[@]}"
fi
exec "${bind[@]}" "${server[@]}"
