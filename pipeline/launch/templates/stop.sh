# The end of this script, however it comes, ends what it started.
pids=()
stop() {
  kill -TERM "${pids[@]}" 2>/dev/null || true
  wait || true
}
trap stop EXIT
