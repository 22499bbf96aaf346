# The README begins with `make demo` and `make test`: each sets everything up first.
#
#   make demo     the whole story on a CPU: SFT, then PPO on Ray, DeepSpeed and vLLM, and GRPO;
#                 with BACKEND=gpu on this machine's first card
#   make quick    at every save: the unit tests, one run of SFT and one of PPO; no Ray, no vLLM
#   make test     at every commit: every line, on a CPU, with Ray, DeepSpeed and vLLM; it hides GPUs
#   make test-all every combination, too: what is marked `slow`, and 2,000 examples of five seeds
#                 for each property
#   make test-card the code for cards, on a card made of host memory; a part of `make test`
#   make test-liger Liger's kernels, which Triton interprets; a part of `make test`, too
#   make test-gpu what only a card can show, on this machine's first one (with BACKEND=gpu)
#   make lint     ruff, import rules and types over everything
#   make bench    the benchmarks
#   make setup    only the virtual environment, .venv
#   make lock     the lock files anew from pyproject.toml
#   make audit    known weaknesses of what the lock files pin; needs pypi.org
#
# PEAKS=FILE.csv has `make bench` hold the plan against a table of peaks like benchmarks/peaks.csv, too.
# TEST_WORKERS=1 runs the tests one after the other (2 at a time by default; more need more memory);
# files go to the workers in their order, the long ones of tests/integration first.
# BACKEND=gpu installs the CUDA build of vLLM instead of the CPU build; then it stays the default.

PYTHON ?= python3
BACKEND ?= $(if $(wildcard .venv/.plimsoll-gpu),gpu,cpu)
TEST_WORKERS ?= 2
BIN := .venv/bin
STAMP := .venv/.plimsoll-$(BACKEND)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# What other environments (modules of a cluster, a pip.conf) would have installed elsewhere than
# into .venv, or used instead of what is there.
export PIP_USER := 0
unexport PIP_TARGET PIP_PREFIX PYTHONPATH PYTHONHOME
# Tests start hundreds of processes; without it each compiles the source anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo quick test test-all test-card test-liger test-gpu lint bench docs setup lock audit clean

demo: setup
	$(BIN)/plimsoll demo

# Of SFT on a mixture that is gone on with, and of PPO whose figures are computed once more.
RUNS := tests/integration/test_run_mixture.py tests/integration/test_run_ppo_numbers.py
WORKERS := -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder

quick test test-all: export CUDA_VISIBLE_DEVICES =
quick: setup
	$(BIN)/python -m pytest -q $(WORKERS) -m "not slow" $(RUNS) tests/unit

test test-card: CHOSEN = and not slow
test-all: THEN = && $(BIN)/python -m pytest -m alone $$(grep -rl mark.alone tests --include=*.py)
test-all: PROPERTIES = for seed in 1 2 3 4 5; do $(BIN)/python -m pytest -q $(WORKERS) -m hypothesis \
  --hypothesis-profile=thorough --hypothesis-seed=$$seed tests/unit || exit 1; done
test test-all: setup
	@[ $(BACKEND) = cpu ] || { echo "these tests run vLLM on the CPU, and .venv has its build for GPUs:" \
	  "make BACKEND=cpu $@, in another clone to keep this one; or make test-gpu"; exit 1; }
	$(BIN)/python -m pytest $(WORKERS) -m "not alone and not card $(CHOSEN)" $(THEN)
	$(MAKE) test-card CHOSEN="$(CHOSEN)"
	$(MAKE) test-liger
	$(PROPERTIES)

# In processes of its own, since the card's library must be loaded before torch.
test-card: setup
	env -u CUDA_VISIBLE_DEVICES PYTHONPATH=$(CURDIR)/tests/fakes/card/every_process OMP_NUM_THREADS=1 \
	  $(BIN)/python -m pytest $(WORKERS) -p fakecard.plugin -m "(gpu or card) and not kernels $(CHOSEN)" \
	  tests/card tests/integration/test_gpu_sync.py tests/unit/machine tests/unit/model

# Triton interprets Liger's kernels, in a folder of its own, as vLLM's CPU build is not to find Triton.
# What goes to stderr is nanobind's list of what Triton leaks.
LIGER := .venv/liger
test-liger: setup
	@[ -d $(LIGER) ] || { rm -rf $(LIGER).part && mkdir $(LIGER).part && \
	  $(PIP) --no-deps --target $(LIGER).part -c requirements/gpu.txt triton==3.9.0 liger-kernel && \
	  mv $(LIGER).part $(LIGER); } || echo "Liger's tests are left out: pip gets no triton and liger-kernel: make test-liger"
	[ ! -d $(LIGER) ] || PYTHONPATH=$(LIGER) TRITON_INTERPRET=1 $(BIN)/python -m pytest -q \
	  -n $(TEST_WORKERS) tests/unit/model/test_model_liger.py 2>/dev/null

test-gpu: setup
	CUDA_VISIBLE_DEVICES=$${CUDA_VISIBLE_DEVICES:-0} $(BIN)/python -m pytest -m gpu \
	  tests/unit/machine tests/unit/model tests/integration/test_gpu_*.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

bench: setup
	for name in head packing shared_prompts memory_runs; do $(BIN)/python benchmarks/$$name.py || exit 1; done
	$(BIN)/python benchmarks/memory_accuracy.py benchmarks/peaks.csv $(PEAKS)

# One at a time: another `make` waits for the one that is setting up.
setup:
	@flock -n Makefile true || echo "another make is setting up .venv: waiting for it"
	@flock Makefile $(MAKE) -s $(STAMP)
	@grep -qF "$$(pwd -P)/.venv/bin" $(BIN)/plimsoll || \
	  { echo ".venv was made in another directory and cannot be moved: make clean, and again"; exit 1; }

# torch comes first and with its own dependencies, so that each machine gets its own build of it;
# the rest comes from a complete lock file, without a resolver (docs/decisions.md says why).
$(STAMP): requirements/$(BACKEND).txt pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if (3, 11) <= v < (3, 13) else \
	  f"Plimsoll needs Python 3.11 or 3.12, and $(PYTHON) is {v.major}.{v.minor}: make PYTHON=python3.11 ... " \
	  "(`uv python install 3.12` brings one where the system has none)")'
	@case "$$PWD" in *\ *) echo "Ray cannot run from a path with spaces: move $$PWD"; exit 1;; esac
	@echo "setting up .venv (about 4 GB, with BACKEND=gpu 9 GB; a few minutes)"
	$(PYTHON) -m venv --clear .venv
	$(PIP) torch==2.13.0
	$(PIP) --no-deps -r requirements/$(BACKEND).txt
	$(PIP) --no-deps --no-build-isolation --editable .
	touch $@

lock: setup
	./requirements/lock.sh

# Not installed into .venv: uv runs it in a home of its own.
audit: setup
	found=0; for file in cpu gpu; do \
	  $(BIN)/uv tool run pip-audit --strict --no-deps --disable-pip -r requirements/$$file.txt || found=1; done; exit $$found

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo "site/index.html is ready"

clean:
	rm -rf .venv
