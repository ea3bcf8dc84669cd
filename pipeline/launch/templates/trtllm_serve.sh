# A context or generation server; the router asks it over HTTP, and the cache goes from one to the other directly.
server=(
  trtllm-serve "$package/checkpoint"
  --host 0.0.0.0
  --port "$http"
  --extra_llm_api_options "$package/$arguments"
)
