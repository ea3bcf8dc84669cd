"""The decoder as a TensorRT network. Read `spec.py`, then `decoder.py`."""
