# Everything here sets up what it needs; a second run finds it done.

# Which Python makes .venv; the newest of 3.11 to 3.14 that is found when empty.
PYTHON ?=
export PYTHON

# Many processes start here; each would compile all it imports, three times the work of a start.
unexport PYTHONDONTWRITEBYTECODE

RUN := JAVA_HOME="$$(cat .venv/java-home)" PATH="$(CURDIR)/.venv/bin:$$PATH"

# More processes than two cores: much of what tests do is to wait. Longest groups first.
SPREAD := -n 5 --dist loadgroup --no-loadscope-reorder

# Tests leave gigabytes in their folder. It goes when all pass, and is there to look at when one fails.
IN_A_FOLDER := --basetemp "$$folder/t" && { chmod -R u+rwX "$$folder"; rm -rf "$$folder"; true; } \
  || { echo "left to look at, delete it afterwards: $$folder" >&2; false; }

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help install demo test nightly lint bench format schema faults docs record-demo lock clean

help: ## Show this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):[^#]*## (.*)/\1\t\2/' | \
	  awk -F'\t' '{ printf "  make %-10s %s\n", $$1, $$2 }'

install: ## Make .venv with the locked packages; find or install Java
	@scripts/setup.sh

demo: install ## Watch the main job on this machine in about a minute
	@$(RUN) logmirror demo

test: testtools checks ## Lint, then every test, against real Apache Kafka brokers
	@folder=$$(mktemp -d) && $(RUN) pytest $(SPREAD) --durations 15 $(IN_A_FOLDER)

nightly: testtools checks ## The same with 50 kills of each kind, and all releases of Kafka everywhere
	@folder=$$(mktemp -d) && LOGMIRROR_TEST_NIGHTLY=1 LOGMIRROR_TEST_KILLS=50 \
	  $(RUN) pytest $(SPREAD) --durations 15 $(IN_A_FOLDER)

lint: install checks ## Ruff, mypy --strict, import contracts

bench: testtools ## Measure against the peers, for an hour; writes docs/bench.md
	@$(RUN) python bench/report.py

format: install ## Format the code and fix what Ruff can fix
	@$(RUN) ruff check --fix .
	@$(RUN) ruff format .

schema: install ## Write the JSON Schema, the reference pages of configuration and metrics, and the dashboard
	@$(RUN) python scripts/write_schema.py
	@$(RUN) python scripts/write_metrics.py
	@$(RUN) python scripts/write_dashboard.py

faults: install ## Simulate every cell of the fault matrix; writes docs/faults.md
	@$(RUN) python scripts/write_faults.py 2

docs: install ## Build the site of docs/ into build/site; a broken link or anchor is an error
	@$(RUN) NO_MKDOCS_2_WARNING=1 mkdocs build

record-demo: install # Record `make demo` as docs/assets/demo.svg
	@$(RUN) python scripts/record_demo.py

lock: install ## Resolve both requirements.lock anew from pyproject.toml
	@$(RUN) uv pip compile pyproject.toml --group dev --extra demo --universal \
	  --python-version 3.11 --generate-hashes --custom-compile-command 'make lock' \
	  --quiet --upgrade --output-file requirements.lock
	@$(RUN) uv pip compile pyproject.toml --universal --python-version 3.11 --generate-hashes \
	  --constraint requirements.lock --custom-compile-command 'make lock' --quiet \
	  --output-file deploy/requirements.lock

clean: ## Remove .venv and everything that tools left behind
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -rf .import_linter_cache spark-warehouse
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# ---- Steps of the targets above -----------------------------------------------------------------

.PHONY: testtools checks

testtools:
	@scripts/setup.sh tests

checks:
	@$(RUN) ruff check --quiet .
	@$(RUN) ruff format --check --quiet .
	@$(RUN) mypy
	@$(RUN) lint-imports --config importlinter.toml
