"""Names of the files of a Triton model, apart from all that needs protobuf."""

from __future__ import annotations

__all__ = ["CONFIG", "ENGINE_ARGS", "LOADED", "OWN_KEYS", "SETTINGS"]

CONFIG, SETTINGS, ENGINE_ARGS = "config.pbtxt", "model.yaml", "model.json"
LOADED = ("model.py", ENGINE_ARGS, "model.onnx", "model.plan", "model.pt", "model.savedmodel", "model.graphdef")
"""Files of a version folder that backends load by default."""
OWN_KEYS = ("triton_config", "logits_post_processors")
"""Keys of model.yaml that do not go to tensorrt_llm.LLM."""
