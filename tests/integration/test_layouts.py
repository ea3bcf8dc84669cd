"""Each layout's generated repository on the real tritonserver, its engine replaced by a TEST DOUBLE (tests/_utils/fake_*.py).

What is proven is the contract with Triton and with clients: tensors, streams, refusals, queues, cancellation. Not proven:
TensorRT-LLM and vLLM themselves. The server is 2.51 (24.10), the oldest that is written for; one serves all tests of a layout.
"""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import ConfigError, MissingToolError
from pipeline.core.stage import StageContext
from pipeline.triton import releases, server, smoke
from pipeline.triton.client import Client, TritonError
from tests._utils import serving
from tests._utils.serving import wait

try:
    server.find_server(serving.serve_config().serve)
except MissingToolError as missing:
    pytest.skip(str(missing), allow_module_level=True)

SLOTS, MAX_QUEUE, STEP = 4, 12, 0.004
"""The queue has room for those that have left and whom a busy machine still serves."""
CONFIG = serving.serve_config(
    max_queue=MAX_QUEUE, smoke_prompt="The 你好🙂 text comes again\n", smoke_tokens=40, smoke_requests=4
)
NAME = "fake_r1"
ROOM = 1024


@dataclass(frozen=True)
class Layout:
    """A repository that is served."""

    name: str
    running: server.Server
    client: Client

    def busy(self) -> float:
        metrics = self.running.endpoint.metrics(NAME)
        return metrics.get("llm_requests_running", metrics.get("vllm:num_requests_running", -1.0))

    def threads(self) -> int:
        """Of the processes that run the models."""
        stubs = [path.parent for path in Path("/proc").glob("[0-9]*/stat") if self._is_stub(path)]
        return sum(len(list((stub / "task").iterdir())) for stub in stubs)

    def _is_stub(self, stat: Path) -> bool:
        try:
            name, _, rest = stat.read_text().partition(") ")
        except OSError:
            return False
        return "triton_python" in name and int(rest.split()[2]) == self.running.process.pid


def generate_repository(layout: str, folder: Path) -> Path:
    """What `package` writes for the oldest release, with the double of the engine beside the model."""
    if layout == "vllm":
        engine = serving.write_fake_vllm_bundle(folder / "engine", max_num_seqs=SLOTS, max_model_len=2 * ROOM)
    else:
        engine = serving.write_fake_bundle(folder / "engine", max_batch_size=SLOTS, max_seq_len=2 * ROOM)
    (folder / "package" / "repository").mkdir(parents=True)
    ctx = StageContext(
        config=CONFIG, inputs={"engine": engine}, checkpoint=None, out=folder / "package", progress=serving.Quiet()
    )
    import_module(f"pipeline.triton.layouts.{layout}").layout(ctx, releases.releases()[0])
    for code in (folder / "package" / "repository").glob("*/1/sampling.py"):
        serving.add_tensorrt_llm(code.parent)
    return folder / "package" / "repository"


@pytest.fixture(scope="module", params=["llmapi", "bls", "vllm"])
def layout(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Layout]:
    repository = generate_repository(request.param, tmp_path_factory.mktemp(request.param))
    before = set(repository.rglob("*"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKE_STEP", str(STEP))
        patch.setattr(server, "EXIT_TIMEOUT", 1)  # the stub is dead by then: waiting for it is in vain
        patch.setattr(server, "_command", serving.with_vllm_backend(server._command))
        with server.start(CONFIG.serve, repository) as started, Client(started.endpoint, NAME, timeout=40) as client:
            yield Layout(request.param, started, client)
            assert started.process.poll() is None, started.log.read_text()[-3000:]
    assert set(repository.rglob("*")) == before, "serving wrote into the packaged repository"


def streamed(client: Client, prompt: str, **options: Any) -> list[str]:
    with client.stream(prompt, **options) as stream:
        return [chunk.text for chunk in stream if chunk.text]


def test_the_smoke_suite_holds_and_leaves_nothing_out(layout: Layout) -> None:
    lines: list[str] = []
    report = smoke.smoke(layout.running.endpoint, NAME, CONFIG, lines.append)
    assert [check for check in report["checks"] if check["passed"] is not True] == [], "\n".join(lines)
    assert report["performance"]["tokens"] == 4 * 40


def test_the_index_is_the_expected_set(layout: Layout) -> None:
    assert layout.running.endpoint.index() == {NAME: "READY"}
    assert smoke.entry(list(layout.running.models)) == NAME


def test_the_server_runs_in_a_folder_of_its_own(layout: Layout) -> None:
    """Started inside a clone of TensorRT-LLM, Python would import the clone, which has no bindings."""
    folder = Path(f"/proc/{layout.running.process.pid}/cwd").resolve()
    assert folder == layout.running.log.parent
    assert (folder / "repository").is_dir()


def test_chunks_are_many_come_in_time_and_add_up(layout: Layout) -> None:
    with layout.client.stream("abc\n", max_tokens=30) as stream:
        chunks = [chunk for chunk in stream if chunk.text]
    assert "".join(chunk.text for chunk in chunks) == layout.client.generate("abc\n", max_tokens=30) == "abc" * 10
    assert len(chunks) == 30
    assert serving.spread_over(lambda: layout.client.stream("abc\n", max_tokens=30), 20 * STEP)


def test_characters_of_several_tokens_come_whole(layout: Layout) -> None:
    pieces = streamed(layout.client, "你🙂好\n", max_tokens=20)
    assert pieces == ["你", "🙂", "好", "你", "🙂", "好"], "20 bytes are twice 3 + 4 + 3"


def test_stop_words_end_the_text_and_no_part_of_them_is_streamed(layout: Layout) -> None:
    options = {"max_tokens": 100, "stop_words": ["ghia", "好"]}
    assert layout.client.generate("abcdefghi\n", **options) == "abcdef"
    assert "".join(streamed(layout.client, "abcdefghi\n", **options)) == "abcdef"


def test_eos_and_max_tokens_end_the_text(layout: Layout) -> None:
    assert layout.client.generate("ab\x04\n", max_tokens=8) == "ab"
    assert layout.client.generate("ab\n", max_tokens=5) == "ababa"


def test_tokens_are_counted(layout: Layout) -> None:
    with layout.client.stream("ab🙂\n", max_tokens=9, count_tokens=True) as stream:
        assert "".join(chunk.text for chunk in stream).startswith("ab🙂a")
    assert stream.tokens == 9


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1.0, "max_tokens": 2}, "temperature"),
        ({"top_p": 1.5, "max_tokens": 2}, "top_p"),
    ],
)
def test_a_wrong_value_is_refused_with_its_name(layout: Layout, options: dict[str, Any], says: str) -> None:
    with pytest.raises(TritonError, match=says):
        layout.client.generate("ab", **options)
    with pytest.raises(TritonError, match=says):
        streamed(layout.client, "ab", **options)


def test_a_failure_of_the_engine_reaches_the_client_and_the_next_request_works(layout: Layout) -> None:
    for ask in (layout.client.generate, lambda *prompt, **options: streamed(layout.client, *prompt, **options)):
        with pytest.raises(TritonError, match="the engine failed"):
            ask("boom", max_tokens=4)
    assert layout.client.generate("ab", max_tokens=2) == "ba"


def test_a_failure_in_mid_stream_reaches_the_client(layout: Layout) -> None:
    """Triton 2.51 loses such an error on its way from one model to another: there must be none in front of the engine's."""
    pieces = []
    with pytest.raises(TritonError, match="the engine failed"), layout.client.stream("midway\n", max_tokens=30) as stream:
        for chunk in stream:
            pieces.append(chunk.text)
    assert "".join(pieces) == "mid"


def test_an_error_inside_a_good_answer_is_an_error(layout: Layout) -> None:
    with pytest.raises(TritonError, match="exactly 1 response") as caught:
        layout.client.generate("abc\n", max_tokens=5, stream=True)
    assert caught.value.status == 200


def test_what_generate_passes_over_in_silence_is_refused_elsewhere(layout: Layout) -> None:
    """`max_token` for `max_tokens`: HTTP's generate ignores it, gRPC and our client do not."""
    body = layout.client.body("abc\n", max_tokens=3)
    assert layout.running.endpoint.generate(NAME, body | {"max_token": 1})["text_output"] in ("abc", ["abc"])
    with pytest.raises(TritonError, match="unexpected inference input 'max_token'"):
        layout.client.infer(body | {"max_token": 1})
    with pytest.raises(ConfigError, match="has no input for max_token"):
        layout.client.generate("abc\n", max_token=1)


def test_plain_infer_is_no_way_to_ask_a_model_that_streams(layout: Layout) -> None:
    body = {"inputs": [{"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["ab"]}]}
    with pytest.raises(TritonError, match="decoupled transaction policy") as caught:
        layout.running.endpoint._open(f"/v2/models/{NAME}/infer", body, 5.0)
    assert caught.value.status == 501


def test_requests_run_side_by_side(layout: Layout) -> None:
    """The last to begin begins before the first one ends: that takes 51 s, longer than the client waits."""
    with ExitStack() as stack:
        streams = [stack.enter_context(layout.client.stream("slow\n", max_tokens=ROOM)) for _ in range(SLOTS)]
        assert [next(stream).text for stream in streams] == ["s"] * SLOTS
        assert ["".join(next(stream).text for _ in range(5)) for stream in streams] == ["lowsl"] * SLOTS
    wait(lambda: layout.busy() == 0)


def test_a_client_that_leaves_frees_its_slot(layout: Layout) -> None:
    with layout.client.stream("slow\n", max_tokens=ROOM) as stream:
        next(stream)
        wait(lambda: layout.busy() == 1)
    wait(lambda: layout.busy() == 0)


def test_clients_that_leave_leave_no_thread_behind(layout: Layout) -> None:
    before = layout.threads()
    for _ in range(5):
        with layout.client.stream("slow\n", max_tokens=ROOM) as stream:
            next(stream)
    wait(lambda: layout.threads() <= before)


def test_an_http_client_that_vanishes_frees_its_slot(layout: Layout) -> None:
    at = layout.running.endpoint
    body = json.dumps(layout.client.body("slow\n", max_tokens=ROOM, stream=True)).encode()
    with socket.create_connection(("127.0.0.1", at.http_port)) as connection:
        head = f"POST /v2/models/{NAME}/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        assert b"200 OK" in connection.recv(4096)
        wait(lambda: layout.busy() == 1)
    wait(lambda: layout.busy() == 0)


def test_a_deadline_bounds_a_stream_and_frees_its_slot(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    assert streamed(layout.client, "ab\n", max_tokens=2), "the client knows the model before it is in a hurry"
    with monkeypatch.context() as hasty, pytest.raises(TritonError, match="DEADLINE_EXCEEDED"):
        hasty.setattr(layout.client, "timeout", 0.3)
        streamed(layout.client, "slow\n", max_tokens=ROOM)
    wait(lambda: layout.busy() == 0)


def test_clients_of_all_kinds_at_once_get_their_own_answers(layout: Layout) -> None:
    def one(number: int) -> str:
        try:
            if number % 4 == 0:
                return layout.client.generate(f"{number}\n", max_tokens=4)
            if number % 4 == 1:
                return "".join(streamed(layout.client, "你🙂好\n", max_tokens=20))
            if number % 4 == 2:
                with layout.client.stream("abc\n", max_tokens=ROOM) as stream:
                    return next(stream).text[:1]
            return layout.client.generate("boom", max_tokens=2)
        except TritonError as error:
            return str(error)

    with ThreadPoolExecutor(SLOTS) as pool:
        answers = list(pool.map(one, range(200)))
    assert all(answer == (str(number) * 4)[:4] for number, answer in zip(range(0, 200, 4), answers[::4], strict=True))
    assert answers[1::4] == ["你🙂好你🙂好"] * 50 and answers[2::4] == ["a"] * 50
    assert all("the engine failed" in answer for answer in answers[3::4])


def test_more_than_slots_and_queue_is_refused(layout: Layout) -> None:
    most = SLOTS + MAX_QUEUE
    if layout.name == "vllm":
        with ThreadPoolExecutor(most + 4) as pool:
            answers = list(pool.map(lambda _: layout.client.generate("abc\n", max_tokens=90), range(most + 4)))
        assert answers == ["abc" * 30] * (most + 4), "vLLM's backend has no limit of its own: what does not run waits"
        return
    with ExitStack() as stack:
        streams = [stack.enter_context(layout.client.stream("slow\n", max_tokens=ROOM)) for _ in range(most)]
        wait(lambda: layout.busy() == most)
        for _ in range(4):
            with pytest.raises(TritonError, match=r"try again later, or raise serve\.max_queue"):
                layout.client.generate("abc\n", max_tokens=3)
        assert [next(stream).text for stream in streams] == ["s"] * most
    wait(lambda: layout.busy() == 0)
    assert layout.client.generate("abc\n", max_tokens=3) == "abc"


def test_the_openai_frontend_of_triton_is_answered_as_it_asks(layout: Layout) -> None:
    """Tensors as its request converters send them: with a batch dimension, and always the counts."""
    if layout.name == "llmapi":
        with pytest.raises(TritonError, match="unexpected inference input"):
            layout.client.infer({"text_input": "abc\n", "stream": False, "max_tokens": 4})
        return
    openai: dict[str, Any] = {"text_input": "abc\n", "stream": True, "exclude_input_in_output": True}
    openai |= dict.fromkeys(("return_num_input_tokens", "return_num_output_tokens"), True)
    sampling = {"max_tokens": 6, "top_p": 1.0, "temperature": 1.0, "seed": 5, "frequency_penalty": 0.5, "presence_penalty": 0.5}
    if layout.name == "vllm":
        openai["sampling_parameters"] = json.dumps(sampling | {"stop": ["bca"]})
    else:
        openai |= sampling | {"stop_words": ["bca"]}
    assert "".join(layout.client.infer(openai)) == "a"
    assert layout.client.infer(openai | {"stream": False}) == ["a"], "one response, as its validation wants"


def refusal(client: Client, prompt: str) -> str:
    """What the client is told instead of a text; nothing came of it where that is a text."""
    try:
        client.generate(prompt, max_tokens=2)
    except (TritonError, OSError) as error:
        return str(error)
    return ""


def test_a_stub_that_died_is_told_from_a_healthy_model(layout: Layout) -> None:
    """Last of all: nothing of this layout works afterwards, and Triton still says that it is ready."""
    with Client(layout.running.endpoint, NAME, timeout=3) as client:  # Triton takes one second to say it
        wait(lambda: "not healthy" in refusal(client, "die"))  # the first one may wait in vain, or not get there in time
    assert layout.running.endpoint.ready(), "readiness lies: this is why smoke asks for text"
    lines: list[str] = []
    report = smoke.smoke(layout.running.endpoint, NAME, CONFIG, lines.append)
    failed = {check["name"]: check["detail"] for check in report["checks"] if check["passed"] is False}
    assert "not healthy" in failed["generate"], lines
    assert "performance" not in report


def test_a_repository_for_a_newer_server_is_refused_before_this_one_starts(tmp_path: Path) -> None:
    engine = serving.write_fake_bundle(tmp_path / "engine")
    (tmp_path / "package" / "repository").mkdir(parents=True)
    common = {"config": CONFIG, "checkpoint": None, "progress": serving.Quiet()}
    ctx = StageContext(inputs={"engine": engine}, out=tmp_path / "package", **common)
    import_module("pipeline.triton.layouts.llmapi").layout(ctx, releases.releases()[-1])
    with pytest.raises(server.StageError, match=r"model_metrics came with Triton 24\.12: 24\.10"):
        server.start(CONFIG.serve, tmp_path / "package" / "repository").__enter__()


def test_without_tensorrt_llm_the_server_does_not_start_and_says_why(tmp_path: Path) -> None:
    repository = generate_repository("llmapi", tmp_path)
    shutil.rmtree(repository / NAME / "1" / "tensorrt_llm")
    with pytest.raises(server.StageError, match="tensorrt_llm cannot be imported"), server.start(CONFIG.serve, repository):
        pass
