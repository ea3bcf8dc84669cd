# Both places that say `decoupled` are equal here, so the configuration needs no completion (which starts a second stub).
# vLLM finds the checkpoint from here; buckets of the time to first token are counted only with that metrics setting.
cd "$package"
server=(
  tritonserver
  "--model-repository=$package/repository"
  "--http-port=$http"
  "--grpc-port=$grpc"
  "--metrics-port=$metrics"
  --metrics-config=histogram_latencies=true
  --disable-auto-complete-config
  --exit-on-error=true
  --exit-timeout-secs=60
  "--backend-config=python,shm-region-prefix-name=${prefix}${rank}_"
)
