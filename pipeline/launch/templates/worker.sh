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
# Ranks inherit the container's variables, which sshd does not pass on by itself.
env | grep -E '^(PATH|LD_LIBRARY_PATH|KEEP_GPUS|NVIDIA_|CUDA_)' >"$home/environment" || true
mkdir -p "$HOME/.ssh"
cp "$home/environment" "$HOME/.ssh/environment"
exec /usr/sbin/sshd -D -e -p 2222 -h "$home/host_key" -o "AuthorizedKeysFile=$home/authorized_keys" \
  -o PidFile=none -o PermitRootLogin=yes -o PasswordAuthentication=no -o PermitUserEnvironment=yes -o StrictModes=no
