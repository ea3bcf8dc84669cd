"""From a DeepSeek-R1-class checkpoint to a verified Triton deployment."""

__version__ = "0.1.0"
