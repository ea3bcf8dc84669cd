"""The router's logits: BF16 activations and weights, FP32 sums and result, for small batches."""
