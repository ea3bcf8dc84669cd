# The router, on the first node, with the names of the nodes that this job got.
router="$SLURM_SUBMIT_DIR/router-$SLURM_JOB_ID.yaml"
cp "$package/launch/slurm/disaggregated.yaml" "$router"
for at in "${!hosts[@]}"; do
  sed -i "s/node$at-of-the-job:/${hosts[at]}:/" "$router"
done
srun --overlap --nodes=1 --ntasks=1 --nodelist="${hosts[0]}" \
  --container-image="$image" --container-mounts="$package:/package:ro,$router:/router.yaml:ro" --no-container-mount-home \
  --output="%x-%j-router.log" \
  trtllm-serve disaggregated --config_file /router.yaml --server_start_timeout @LOAD@ --request_timeout @REQUEST@ &

