# What the engine kept when the bundle was warmed, where it can be written: the package may be read-only, or shared by ranks.
cache="${TMPDIR:-/tmp}/warmed_${prefix}${rank}"
rm -rf "$cache"
cp -R "$package/cache/${name%-*}" "$cache"
chmod -R u+w "$cache"
TLLM_AUTOTUNER_CACHE_PATH="$cache/autotuner.json"
TRTLLM_DG_CACHE_DIR="$cache/deep_gemm"
export TLLM_AUTOTUNER_CACHE_PATH TRTLLM_DG_CACHE_DIR
