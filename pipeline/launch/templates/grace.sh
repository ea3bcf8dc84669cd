# Grace: the GPUs' memory is NUMA nodes too; what the host allocates belongs into the processors' own (0 and 1).
bind=(numactl "--membind=0,1")
