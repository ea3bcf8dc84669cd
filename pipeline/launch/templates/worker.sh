#!/usr/bin/env bash
# A worker of a LeaderWorkerSet group: an sshd that only the group's key opens, over which the leader starts its ranks.
set -euo pipefail

if ! command -v /usr/sbin/sshd >/dev/null; then
  echo "worker.sh: this image has no sshd: add openssh-server to it, and name it as serve.container" >&2
  exit 5
fi
home="$(mktemp -d)"
ssh-keygen -q -t ed25519 -N '' -f "$home/host_key"
install -m 600 /ssh-key/public "$home/authorized_keys"
mkdir -p /run/sshd
# sshd passes none of the container's variables on: ranks need those of the loader, of Open MPI (OPAL_PREFIX) and of the GPUs.
mkdir -p "$HOME/.ssh"
kept='PATH|LD_LIBRARY_PATH|PYTHONPATH|KEEP_GPUS|((CUDA|NVIDIA|NCCL|OPAL|OMPI|PMIX|UCX|UCC|HPCX|TRTLLM|TLLM)_\w+)'
env | grep -E "^($kept)=" >"$HOME/.ssh/environment" || true

# No configuration of the image's own; keys are this group's.
exec /usr/sbin/sshd -D -e -f /dev/null -p 2222 -h "$home/host_key" -o "AuthorizedKeysFile=$home/authorized_keys" \
  -o PidFile=none -o PermitRootLogin=yes -o PasswordAuthentication=no -o PermitUserEnvironment=yes -o StrictModes=no
