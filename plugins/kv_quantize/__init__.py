"""A KV cache to FP8 or INT8, with one scale a chunk of tokens that lets the largest thousandth saturate."""
