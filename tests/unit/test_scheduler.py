"""The scheduler against a model whose next token depends on the whole prefix, read back through the pages."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

from tests._utils import fake_runtime, serving

from sampler import Sampling  # isort: skip  (serving puts triton_repo/torch/1 on the path)
from scheduler import FinishEvent, Limits, QueueFullError, Request, Scheduler, TokenEvent  # isort: skip


class Listener:
    """Collects one request's events."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.tokens: list[int] = []
        self.finish: FinishEvent | None = None
        self.stop_at, self.done = stop_at, threading.Event()

    def __call__(self, event: TokenEvent | FinishEvent) -> bool:
        assert self.finish is None, f"{event} came after the last event"
        if isinstance(event, FinishEvent):
            self.finish = event
            self.done.set()
            return True
        self.tokens.append(event.token)
        return len(self.tokens) == self.stop_at


def make(max_queue: int = 100, **info: Any) -> Scheduler:
    engine = fake_runtime.CompiledEngine(serving.INFO | info)
    return Scheduler(engine, Limits.of(engine.info, max_queue))


def request(number: int, prompt: list[int], max_tokens: int, listener: Listener, **rest: Any) -> Request:
    return Request(id=number, prompt=prompt, max_tokens=max_tokens, on_event=listener, **rest)


def drain(scheduler: Scheduler, rounds: int = 2000) -> None:
    for _ in range(rounds):
        if not (scheduler.stats().running or scheduler.stats().waiting):
            return
        scheduler.iterate()
    raise AssertionError(f"still busy after {rounds} rounds: {scheduler.stats()}")


def test_many_mixed_requests_get_what_each_would_get_alone() -> None:
    rng, scheduler = random.Random(0), make(num_pages=40)
    wanted = {}
    for number in range(60):
        prompt = [rng.randrange(97, 123) for _ in range(rng.choice([1, 7, 8, 9, 16, 17, 60, 120]))]
        listener, count = Listener(), rng.randrange(1, 60)
        scheduler.submit(request(number, prompt, count, listener))
        wanted[number] = (listener, fake_runtime.continuation(prompt, count))
    drain(scheduler)
    for listener, tokens in wanted.values():
        assert listener.tokens == tokens
        assert listener.finish == FinishEvent("length")
    assert scheduler.stats().pages_used == 0
    assert scheduler.stats().tokens == sum(len(tokens) for _, tokens in wanted.values())
    assert max(scheduler.engine.batches) == serving.INFO["max_batch_size"]


def test_random_cancels_leave_the_others_right_and_free_every_page() -> None:
    rng, scheduler, listeners = random.Random(1), make(num_pages=30), {}
    for number in range(40):
        prompt = [rng.randrange(97, 123) for _ in range(rng.randrange(1, 80))]
        listeners[number] = (Listener(), prompt)
        scheduler.submit(request(number, prompt, 30, listeners[number][0]))
    while scheduler.stats().running or scheduler.stats().waiting:
        scheduler.iterate()
        if rng.random() < 0.3:
            scheduler.cancel(rng.randrange(40))
    reasons = {listener.finish.reason for listener, _ in listeners.values()}
    assert reasons == {"cancelled", "length"}
    for listener, prompt in listeners.values():
        assert listener.tokens == fake_runtime.continuation(prompt, len(listener.tokens))
    assert scheduler.stats().pages_used == 0
    assert sorted(scheduler._free_pages) == list(range(1, 30))


def test_decoding_goes_on_while_a_long_prompt_is_prefilled() -> None:
    scheduler, short, long = make(), Listener(), Listener()
    scheduler.submit(request(1, [97], 50, short))
    scheduler.iterate()
    scheduler.submit(request(2, [98] * 160, 5, long))
    for _ in range(10):
        scheduler.iterate()
    assert len(short.tokens) == 11, "one token a round, beside one chunk of the other's prompt"
    assert len(long.tokens) == 1, "160 tokens are ten chunks of 16"


def test_the_head_of_the_queue_is_not_overtaken() -> None:
    scheduler = make(num_pages=33)
    order: list[int] = []

    def listen(number: int) -> Any:
        return lambda event: order.append(number) if isinstance(event, FinishEvent) else None

    for number, (length, count) in enumerate([(8, 120), (8, 240), (1, 1), (1, 1)]):
        scheduler.submit(Request(id=number, prompt=[97] * length, max_tokens=count, on_event=listen(number)))
    drain(scheduler)
    assert order == [0, 2, 3, 1], "the large one starts before the small ones that came after it"


def test_cancelling_frees_the_slot_before_the_next_step() -> None:
    scheduler, listener = make(), Listener()
    scheduler.submit(request(1, [97] * 20, 100, listener))
    scheduler.iterate()
    scheduler.cancel(1)
    scheduler.iterate()
    assert listener.finish == FinishEvent("cancelled")
    assert scheduler.stats().pages_used == 0
    scheduler.cancel(1)
    scheduler.iterate()


def test_eos_ends_a_sequence_and_is_not_delivered() -> None:
    scheduler, listener = make(), Listener()
    scheduler.submit(request(1, [*b"ab", fake_runtime.EOS, *b"\n"], 50, listener, eos=frozenset([fake_runtime.EOS])))
    drain(scheduler)
    assert (bytes(listener.tokens), listener.finish) == (b"ab", FinishEvent("stop"))


def test_a_listener_ends_its_sequence_and_one_that_raises_ends_only_its_own() -> None:
    scheduler, stopping, other = make(), Listener(stop_at=3), Listener()
    failed: list[FinishEvent] = []

    def raising(event: TokenEvent | FinishEvent) -> None:
        if isinstance(event, TokenEvent):
            raise KeyError("bad")
        failed.append(event)

    scheduler.submit(request(1, [97], 50, stopping))
    scheduler.submit(Request(id=2, prompt=[98], max_tokens=50, on_event=raising))
    scheduler.submit(request(3, [99], 20, other))
    drain(scheduler)
    assert (len(stopping.tokens), stopping.finish) == (3, FinishEvent("stop"))
    assert failed == [FinishEvent("error", "KeyError: 'bad'")]
    assert other.tokens == fake_runtime.continuation([99], 20)


@pytest.mark.parametrize(("length", "count", "says"), [
    (0, 1, "no tokens"), (1, 0, "max_tokens=0"), (200, 57, "max_seq_len of 256"),
    (100, 100, "25 KV pages, but the engine has 19"),
])  # fmt: skip
def test_what_can_never_run_is_refused_with_the_limit(length: int, count: int, says: str) -> None:
    scheduler = make(num_pages=20)
    with pytest.raises(ValueError, match=says):
        scheduler.submit(request(1, [97] * length, count, Listener()))
    assert scheduler.stats().waiting == 0


def test_the_queue_has_a_limit_and_free_slots_do_not_count() -> None:
    scheduler = make(max_queue=2)
    for number in range(4 + 2):
        scheduler.submit(request(number, [97], 5, Listener()))
    with pytest.raises(QueueFullError, match=r"2 requests wait already, of at most serve.max_queue=2"):
        scheduler.submit(request(9, [97], 5, Listener()))
    drain(scheduler)
    scheduler.submit(request(9, [97], 5, Listener()))


def test_sampled_tokens_depend_on_the_seed_and_not_on_the_neighbours() -> None:
    def run(neighbours: int) -> list[int]:
        scheduler, listener = make(), Listener()
        for number in range(neighbours):
            scheduler.submit(request(10 + number, [100 + number], 40, Listener(), sampling=Sampling(9.0, seed=number)))
        scheduler.submit(request(1, [97] * 9, 30, listener, sampling=Sampling(5.0, top_k=20, seed=7)))
        drain(scheduler)
        return listener.tokens

    assert run(0) == run(3)
    assert len(set(run(0))) > 5, "nothing was sampled"


def test_threads_submit_while_the_engine_runs() -> None:
    scheduler = make()
    scheduler.start()
    listeners = [(Listener(), [97 + number % 26]) for number in range(30)]
    threads = [
        threading.Thread(target=scheduler.submit, args=(request(number, prompt, 25, listener),))
        for number, (listener, prompt) in enumerate(listeners)
    ]
    for thread in threads:
        thread.start()
    for listener, prompt in listeners:
        serving.wait(listener.done.is_set, 120)
        assert listener.tokens == fake_runtime.continuation(prompt, 25)
    scheduler.stop()


def test_an_engine_that_fails_fails_every_request_and_later_ones() -> None:
    scheduler, listeners = make(step_seconds=0.001), [Listener() for _ in range(8)]
    for number, listener in enumerate(listeners):
        scheduler.submit(request(number, [97], 200, listener))
    scheduler.start()
    bad = Listener()
    scheduler.submit(request(99, [fake_runtime.RAISE], 5, bad))
    for listener in [*listeners, bad]:
        serving.wait(listener.done.is_set, 120)
    assert bad.finish.reason == "error"
    assert "told to fail" in bad.finish.error
    assert "restart the server" in bad.finish.error
    with pytest.raises(RuntimeError, match="told to fail"):
        scheduler.submit(request(100, [97], 5, Listener()))
    assert scheduler.stats().pages_used == 0
    scheduler.stop()


def test_stopping_ends_what_runs_and_what_waits() -> None:
    scheduler, listeners = make(), [Listener() for _ in range(6)]
    for number, listener in enumerate(listeners):
        scheduler.submit(request(number, [*b"slow"], 200, listener))
    scheduler.start()
    scheduler.stop()
    assert {listener.finish for listener in listeners} == {FinishEvent("error", "the server is stopping")}
