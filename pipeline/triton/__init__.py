"""Triton: model repositories, the server that serves them, a client, and the contract checks of `smoke`."""
