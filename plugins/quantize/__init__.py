"""Activations to FP8 (1x128) and NVFP4 (1x16), with scales where tensor cores read them, and back to BF16."""
