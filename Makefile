# `make demo` trains and exports a small agent; `make test` runs every check. Both set the environment up first.
SEED ?= 1
ARGS ?=
WORKERS ?= 3
BIN := .venv/bin
PYTEST := $(BIN)/pytest --numprocesses $(WORKERS) --no-loadscope-reorder
# Folders whose tests start no engine, no ranks and no Slurm, without the files that wait for other processes.
QUICK := tests/algorithms tests/config tests/hardware tests/jobs tests/monitor tests/packing tests/rewards tests/tasks \
	tests/trainer tests/test_recipes.py tests/test_registry.py tests/test_tree.py \
	--ignore tests/rewards/test_verify.py --ignore tests/rewards/test_judge_report.py

.PHONY: setup demo slurm-demo image test test-all campaigns test-newest test-quick checks lint types contracts pytest fuzz docs site clean

setup:
	@scripts/setup.sh

demo: setup
	@$(BIN)/arpo demo --seed $(SEED) $(ARGS)

# Installs Slurm from the distribution's packages if it is absent, and logs that first; their services are not started.
# Stops everything it started.
slurm-demo: setup
	@slurm/onebox/demo.sh $(ARGS)

# Builds the container image of a job from requirements.lock and checks it: ARGS="--sqsh FILE" writes it for pyxis.
image:
	@slurm/container/build.sh $(ARGS)

# What CI runs, in about 12 minutes on two cores. The checks of the source run next to the tests: they use one core.
test: setup
	+@$(MAKE) --no-print-directory --jobs 2 pytest checks

checks: lint types contracts

# For daily work, under 90 seconds.
test-quick: lint contracts
	$(PYTEST) --numprocesses 2 $(QUICK) $(ARGS)

test-all: test campaigns

# Hours: the whole demo, full matrices of layouts, repeated kills, loads, Slurm faults. ARGS="tests/e2e": those of a
# folder. Two workers, because many campaigns run a whole job: four at a time on two cores reach their timeouts.
campaigns: setup
	slurm/onebox/onebox.sh install
	$(BIN)/pytest --numprocesses 2 --no-loadscope-reorder --campaigns -m "slow_campaign or slurm_campaign" --durations 40 \
		$(ARGS)

# The trainer with the newest megatron-core and torch, in an environment of its own (docs/internals/versions.md).
test-newest:
	@scripts/setup_newest.sh
	.venv-newest/bin/pytest --numprocesses 2 tests/actor/test_exactness.py tests/actor/test_optimizer.py \
		tests/actor/test_checkpoint.py tests/actor/test_overlap.py $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/check_prose.py

types: setup
	$(BIN)/mypy

contracts: setup
	$(BIN)/lint-imports
	$(BIN)/deptry .

pytest: setup
	$(PYTEST) --durations 20 $(ARGS)

# The property tests on new examples; a failing example is kept in .hypothesis and tried first the next time.
fuzz: setup
	$(PYTEST) -m hypothesis --hypothesis-profile=new $(ARGS)

# Regenerates the pages and tables that are made from the code.
docs: setup
	$(BIN)/python scripts/make_docs.py

# Builds the site of docs/ into build/site.
site: setup
	$(BIN)/mkdocs build --quiet

clean:
	rm -rf .venv .venv-newest runs build *.egg-info
