"""Weight conversion on the GPU: FP8 in blocks of 128x128 to NVFP4, at the speed of a copy."""
