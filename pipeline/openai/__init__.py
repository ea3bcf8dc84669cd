"""OpenAI's HTTP API in front of a Triton server: a small process that turns chats and prompts into gRPC streams.

    python -m pipeline.openai --grpc 127.0.0.1:8001 --model tiny_r1 --tokenizer DIR --port 9000

One file a concern: `schema` (what a request may say), `template` (a chat as the model's prompt), `tokens` (counting),
`backend` (Triton over gRPC, any of our layouts), `scan` and `reasoning` (stop words and <think> in a stream), `choice`
(one generation as deltas), `service` (a request's generations), `answer` (OpenAI's objects and server-sent events), `app`
(HTTP), `errors`, `process` (the loop and its workers), `companion` (beside a server of ours).
Nothing here imports torch or transformers; it runs wherever the tokenizer's files lie.
"""
