# `make demo` trains and exports a small agent; `make test` runs every check. Both set the environment up first.
SEED ?= 1
ARGS ?=
WORKERS ?= 2
BIN := .venv/bin

.PHONY: setup demo test lint types contracts pytest test-slow docs clean

setup:
	@scripts/setup.sh

demo: setup
	@$(BIN)/arpo demo --seed $(SEED) $(ARGS)

test: lint types contracts pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

contracts: setup
	$(BIN)/lint-imports

pytest: setup
	$(BIN)/pytest --numprocesses $(WORKERS) --no-loadscope-reorder --durations 20 $(ARGS)

# Minutes of kill -9 and restart, beside `make test`.
test-slow: setup
	$(BIN)/pytest -m slow_campaign $(ARGS)

# Regenerates what is made from the code: the configuration reference.
docs: setup
	$(BIN)/python scripts/make_docs.py

clean:
	rm -rf .venv runs build *.egg-info
