# One venv for everything, made on first use. PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu in the environment gets
# torch's small CPU build where pip's own index offers the CUDA one.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-demo
ARGS ?=
# The tests run two and more ranks at once; more than one thread each would only contend for the cores. Bytecode is kept,
# also where the environment says otherwise: workers, ranks and scripts import the same files, some hundred times.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest
# Files go to workers whole, so each worker has its own processes for ranks, and a file's trainings are done once; in their
# order: tests/tools first (tests/conftest.py), which wait longest, and the engine's, which are short, last, so that no worker
# is left alone with a long one. Two more than two cores: half of the time goes to waits that tests are about (three workers
# took 648 s, four 533 s, on 2026-11-25).
WORKERS ?= 4
PYTEST += --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help setup demo bench bench-full gpu-check docs fast test nightly lint fuzz clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP)  ## make .venv and install into it (again only when pyproject.toml or constraints.txt changed)

# What the build leaves here is not needed, and once out of date it would hide the installed metadata (entry points) from
# every python that is started here.
$(DEMO_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@echo 'installing torch, lightning and matplotlib into $(VENV)'
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[lightning,plot]'
	@rm -rf megastrategy.egg-info
	@touch $@

$(STAMP): $(DEMO_STAMP)
	@echo 'installing what tests and benchmarks need into $(VENV)'
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'  # the first with --group
	$(BIN)/python -m pip install --quiet -c constraints.txt --group test --group bench
	@touch $@

DEMO_STEPS := 100
demo: $(DEMO_STAMP)  ## train a byte-level GPT on two ranks, here and under "ddp" (ARGS="--steps 700", ARGS="--help")
	$(BIN)/python examples/train_gpt.py --steps $(DEMO_STEPS) --compare $(ARGS)

bench: $(STAMP)  ## measure against torch DDP and other peers, a few minutes, into runs/bench (ARGS="--network 1gbit" as root)
	$(BIN)/python -m benchmarks $(ARGS)

bench-full: $(STAMP)  ## more cases, engines and ranks, hours (ARGS="--help" lists the options)
	$(BIN)/python -m benchmarks --full $(ARGS)

gpu-check: $(STAMP)  ## check the engine on this machine's GPUs (ARGS="--gpus 8"; ARGS="--device cpu" tries the program itself)
	$(BIN)/python -m benchmarks.gpu_check $(ARGS)

fast: $(STAMP)  ## the engine's own tests, without checkpoints or any framework: after each change (ARGS go to pytest)
	$(PYTEST) tests/test_architecture.py $(ENGINE) $(ARGS)

test: lint  ## lint, types, and the suite without the tests marked nightly: before each merge (ARGS go to pytest)
	$(PYTEST) $(ARGS)

ENGINE := tests/core --ignore tests/core/checkpoint
DOORS_PARITY := tests/doors/lightning/test_lightning_parity.py tests/doors/fabric/test_fabric.py \
  tests/doors/accelerate/test_accelerate.py
nightly: lint docs  ## every case, scripts in interpreters of their own; then the engine with results late, early and at random
	$(BIN)/python -m pip install --quiet -c constraints.txt --group nightly
	FRESH_SCRIPTS=1 $(PYTEST) -m "nightly or not nightly" tests campaigns $(ARGS)
	for backend in rings process-group; do for delivery in at-wait at-launch at-random; do \
	  $(PYTEST) $(ENGINE) tests/pipeline $(DOORS_PARITY) --collectives lazy-$$delivery --backend $$backend $(ARGS) || exit 1; \
	done; done
	MKL_ENABLE_INSTRUCTIONS=SSE4_2 $(PYTEST) $(ENGINE) $(DOORS_PARITY) --odd-offsets $(ARGS)

lint: $(STAMP)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(STAMP)  ## the site of the pages and of all public names, into build/docs; a warning is an error
	$(BIN)/python -m pip install --quiet -c constraints.txt --group docs
	$(BIN)/python -m sphinx --quiet --fail-on-warning -b html -c docs . build/docs

fuzz: $(STAMP)  ## random programs against torch DDP and plain torch, a minute (ARGS="--minutes 60 --seed 7")
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzzing $(ARGS)

clean:  ## remove .venv, caches and build outputs; runs/ stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
