SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
VENV ?= .venv
BIN := $(VENV)/bin
PY := $(BIN)/python

.PHONY: help venv quickstart test test-all lint typecheck bench demo-models clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

venv:  ## the environment .venv, which the targets below make first; PYTHON=… chooses the interpreter
	@bash .ci/make-venv $(VENV)

quickstart: venv  ## distil the demo teacher into its student, evaluate, report: outputs/quickstart
	$(BIN)/opd train experiment=quickstart run_dir=outputs/quickstart
	$(BIN)/opd report outputs/quickstart

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

bench: venv  ## time and peak memory of the objective, against naive code and the floor
	$(PY) examples/bench/objective.py $(ARGS)

demo-models: venv  ## train the models of opd/demo/models again, some minutes
	$(PY) -m opd.demo.recipe opd/demo/models

clean:  ## remove builds and caches; the environment and outputs/ stay
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
