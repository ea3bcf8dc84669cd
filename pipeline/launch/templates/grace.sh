# Grace: the GPUs' memory is NUMA nodes too; what the host allocates belongs into the processors' own (0 and 1).
bind=()
if command -v numactl >/dev/null; then
  bind=(numactl "--membind=0,1")
else
  echo "instance.sh: no numactl in this container: host memory may land on GPUs" >&2
fi
