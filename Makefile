# All tools go into .venv, all outputs into build; nothing here needs root or touches the rest of the machine.
#
#   PYTHON=python3.13   the interpreter of .venv (run `make clean` when changing it)
#   JOBS=3              how many processes run the tests, which wait for half of their time: more than there are cores
#   TESTS=tests/stores  which tests; PYTEST_FLAGS="-k redis -x" how
#   BENCH_FLAGS=...     what to hand to the benchmark; REPORT_ROUNDS=3 how many rounds bench-report has
#   MATRIX_FLAGS="--server /path/of/valkey-server"  another server for the matrix; --list, --fast, --only "Redis 7"
#   SERVE_FLAGS="--port 9000 --store redis://..."   what to hand to the service
#   WHEEL_FLAGS="--python python3.13"   for which interpreter `make wheel` compiles and tests

PYTHON ?= python3
JOBS ?= 3
TESTS ?= tests
PYTEST_FLAGS ?=
BENCH_FLAGS ?=
SERVE_FLAGS ?=
WHEEL_FLAGS ?=

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
TOOLS := .venv/.tools
CHECK_TOOLS := .venv/.check-tools
RUNNABLE := .venv/.runnable
PURE := build/pure/.built
COMPILED := build/compiled/.built
WEB_PEERS := build/web-peers/.installed
SHARED_PEERS := build/shared-peers/.installed
OLDEST := build/oldest/.installed
RELEASE_TOOLS := build/release-tools/.installed
RECIPE := pyproject.toml setup.py
SOURCES := $(RECIPE) $(shell find src -type f ! -name '*.py[co]' ! -path '*.egg-info/*')
TYPED := $(wildcard src tests benchmarks examples release docs/*.py)

# Succeeds where an extension module can be built: the compiler that Python would call, and the headers of Python.
CAN_COMPILE := $(BIN)/python -c 'import os, shutil, sys, sysconfig as s; \
	cc = (os.environ.get("CC") or s.get_config_var("CC") or "").split(); \
	sys.exit(not (cc and shutil.which(cc[0]) and os.path.exists(s.get_config_var("INCLUDEPY") + "/Python.h")))'

# Adds up the reports of several runs of pytest.
define TALLY
import sys, xml.etree.ElementTree as xml
suites = [suite.attrib for path in sys.argv[1:] for suite in xml.parse(path).iter("testsuite")]
total, skipped, failures, errors = (sum(int(s[k]) for s in suites) for k in ("tests", "skipped", "failures", "errors"))
failed = failures + errors
print(f"{total - failed - skipped} passed, {failed} failed, {skipped} skipped")
endef
export TALLY

# Compile a module once and not in every process that a test starts; the cache is not beside the sources.
export PYTHONDONTWRITEBYTECODE :=
export PYTHONPYCACHEPREFIX := $(CURDIR)/build/pycache

.PHONY: help check serve test test-pure test-compiled coverage soak mutants limits-check lint lint-workflows format types bench exactness web-peers shared-peers docs docs-serve docs-stage docs-plots bench-report matrix oldest wheel sbom release-check clean
.NOTPARALLEL:
.DELETE_ON_ERROR:

help: ## list the targets (the default)
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

TYPES := $(MAKE) --no-print-directory types # by this name, as `make -n` runs every line that names MAKE

QUICK := HEADGATE_TEST_SERVERS=0 HEADGATE_MACHINE_RUNS=10 HEADGATE_MACHINE_WALKS=100 HEADGATE_MODEL_STEPS=1500 \
	HEADGATE_MUTATED_CONNECTIONS=500
QUICK_TESTS = -m pytest -q -n $(JOBS) --dist loadgroup -m "not server and not slow and not framework" \
	--hypothesis-profile=quick $(PYTEST_FLAGS) $(TESTS)

# Servers are forbidden, even where there are some: a test without its mark fails here on every machine. The types are
# checked while the tests run, which leave a part of two cores idle; what the checkers say is shown after the tests.
check: lint ## the fast lane: lint, types, the quick tests without servers and web frameworks; under a minute
	@mkdir -p build
	@$(TYPES) >build/types.txt 2>&1 & types=$$!; \
	trap 'kill $$types 2>/dev/null' EXIT; trap 'exit 130' INT TERM; \
	echo "== tests that need no server; types beside them"; \
	$(QUICK) HEADGATE_EXPECT_COMPILED=0 $(BIN)/python $(QUICK_TESTS); status=$$?; \
	wait $$types || status=1; cat build/types.txt; exit $$status

serve: $(RUNNABLE) ## the service on http://127.0.0.1:8080/, memory store
	@exec $(BIN)/headgate serve $(SERVE_FLAGS)

# $(call pytest,build,0 or 1,PYTHONPATH): the suite against one build
pytest = PYTHONPATH=$(3) HEADGATE_EXPECT_COMPILED=$(2) $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup \
	--junit-xml build/results/$(1).xml $(PYTEST_FLAGS) $(TESTS)

# What lies above the modules that are compiled: once is enough, on the build that most users get. The mark is on the
# rows of tables that are only another server, or another way to one.
ONCE := $(foreach part,faults service coordination budget jobs web limits postgresql hybrid/test_processes.py \
	hybrid/test_topologies.py hybrid/test_other_stores.py hybrid/test_ledger_stores.py stores/test_outages.py \
	stores/test_lifetimes.py stores/test_redis.py test_async_batching.py test_clock_steps_back.py test_contributing.py \
	test_docs.py test_docstrings.py test_examples.py test_imports.py test_inspection.py test_lua.py test_packaging.py \
	test_redis_trips.py test_servers.py test_site.py \
	test_unclosed.py test_warm_up.py,--ignore=tests/$(part)) -m "not once"

# The types are checked beside the first tests, and by what these leave of two cores.
test: lint $(TOOLS) $(COMPILED) ## lint, types, and the whole suite against the pure and the compiled build
	@rm -rf build/results
	@$(BIN)/python -m tests.service.deploy.tools # a browser, nginx, Prometheus: real ones, where they can be had
	@nice $(TYPES) >build/types.txt 2>&1 & types=$$!; \
	trap 'kill $$types 2>/dev/null' EXIT; trap 'exit 130' INT TERM; \
	status=0; \
	echo "== tests, plain Python"; \
	if [ ! -e $(COMPILED) ]; then $(call pytest,pure,0,); else $(call pytest,pure,0,) $(ONCE); fi || status=1; \
	wait $$types || status=1; cat build/types.txt; \
	if [ -e $(COMPILED) ]; then \
		echo "== tests, compiled"; $(call pytest,compiled,1,$(CURDIR)/build/compiled) || status=1; \
	fi; \
	$(BIN)/python -c "$$TALLY" build/results/*.xml && exit $$status

test-pure: $(TOOLS) ## the suite against plain Python only
	@$(call pytest,pure,0,)

test-compiled: $(COMPILED) ## the suite against the compiled build only
	@$(call pytest,compiled,1,$(CURDIR)/build/compiled)

# A test that is about speed may fail while it is measured; the figure is reported all the same. A test that interrupts
# a process at every moment would interrupt the measurement, and not end.
coverage: $(TOOLS) ## branch coverage of the plain build, all processes of the tests included; build/coverage/html
	@rm -rf build/coverage && mkdir -p build/coverage
	@HEADGATE_EXPECT_COMPILED=0 $(BIN)/python -m coverage run -m pytest -q -n $(JOBS) --dist loadgroup \
		--ignore=tests/test_interrupts.py $(PYTEST_FLAGS) $(TESTS) || echo "== some tests failed"
	@$(BIN)/python -m coverage combine -q
	@$(BIN)/python -m coverage html -q
	@$(BIN)/python -m coverage report

soak: $(COMPILED) ## what takes minutes: processes killed and frozen, locks under torture, crawlers, thousands of traces
	@HEADGATE_HERD_SECONDS=30 HEADGATE_HERD_PROCESSES=8 HEADGATE_MACHINE_RUNS=2000 HEADGATE_MACHINE_WALKS=20000 \
		PYTHONPATH=$$([ ! -e $(COMPILED) ] || echo $(CURDIR)/build/compiled) \
		$(BIN)/python -m pytest -v -s $(PYTEST_FLAGS) tests/hybrid/test_fleet.py tests/hybrid/test_processes.py \
		tests/hybrid/test_regions.py tests/hybrid/test_several_keys.py
	@HEADGATE_CUT_SECONDS=60 HEADGATE_CUTS=2 PYTHONPATH=$$([ ! -e $(COMPILED) ] || echo $(CURDIR)/build/compiled) \
		$(BIN)/python -m pytest -v -s $(PYTEST_FLAGS) tests/hybrid/test_region_limiter.py -k cut_between
	@HEADGATE_SHARED_KILLS=100000 HEADGATE_SHARED_SECONDS=30 \
		PYTHONPATH=$$([ ! -e $(COMPILED) ] || echo $(CURDIR)/build/compiled) \
		$(BIN)/python -m pytest -v -s $(PYTEST_FLAGS) tests/stores/test_shared_processes.py
	@HEADGATE_SERVICE_WHOLE=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist loadgroup $(PYTEST_FLAGS) -k service tests/stores tests/algorithms
	@HEADGATE_MUTATED_CONNECTIONS=100000 PYTHONPATH=$$([ ! -e $(COMPILED) ] || echo $(CURDIR)/build/compiled) \
		$(BIN)/python -m pytest -v $(PYTEST_FLAGS) tests/service/test_http2_floods.py
	@HEADGATE_AGREEMENT_WALKS=100 HEADGATE_SEVERAL_SECONDS=60 \
		$(BIN)/python -m pytest -v $(PYTEST_FLAGS) tests/stores/test_agreement.py tests/stores/test_several.py tests/hybrid/test_several_stores.py \
		tests/hybrid/test_several_processes.py
	@$(BIN)/python -m tests.coordination.soak
	@$(BIN)/python -m tests.jobs.drain celery
	@$(BIN)/python -m tests.jobs.drain dramatiq
	@$(BIN)/python -m tests.support.llm_fleet --processes 8 --seconds 60
	@$(BIN)/python -m pytest -n $(JOBS) --hypothesis-profile=explore -k every_trace tests/coordination

mutants: $(TOOLS) ## break the protocol of the hybrid limiter on purpose, and see its tests notice
	@$(BIN)/python -m tests.hybrid.mutants

limits-check: $(TOOLS) ## the tests of Flask-Limiter and of limits on headgate.limits; downloads them, five minutes
	@$(BIN)/python -m tests.limits.suites

lint: lint-workflows ## ruff: rules and format; zizmor and check-jsonschema: .github
	@echo "== lint"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

lint-workflows: $(CHECK_TOOLS) ## only what is in .github, without a network
	@$(BIN)/zizmor --offline --pedantic --no-progress -q .github
	@$(BIN)/check-jsonschema -q --builtin-schema vendor.github-workflows .github/workflows/*.yml
	@$(BIN)/check-jsonschema -q --builtin-schema vendor.dependabot .github/dependabot.yml

format: $(CHECK_TOOLS) ## let ruff put the format right, and what else it can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

types: $(CHECK_TOOLS) ## mypy, strict, for all; pyright for examples and what users call
	@echo "== types"
	@$(BIN)/mypy $(TYPED)
	@$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(PURE) $(COMPILED) ## measure headgate and its peers side by side
	@$(BIN)/python -m benchmarks --pure-path build/pure \
		$$([ ! -e $(COMPILED) ] || echo --compiled-path build/compiled) $(BENCH_FLAGS)

# Fewer rounds than `make bench`, so that all parts together take about twenty minutes; the page names their number. A part
# that fails is named on the page, and the others stand.
REPORT_ROUNDS ?= 3
bench-report: $(PURE) $(COMPILED) ## docs/benchmarks.md and its pictures, from a full run: about 20 minutes
	@$(MAKE) --no-print-directory shared-peers || echo "== without the peers of shared, which could not be installed"
	@$(BIN)/python -m benchmarks --pure-path build/pure --rounds $(REPORT_ROUNDS) --json build/bench.json \
		$$([ ! -e $(COMPILED) ] || echo --compiled-path build/compiled) $(BENCH_FLAGS); status=$$?; \
	$(BIN)/python -m benchmarks.page build/bench.json >build/benchmarks.md && \
		mv build/benchmarks.md docs/benchmarks.md && exit $$status

MATRIX_FLAGS ?=
matrix: $(TOOLS) ## the tests that depend on the server, on every Redis and Valkey at hand: a few minutes each
	@$(BIN)/python -m tests.matrix --jobs $(JOBS) $(MATRIX_FLAGS)

# What depends on the packages of the extras. Old packages warn of what they will no longer do, and leave things unclosed.
OLDEST_TESTS := $(foreach part,web limits jobs telemetry postgresql budget/test_llm_clients.py coordination/test_clients.py \
	stores/test_redis.py stores/test_redis_joint.py faults/test_cluster.py faults/test_sentinel.py service/test_contract.py \
	service/test_redis.py service/test_commands.py,tests/$(part))
FLASK_TESTS := tests/web/test_flask.py tests/limits/test_extensions.py
ON_OLDEST = HEADGATE_EXPECT_COMPILED=0 PYTHONWARNINGS=default build/oldest/bin/python -m pytest -q -n $(JOBS) --dist loadgroup $(PYTEST_FLAGS) \
	-W ignore::DeprecationWarning -W ignore::PendingDeprecationWarning -W ignore::pytest.PytestUnraisableExceptionWarning
oldest: $(OLDEST) ## the tests of what extras bring along, with the oldest version of each that pyproject.toml allows
	@status=0; \
	$(ON_OLDEST) $(OLDEST_TESTS) || status=1; \
	PYTHONPATH=$(CURDIR)/build/oldest/flask $(ON_OLDEST) $(FLASK_TESTS) || status=1; \
	exit $$status

exactness: $(TOOLS) $(WEB_PEERS) ## 60 requests at once against 20 an hour, at every door of headgate and of its peers
	@$(BIN)/python -m benchmarks.exactness --python build/web-peers/bin/python $(BENCH_FLAGS)

web-peers: $(WEB_PEERS) ## limiters of other projects for web frameworks, in build/web-peers

shared-peers: $(SHARED_PEERS) ## what `make bench BENCH_FLAGS="--only shared"` runs beside, in build/shared-peers

docs: docs-stage ## the site, into build/site; a link that leads nowhere is an error
	@$(BIN)/zensical build --strict --clean

docs-serve: docs-stage ## the site on http://127.0.0.1:8000/; run `make docs-stage` in another terminal after a change
	@$(BIN)/zensical serve --dev-addr 127.0.0.1:8000

docs-stage: $(CHECK_TOOLS)
	@$(BIN)/python docs/stage.py

docs-plots: $(TOOLS) ## draw the pictures of the documentation anew
	@$(BIN)/python docs/plots.py
	@$(BIN)/python docs/hybrid_tables.py
	@$(BIN)/python docs/lease_rules.py
	@$(BIN)/python docs/jobs_plot.py
	@$(BIN)/python docs/region_figures.py
	@$(BIN)/python docs/architecture_plot.py

wheel: $(RELEASE_TOOLS) ## into dist: sdist, pure wheel, this platform's wheel; checked, installed without a compiler, tested
	@PYTHONPYCACHEPREFIX= $(QUICK) build/release-tools/bin/python -m release.wheel $(WHEEL_FLAGS) $(QUICK_TESTS)

sbom: $(RELEASE_TOOLS) ## into dist: what the wheel of dist and each extra bring along, as CycloneDX
	@build/release-tools/bin/python -m release.sbom dist/*-py3-none-any.whl

release-check: check wheel sbom ## all of a release that a machine can check, up to the upload
	@build/release-tools/bin/python -m release.ready

clean: ## remove everything that make has made, .venv too
	rm -rf .venv build dist .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests benchmarks examples docs -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
	find src -name '*.so' -delete

$(BIN)/python:
	@echo "== installing into .venv"
	@$(PYTHON) -m venv .venv
	@$(PIP) install --upgrade "pip>=25.1"

$(TOOLS): $(RECIPE) | $(BIN)/python
	@echo "== tools for tests, lint, build and benchmark"
	@$(PIP) install --upgrade --group dev
	@$(PIP) install --no-deps "arq>=0.26" # it asks for an older redis-py than headgate does, and runs with this one
	@HEADGATE_PURE=1 $(PIP) install --upgrade --no-build-isolation --editable ".[all]"
	@touch $@ $(CHECK_TOOLS) $(RUNNABLE)

# The same without the servers.
$(CHECK_TOOLS): $(RECIPE) | $(BIN)/python
	@echo "== tools for lint, types and tests without servers"
	@$(PIP) install --upgrade --group check
	@HEADGATE_PURE=1 $(PIP) install --upgrade --no-build-isolation --editable ".[all]"
	@touch $@ $(RUNNABLE)

# The peers bring old and heavy packages along, so they have an environment of their own.
$(WEB_PEERS): pyproject.toml | $(BIN)/python
	@echo "== web frameworks and their limiters"
	@$(PYTHON) -m venv build/web-peers
	@build/web-peers/bin/python -m pip --disable-pip-version-check -qq install --upgrade "pip>=25.1"
	@build/web-peers/bin/python -m pip --disable-pip-version-check -qq install --group web-peers
	@touch $@

# Flask comes before what is installed: the oldest one and the oldest Quart do not fit into one environment.
$(OLDEST): $(RECIPE) tests/oldest.py
	@echo "== the oldest versions of what extras bring along"
	@rm -rf build/oldest
	@$(PYTHON) -m venv build/oldest
	@build/oldest/bin/python -m pip --disable-pip-version-check -qq install --upgrade "pip>=25.1"
	@build/oldest/bin/python -m tests.oldest >build/oldest/all.txt
	@build/oldest/bin/python -m tests.oldest flask >build/oldest/flask.txt
	@build/oldest/bin/python -m pip --disable-pip-version-check -qq install -r build/oldest/all.txt
	@build/oldest/bin/python -m pip --disable-pip-version-check -qq install --no-deps "arq>=0.26"
	@build/oldest/bin/python -m pip --disable-pip-version-check -qq install --target build/oldest/flask -r build/oldest/flask.txt --group oldest-flask
	@HEADGATE_PURE=1 build/oldest/bin/python -m pip --disable-pip-version-check -qq install --no-build-isolation --no-deps --editable .
	@touch $@

$(SHARED_PEERS): pyproject.toml | $(BIN)/python
	@echo "== stores that processes share"
	@$(PYTHON) -m venv build/shared-peers
	@build/shared-peers/bin/python -m pip --disable-pip-version-check -qq install --upgrade "pip>=25.1"
	@build/shared-peers/bin/python -m pip --disable-pip-version-check -qq install --group shared-peers
	@touch $@

# What makes a release has an environment of its own, so that no other package can change what is uploaded.
$(RELEASE_TOOLS): pyproject.toml
	@echo "== tools that build and check wheels"
	@$(PYTHON) -m venv build/release-tools
	@build/release-tools/bin/python -m pip --disable-pip-version-check -qq install --upgrade "pip>=25.1"
	@build/release-tools/bin/python -m pip --disable-pip-version-check -qq install --group release
	@touch $@

# What the service needs and no more: the tools for tests take minutes where the network is slow.
$(RUNNABLE): $(RECIPE) | $(BIN)/python
	@echo "== what the service needs"
	@$(PIP) install "setuptools>=77"
	@HEADGATE_PURE=1 $(PIP) install --no-build-isolation --editable ".[all]"
	@touch $@

$(PURE): $(SOURCES) $(TOOLS)
	@echo "== building plain Python"
	@rm -rf build/pure build/lib*
	@HEADGATE_PURE=1 $(PIP) install --no-build-isolation --no-deps --target build/pure .
	@touch $@

# Without a compiler this makes nothing, and asks again the next time.
$(COMPILED): $(SOURCES) $(TOOLS)
	@rm -rf build/compiled build/lib*
	@if $(CAN_COMPILE); then \
		echo "== compiling" && \
		HEADGATE_REQUIRE_COMPILED=1 $(PIP) install --no-build-isolation --no-deps --target build/compiled . && \
		PYTHONPATH=build/compiled $(BIN)/python -c 'import headgate, sys; sys.exit(not headgate.COMPILED)' && \
		touch $@; \
	else \
		echo "== no C compiler or no Python.h here: only plain Python can be tested and measured"; \
	fi
