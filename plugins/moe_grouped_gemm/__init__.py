"""R1's routed experts for one rank: permutation, gate+up with SwiGLU, down, weighted sum; FP8 in blocks, or NVFP4 weights."""
