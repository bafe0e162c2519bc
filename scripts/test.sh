#!/usr/bin/env bash
# All checks: scripts/test.sh [pytest arguments], e.g. scripts/test.sh -m "not slow"
set -euo pipefail
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/env.sh"
ensure_env test

cd "$ROOT"
ruff check .
ruff format --check .
mypy
lint-imports
# Several ranks share the cores; one thread each is fastest and keeps sums in one order.
OMP_NUM_THREADS=1 exec python -m pytest "$@"
