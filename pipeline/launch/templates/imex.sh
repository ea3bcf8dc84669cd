# Memory of other nodes is reached over NVLink through IMEX: without a channel, NCCL falls back to the network or hangs.
if [[ ! -e /dev/nvidia-caps-imex-channels/channel0 ]]; then
  echo "instance.sh: no IMEX channel is in this container: see launch/README.md, NVLink between nodes" >&2
  exit 5
fi
