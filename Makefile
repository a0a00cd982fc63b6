# Every target makes the environment it needs; nothing has to be installed by hand.
PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/python -m
SEED ?= 0
NAME ?= quickstart-$(shell date +%Y%m%d-%H%M%S)

.PHONY: quickstart quickstart-control train test check proto descriptors up down clean

quickstart: $(VENV)/.quickstart ## Train an agent through every service, on this machine, in minutes.
	$(RUN) services.launcher --config examples/quickstart/multiplexed.toml --name $(NAME) --seed $(SEED)

quickstart-control: $(VENV)/.quickstart ## The same with shuffled rewards: nothing must be learned.
	SEAMFLOW_TRAINER_SHUFFLE_REWARDS=true $(RUN) services.launcher \
		--config examples/quickstart/multiplexed.toml --name $(NAME)-shuffled --seed $(SEED)

test: $(VENV)/.dev ## All tests.
	$(RUN) pytest

check: $(VENV)/.dev ## Format, lint, types, contract.
	$(RUN) ruff format --check .
	$(RUN) ruff check .
	$(RUN) mypy sdk/seamflow services trajectory_manager rollout scheduler trainer
	$(VENV)/bin/buf lint
	$(VENV)/bin/buf breaking --against protos/released.binpb

# Generated with the oldest toolchain we support: what it makes loads on every newer protobuf.
proto: .venv-proto/.made ## Generate sdk/seamflow/*/v1 from protos/.
	.venv-proto/bin/python -m grpc_tools.protoc -Iprotos \
		--plugin=protoc-gen-mypy=.venv-proto/bin/protoc-gen-mypy \
		--plugin=protoc-gen-mypy_grpc=.venv-proto/bin/protoc-gen-mypy_grpc \
		--python_out=sdk --grpc_python_out=sdk --mypy_out=quiet:sdk --mypy_grpc_out=quiet:sdk \
		$$(find protos -name '*.proto' | sort)

descriptors: $(VENV)/.dev ## At a release only: what later versions must not break.
	$(VENV)/bin/buf build --as-file-descriptor-set -o protos/released.binpb

up: ## Every service and Redis in containers.
	docker compose up --build

down:
	docker compose down

clean:
	rm -rf $(VENV) .venv-proto runs

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.quickstart: $(VENV)/bin/python pyproject.toml
	$(VENV)/bin/python -m pip install --quiet torch==2.13.0
	$(VENV)/bin/python -m pip install --quiet -e '.[quickstart]'
	touch $@

$(VENV)/.dev: $(VENV)/.quickstart
	$(VENV)/bin/python -m pip install --quiet -e '.[dev]'
	touch $@

.venv-proto/.made:
	$(PYTHON) -m venv .venv-proto
	.venv-proto/bin/python -m pip install --quiet 'grpcio-tools==1.62.3' 'mypy-protobuf==3.6.0' 'setuptools<81'
	touch $@
