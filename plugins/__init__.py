"""Opt-in extensions: kernels, formats and models that run only when a configuration names them."""
