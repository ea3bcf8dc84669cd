#!/usr/bin/env bash
# The leader of a LeaderWorkerSet group: leader.sh NAME RANKS RANKS_PER_POD. Waits for its workers and starts one rank a GPU with
# mpirun over ssh.
set -euo pipefail

name="${1:?give the name of an instance}"
ranks="${2:?give the number of ranks}"
per_node="${3:?give the ranks of one pod}"
port=2222
# The key pair of the Secret, in the form that ssh accepts.
mkdir -p "$HOME/.ssh"
install -m 600 /ssh-key/private "$HOME/.ssh/id_ed25519"

# Address of worker i: that of the leader, POD.SUBDOMAIN.NAMESPACE, with -i after the pod's name.
hosts=("$LWS_LEADER_ADDRESS")
for ((worker = 1; worker < LWS_GROUP_SIZE; worker++)); do
  hosts+=("${LWS_LEADER_ADDRESS/./-$worker.}")
done
if [[ "$((${#hosts[@]} * per_node))" -ne "$ranks" ]]; then
  echo "leader.sh: ${#hosts[@]} pods of $per_node GPUs are not the $ranks ranks of $name" >&2
  exit 2
fi

# Workers come up after the image is pulled.
pull_seconds=@PULL@
deadline="$((SECONDS + pull_seconds))"
for host in "${hosts[@]:1}"; do
  until (exec 3<>"/dev/tcp/$host/$port") 2>/dev/null; do
    if ((SECONDS > deadline)); then
      echo "leader.sh: $host does not answer on port $port" >&2
      exit 3
    fi
    sleep 2
  done
done

# Ranks of one pod lie together (ppr), which is how GPUs are counted; nothing is bound, since loading needs all cores.
exec mpirun --allow-run-as-root -n "$ranks" --host "$(printf '%s\n' "${hosts[@]/%/:$per_node}" | paste -sd,)" \
  --map-by "ppr:$per_node:node" --bind-to none --mca orte_keep_fqdn_hostnames 1 --mca pml ob1 \
  --mca plm_rsh_args "-p $port -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null" \
  -x PATH -x LD_LIBRARY_PATH -x KEEP_GPUS \
  bash /package/launch/instance.sh "$name" ranked
