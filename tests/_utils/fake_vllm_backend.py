"""TEST DOUBLE of Triton's vLLM backend (backends/vllm/model.py): the tensors and rules of its documentation over a toy engine.

It reads our model.json, refuses what AsyncEngineArgs does not know and a GPU kind of several ranks, needs the decoupled
policy, and takes `model` relative to the working directory. A token is a byte; the answer is the prompt reversed, or what stands
before its newline, for ever; EOT (0x04) is EOS; "boom" fails in the engine, "mid" does after three tokens, "die" kills the process,
"slow" takes 0.2 s a step and others FAKE_STEP seconds. What exceeds max_num_seqs waits.
"""

import asyncio
import itertools
import json
import os
import threading

import numpy as np
import triton_python_backend_utils as pb_utils

ENGINE_ARGS = {
    "model", "tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size", "enable_expert_parallel", "max_model_len",
    "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization", "kv_cache_dtype", "block_size", "enable_prefix_caching",
    "enable_chunked_prefill", "trust_remote_code", "disable_log_stats", "quantization", "speculative_config",
}  # fmt: skip
SAMPLING = {
    "max_tokens", "temperature", "top_k", "top_p", "seed", "stop", "ignore_eos", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "min_tokens",
}  # fmt: skip
EOS, FINAL = 4, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        assert pb_utils.using_decoupled_model_transaction_policy(config), "must be configured to use decoupled"
        with open(os.path.join(pb_utils.get_model_dir(), "model.json"), encoding="utf-8") as file:
            engine = json.load(file)
        if unknown := engine.keys() - ENGINE_ARGS:
            raise TypeError(f"AsyncEngineArgs got unexpected keyword arguments {sorted(unknown)}")
        if not os.path.isfile(os.path.join(engine["model"], "config.json")):
            raise ValueError(f"{engine['model']} is no model: it has no config.json")
        if args["model_instance_kind"] == "GPU" and engine["tensor_parallel_size"] * engine["pipeline_parallel_size"] > 1:
            raise ValueError("KIND_GPU is currently for single-GPU models, please specify KIND_MODEL")
        self.length, self.slots = engine["max_model_len"], asyncio.Semaphore(engine["max_num_seqs"])
        self.running, self.tokens = self.metrics(args["model_name"])
        self.busy = 0
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def metrics(self, model):
        kinds = {"vllm:num_requests_running": "GAUGE", "vllm:generation_tokens_total": "COUNTER"}
        self.families = [
            pb_utils.MetricFamily(name=name, description="as vLLM's", kind=getattr(pb_utils.MetricFamily, kind))
            for name, kind in kinds.items()
        ]
        return [family.Metric(labels={"model": model, "version": "1"}) for family in self.families]

    def execute(self, requests):
        for request in requests:
            tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            asyncio.run_coroutine_threadsafe(self.serve(tensors, request.get_response_sender()), self.loop)

    def finalize(self):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()

    async def serve(self, tensors, sender):
        try:
            async with self.slots:
                self.count(+1)
                try:
                    await self.generate(Request(tensors, self.length), sender)
                finally:
                    self.count(-1)
        except Exception as error:
            failure = pb_utils.TritonError(f"Error generating stream: {error}")
            sender.send(pb_utils.InferenceResponse(output_tensors=[strings("text_output", "N/A")], error=failure), flags=FINAL)

    def count(self, change):
        self.busy += change
        self.running.set(self.busy)

    async def generate(self, request, sender):
        sent = b""
        async for made, finished in request.steps():
            self.tokens.increment(1)
            if sender.is_cancelled():
                error = pb_utils.TritonError(message="Request was cancelled", code=pb_utils.TritonError.CANCELLED)
                sender.send(pb_utils.InferenceResponse(error=error), flags=FINAL)
                return
            if request.stream:
                chunk = request.response(request.text(made, finished)[len(request.text(sent, False)) :], len(made) - len(sent))
                sender.send(chunk, flags=FINAL if finished else 0)
                sent = made
        if not request.stream:
            prompt = "" if request.exclude else request.prompt
            sender.send(request.response(prompt + request.text(made, True), len(made)), flags=FINAL)


class Request:
    def __init__(self, tensors, length):
        flags = {name: bool(value[0]) for name, value in tensors.items() if value.dtype == bool}
        self.prompt, self.stream = tensors["text_input"][0].decode(), flags.get("stream", False)
        self.exclude = flags.get("exclude_input_in_output", self.stream)
        if self.stream and not self.exclude:
            raise ValueError("When streaming, `exclude_input_in_output` = False is not allowed.")
        self.counts = [name for name in ("num_input_tokens", "num_output_tokens") if flags.get(f"return_{name}")]
        self.given = json.loads(tensors["sampling_parameters"][0]) if "sampling_parameters" in tensors else {}
        self.check(length)

    def check(self, length):
        if unknown := self.given.keys() - SAMPLING:
            raise TypeError(f"SamplingParams got {sorted(unknown)}")
        if not self.prompt:
            raise ValueError("The decoder prompt cannot be empty")
        if self.given.get("max_tokens", 16) < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.given['max_tokens']}.")
        if self.given.get("temperature", 1.0) < 0:
            raise ValueError(f"temperature must be non-negative, got {self.given['temperature']}.")
        if not 0 < self.given.get("top_p", 1.0) <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.given['top_p']}.")
        self.most = min(self.given.get("max_tokens", 16), length - len(self.prompt.encode()))

    def text(self, made, finished):
        """What is certain of the bytes so far: no half of a character, no stop word and no beginning of one."""
        text = made.decode(errors="ignore")
        for word in self.given.get("stop", []):
            if word in text:
                return text[: text.index(word)]
            held = max((size for size in range(1, len(word)) if text.endswith(word[:size])), default=0)
            text = text if finished else text[: len(text) - held]
        return text

    async def steps(self):
        before, newline, _ = self.prompt.partition("\n")
        answer = itertools.cycle(before.encode()) if newline else iter(self.prompt[::-1].encode())
        pause = 0.2 if self.prompt.startswith("slow") else float(os.environ.get("FAKE_STEP", "0"))
        made = b""
        while True:
            await asyncio.sleep(pause)
            if self.prompt.startswith("die"):
                os._exit(1)
            if self.prompt.startswith("boom") or (self.prompt.startswith("mid") and len(made) > 2):
                raise RuntimeError("the engine failed")
            token = next(answer, EOS)
            ended = token == EOS and not self.given.get("ignore_eos")
            made += b"" if ended else bytes([token])
            stopped = any(word in made.decode(errors="ignore") for word in self.given.get("stop", []))
            finished = ended or stopped or len(made) >= self.most
            yield made, finished
            if finished:
                return

    def response(self, text, tokens):
        values = {"num_input_tokens": len(self.prompt.encode()), "num_output_tokens": tokens}
        counts = [pb_utils.Tensor(name, np.array([values[name]], np.uint32)) for name in self.counts]
        return pb_utils.InferenceResponse(output_tensors=[strings("text_output", text), *counts])


def strings(name, text):
    return pb_utils.Tensor(name, np.array([text.encode()], dtype=np.object_))
