# Everything a person or CI runs. `make help` lists the targets.
#
# Each environment carries a stamp that depends on pyproject.toml, so nothing is installed twice; `make clean` starts over.
# Another interpreter: make PYTHON=python3.12 test (after `make clean`).

PYTHON ?= python3
VENV := .venv
DEMO_VENV := .venv-demo
BIN := $(VENV)/bin
DEMO_BIN := $(DEMO_VENV)/bin

# What the tests compare with, to the digit: the recorded facts in tests/ hold for these two.
TORCH := torch==2.13.0
MEGATRON := megatron-core==0.16.1
# HTA without jupyterlab, which its analyses do not import: 80 MB instead of 500.
HTA_PARTS := HolisticTraceAnalysis==0.5.0 plotly narwhals

LINKS := build/typing
FOLDERS := collectors queries reports
SOURCES := $(shell find traceanalyzer $(FOLDERS) -type f -not -path '*/__pycache__/*')
DEMO := fixtures/megatron_tp2_sp
LARGE := fixtures/gpt_moe_1024
LARGE_PROFILED := 0-7,8-252:4,256-263,512-519,768-775
PIP_FLAGS := -qq --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo demo-large test test-all check static lint types imports docs docs-check bench links clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/\1	\2/p' $(MAKEFILE_LIST) | expand -t 14

demo: $(DEMO_VENV)/.installed  ## import the recorded two-rank run and lay it beside its expectation
	$(DEMO_BIN)/traceanalyzer import $(DEMO)/rank0.json.gz $(DEMO)/rank1.json.gz --job $(DEMO)/job.toml -o demo.parquet
	$(DEMO_BIN)/traceanalyzer diff demo.parquet

# The ranks that attach --ranks auto profiles: a model-parallel replica, one data- and one expert-parallel group.
demo-large: $(DEMO_VENV)/.installed  ## simulate a step of 1,024 ranks and lay it beside its expectation
	$(DEMO_BIN)/traceanalyzer simulate $(LARGE)/job.toml --profiled $(LARGE_PROFILED) -o demo-large.parquet
	$(DEMO_BIN)/traceanalyzer diff demo-large.parquet

test: $(VENV)/.installed  ## the test suite
	$(BIN)/python -P -m pytest -n 2 --dist loadfile

test-all: $(VENV)/.installed  ## the whole suite and the jobs that take long
	$(BIN)/python -P -m pytest -n 2 --dist loadfile -m "slow or not slow"

check: static test  ## everything CI runs

static: lint types imports docs-check  ## check without the tests

lint: $(VENV)/.installed  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed links  ## mypy (strict) and pyright
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python

# import-linter reads the pyproject.toml of the folder it runs in, and finds all subpackages only in the tree of links.
imports: $(VENV)/.installed links  ## the import contract: arrows go one way
	cd $(LINKS) && PYTHONPATH=. $(abspath $(BIN))/lint-imports --no-cache

docs: $(VENV)/.installed  ## regenerate docs/tables.md and docs/cli.md
	$(BIN)/python docs/generate.py

docs-check: $(VENV)/.installed  ## fail if docs/tables.md is not what the schema says
	$(BIN)/python docs/generate.py --check

HTA := .venv-hta
$(HTA)/.installed: Makefile
	test -x $(HTA)/bin/python || $(PYTHON) -m venv $(HTA)
	$(HTA)/bin/python -m pip install $(PIP_FLAGS) HolisticTraceAnalysis
	touch $@

bench: $(VENV)/.installed $(HTA)/.installed  ## every benchmark in benchmarks/, beside HTA
	@set -e; found=; for file in benchmarks/bench_*.py; do \
	  [ -e "$$file" ] || continue; found=yes; echo "== $$file"; HTA_PYTHON=$(HTA)/bin/python $(BIN)/python "$$file"; \
	done; [ -n "$$found" ] || echo "benchmarks/ has no bench_*.py"

# The folders at the root are subpackages of traceanalyzer by [tool.setuptools.package-dir], which no type checker and
# no import linter follows: they read this throw-away tree of links instead (docs/decisions/0002-package-dir.md).
links:
	@rm -rf $(LINKS) && mkdir -p $(LINKS)/traceanalyzer
	@for f in traceanalyzer/* $(FOLDERS); do ln -sfn ../../../$$f $(LINKS)/traceanalyzer/; done
	@ln -sfn ../../pyproject.toml $(LINKS)/pyproject.toml

# --no-deps for megatron-core: its dependencies are for GPUs, and the parts the tests import need only torch and numpy.
$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_FLAGS) --editable '.[dev]' $(TORCH) numpy
	$(BIN)/python -m pip install $(PIP_FLAGS) --no-deps $(MEGATRON) $(HTA_PARTS)
	@touch $@

# A real install, as a user gets it: without torch, and again whenever a source changed. build/lib goes first, because
# setuptools would pack modules that were deleted since. --no-compile halves the time; the imports compile what they need.
$(DEMO_VENV)/.installed: pyproject.toml $(SOURCES)
	test -x $(DEMO_BIN)/python || $(PYTHON) -m venv $(DEMO_VENV)
	rm -rf build/lib
	$(DEMO_BIN)/python -m pip install $(PIP_FLAGS) --no-compile .
	@touch $@

clean:  ## remove environments, builds and caches
	rm -rf $(VENV) $(DEMO_VENV) $(HTA) build dist demo.parquet demo-large.parquet *.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find traceanalyzer $(FOLDERS) tests fixtures benchmarks docs -name __pycache__ -type d -prune -exec rm -rf {} +
