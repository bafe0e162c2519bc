#!/usr/bin/env bash
# Train on this machine: scripts/train.sh [CONFIG.toml] [--section.key value ...]
#
#   CONFIG    default: train_configs/mixle_debug.toml
#   NGPU      number of processes; default: the number of accelerators, else 1
#   LOG_RANK  whose output to show; default: 0
#
# Everything after the config is TorchTitan's command line, e.g. --training.steps 100.
set -euo pipefail
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/env.sh"
case "${1:-}" in
  -h | --help)
    sed -n '2,9s/^# \{0,1\}//p' "$ROOT/scripts/train.sh"
    exit 0
    ;;
esac
ensure_env ""

CONFIG="$ROOT/train_configs/mixle_debug.toml"
if [ $# -gt 0 ] && [ "${1#--}" = "$1" ]; then
  CONFIG="$1"
  shift
  [ -f "$CONFIG" ] || {
    echo "No config file $CONFIG; the ones of this repository are in train_configs/" >&2
    exit 2
  }
fi
NGPU="${NGPU:-$(python -c 'import torch; print(max(1, torch.accelerator.device_count()))')}"

exec python -m torchtitan_mixle.launch --standalone --nproc_per_node "$NGPU" --role rank --tee 3 --local-ranks-filter "${LOG_RANK:-0}" \
  -m torchtitan.train --job.config_file "$CONFIG" "$@"
