"""Products by the cuBLASLt algorithm that was measured fastest for their shape, offline."""
