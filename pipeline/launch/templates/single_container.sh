#!/usr/bin/env bash
# Starts every server of this package in a container of its own on this node and waits; Ctrl-C stops them all.
set -euo pipefail

package="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
image=@IMAGE@
# Caches of kernels and downloads outlive the containers here.
cache="${CACHE:-$HOME/.cache}"
mkdir -p "$cache"

names=()
stop() {
  # Guard: tritonserver needs a SIGTERM and time; killed, it leaves stubs and regions in /dev/shm behind.
  docker stop --time 90 "${names[@]}" >/dev/null 2>&1 || true
}
trap stop EXIT

# The package is read-only: Triton's stubs would write __pycache__ into the model repository.
start() {
  local name="$1"
  shift
  names+=("@NAME@-$name")
  docker run --rm --name "@NAME@-$name" --gpus all --network host \
    @SHM@ --ulimit memlock=-1 --ulimit stack=67108864 --ulimit nofile=1048576:1048576 \
    --volume "$package:/package:ro" --volume "$cache:/root/.cache" \
    "$image" "$@" &
}

# One line a server: its name and what runs in its container.
@STARTS@
# The first one that ends ends them all.
wait -n
