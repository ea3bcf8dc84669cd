"""The held-out text of the logits comparison, and whether there is room for it. Without torch."""

from __future__ import annotations

from math import prod
from pathlib import Path

from pipeline.checkpoint.layout import parameters
from pipeline.core.errors import ConfigError
from pipeline.models.arch import Arch

__all__ = ["heldout_file", "memory_needed", "windows_of"]


def heldout_file(checkpoint: Path, named: str | None) -> Path | None:
    """The text to read: the one that `verify.text` names, else the checkpoint's own, if it has one."""
    if named is None:
        own = checkpoint / "heldout.txt"
        return own if own.is_file() else None
    if not Path(named).is_file():
        raise ConfigError(f"verify.text={named} is not a file: name a UTF-8 text that the model was not trained on.")
    return Path(named)


def windows_of(text: Path, tokenizer: Path, arch: Arch, *, tokens: int, window: int) -> list[list[int]]:
    """Token ids in windows of at most `window`, each begun by the BOS token; at most `tokens` in all.

    The windows are spread evenly over the text, so that all of its kinds of prose and code are heard.
    """
    start = [] if arch.bos_token_id is None else [arch.bos_token_id]
    ids = _token_ids(text, tokenizer)
    if max(ids, default=0) >= arch.vocab_size:
        raise ConfigError(f"{tokenizer} yields token {max(ids)}, but the model has {arch.vocab_size}: it is another's.")
    window = min(window, tokens, arch.max_position_embeddings)
    step = max(1, window - len(start))
    pieces = [start + ids[at : at + step] for at in range(0, len(ids), step)]
    room = max(1, tokens // window)
    chosen = [piece for piece in pieces[:: max(1, len(pieces) // room)][:room] if len(piece) > 1]
    if not chosen:
        raise ConfigError(f"{text} holds {len(ids)} tokens, too few to predict any: give a longer text as verify.text.")
    return chosen


def _token_ids(text: Path, tokenizer: Path) -> list[int]:
    from tokenizers import Tokenizer

    if not tokenizer.is_file():
        raise ConfigError(f"{tokenizer} is missing: the held-out text cannot be tokenised without it.")
    try:
        model = Tokenizer.from_file(str(tokenizer))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"{tokenizer} is not a tokenizer ({error}): fetch it again.") from error
    try:
        content = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{text} cannot be read as UTF-8 text ({error}): name another as verify.text.") from error
    return list(model.encode(content, add_special_tokens=False).ids)


def memory_needed(arch: Arch, tokens: int) -> int:
    """Bytes of one model in float32 and of the log-probabilities of `tokens` positions."""
    weights = sum(prod(shape) for _, shape in parameters(arch))
    return 4 * (weights + tokens * arch.vocab_size)
