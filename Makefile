# `make demo` trains and exports a small agent; `make test` runs every check. Both set the environment up first.
SEED ?= 1
ARGS ?=
WORKERS ?= 3
BIN := .venv/bin

.PHONY: setup demo slurm-demo test lint types contracts pytest fuzz test-slow test-slurm docs clean

setup:
	@scripts/setup.sh

demo: setup
	@$(BIN)/arpo demo --seed $(SEED) $(ARGS)

# Installs Slurm from the distribution's packages if it is absent, and says so first; their services are not started.
# Ends what it started.
slurm-demo: setup
	@slurm/onebox/demo.sh $(ARGS)

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

# The property tests on examples that no run has seen; what fails is kept in .hypothesis and tried first the next time.
fuzz: setup
	$(BIN)/pytest --numprocesses $(WORKERS) -m hypothesis --hypothesis-profile=new $(ARGS)

# Minutes of kill -9 and restart, and of `arpo bench gpu` on a CPU, beside `make test`.
test-slow: setup
	$(BIN)/pytest -m slow_campaign $(ARGS)

# The faults of a cluster on a real Slurm of two nodes on this machine; `make test` has the most telling ones.
test-slurm: setup
	slurm/onebox/onebox.sh install
	$(BIN)/pytest tests/cluster -m 'slurm_campaign or not slurm_campaign' $(ARGS)

# Regenerates what is made from the code: the configuration reference.
docs: setup
	$(BIN)/python scripts/make_docs.py

clean:
	rm -rf .venv runs build *.egg-info
