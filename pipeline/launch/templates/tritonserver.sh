# Both places that say `decoupled` are equal here, so the configuration needs no completion (which starts a second stub).
server=(
  tritonserver
  "--model-repository=$package/repository"
  "--http-port=$http"
  "--grpc-port=$grpc"
  "--metrics-port=$metrics"
  --disable-auto-complete-config
  --exit-on-error=true
  --exit-timeout-secs=60
  "--backend-config=python,shm-region-prefix-name=${prefix}${rank}_"
)
