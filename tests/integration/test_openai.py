"""OpenAI's own client against the gateway on the real tritonserver, with each of our layouts behind it.

The engines are TEST DOUBLES that repeat the prompt's first line for ever, a byte a token, so that every text, cut and count
is known. `test_openai_engine.py` does the same with the compiled engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import openai
import pytest

from pipeline.core.errors import MissingToolError
from pipeline.core.stage import StageContext
from pipeline.openai.companion import beside
from pipeline.triton import releases, server
from tests._utils import serving
from tests._utils.gateway import MAX_QUEUE, ROOM, config, write_tokenizer

try:
    server.find_server(serving.serve_config().serve)
except MissingToolError as missing:
    pytest.skip(str(missing), allow_module_level=True)

MODELS = {"torch": "fake_r1", "llmapi": "fake_llm", "bls": "adapter", "vllm": "fake_vllm"}
KEY = "s3cret"
MANY = 400
"""Tokens: a slow text of them takes 80 s, longer than `serving.wait` waits."""


def write_repository(folder: Path) -> Path:
    """All layouts in one repository: doubles of the engines."""
    engine = serving.write_fake_engine(folder / "engine", step_seconds=0.004, max_seq_len=ROOM, num_pages=4 * ROOM // 8 + 1)
    repository = serving.package_engine(engine, folder / "package", config(), serving.FAKE_RUNTIME)
    third = {"free_gpu_memory_fraction": 0.3}  # all are said to be on one GPU
    bundle = serving.write_fake_bundle(folder / "bundle", max_seq_len=ROOM, kv_cache_config=third)
    vllm = serving.write_fake_vllm_bundle(folder / "vllm", max_model_len=ROOM, max_num_seqs=4, gpu_memory_utilization=0.3)
    for layout, inputs in (("llmapi", bundle), ("bls", bundle), ("vllm", vllm)):
        ctx = StageContext(
            config=config(model_name=MODELS[layout]), inputs={"engine": inputs}, checkpoint=None, out=folder / "package",
            progress=serving.Quiet(),
        )  # fmt: skip
        import_module(f"pipeline.triton.layouts.{layout}").layout(ctx, releases.releases()[0])
    for code in repository.glob("*/1/sampling.py"):
        serving.add_tensorrt_llm(code.parent)
    return repository


@dataclass(frozen=True)
class Gateway:
    """One gateway, the client of it, and the server behind."""

    layout: str
    client: openai.OpenAI
    running: server.Server
    url: str

    @property
    def model(self) -> str:
        return MODELS[self.layout]

    def chat(self, text: str, **options: Any) -> Any:
        messages = [{"role": "user", "content": text}]
        return self.client.chat.completions.create(model=self.model, messages=messages, **{"temperature": 0} | options)

    def busy(self) -> float:
        """Requests that hold a slot of an engine."""
        metrics = self.running.endpoint.metrics()
        return metrics["llm_requests_running"] + metrics["vllm:num_requests_running"]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[server.Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKE_STEP", "0.004")
        patch.setattr(server, "_command", serving.with_vllm_backend(server._command))
        with server.start(config().serve, write_repository(tmp_path_factory.mktemp("openai"))) as started:
            yield started
            assert started.process.poll() is None, started.log.read_text()[-3000:]


@pytest.fixture(scope="module")
def gateways(running: server.Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Gateway]]:
    tokenizer = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    with ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setenv("TEST_KEY", KEY)
        found = {}
        for layout, model in MODELS.items():
            serve = config(model_name=model, openai_api_key_env="TEST_KEY", tokenizer=str(tokenizer)).serve
            companion = stack.enter_context(beside(serve, running.endpoint, running.models, Path("unused")))
            assert companion
            url = companion.line.split()[-1]
            client = stack.enter_context(openai.OpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=60))
            found[layout] = Gateway(layout, client, running, url)
        yield found
        for gateway in found.values():
            assert gateway.client.models.list().data[0].id == gateway.model, "it lives on after all that was done to it"


@pytest.fixture(params=MODELS)
def gateway(request: pytest.FixtureRequest, gateways: dict[str, Gateway]) -> Gateway:
    return gateways[request.param]


@pytest.fixture
def torch(gateways: dict[str, Gateway]) -> Gateway:
    return gateways["torch"]


def texts(stream: Any) -> tuple[list[str], list[str], Any]:
    """(thoughts, contents, last chunk with a choice) of a chat's stream."""
    chunks = [chunk for chunk in stream if chunk.choices]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    thoughts = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    return [t for t in thoughts if t], [delta.content for delta in deltas if delta.content], chunks[-1]


# --- answers --------------------------------------------------------------------------------------------------


def test_a_chat_and_its_stream_say_the_same(gateway: Gateway) -> None:
    whole = gateway.chat("你好🙂 a", max_tokens=30)
    thoughts, contents, last = texts(gateway.chat("你好🙂 a", max_tokens=30, stream=True))
    assert whole.choices[0].message.content == "".join(contents) == "你好🙂 a你好🙂 a你好"
    assert thoughts == [] and len(contents) > 8
    assert whole.choices[0].finish_reason == last.choices[0].finish_reason == "length"
    assert (whole.object, last.object, whole.model) == ("chat.completion", "chat.completion.chunk", gateway.model)
    assert whole.id.startswith("chatcmpl-") and whole._request_id


def test_usage_counts_tokens(gateway: Gateway) -> None:
    prompt = len("abc\n") + (gateway.layout == "torch")  # only the torch engine adds its BOS
    expected = {"prompt_tokens": prompt, "completion_tokens": 7, "total_tokens": prompt + 7}
    usage = gateway.chat("abc", max_completion_tokens=7).usage
    assert {name: getattr(usage, name) for name in expected} == expected
    *others, last = gateway.chat("abc", max_tokens=7, stream=True, stream_options={"include_usage": True})
    assert all(chunk.usage is None for chunk in others) and last.choices == []
    assert {name: getattr(last.usage, name) for name in expected} == expected


def test_thoughts_are_apart(gateway: Gateway) -> None:
    prompt = "<think>\f1 + 1\f</think>\f\fIs 2.\x04"  # \f: white space like a newline, which ends the doubles' line
    message = gateway.chat(prompt, max_tokens=99).choices[0].message
    thoughts, contents, _ = texts(gateway.chat(prompt, max_tokens=99, stream=True))
    assert ("".join(thoughts), "".join(contents)) == (message.reasoning_content, message.content) == ("1 + 1", "Is 2.")
    plain = gateway.chat(prompt, max_tokens=99, extra_body={"separate_reasoning": False}).choices[0].message
    assert plain.content.startswith("<think>\f1 + 1\f</think>") and not hasattr(plain, "reasoning_content")


@pytest.mark.parametrize("stop", ["efa", ["zzz", "efa"], ["fab", "def"]])
def test_a_stop_word_ends_the_text_and_never_leaks(gateway: Gateway, stop: str | list[str]) -> None:
    expected = "abc" if "def" in stop else "abcd"
    whole = gateway.chat("abcdef", max_tokens=50, stop=stop).choices[0]
    assert (whole.message.content, whole.finish_reason) == (expected, "stop")
    _, contents, last = texts(gateway.chat("abcdef", max_tokens=50, stop=stop, stream=True))
    assert "".join(contents) == expected and last.choices[0].finish_reason == "stop"


def test_eos_is_a_stop(gateway: Gateway) -> None:
    answer = gateway.chat("ab\x04", max_tokens=9)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("ab", "stop")
    assert gateway.chat("ab\x04", max_tokens=6, extra_body={"ignore_eos": True}).choices[0].message.content == "ab\x04ab\x04"


def test_without_max_tokens_all_that_fits_is_made(gateway: Gateway) -> None:
    answer = gateway.chat("abc")
    assert answer.choices[0].finish_reason == "length"
    assert ROOM - 2 <= answer.usage.total_tokens <= ROOM


def test_completions_take_several_prompts_and_n(gateway: Gateway) -> None:
    answer = gateway.client.completions.create(model=gateway.model, prompt=["ab\n", "cd\n"], n=2, max_tokens=4, temperature=0)
    assert [choice.text for choice in answer.choices] == ["abab", "abab", "cdcd", "cdcd"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.completion_tokens == 16
    stream = gateway.client.completions.create(model=gateway.model, prompt="<think>x\n", max_tokens=5, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream).startswith("<think>"[:5]), "no thoughts are looked for"


def test_a_seed_gives_the_same_text_again(torch: Gateway) -> None:
    def run(seed: int) -> str:
        prompt = {"model": torch.model, "prompt": "abcd", "max_tokens": 12, "temperature": 2.0}
        return torch.client.completions.create(**prompt, seed=seed, top_p=1.0, extra_body={"top_k": 0}).choices[0].text

    assert [run(5), run(-6)] == [run(5), run(-6)]


def test_models_health_and_metrics(gateway: Gateway) -> None:
    [model] = gateway.client.models.list().data
    assert model.id == gateway.client.models.retrieve(gateway.model).id == gateway.model
    root = gateway.client.with_options(base_url=gateway.url.removesuffix("/v1"))
    assert root.get("/health", cast_to=object) == {"status": "ok"}
    page = root.get("/metrics", cast_to=str)
    assert "nv_inference_request_success" in page and 'openai_requests_total{path="/v1/models",status="200"} ' in page


# --- refusals -------------------------------------------------------------------------------------------------


def test_errors_are_those_of_openai_s_client(gateway: Gateway) -> None:
    for options, kind, code, says in (
        ({"max_tokens": 5000}, openai.BadRequestError, "context_length_exceeded", "max_seq_len|max_tokens=5000"),
        ({"temperature": -1}, openai.BadRequestError, "invalid_value", "temperature=-1"),
        ({"logprobs": True}, openai.BadRequestError, "unsupported_parameter", "logprobs"),
        ({"extra_body": {"max_token": 5}}, openai.BadRequestError, "unknown_parameter", "max_token"),
    ):
        for stream in (False, True):
            with pytest.raises(kind, match=says) as caught:
                gateway.chat("abc", stream=stream, **options)
            assert caught.value.code == code and caught.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        gateway.client.chat.completions.create(model="gpt", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.AuthenticationError, match="API key"):
        gateway.client.with_options(api_key="wrong").models.list()


def test_a_prompt_that_is_too_long_is_refused(gateway: Gateway) -> None:
    with pytest.raises(openai.BadRequestError, match=f"together they may have {ROOM}"):
        gateway.chat("x" * 2 * ROOM)
    for length in (2 * ROOM, 10**6):
        with pytest.raises(openai.BadRequestError) as caught:
            gateway.chat("x" * length, max_tokens=4)
        assert caught.value.code == "context_length_exceeded"


def test_an_engine_that_fails_is_500_or_an_error_inside_the_stream(gateway: Gateway) -> None:
    if gateway.layout == "torch":
        pytest.skip("its double fails for good: test_serve_failures has that")
    with pytest.raises(openai.InternalServerError) as caught:
        gateway.chat("boom", max_tokens=20)
    assert caught.value.status_code == 500 and caught.value.code == "engine_error"
    with pytest.raises(openai.APIError, match="fail"):
        list(gateway.chat("mid abc", max_tokens=20, stream=True))
    assert gateway.chat("abc", max_tokens=3).choices[0].message.content == "abc", "others go on"


def test_a_full_queue_is_429(gateway: Gateway) -> None:
    if gateway.layout == "vllm":
        pytest.skip("vLLM lets any number of requests wait")

    def held() -> float:
        metrics = gateway.running.endpoint.metrics()
        return metrics["llm_requests_running"] + metrics["llm_requests_waiting"]

    fit = 4 + MAX_QUEUE
    serving.wait(lambda: held() == 0)
    with ThreadPoolExecutor(fit) as pool:
        streams = [pool.submit(gateway.chat, "slow", max_tokens=MANY, stream=True) for _ in range(fit)]
        serving.wait(lambda: held() == fit)
        for stream in (False, True, False):
            with pytest.raises(openai.RateLimitError) as caught:
                gateway.chat("abc", max_tokens=3, stream=stream)
            assert caught.value.code == "queue_full" and caught.value.response.headers["retry-after"] == "1"
        for future in as_completed(streams):  # those that waited come when others leave
            assert next(future.result()).choices
            future.result().close()
    serving.wait(lambda: held() == 0)
    assert gateway.chat("abc", max_tokens=3).choices[0].message.content == "abc"


# --- many at once, and clients that leave ---------------------------------------------------------------------


def test_streams_side_by_side_keep_apart(gateway: Gateway) -> None:
    def one(number: int) -> str:
        return "".join(texts(gateway.chat(f"{number:02d}.", max_tokens=60, stream=True))[1])

    numbers = range(4 + MAX_QUEUE)
    with ThreadPoolExecutor(len(numbers)) as pool:
        assert list(pool.map(one, numbers)) == [f"{number:02d}." * 20 for number in numbers]


def test_a_stream_that_is_left_frees_its_slot(gateway: Gateway) -> None:
    serving.wait(lambda: gateway.busy() == 0)
    stream = gateway.chat("slow", max_tokens=MANY, stream=True)
    next(stream)
    serving.wait(lambda: gateway.busy() == 1)
    stream.close()
    serving.wait(lambda: gateway.busy() == 0)


def test_a_client_that_waits_for_a_whole_answer_and_vanishes_frees_its_slot(gateway: Gateway) -> None:
    serving.wait(lambda: gateway.busy() == 0)
    with suppress(openai.APITimeoutError):
        gateway.client.with_options(timeout=0.3).chat.completions.create(
            model=gateway.model, messages=[{"role": "user", "content": "slow"}], max_tokens=MANY
        )
    serving.wait(lambda: gateway.busy() == 0)
