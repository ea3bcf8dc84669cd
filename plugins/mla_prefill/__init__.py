"""Attention over keys and values of each head, for prompts: the form of latent attention that decompresses its cache."""
