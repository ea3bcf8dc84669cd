"""Train tiny_r1, a 14M-parameter DeepSeek-R1 in every respect but size, and write its checkpoint.

    python -m scripts.train_tiny_r1 corpus --stdlib DIR     collect, tokenise        (CPU, half a minute)
    python -m scripts.train_tiny_r1 train --minutes 0.6     train, keep the best     (one H200)
    python -m scripts.train_tiny_r1 export                  FP8, shards, model card  (CPU, a minute)

The model trained is the reference model itself, with one exchange: each MoE layer computes all experts
for all tokens, as one wide MLP whose middle is multiplied by the router's weights. That costs four times
the arithmetic and saves all the gathering, which at this size is far faster. As in DeepSeek-V3, load is
balanced without a loss: an expert that got more tokens than the mean has its choice bias lowered by a
constant, one that got fewer has it raised. The MTP layer shares embedding and head with the model.
"""

from __future__ import annotations

import argparse
import json
import math
import sysconfig
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from pipeline.models.arch import Arch
from pipeline.models.deepseek_v3 import DeepseekV3, Gate, Mlp
from scripts.tiny_r1_corpus import VOCAB_SIZE, prepare
from scripts.tiny_r1_export import export

ARCH = Arch(
    vocab_size=VOCAB_SIZE,
    hidden_size=256,
    intermediate_size=512,
    moe_intermediate_size=128,
    num_hidden_layers=5,
    num_nextn_predict_layers=1,
    num_attention_heads=4,
    q_lora_rank=128,
    kv_lora_rank=128,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    n_routed_experts=16,
    n_shared_experts=1,
    num_experts_per_tok=4,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
    first_k_dense_replace=1,
    rope_scaling={
        "type": "yarn",
        "factor": 4,
        "original_max_position_embeddings": 512,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    max_position_embeddings=2048,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=2,
)

TOKENS_PER_STEP = 65536
SHORT, LONG = 512, 1024  # sequence lengths; every fourth batch is long
MTP_WEIGHT = 0.3
PEAK_RATE, WARMUP_STEPS = 3e-3, 200
BIAS_RATE = 1e-3
DROPOUT = 0.1  # the corpus is read six times over; longer runs only learn it by heart
EVAL_WINDOWS = 256


class DenseMoe(nn.Module):
    """`Moe`, with every expert computed for every token."""

    def __init__(self, arch: Arch) -> None:
        super().__init__()
        self.arch = arch
        self.gate = Gate(arch)
        self.experts = Mlp(arch.hidden_size, arch.n_routed_experts * arch.moe_intermediate_size)
        self.shared_experts = Mlp(arch.hidden_size, arch.n_shared_experts * arch.moe_intermediate_size)
        self.register_buffer("load", torch.zeros(arch.n_routed_experts), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, H] -> [B, T, H]; tokens per expert are left in `load`."""
        with torch.autocast(x.device.type, enabled=False):
            weights, indices = self.gate(x.flatten(0, -2))
        mix = weights.new_zeros(len(weights), self.arch.n_routed_experts).scatter(1, indices, weights)
        self.load.copy_((mix > 0).sum(0))
        middle = F.silu(self.experts.gate_proj(x)) * self.experts.up_proj(x)
        middle = middle.unflatten(-1, (self.arch.n_routed_experts, -1))
        middle = middle * mix.to(middle.dtype).view(*x.shape[:-1], -1, 1)
        return self.experts.down_proj(middle.flatten(-2)) + self.shared_experts(x)


def trainable(arch: Arch) -> DeepseekV3:
    """The reference with `DenseMoe`s, tied MTP embedding and head, dropout and initial weights."""
    model = DeepseekV3(arch)
    for number, layer in enumerate(model.model.layers):
        if arch.is_moe(number):
            layer.mlp = DenseMoe(arch)
        for branch in (layer.self_attn, layer.mlp):
            branch.register_forward_hook(lambda self, _, out: F.dropout(out, DROPOUT, self.training))
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            wide = "embed" in name or "head" in name
            nn.init.normal_(weight, std=0.02 if wide else 0.5 * weight.shape[1] ** -0.5)
    mtp = model.model.layers[-1]
    mtp.embed_tokens.weight, mtp.shared_head.head.weight = model.model.embed_tokens.weight, model.lm_head.weight
    return model


def published(model: DeepseekV3) -> dict[str, Tensor]:
    """The state under Hugging Face's names: experts apart, the tied MTP weights copied."""
    arch, state = model.arch, {}
    for name, weight in model.state_dict().items():
        prefix, stacked, rest = name.partition(".experts.")
        parts = weight.chunk(arch.n_routed_experts, int("down_proj" in rest)) if stacked else ()
        state |= {f"{prefix}.experts.{i}.{rest}": part.contiguous() for i, part in enumerate(parts)}
        if not stacked:
            state[name] = weight.clone()
    return state


def losses(model: DeepseekV3, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy of the next token and of MTP's one after it, for ids [B, T + 2]."""
    hidden = model.hidden(ids[:, :-2])
    main = model.lm_head(hidden)
    ahead = model.mtp_logits(ids[:, :-1], hidden)
    return (
        F.cross_entropy(main.flatten(0, 1).float(), ids[:, 1:-1].flatten()),
        F.cross_entropy(ahead.flatten(0, 1).float(), ids[:, 2:].flatten()),
    )


@torch.no_grad()
def balance(model: DeepseekV3, rate: float) -> None:
    """Move each expert's choice bias against its load, keeping the biases' mean at zero."""
    for layer in model.model.layers:
        if isinstance(layer.mlp, DenseMoe):
            bias, load = layer.mlp.gate.e_score_correction_bias, layer.mlp.load
            bias += rate * torch.sign(load.mean() - load)
            bias -= bias.mean()


class Batches:
    """Random windows of the token stream; a quarter of them begin where a document does."""

    def __init__(self, corpus: Path, device: str) -> None:
        data = np.load(corpus)
        self.train = torch.from_numpy(data["train"].astype(np.int32)).to(device)
        self.starts = torch.from_numpy(data["starts"]).to(device)
        self.heldout = torch.from_numpy(data["heldout"].astype(np.int64)).to(device)

    def next(self, rows: int, length: int) -> Tensor:
        """[rows, length + 2]"""
        device = self.train.device
        begin = torch.randint(0, len(self.train) - length - 2, (rows,), device=device)
        documents = self.starts[torch.randint(0, len(self.starts), (rows // 4,), device=device)]
        begin[: rows // 4] = documents.clamp(max=len(self.train) - length - 2)
        return self.train[begin.unsqueeze(1) + torch.arange(length + 2, device=device)].long()

    def unseen(self) -> Tensor:
        """The first EVAL_WINDOWS windows of held-out text, [windows, SHORT + 2]"""
        windows = self.heldout.unfold(0, SHORT + 2, SHORT)
        return windows[:: max(1, len(windows) // EVAL_WINDOWS)][:EVAL_WINDOWS]


@torch.no_grad()
def evaluate(model: DeepseekV3, windows: Tensor) -> tuple[float, float]:
    """Held-out losses: next token, and MTP's."""
    model.eval()
    sums = torch.zeros(2)
    for chunk in windows.split(32):
        with torch.autocast(chunk.device.type, torch.bfloat16):
            sums += torch.stack(losses(model, chunk)).cpu() * len(chunk)
    model.train()
    main, ahead = (sums / len(windows)).tolist()
    return main, ahead


def optimiser(model: nn.Module, device: str) -> torch.optim.Optimizer:
    """AdamW; only matrices decay."""
    weights = list(model.parameters())
    groups = [
        {"params": [w for w in weights if w.dim() > 1], "weight_decay": 0.3},
        {"params": [w for w in weights if w.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.95), fused=device == "cuda")


def train(args: argparse.Namespace) -> None:
    """Train for `--minutes`, the learning rate following the clock along a cosine to a twentieth."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    batches = Batches(args.work / "corpus.npz", args.device)
    model = trainable(ARCH).to(args.device).train()
    step_losses = torch.compile(losses, dynamic=False) if args.compile else losses
    optim = optimiser(model, args.device)
    best, step, began, seen = (math.inf, {}), 0, 0.0, 0
    done, log = False, []
    while not done:
        length = LONG if step % 4 == 3 else SHORT
        if step == 8:  # both shapes are compiled: the clock starts
            began = time.perf_counter()
        progress = (time.perf_counter() - began) / (60 * args.minutes) if began else 0.0
        done = progress >= 1
        cosine = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(progress, 1)))
        for group in optim.param_groups:
            group["lr"] = PEAK_RATE * min(cosine, (step + 1) / WARMUP_STEPS)
        ids = batches.next(args.tokens_per_step // length, length)
        with torch.autocast(args.device, torch.bfloat16):
            main, ahead = step_losses(model, ids)
        (main + MTP_WEIGHT * ahead).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        optim.zero_grad(set_to_none=True)
        balance(model, BIAS_RATE * cosine)
        step, seen = step + 1, seen + ids.shape[0] * length
        if done or step % args.eval_every == 0:
            unseen, unseen_mtp = evaluate(model, batches.unseen())
            log.append({"step": step, "tokens": seen, "train": main.item(), "mtp": ahead.item(),
                        "heldout": unseen, "heldout_mtp": unseen_mtp, "load": spread(model),
                        "seconds": round(time.perf_counter() - began, 1)})  # fmt: skip
            print(json.dumps(log[-1]), flush=True)
            if unseen < best[0]:
                best = (unseen, published(model))
    save_file(best[1], args.work / "weights.safetensors")
    (args.work / "train.json").write_text(json.dumps(log, indent=1) + "\n")


def spread(model: DeepseekV3) -> float:
    """The busiest expert's load over the mean, worst layer."""
    loads = [layer.mlp.load for layer in model.model.layers if isinstance(layer.mlp, DenseMoe)]
    return round(max((load.max() / load.mean()).item() for load in loads), 2)


def main() -> None:
    """Parse the command line and run one step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/tiny_r1"), help="scratch directory")
    steps = parser.add_subparsers(dest="step", required=True)
    corpus = steps.add_parser("corpus")
    corpus.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    learn = steps.add_parser("train")
    learn.add_argument("--minutes", type=float, default=0.6)
    learn.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    learn.add_argument("--tokens-per-step", type=int, default=TOKENS_PER_STEP)
    learn.add_argument("--eval-every", type=int, default=200, help="steps")
    learn.add_argument("--no-compile", dest="compile", action="store_false")
    ship = steps.add_parser("export")
    ship.add_argument("--out", type=Path, default=Path("pipeline/data/tiny_r1"))
    args = parser.parse_args()
    if args.step == "corpus":
        print(json.dumps(prepare(args.stdlib, args.work), indent=1))
    elif args.step == "train":
        train(args)
    else:
        export(ARCH, args.work, args.out)


if __name__ == "__main__":
    main()
