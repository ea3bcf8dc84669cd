#!/usr/bin/env python3
"""Writes a random checkpoint of two decoder layers of DeepSeek-R1's widths, one dense and one MoE, in FP8 blocks.

    python scripts/make_r1_layers.py FOLDER [--experts 8]
    python -m pipeline build +hw=rtx_pro_6000 engine=tensorrt checkpoint=FOLDER verify.tokens=256 verify.max_kl=100 \\
        engine.tensorrt.max_seq_len=512 engine.tensorrt.check_tokens=8

It is what the whole build is tried on at R1's sizes (1.2e9 parameters with 8 experts); the vocabulary is one token a byte and some.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.make_r1_headers import r1_config  # noqa: E402
from tests._utils import random_checkpoint  # noqa: E402

WIDTHS = (
    "hidden_size", "intermediate_size", "moe_intermediate_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
)  # fmt: skip


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--experts", type=int, default=8, help="routed ones, a multiple of 4; each token visits 4")
    options = parser.parse_args()
    widths = {name: value for name, value in r1_config().items() if name in WIDTHS}
    layers = {"num_hidden_layers": 2, "num_nextn_predict_layers": 0, "num_key_value_heads": widths["num_attention_heads"]}
    random_checkpoint.write(options.folder, widths | layers | {"n_routed_experts": options.experts})


if __name__ == "__main__":
    main()
