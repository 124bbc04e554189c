#!/usr/bin/env bash
# Runs the tests of CUDA's rules with another version of torch, in an environment of its own, and compares what steps
# allocate with what they do under the pinned one (benchmarks/data/cuda_steps.json):
#
#     bash scripts/test_with_torch.sh 2.11.0 [FOLDER]
#
# On Linux this downloads a build with CUDA, several GB; no GPU is needed. What is compared with fake cuda tensors is
# skipped there: such a build brings a device of its own, with which fakes run no backward.
set -euo pipefail
version="$1"
folder="${2:-.venv-torch-$version}"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ ! -x "$folder/bin/python" ]; then
  python3 -m venv "$folder"
fi
# Everything else as pinned, torch and what it brings left to pip.
grep -v -E '^(torch|triton|nvidia-)' constraints.txt > "$folder/constraints.txt"
"$folder/bin/python" -m pip install --quiet -c "$folder/constraints.txt" "torch==$version" -e '.[test,models]'
"$folder/bin/python" -c 'import torch; print("torch", torch.__version__)'
"$folder/bin/python" -m pytest -q \
  tests/trace/test_cuda_autocast.py tests/trace/test_cuda_attention.py tests/trace/test_fake_cuda.py \
  tests/trace/test_tracer.py tests/predict/test_cuda_memory.py tests/predict/test_cuda_temporaries.py \
  tests/predict/test_caching_allocator.py tests/test_targets.py
"$folder/bin/python" -m benchmarks.fake_cuda.digests compare benchmarks/data/cuda_steps.json
