"""triton_repo/llmapi without a server: requests, streaming, cancelling. pb_utils and tensorrt_llm are stand-ins."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pytest
import yaml

from tests._utils import fake_tensorrt_llm
from tests._utils.serving import wait

CODE = Path(__file__).parents[2] / "triton_repo" / "llmapi" / "1"
FINAL = 1
LIMIT = {"max_requests": {"string_value": "3"}}
CONFIG = {"model_transaction_policy": {"decoupled": True}, "max_batch_size": 0, "parameters": LIMIT}


@dataclass
class Tensor:
    label: str
    array: np.ndarray

    def name(self) -> str:
        return self.label

    def as_numpy(self) -> np.ndarray:
        return self.array


@dataclass
class Response:
    output_tensors: list[Tensor] = field(default_factory=list)
    error: Any = None

    def text(self) -> str:
        return next(t.array[0] for t in self.output_tensors if t.label == "text_output").decode()


@dataclass
class Sender:
    responses: list[Response] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)
    gone: bool = False

    def send(self, response: Response | None = None, flags: int = 0) -> None:
        if response is not None:
            self.responses.append(response)
        if flags & FINAL:
            assert not self.done.is_set(), "a second final response"
            self.done.set()

    def is_cancelled(self) -> bool:
        return self.gone


@dataclass
class Request:
    tensors: dict[str, np.ndarray]
    ident: str = ""
    sender: Sender = field(default_factory=Sender)

    def get_response_sender(self) -> Sender:
        return self.sender

    def inputs(self) -> list[Tensor]:
        return [Tensor(name, array) for name, array in self.tensors.items()]

    def request_id(self) -> str:
        return self.ident


class TritonError(Exception):
    UNAVAILABLE, CANCELLED, INVALID_ARG, INTERNAL = "UNAVAILABLE", "CANCELLED", "INVALID_ARG", "INTERNAL"

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class TritonModelException(Exception):  # noqa: N818
    """As the server's."""


class Counter:
    """A metric family and its only metric, by name."""

    GAUGE, COUNTER = "gauge", "counter"
    values: ClassVar[dict[str, float]] = {}

    def __init__(self, name: str, description: str, kind: str) -> None:
        self.label = name
        self.values[name] = 0

    def Metric(self, labels: dict[str, str]) -> Counter:  # noqa: N802
        return self

    def set(self, value: float) -> None:
        self.values[self.label] = value

    def increment(self, value: float) -> None:
        self.values[self.label] += value


def load_file(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, CODE / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def code(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """model.py, as Triton's stub would load it."""
    backend = ModuleType("triton_python_backend_utils")
    for name, value in {
        "Tensor": Tensor, "InferenceResponse": Response, "TritonError": TritonError,
        "TRITONSERVER_RESPONSE_COMPLETE_FINAL": FINAL, "MetricFamily": Counter, "TritonModelException": TritonModelException,
    }.items():  # fmt: skip
        setattr(backend, name, value)
    modules = {"triton_python_backend_utils": backend} | dict.fromkeys(("tensorrt_llm", "tensorrt_llm.llmapi"), fake_tensorrt_llm)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("sampling", "settings", "ensemble"):
        monkeypatch.setitem(sys.modules, name, None)
        load_file(name)
    return load_file("model")


def arguments(folder: Path, config: dict[str, Any] = CONFIG, **settings: Any) -> dict[str, str]:
    (folder / "1").mkdir(exist_ok=True)
    policy = {"decoupled": True, "max_batch_size": 0}
    settings = {"model": "checkpoint", "tensor_parallel_size": 2, "triton_config": policy} | settings
    (folder / "1" / "model.yaml").write_text(yaml.safe_dump(settings))
    names = {"model_name": "m", "model_instance_name": "m_0_1"}
    return {"model_config": json.dumps(config), "model_repository": str(folder), "model_version": "1", **names}


@pytest.fixture
def model(code, tmp_path):
    served = code.TritonPythonModel()
    served.initialize(arguments(tmp_path))
    yield served
    served.finalize()
    assert served._llm.down


def text(value: str) -> np.ndarray:
    return np.array([value.encode()], np.object_)


def ask(prompt: str, ident: str = "", **inputs: Any) -> Request:
    arrays = {name: value if isinstance(value, np.ndarray) else np.array([value]) for name, value in inputs.items()}
    return Request({"text_input": text(prompt), **arrays}, ident)


def ask_long(ident: str = "", **inputs: Any) -> Request:
    """For a text that takes 200 s."""
    return ask("slow\n", ident, sampling_param_max_tokens=1000, **inputs)


def answered(model: Any, request: Request) -> list[Response]:
    model.execute([request])
    wait(request.sender.done.is_set)
    return request.sender.responses


def test_the_engine_gets_model_yaml_without_what_concerns_triton(model, tmp_path):
    assert model._llm.arguments == {"tensor_parallel_size": 2}
    assert model._llm.model == str(tmp_path / "1" / "checkpoint")


def test_one_response_without_streaming(model):
    [response] = answered(model, ask("abc", return_finish_reason=True, return_cumulative_logprob=True))
    outputs = {tensor.label: tensor.array[0] for tensor in response.output_tensors}
    assert outputs == {"text_output": b"cba", "finish_reason": b"stop", "cumulative_logprob": -3.0}


def test_streaming_sends_only_new_text(model):
    responses = answered(model, ask("abc", streaming=True))
    assert [response.text() for response in responses] == ["c", "b", "a", ""]


def test_the_prompt_comes_first_when_asked_for(model):
    [response] = answered(model, ask("abc", sampling_param_exclude_input_from_output=False))
    assert response.text() == "abccba"


def test_sampling_reaches_the_engine_under_its_own_names(code):
    call = code.read_call({
        "text_input": text("x"), "sampling_param_top_p": np.array([0.5], np.float32),
        "sampling_param_seed": np.array([7], np.uint64), "sampling_param_stop": np.array([b"a", b"b"], np.object_),
    })  # fmt: skip
    assert call.sampling == {"top_p": 0.5, "seed": 7, "stop": ["a", "b"]}


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        ({"sampling_param_max_tokens": 0}, "at least 1"),
        ({"sampling_param_top_p": 1.5}, "at most 1"),
        ({"sampling_param_temperature": -1.0}, "0 or above"),
        ({"sampling_param_best_of": 2}, "one completion"),
        ({"lora_name": text("x")}, "not served"),
        ({"streaming": np.array([True, False])}, "send one"),
        ({"guided_decoding_guide_type": text("json")}, "the engine has no guided_decoding_backend"),
        ({"guided_decoding_guide_type": text("xml")}, "not one of json, json_schema, regex, ebnf_grammar"),
        ({"guided_decoding_guide_type": text("regex")}, "needs a guided_decoding_guide"),
        ({"text_input": text("")}, "empty"),
        ({"text_input": np.array([[b"a"]], np.object_)}, "shape"),
    ],
)
def test_refusals_are_sentences_and_invalid_arguments(model, inputs, sentence):
    [response] = answered(model, ask("abc", **inputs))
    assert response.error.code == "INVALID_ARG"
    assert sentence in str(response.error)


def test_no_chunk_ends_inside_a_character_or_a_stop_word(model):
    responses = answered(model, ask("🙂你b", streaming=True, sampling_param_stop=text("你🙂")))
    assert [response.text() for response in responses] == ["b", ""]
    assert [response.text() for response in answered(model, ask("🙂你b", streaming=True))] == ["b", "你", "🙂", ""]


def test_counts_of_tokens_come_with_the_last_response(model):
    *others, last = answered(model, ask("🙂b", streaming=True, return_num_input_tokens=True, return_num_output_tokens=True))
    assert {tensor.label: tensor.array[0] for tensor in last.output_tensors if tensor.label != "text_output"} == {
        "num_input_tokens": 5, "num_output_tokens": 5,
    }  # fmt: skip
    assert all(len(response.output_tensors) == 1 for response in others)


def test_guides_reach_an_engine_that_is_set_up_for_them(code, tmp_path):
    served = code.TritonPythonModel()
    served.initialize(arguments(tmp_path, guided_decoding_backend="xgrammar"))
    for kind, guide in {"json": {"json_object": True}, "regex": {"regex": "a+"}, "ebnf_grammar": {"grammar": "a+"}}.items():
        answered(served, ask("ab", guided_decoding_guide_type=text(kind), guided_decoding_guide=text("a+")))
        assert served._llm.results[-1]._values["guided_decoding"].guide == guide
    served.finalize()


def test_what_does_not_fit_is_refused_and_room_comes_back(model):
    running = [ask_long(ident=str(number)) for number in range(3)]
    model.execute(running)
    wait(lambda: [bool(result.outputs[0].token_ids) for result in model._llm.results] == [True] * 3)
    [response] = answered(model, ask("ab"))
    assert (response.error.code, "try again later" in str(response.error)) == ("UNAVAILABLE", True)
    assert Counter.values["llm_requests_running"] == 3
    for request in running:
        request.sender.gone = True
    wait(lambda: all(request.sender.done.is_set() for request in running))
    assert answered(model, ask("ab"))[0].text() == "ba"
    assert Counter.values["llm_generated_tokens"] > 2


def test_a_failing_engine_answers_and_the_next_request_works(model):
    [response] = answered(model, ask("boom"))
    assert (str(response.error), response.error.code) == ("the engine failed", "INTERNAL")
    assert answered(model, ask("ab"))[0].text() == "ba"


def test_a_client_that_left_aborts_its_generation(model):
    request = ask_long(streaming=True)
    model.execute([request])
    wait(lambda: request.sender.responses)
    request.sender.gone = True
    wait(request.sender.done.is_set)
    assert request.sender.responses[-1].error.code == "CANCELLED"
    assert model._llm.results[-1].aborted


def test_stop_with_the_same_id_cancels(model):
    running, stop = ask_long(ident="7"), ask("", ident="7", stop=True)
    model.execute([running])
    assert answered(model, stop)[0].text() == ""
    wait(running.sender.done.is_set)
    assert running.sender.responses[-1].error.code == "CANCELLED"


def test_shutting_down_answers_what_still_runs(code, tmp_path):
    served = code.TritonPythonModel()
    served.initialize(arguments(tmp_path))
    request = ask_long()
    served.execute([request])
    wait(lambda: Counter.values["llm_requests_running"] == 1)
    served.finalize()
    assert request.sender.responses[-1].error.code == "UNAVAILABLE"


def test_config_and_model_yaml_must_agree(code, tmp_path):
    with pytest.raises(RuntimeError, match="make them equal"):
        code.TritonPythonModel().initialize(arguments(tmp_path, {"max_batch_size": 0}))


def test_instances_get_gpus_of_their_own(code, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "all")
    lists = {**LIMIT, "gpu_device_ids": {"string_value": "0,1;4,5"}}
    two = CONFIG | {"instance_group": [{"count": 2, "kind": "KIND_CPU"}], "parameters": lists}
    found = sys.modules["settings"].read_settings(arguments(tmp_path, two))
    assert (found.engine["gpus_per_node"], os.environ["CUDA_VISIBLE_DEVICES"]) == (2, "4,5"), "the second, m_0_1"
    with pytest.raises(RuntimeError, match=r"2 instances need as many lists of GPUs .*; it has 0"):
        sys.modules["settings"].read_settings(arguments(tmp_path, two | {"parameters": LIMIT}))


def test_the_period_of_model_yaml_is_used_and_what_it_lacks_is_named(code, tmp_path):
    policy = {"decoupled": True, "max_batch_size": 0, "cancellation_check_period_ms": 250}
    found = sys.modules["settings"].read_settings(arguments(tmp_path, triton_config=policy))
    assert (found.cancel_period, found.max_requests) == (0.25, 3)
    with pytest.raises(RuntimeError, match=r"triton_config of model.yaml says None and None; make them equal"):
        sys.modules["settings"].read_settings(arguments(tmp_path, triton_config={}))


def test_a_missing_engine_is_named_with_the_way_out(code, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    with pytest.raises(RuntimeError, match=r"tensorrt_llm cannot be imported .*container"):
        code.TritonPythonModel().initialize(arguments(tmp_path))
