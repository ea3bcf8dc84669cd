# The router, on this host, with the names of the hosts.
router="$(mktemp)"
cp "$package/launch/mpi/disaggregated.yaml" "$router"
for at in "${!hosts[@]}"; do
  sed -i "s/node$at-of-the-job:/${hosts[at]}:/" "$router"
done
trtllm-serve disaggregated --config_file "$router" --server_start_timeout @LOAD@ --request_timeout @REQUEST@ &
pids+=("$!")

