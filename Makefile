# Every target makes the environment it needs; nothing has to be installed by hand.
# Modules are compiled once, not by each of the processes that tests start.
unexport PYTHONDONTWRITEBYTECODE
PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/python -m
SEED ?= 0
WORKERS ?= 4
# How often `make test` repeats a test that fails; it says which.
RERUNS ?= 0
# Such as deploy/requirements.lock: install exactly the versions that it names.
LOCK ?=
INSTALL = $(VENV)/bin/python -m pip install --quiet $(addprefix -c ,$(LOCK))
# Named after the content of its recipe: as long as that stays, nothing is installed again.
SGLANG = .venv-sglang/.made-$(shell cat deploy/sglang_cpu/*.* | sha256sum | cut -c 1-12)
FRAMEWORKS = $(patsubst tests/suites/agents/frameworks/requirements/%.txt,.venv-frameworks/%,$(wildcard tests/suites/agents/frameworks/requirements/*.txt))
ADAPTERS = $(patsubst adapters/%/requirements.txt,.venv-adapters/%,$(wildcard adapters/*/requirements.txt))

.DEFAULT_GOAL := help
.PHONY: help quickstart bench suite test test-unit check docs site lock proto descriptors up images health down clean \
	.venv-sglang .venv-frameworks .venv-adapters $(ADAPTERS)

help: ## List the targets.
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 22

quickstart: $(VENV)/.quickstart ## Train an agent through every service, on this machine, in minutes.
	$(RUN) services.launcher --config examples/quickstart/multiplexed.toml --seed $(SEED) \
		--name $(or $(NAME),quickstart-$(shell date +%Y%m%d-%H%M%S))

bench: $(VENV)/.dev ## Run a bench, such as NAME=store; without a NAME they are listed.
	$(RUN) tools.suites bench $(NAME)

suite: $(VENV)/.dev ## Run a suite of tests, such as NAME=field; without a NAME they are listed.
	$(RUN) tools.suites suite $(NAME)

# `make bench-store` is `make bench NAME=store`, `make test-field` is `make suite NAME=test-field`.
bench-%:
	@$(MAKE) --no-print-directory bench NAME=$*
test-% chaos-%:
	@$(MAKE) --no-print-directory suite NAME=$@

test: $(VENV)/.dev ## The tests, distributed by file over WORKERS processes (4; 0: in this one).
	$(RUN) pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=25 --reruns $(RERUNS) -rfER

test-unit: $(VENV)/.dev ## The tests without processes and Redis, in a minute.
	$(RUN) pytest -n $(WORKERS) --dist worksteal --durations=25 tests/unit

check: $(VENV)/.dev ## Format, lint, types, contract.
	$(RUN) ruff format --check .
	$(RUN) ruff check .
	$(RUN) mypy sdk/seamflow services trajectory_manager rollout scheduler trainer tools bench examples \
		adapters tests \
		deploy/create_run.py deploy/generate_secrets.py deploy/containers.py \
		deploy/docker/install.py deploy/docker/mount_points.py deploy/docker/smoke.py deploy/docker/start.py
	$(VENV)/bin/buf lint
	$(VENV)/bin/buf breaking --against protos/released.binpb

# Generated with the oldest toolchain we support: what it makes loads on every newer protobuf.
docs: $(VENV)/.dev ## Generate the pages of settings, permissions, benchmarks and reliability.
	$(RUN) tools.reference

site: $(VENV)/.dev ## The pages as a web site with search: runs/site/html.
	$(VENV)/bin/python -m pip install --quiet -e '.[site]'
	$(RUN) tools.site

lock: .venv-uv/bin/uv ## Renew deploy/requirements.lock: one version of each package, for all extras and systems.
	.venv-uv/bin/uv pip compile pyproject.toml --quiet --upgrade --all-extras --universal --python-version 3.11 \
		--no-emit-index-url --no-emit-find-links --annotation-style line --custom-compile-command 'make lock' \
		-o deploy/requirements.lock

proto: .venv-proto/.made ## Generate sdk/seamflow/*/v1 from protos/.
	.venv-proto/bin/python -m grpc_tools.protoc -Iprotos \
		--plugin=protoc-gen-mypy=.venv-proto/bin/protoc-gen-mypy \
		--plugin=protoc-gen-mypy_grpc=.venv-proto/bin/protoc-gen-mypy_grpc \
		--python_out=sdk --grpc_python_out=sdk --mypy_out=quiet:sdk --mypy_grpc_out=quiet:sdk \
		$$(find protos -name '*.proto' | sort)

descriptors: $(VENV)/.dev ## At a release only: what later versions must not break.
	$(VENV)/bin/buf build --as-file-descriptor-set -o protos/released.binpb

up: ## Every service and Redis in containers, until all are healthy; PROFILES='scoring sglang' adds these.
	$(PYTHON) deploy/containers.py up $(addprefix --profile ,$(PROFILES))

images: ## An image of each service, as they are deployed, on shared bases; PROFILES=sglang adds SGLang's.
	$(PYTHON) deploy/containers.py images $(addprefix --profile ,$(PROFILES))

health: ## One line: which containers are ready, and which are not.
	@$(PYTHON) deploy/containers.py health

down: ## Stop and remove the containers; volumes stay.
	$(PYTHON) deploy/containers.py down

clean:
	rm -rf $(VENV) .venv-proto .venv-uv .venv-oldest .venv-peers .venv-sglang .venv-adapters .venv-frameworks .venv-parsers runs

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.quickstart: $(VENV)/bin/python pyproject.toml
	$(INSTALL) torch==2.13.0
	$(INSTALL) -e '.[quickstart]'
	touch $@

$(VENV)/.dev: $(VENV)/.quickstart
	$(INSTALL) -e '.[dev]'
	touch $@

.venv-oldest/.made: pyproject.toml
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet 'grpcio==1.62.3' 'protobuf==4.25.*' \
		'grpcio-health-checking==1.62.3' pytest pytest-asyncio pytest-timeout
	.venv-oldest/bin/python -m pip install --quiet --no-deps -e .
	touch $@

.venv-sglang: $(SGLANG)
.venv-frameworks: $(FRAMEWORKS:=/.made)
.venv-adapters: $(ADAPTERS)

$(SGLANG):
	$(PYTHON) -m venv --clear .venv-sglang
	.venv-sglang/bin/python -m pip install --quiet -r deploy/sglang_cpu/requirements.txt
	.venv-sglang/bin/python -m pip install --quiet --no-deps -r deploy/sglang_cpu/sglang.txt
	cp deploy/sglang_cpu/sglang_cpu_names.* .venv-sglang/lib/python3.*/site-packages/
	touch $@

# The parsers' files alone are run: nothing that they need of a GPU is installed.
.venv-parsers/.made: tests/suites/parsers/requirements.txt
	$(PYTHON) -m venv .venv-parsers
	.venv-parsers/bin/python -m pip install --quiet --no-deps -r $<
	.venv-parsers/bin/python -m pip install --quiet pydantic orjson partial-json-parser regex openai
	touch $@

# Each adapter's framework in an environment of its own: python -m seamflow.environment runs there.
$(ADAPTERS): .venv-adapters/%: .venv-adapters/%/.made

.venv-adapters/%/.made: adapters/%/requirements.txt
	$(PYTHON) -m venv .venv-adapters/$*
	.venv-adapters/$*/bin/python -m pip install --quiet 'grpcio>=1.62' 'protobuf>=4.25,<8' \
		$(addprefix -r ,$(wildcard adapters/$*/requirements*.txt))
	.venv-adapters/$*/bin/python -m pip install --quiet --no-deps -e .
	touch $@

.venv-frameworks/%/.made: tests/suites/agents/frameworks/requirements/%.txt
	$(PYTHON) -m venv .venv-frameworks/$*
	.venv-frameworks/$*/bin/python -m pip install --quiet -r $<
	touch $@

.venv-uv/bin/uv:
	$(PYTHON) -m venv .venv-uv
	.venv-uv/bin/python -m pip install --quiet 'uv>=0.8'

.venv-proto/.made:
	$(PYTHON) -m venv .venv-proto
	.venv-proto/bin/python -m pip install --quiet 'grpcio-tools==1.62.3' 'mypy-protobuf==3.6.0' 'setuptools<81'
	touch $@
