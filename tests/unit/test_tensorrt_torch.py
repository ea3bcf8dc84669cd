"""The two engines of ours say the same: TensorRT's networks, interpreted, and the graph that engine=torch compiles."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("tensorrt_rtx_bindings", reason="it defines the networks: pip install 'r1-pipeline[rtx]'")
torch = pytest.importorskip("torch", reason="the other engine is in torch")

from pipeline.onnx.decoder import absorbed, expanded  # noqa: E402
from tests.unit.test_tensorrt_network import ARCH, session, spec, start  # noqa: E402

PROMPT, TOKENS = 20, 8


def greedy_torch(prompt: np.ndarray) -> tuple[list[int], np.ndarray]:
    """Prefill by the expanded form, steps by the absorbed one; the tokens, and the logits that they were chosen by."""
    sizes = {"max_seq_len": "64", "max_batch_size": "1", "prefill_chunk": "32"}
    (first, (_, _, _, past), _), (step, *_) = expanded(**sizes), absorbed(**sizes)
    pages, given, found, logits = torch.tensor([[1, 2]]), torch.from_numpy(prompt), [], []
    positions = torch.arange(prompt.shape[1])[None]
    with torch.inference_mode():
        while len(found) < TOKENS:
            made = (step if found else first)(given, positions, pages, past)
            past, positions = made["present"], positions[:, -1:] + 1
            logits.append(made["logits"].numpy()[0])
            found.append(int(logits[-1].argmax()))
            given = torch.tensor([found[-1:]])
    return found, np.stack(logits)


def test_greedy_tokens_are_those_of_the_torch_engine(tmp_path) -> None:
    """In float32, on two ranks that have half of the experts each; one rank is compared with these elsewhere."""
    ranks = 2
    torch.set_num_threads(1)
    prompt = np.random.default_rng(8).integers(3, ARCH.vocab_size, (1, PROMPT))
    tokens, wanted = greedy_torch(prompt)
    specs = [
        spec(form, rank=rank, ranks=ranks, max_tokens=64 if form == "expanded" else 1)
        for form in ("expanded", "absorbed")
        for rank in range(ranks)
    ]
    one = session(tmp_path, *specs, rows=1)
    logits, _ = one.step("expanded", np.broadcast_to(prompt, (ranks, 1, PROMPT)), start(0, ranks, 1))
    found, rows = [int(logits[0, 0, -1].argmax())], [logits[0, 0, -1]]
    while len(found) < TOKENS:
        given = np.full((ranks, 1, 1), found[-1])
        logits, _ = one.step("absorbed", given, start(PROMPT - 1 + len(found), ranks, 1))
        rows.append(logits[0, 0, 0])
        found.append(int(rows[-1].argmax()))
    assert found == tokens
    assert np.abs(np.stack(rows) - wanted).max() < 2e-4
