"""The products that carry latent attention's queries into the latent space, and its results out again."""
