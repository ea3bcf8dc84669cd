"""Decoding with latent attention: every head attends over the cached latents themselves, pages of a shared cache."""
