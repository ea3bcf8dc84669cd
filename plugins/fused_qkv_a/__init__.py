"""The way into latent attention: one GEMM for q, latent and rope key, both norms, RoPE, and the write into the KV cache."""
