# Every target sets up what it needs; a second run skips that.

# The Python of .venv. Empty: 3.11, which the tests run on, else the oldest later one.
PYTHON ?=
export PYTHON

# Tests start many processes; without compiled modules each start takes three times the CPU time.
unexport PYTHONDONTWRITEBYTECODE

RUN := JAVA_HOME="$$(cat .venv/java-home)" PATH="$(CURDIR)/.venv/bin:$$PATH"

# More processes than two cores, because tests wait for servers. Longest groups first. If one of the
# processes dies, the run ends and names its test: with a replacement it could wait for ever.
SPREAD := -n 7 --max-worker-restart 0 --dist loadgroup --no-loadscope-reorder

# The files of tests take gigabytes. They are deleted if all tests pass, and kept if one fails. The
# failed tests are named once more at the end: the last lines of a long log are what people read.
IN_A_FOLDER := --basetemp "$$folder/t" && { chmod -R u+rwX "$$folder"; rm -rf "$$folder"; true; } \
  || { echo "files of the failed tests, delete them afterwards: $$folder" >&2; \
  echo "failed, in this run and not mended since:" >&2; \
  grep -so '"tests/.*"' .pytest_cache/v/cache/lastfailed >&2; false; }

# Which tests run; tests/kit/tiers.py says which belong to what. Test modules are compiled first, by
# two processes: each of those that run tests would compile all of them.
COMPILE := sh -c 'for half in "[a-d]" "[e-z]"; do \
  pytest --collect-only -qq tests/$$half* >/dev/null & done; wait'
pytest = @export LOGMIRROR_TEST_TIER=$(1); $(RUN) $(COMPILE); \
  folder=$$(mktemp -d) && $(RUN) pytest $(2) $(IN_A_FOLDER)

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help install demo check test gate nightly lint bench format schema faults docs record-demo lock clean

help: ## Show this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):[^#]*## (.*)/\1\t\2/' | \
	  awk -F'\t' '{ printf "  make %-10s %s\n", $$1, $$2 }'

install: ## Create .venv with the locked packages; find or install Java
	@scripts/setup.sh

demo: install ## Run the main job on this machine in about a minute
	@$(RUN) logmirror demo

check: install checks ## Lint, types, contracts, unit tests; no JVM; three minutes
	@folder=$$(mktemp -d) && LOGMIRROR_TEST_TIER=check $(RUN) env JAVA_HOME=$$folder/none \
	  pytest -n 4 -q --durations 5 $(IN_A_FOLDER)

test: testtools checks ## Every promise and judge once, with Apache Kafka 3.9 and 4.3, S3 and Spark
	$(call pytest,test,$(SPREAD) --durations 15)

gate: testtools ## What .ci/run runs after `make test`: repeated kills, other releases, full sizes
	$(call pytest,gate,$(SPREAD) --durations 15)

nightly: testtools checks ## Everything, with 50 kills of each kind and every cell of the fault matrix
	$(call pytest,nightly,$(SPREAD) --durations 15)

lint: install checks ## Format, Ruff, mypy --strict, import contracts

bench: testtools ## Benchmark against the peers, about an hour; writes docs/bench.md
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

lock: install ## Resolve both requirements.lock again from pyproject.toml
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
