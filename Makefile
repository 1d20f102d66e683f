PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The editable install maps packages by name, so a new package requires a new installation.
INPUTS := pyproject.toml constraints.txt $(wildcard services/*/__init__.py shared/*/__init__.py kernels/*/__init__.py)
RUN := $(VENV)/.installed-run
DEV := $(VENV)/.installed-dev
# schemathesis depends on dozens of packages that nothing else needs, so it has an environment of its own.
CONFORMANCE := .venv-conformance
# Clients that need other versions of packages than Baton's own tests.
CLIENTS := .venv-clients
# LiteLLM has one, too. `make test` uses it as a client, and `make bench-gateway` measures it as a proxy.
LITELLM := .venv-litellm
# uv writes the hashes of all files of a release, so one lock file serves x86-64 and ARM.
LOCK := .venv-lock
COMPILE := $(LOCK)/bin/uv pip compile pyproject.toml --quiet --constraints constraints.txt --python-version 3.12 \
	--universal --generate-hashes --no-annotate --custom-compile-command 'make lock'
SOURCES := services shared kernels
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
# A variable because a comma would split the argument of `call`.
RUN_EXTRAS := bench,gateway,worker

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS += --no-print-directory --no-builtin-rules
.DEFAULT_GOAL := help
# Many processes start from these sources. Without cached bytecode each of them would compile the sources anew.
unexport PYTHONDONTWRITEBYTECODE
.PHONY: help up test clients fuzz conformance soak chaos check lint bench bench-gateway lock images kind-up e2e-k8s owners proto dashboards clean

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

up: $(RUN)  ## Start a local Baton with the demo model; ARGS='--model DIR --prefill 2' adds flags of `baton up`
	@exec $(BIN)/baton up $(ARGS)

# tests/groups.py says which process gets which tests. One process where some are picked, so that -s works, but two for
# all unit tests, which keep a core busy each.
test: $(DEV) $(LITELLM)/.installed  ## Run all tests in three processes; ARGS='-m unit' or ARGS='tests/cli -x' picks some
	@exec $(BIN)/python -m pytest $(or $(subst -m unit,-m unit --numprocesses 2,$(ARGS)),--numprocesses 3)

clients: $(RUN) $(CLIENTS)/.installed  ## Run large clients against a local Baton: llama-index, guidellm, aiperf
	@exec $(CLIENTS)/bin/python -m pytest --confcutdir=tests/clients/apart tests/clients/apart \
		--baton $(BIN)/baton $(ARGS)

fuzz: $(DEV)  ## Send forty times as many random bodies and messages as `make test` (FUZZ_SEED=N repeats a run)
	@export FUZZ_BODIES=$${FUZZ_BODIES:-200000} FUZZ_SEED=$${FUZZ_SEED:-$$RANDOM}; echo "FUZZ_SEED=$$FUZZ_SEED"; \
		export FUZZ_MESSAGES=$${FUZZ_MESSAGES:-100000} FUZZ_ANNOUNCEMENT_PODS=$${FUZZ_ANNOUNCEMENT_PODS:-200}; \
		exec $(BIN)/python -m pytest -s -m soak tests/gateway/fuzz tests/fuzz_peers \
		tests/e2e/test_bad_announcements.py $(ARGS)

conformance: $(RUN) $(CONFORMANCE)/.installed  ## Send 2,000 requests made from OpenAI's specification, OPENAPI=FILE
	@exec $(CONFORMANCE)/bin/python -m tests.conformance --baton $(BIN)/baton $(ARGS) $(OPENAPI)

# `make test` runs these expensive tests with fewer seeds, shapes and requests.
soak: $(DEV)  ## Run the tests that `make test` shortens: all seeds and shapes, ten times the requests (SOAK_SEED=N repeats these)
	@export GRAMMAR_SEEDS=$${GRAMMAR_SEEDS:-50} SAMPLER_SEEDS=$${SAMPLER_SEEDS:-4} \
		AGGREGATED_SHAPES=$${AGGREGATED_SHAPES:-8} DISAGGREGATED_SHAPES=$${DISAGGREGATED_SHAPES:-100} \
		SOAK_REQUESTS=$${SOAK_REQUESTS:-10000} ALL_RANKS=$${ALL_RANKS:-1} \
		SCHEDULER_EXAMPLES=$${SCHEDULER_EXAMPLES:-500}; \
		exec $(BIN)/python -m pytest -m soak tests/engine/test_grammars.py tests/engine/test_device_sampler.py \
		tests/engine/test_ranks.py tests/engine/test_stages.py tests/engine/test_expert_parallel.py \
		tests/engine/test_scheduler.py tests/e2e/test_equality.py tests/e2e/test_soak.py $(ARGS)

chaos: $(DEV)  ## Two thousand faults on a fleet under load (CHAOS_SEED=N repeats a run)
	@CHAOS_SCENARIOS=$${CHAOS_SCENARIOS:-2000} exec $(BIN)/python -m pytest -s -m soak tests/chaos/test_chaos.py $(ARGS)

check: lint  ## All checks that need no running test, and the lines of each package beside its budget
	@$(BIN)/python .ci/line_budget.py
	@$(BIN)/mypy $(SOURCES)

lint: $(DEV)  ## Check formatting, style and the import contracts
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/lint-imports

bench: $(DEV)  ## Measure this machine's CPU path
	@exec $(BIN)/python loadtest/engine/cpu_bench.py $(ARGS)

bench-gateway: $(DEV) $(LITELLM)/.installed  ## Measure the gateway beside LiteLLM's proxy, engines simulated
	@exec $(BIN)/python loadtest/gateway/gateway_bench.py --litellm $(LITELLM)/bin/litellm $(ARGS)

# Hashes cannot be in constraints.txt: pip would then require one for every package, and an editable install has none.
lock: $(LOCK)/.installed constraints.txt pyproject.toml  ## Pin what the images install, with hashes
	echo setuptools | $(COMPILE:pyproject.toml=-) --output-file docker/requirements/build.txt
	$(COMPILE) --extra gateway --output-file docker/requirements/gateway.txt
	$(COMPILE) --extra worker --extra gpu --output-file docker/requirements/worker-cuda.txt
	$(COMPILE) --extra worker --torch-backend cpu --output-file docker/requirements/worker-cpu.txt

images:  ## Build the images of gateway and workers (needs docker)
	@for image in gateway worker-cpu worker-cuda; do \
		docker build --file docker/$$image.Dockerfile --tag baton/$$image:$(VERSION) \
			--build-arg VERSION=$(VERSION) --build-arg REVISION=$$(git rev-parse HEAD) .; \
	done

kind-up:  ## Make a kind cluster with ingress-nginx and the demo model (needs docker, kind, kubectl and helm)
	@k8s/kind-up.sh

e2e-k8s: $(DEV)  ## Install, break, upgrade and remove Baton in the cluster of KUBECONFIG, in a namespace of its own
	@exec $(BIN)/python -m pytest -s -x tests/k8s/e2e.py $(ARGS)

owners: $(DEV)  ## Test who owns which field with Helm and kubectl on a real API server, whose binaries are in KUBE=FOLDER
	@KUBE="$(abspath $(or $(KUBE),$(error KUBE=FOLDER says where etcd, kube-apiserver, kube-controller-manager and kubectl are)))" \
		exec $(BIN)/python -m pytest tests/k8s/owners.py $(ARGS)

proto: $(DEV)  ## Generate the code of shared/baton_proto again
	@$(BIN)/python -m grpc_tools.protoc -Ishared --python_out=shared --pyi_out=shared --grpc_python_out=shared \
		shared/baton_proto/*.proto

dashboards: $(DEV)  ## Write the Grafana dashboards of the chart again
	@$(BIN)/python -m helm.dashboards

clean:  ## Remove the virtual environments, caches and build output
	@rm -rf $(VENV) $(CONFORMANCE) $(CLIENTS) $(LITELLM) $(LOCK) build dist
	@rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find . -name .git -prune -o \( -name __pycache__ -o -name '*.egg-info' \) -prune -exec rm -rf {} +

# Shows one line per package instead of pip's several, so that users see progress. Warnings and errors go to stderr.
define install
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@echo "Installing Baton into $(VENV) (only when its dependencies changed)"
	@$(BIN)/pip install --disable-pip-version-check --no-input -c constraints.txt -e '.[$(1)]' \
		| sed -un -e 's/^Collecting \([^ ]*\).*/  \1/p' -e 's/^Installing collected packages.*/  unpacking/p'
endef

$(RUN): $(INPUTS)
	$(call install,$(RUN_EXTRAS))
	@touch $@

# The extra `dev` has everything that `make up` needs, so one installation serves both.
$(DEV): $(INPUTS)
	$(call install,dev)
	@touch $(RUN) $@

$(CONFORMANCE)/.installed: tests/conformance/requirements.txt
	@echo "Installing schemathesis into $(CONFORMANCE)"
	@test -x $(CONFORMANCE)/bin/pip || $(PYTHON) -m venv $(CONFORMANCE)
	@$(CONFORMANCE)/bin/pip install --quiet --disable-pip-version-check --no-input -r $<
	@touch $@

$(CLIENTS)/.installed: tests/clients/apart/requirements.txt
	@echo "Installing clients into $(CLIENTS)"
	@test -x $(CLIENTS)/bin/pip || $(PYTHON) -m venv $(CLIENTS)
	@$(CLIENTS)/bin/pip install --quiet --disable-pip-version-check --no-input -r $<
	@touch $@

$(LOCK)/.installed:
	@test -x $(LOCK)/bin/pip || $(PYTHON) -m venv $(LOCK)
	@$(LOCK)/bin/pip install --quiet --disable-pip-version-check --no-input uv==0.13.9
	@touch $@

$(LITELLM)/.installed: loadtest/gateway/litellm_requirements.txt
	@echo "Installing LiteLLM into $(LITELLM)"
	@test -x $(LITELLM)/bin/pip || $(PYTHON) -m venv $(LITELLM)
	@$(LITELLM)/bin/pip install --quiet --disable-pip-version-check --no-input -r $<
	@touch $@
