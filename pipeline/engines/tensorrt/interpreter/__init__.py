"""Runs a network definition in numpy, layer by layer: the very one that the builder gets, without a GPU.

It says whether the *definition* computes the model; what TensorRT's kernels make of it only a GPU can say. Layers compute in
float32 and every tensor is rounded to its type. Ranks run in turn: each is a generator that stops at a collective until all
have come there.
"""

from pipeline.engines.tensorrt.interpreter.run import Exchange, Interpreter, exchanged, run_ranks

__all__ = ["Exchange", "Interpreter", "exchanged", "run_ranks"]
