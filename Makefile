# The two commands of the README are `make demo` and `make test`. Both install into .venv first: the
# demo what it needs, the tests all the rest.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CPP := src/gradvac/engine/cpp/* src/gradvac/utils/native.cpp src/gradvac/utils/native.h
# Two workers on two cores: one torch thread each, or they fight over the cores.
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

FAST := tests/gram tests/rules tests/aligner tests/sampling tests/tasks tests/runs tests/studies tests/engine/test_rows.py \
	tests/engine/test_components.py tests/engine/test_per_task.py tests/architecture/test_imports.py \
	tests/architecture/test_names.py tests/architecture/test_public_api.py

.PHONY: help install demo test test-fast lint docs bench clean

help:  ## say what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 10

$(VENV)/.demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[nmt,report]"
	@touch $@

$(VENV)/.installed: $(VENV)/.demo
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	@touch $@

install: $(VENV)/.installed  ## install into .venv

demo: $(VENV)/.demo  ## run the main job on embedded data
	$(BIN)/gradvac demo

lint: install  ## ruff, mypy and clang-format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CPP)
	$(BIN)/mypy

test: lint  ## lint, type-check, run all tests
	$(TEST_ENV) $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

test-fast: install  ## what a minute can test: library, rules, names, imports
	$(BIN)/ruff check .
	$(TEST_ENV) $(BIN)/python -m pytest --numprocesses 2 --quiet $(FAST)

docs: install  ## write what follows from the code into the pages, build them into site/
	$(BIN)/python docs/write_pages.py
	$(BIN)/mkdocs build --strict

bench: install  ## time the rules and a small step on this machine
	$(BIN)/python benchmarks/rules.py
	$(BIN)/python benchmarks/step.py --size tiny --tasks 4 8

clean:  ## remove what was installed and built
	rm -rf $(VENV) site build dist
