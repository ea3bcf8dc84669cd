#!/usr/bin/env bash
# Starts every server of this package on this node without a container and waits; Ctrl-C stops them all.
# tritonserver, and tensorrt_llm in the Python that its stubs take, must be on PATH: run it inside an image, or a node set up so.
set -euo pipefail

launch="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
@STOP@
# In the background; its number is kept for the end.
start() {
  "$@" &
  pids+=("$!")
}

# One line a server.
@STARTS@
# The first one that ends ends them all.
wait -n
