#!/usr/bin/env bash
# Runs the tests, from any folder: bash scripts/test.sh [arguments of pytest]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare_environment
cd "$root"
# Two processes of one thread each: tests are small, and threads that wait for each other are slower.
OMP_NUM_THREADS=1 exec "$python" -m pytest -n 2 "$@"
