"""From a checked request to its generations: prompt, options, and one stream for each choice. Knows nothing of HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.openai.answer import usage
from pipeline.openai.backend import Backend, Model
from pipeline.openai.choice import End, Plain, generation
from pipeline.openai.errors import ApiError
from pipeline.openai.reasoning import OPEN, Delta, Splitter
from pipeline.openai.schema import ChatRequest, CompletionRequest, Request
from pipeline.openai.template import ChatTemplate
from pipeline.openai.tokens import TokenCounter

__all__ = ["Run", "Service", "Settings"]

DEFAULT_TOKENS = 4096
"""max_tokens of a request that names none, where the length of the model's context is not known."""
LONG = 20_000
"""Characters from which a prompt is tokenized beside the event loop, so that other streams go on."""
Item = tuple[int, Delta | End]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How one gateway works."""

    grpc: str
    """host:port of the server's gRPC service."""
    model: str
    """Name of the model in Triton."""
    tokenizer: Path
    """Folder of tokenizer.json, tokenizer_config.json and generation_config.json."""
    served_name: str = ""
    """What clients call the model; empty: its name in Triton."""
    metrics_url: str = ""
    api_key: str = ""
    """Clients must send it; empty: nobody is asked."""
    max_model_len: int | None = None
    """Tokens of prompt and output together; None: what the model's configuration tells."""
    timeout: float = 3600.0
    """Seconds that one generation may take."""
    grace: float = 5.0
    """Seconds that running answers get when the gateway is told to stop."""
    workers: int = 1
    """Processes that share the port: one carries some 5,000 tokens/s."""

    @property
    def name(self) -> str:
        """The model's name for clients."""
        return self.served_name or self.model


class Service:
    """One model behind OpenAI's API."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._counter = TokenCounter(settings.tokenizer)
        self._template = ChatTemplate.load(settings.tokenizer)
        self._defaults = _defaults(settings.tokenizer)
        self.backend: Backend

    def connect(self) -> None:
        """Make the connection; inside the event loop that will use it."""
        self.backend = Backend(self.settings.grpc, self.settings.model, self.settings.timeout)

    def require_model(self, name: str) -> None:
        """ApiError 404 for a model that is not this one."""
        if name != self.settings.name:
            message = f"The model {name[:80]!r} does not exist: this server has {self.settings.name!r}."
            raise ApiError(404, message, param="model", code="model_not_found")

    def chat(self, call: ChatRequest, request_id: str) -> Run:
        """The generations of a chat."""
        self.require_model(call.model)
        if self._template is None:
            raise ApiError(400, "The model has no chat template: use /v1/completions.", code="no_chat_template")
        text = self._template.render(call.messages, **(call.chat_template_kwargs or {}))
        prompt = self._counter.without_bos(text)
        if not prompt:
            raise ApiError(400, "The messages make an empty prompt: send at least one character.", param="messages")
        plain = call.separate_reasoning is False
        return Run(self, call, [prompt], request_id, None if plain else text.rstrip().endswith(OPEN))

    def complete(self, call: CompletionRequest, request_id: str) -> Run:
        """The generations of one or several prompts."""
        self.require_model(call.model)
        return Run(self, call, call.prompts, request_id, None)

    async def count_prompt(self, prompt: str) -> int:
        """Tokens of a prompt, by the tokenizer."""
        if len(prompt) < LONG:
            return self._counter.prompt(prompt)
        return await asyncio.to_thread(self._counter.prompt, prompt)

    async def max_tokens(self, call: Request, prompt: str, model: Model) -> int:
        """Tokens that a generation may have: what the request says, else all that fits.

        Raises:
            ApiError: 400 for a prompt that cannot fit, which is not tokenized where its bytes alone show that.
        """
        limit, wanted = self.settings.max_model_len or model.max_model_len, call.max_tokens
        if limit is None:
            return wanted or DEFAULT_TOKENS
        length = len(prompt.encode()) // self._counter.longest  # at least
        if length < limit:
            if wanted is not None and model.dialect.checks_length:
                return wanted
            length = await self.count_prompt(prompt)
        if length + (wanted or 1) > limit:
            asked = f" and max_tokens={wanted}" if wanted else ""
            message = f"The prompt has at least {length} tokens{asked}, but together they may have {limit}"
            raise ApiError(400, f"{message}: shorten it, or ask for less.", code="context_length_exceeded")
        return wanted or limit - length

    async def start(
        self, call: Request, prompt: str, number: int, request_id: str, inside: bool | None
    ) -> AsyncGenerator[Delta | End, None]:
        """One generation. `inside`: whether the prompt has opened a thought; None: do not look for thoughts."""
        model = await self.backend.model()
        most = await self.max_tokens(call, prompt, model)
        defaults = {name: value for name, value in self._defaults.items() if model.dialect.has(name)}
        options = defaults | call.sampling() | {"max_tokens": most}
        if "seed" in options:
            options["seed"] += number
        pieces = self.backend.generate(prompt, options, stream=bool(call.stream), request_id=f"{request_id}-{number}")
        splitter = Plain() if inside is None else Splitter(inside)
        return generation(pieces, stops=call.stops, splitter=splitter, max_tokens=most, count=self._counter.output)


class Run:
    """The generations of one request, merged: iterate `items`, then ask for `counts`."""

    def __init__(self, service: Service, call: Request, prompts: list[str], request_id: str, inside: bool | None) -> None:
        self._service, self._call, self._id, self._inside = service, call, request_id, inside
        self._prompts, self._ends = prompts, dict[int, End]()
        self.choices = len(prompts) * (call.n or 1)

    async def items(self) -> AsyncGenerator[Item, None]:
        """(choice, delta or end) in the order in which they come. Closing it cancels what still runs."""
        streams = [await self._start(number) for number in range(self.choices)]
        async with aclosing(_merge(streams)) as merged:
            async for number, item in merged:
                if isinstance(item, End):
                    self._ends[number] = item
                yield number, item

    async def counts(self) -> dict[str, int]:
        """Tokens of all prompts, each counted once, and of all generations."""
        prompt_tokens = 0
        for place, prompt in enumerate(self._prompts):
            told = self._ends[place * (self._call.n or 1)].prompt_tokens
            prompt_tokens += await self._service.count_prompt(prompt) if told is None else told
        return usage(prompt_tokens, sum(end.completion_tokens for end in self._ends.values()))

    async def _start(self, number: int) -> AsyncGenerator[Delta | End, None]:
        place, repeat = divmod(number, self._call.n or 1)
        return await self._service.start(self._call, self._prompts[place], repeat, f"{self._id}-{place}", self._inside)


async def _merge(streams: list[AsyncGenerator[Delta | End, None]]) -> AsyncGenerator[Item, None]:
    """All items of all streams. The first that fails ends the others."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for alone in only:
                yield 0, alone
        return
    queue: asyncio.Queue[Item | Exception | None] = asyncio.Queue(maxsize=len(streams))
    tasks = [asyncio.create_task(_pump(number, stream, queue)) for number, stream in enumerate(streams)]
    async with AsyncExitStack() as stack:
        stack.push_async_callback(_cancel, tasks)
        for _ in streams:
            while (item := await queue.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item


async def _pump(number: int, stream: AsyncGenerator[Delta | End, None], queue: asyncio.Queue[Item | Exception | None]) -> None:
    """Put the items of one stream into the queue, and last None or what ended it."""
    end: Exception | None = None
    try:
        async with aclosing(stream):
            async for item in stream:
                await queue.put((number, item))
    except Exception as error:  # whatever it is, the reader raises it
        end = error
    await queue.put(end)


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _defaults(folder: Path) -> dict[str, Any]:
    """Sampling of requests that do not say: generation_config.json's, else OpenAI's."""
    path = folder / "generation_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if config.get("do_sample") is False:
        return {"temperature": 0.0}
    names = ("temperature", "top_p", "top_k")
    return {"temperature": 1.0, "top_p": 1.0} | {name: config[name] for name in names if config.get(name) is not None}
