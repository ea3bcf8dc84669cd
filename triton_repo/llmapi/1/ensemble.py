"""Inputs of TensorRT-LLM's ensemble and BLS models, with their batch dimension of one, in the names of its llmapi model."""

from __future__ import annotations

import numpy as np

NAMES = {
    "text_input": "text_input",
    "stream": "streaming",
    "max_tokens": "sampling_param_max_tokens",
    "stop_words": "sampling_param_stop",
    "bad_words": "sampling_param_bad",
    "end_id": "sampling_param_end_id",
    "pad_id": "sampling_param_pad_id",
    "top_k": "sampling_param_top_k",
    "top_p": "sampling_param_top_p",
    "temperature": "sampling_param_temperature",
    "length_penalty": "sampling_param_length_penalty",
    "repetition_penalty": "sampling_param_repetition_penalty",
    "presence_penalty": "sampling_param_presence_penalty",
    "frequency_penalty": "sampling_param_frequency_penalty",
    "min_tokens": "sampling_param_min_tokens",
    "seed": "sampling_param_seed",
    "ignore_eos": "sampling_param_ignore_eos",
    "exclude_input_in_output": "sampling_param_exclude_input_from_output",
    "guided_decoding_guide_type": "guided_decoding_guide_type",
    "guided_decoding_guide": "guided_decoding_guide",
    "return_finish_reason": "return_finish_reason",
    "return_num_input_tokens": "return_num_input_tokens",
    "return_num_output_tokens": "return_num_output_tokens",
}
WORDS = ("stop_words", "bad_words")
"""Old clients send an empty word for none."""
REFUSED = ("return_log_probs", "return_context_logits", "return_generation_logits")


def translate(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The inputs of a request by the names of the llmapi model, without the batch dimension.

    Raises:
        ValueError: with a sentence for the client.
    """
    given = {name: array.reshape(-1) for name, array in tensors.items()}
    if wrong := [name for name in REFUSED if name in given and given[name].any()]:
        raise ValueError(f"{', '.join(wrong)}: not served by this model; leave it out")
    if "beam_width" in given and int(given["beam_width"][0]) != 1:
        raise ValueError(f"beam_width={given['beam_width'][0]}: there is one completion; leave it out")
    for name in WORDS:
        if name in given:
            given[name] = np.array([word for word in given[name] if word], np.object_)
    return {NAMES[name]: array for name, array in given.items() if name in NAMES and array.size}
