#!/usr/bin/env bash
# Trains a byte-level GPT inside a memory budget: bash scripts/demo.sh [overrides, such as memfit.budget=56MiB]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare_environment
exec "$python" "$root/scripts/train.py" "$@"
