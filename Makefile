# Every target makes the environment it needs; nothing has to be installed by hand.
# Modules are compiled once, not by each of the processes that tests start.
unexport PYTHONDONTWRITEBYTECODE
PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/python -m
# Of suites: whatever they started ends with them, also when they are killed.
CONTAINED = $(RUN) tools.suites.contained $(RUN)
SEED ?= 0
WORKERS ?= 4
# How often `make test` repeats a test that fails; it says which.
RERUNS ?= 0
PEERS ?= default
DEVICE ?= cuda
CLIENT_PACKAGES = golang-go golang-google-grpc-dev golang-google-protobuf-dev protoc-gen-go protoc-gen-go-grpc g++ \
	pkg-config libgrpc++-dev libprotobuf-dev protobuf-compiler protobuf-compiler-grpc
RELEASE ?= 4d4fe0304685301e9d997fabe4ca2ce84d377b23
# Such as deploy/requirements.lock: install exactly the versions that it names.
LOCK ?=
INSTALL = $(VENV)/bin/python -m pip install --quiet $(addprefix -c ,$(LOCK))
NAME ?= quickstart-$(shell date +%Y%m%d-%H%M%S)
# Named after the content of its recipe: as long as that stays, nothing is installed again.
SGLANG = .venv-sglang/.made-$(shell cat deploy/sglang_cpu/*.* | sha256sum | cut -c 1-12)
FRAMEWORKS = $(patsubst tests/suites/agents/frameworks/requirements/%.txt,.venv-frameworks/%,$(wildcard tests/suites/agents/frameworks/requirements/*.txt))
ADAPTERS = $(patsubst adapters/%/requirements.txt,.venv-adapters/%,$(wildcard adapters/*/requirements.txt))
SGLANG_TESTS ?= tests/integration/rollout/server tests/system/rollout/server tests/system/sglang

.DEFAULT_GOAL := help
.PHONY: quickstart quickstart-control bench-quickstart bench-modes bench-algorithms bench-environment bench-lag bench-streaming bench-install bench-wheel bench-model bench-store bench-growth \
	bench-train bench-generation bench-backpressure bench-turns bench-tracing bench-stop-strings bench-gateway bench-rollout bench-weights bench-ranker bench-pipeline bench-fusion bench-size bench-gpu bench-fleet bench-wan bench-cost bench-allocation \
	chaos-store chaos-scheduler chaos-ranks chaos-trainer chaos-environments chaos-edges model-store test-mixed test-agents test-frameworks test-environments test-field test-math test-readme test-console test-health test-models test-allocation test-publish-kills test-slurm test-roundtrips \
	test test-unit test-long test-busy test-compose test-chart-pods test-clients test-sglang test-trackers test-algorithms test-sdk-range check docs site lock proto descriptors up images health down clean help .venv-sglang $(ADAPTERS)

help: ## List the targets.
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 22

quickstart: $(VENV)/.quickstart ## Train an agent through every service, on this machine, in minutes.
	$(RUN) services.launcher --config examples/quickstart/multiplexed.toml --name $(NAME) --seed $(SEED)

quickstart-control: $(VENV)/.quickstart ## The same with shuffled rewards: nothing must be learned.
	SEAMFLOW_TRAINER_ALGORITHM__SHUFFLE_REWARDS=true $(RUN) services.launcher \
		--config examples/quickstart/multiplexed.toml --name $(NAME)-shuffled --seed $(SEED)

bench-quickstart: $(VENV)/.quickstart ## Three seeds in a row and the control; bench/results/quickstart.json.
	$(RUN) bench.quickstart.seeds

bench-modes: $(VENV)/.quickstart ## The quickstart multiplexed and disaggregated, three seeds: which learns sooner.
	$(RUN) bench.quickstart.modes

bench-lag: $(VENV)/.quickstart ## The quickstart on samples that are older and older, with and without correction.
	$(RUN) bench.quickstart.lag

bench-streaming: $(VENV)/.dev ## Steps that start with their first group next to steps that wait for all.
	$(RUN) bench.train.streaming

bench-algorithms: $(VENV)/.quickstart ## The quickstart with each algorithm: what each learns, and how soon.
	$(RUN) bench.quickstart.algorithms

bench-environment: $(VENV)/.quickstart .venv-adapters/reasoning_gym ## reasoning-gym's spell_backward, learned from configuration alone; three seeds.
	$(RUN) bench.quickstart.spell_backward

bench-install: ## From a fresh clone to the first optimizer step; bench/results/install.json.
	$(PYTHON) -m bench.quickstart.install

bench-wheel: $(VENV)/.dev .venv-uv/bin/uv ## The wheel of a clean clone in an empty environment, by pip and by uv, until an agent is trained.
	$(RUN) bench.quickstart.wheel

bench-model: $(VENV)/.dev ## A language model of 135M parameters, trained and measured, in hours; PARTS="learning trl"; QUICK=1: two steps, no result.
	$(RUN) bench.language_model $(if $(QUICK),--quick) $(if $(PARTS),--parts $(PARTS))

bench-store: $(VENV)/.dev ## Appends next to other stores, interleaved; PEERS=all adds Ray, Reverb and TransferQueue.
	$(RUN) bench.trajectory_manager.store --peers $(PEERS)

bench-growth: $(VENV)/.dev ## Latency, memory and leases from 1,000 to 100,000 live trajectories.
	$(RUN) bench.trajectory_manager.growth

bench-generation: $(VENV)/.dev ## The embedded engine next to transformers' generate; PEERS=all adds vLLM on the CPU.
	$(RUN) bench.rollout.generation --peers $(PEERS)

bench-train: $(VENV)/.dev ## Whole training runs; PEERS=all: next to TRL; LEARN=1: seconds until a task is learned instead.
	$(RUN) bench.train --peers $(PEERS) $(if $(LEARN),--learn)

bench-backpressure: $(VENV)/.dev ## A stopped trainer, a slow store, a full store.
	$(RUN) tests.chaos.store.backpressure

bench-weights: $(VENV)/.dev ## Shards next to a plain socket copy, relays, the stall of an update.
	$(RUN) bench.rollout.weights

bench-rollout: $(VENV)/.dev $(SGLANG) ## Turns through all services next to SGLang alone; then bench-generation.
	$(RUN) bench.rollout.sglang
	$(RUN) bench.rollout.generation --peers $(PEERS)

bench-turns: $(VENV)/.dev ## 1,000 turns at a time through one gateway on emulated engines, 100 cancelled at once.
	$(RUN) bench.rollout.turns

bench-tracing: $(VENV)/.dev ## What tracing costs per turn, switched off and on, next to services without its code.
	$(RUN) bench.rollout.tracing

bench-stop-strings: $(VENV)/.dev ## CPU time of a gateway for a long answer with stop strings, next to one without.
	$(RUN) bench.rollout.stop_strings --seed $(SEED)

bench-gateway: $(VENV)/.dev ## The HTTP gateway next to gRPC, FastAPI and a bare aiohttp server; 1,000 open streams.
	$(RUN) bench.http_gateway

bench-ranker: $(VENV)/.quickstart .venv-adapters/reasoning_gym ## Rankers on synthetic lengths and an emulated fleet, then on answers of SmolLM2 and real engines.
	$(RUN) bench.rollout.ranker
	$(RUN) bench.real_lengths

bench-pipeline: $(VENV)/.dev ## Six ways to use the same nodes, simulated.
	$(RUN) bench.sim

bench-fusion: $(VENV)/.dev ## Schedules of actor and critic in one fused pipeline: RLHFuse's twelve settings, and some executed.
	$(RUN) bench.fusion
	$(RUN) bench.fusion.executed_plans

bench-gpu: $(VENV)/.dev ## On a machine with a GPU: training, decoding, publish, lending, the forecast's error; DEVICE=cpu tries it.
	$(CONTAINED) bench.gpu --device $(DEVICE) $(addprefix --sglang ,$(SGLANG_PYTHON))

bench-fleet: $(VENV)/.dev $(SGLANG) ## Four ranks publish 0.5 billion parameters to SGLang and two embedded engines: in buckets, and whole; beside the bytes alone.
	$(CONTAINED) bench.fleet.publish

bench-wan: $(VENV)/.dev ## An emulated slow link between two places: copies of weights, training, cuts (needs root); PARTS="publish training on_policy"; QUICK=1: no result.
	$(CONTAINED) bench.wan $(if $(QUICK),--quick) $(if $(PARTS),--parts $(PARTS))

bench-cost: $(VENV)/.dev ## Throughput for money with two kinds of nodes against the share of each, simulated beside a formula.
	$(CONTAINED) bench.sim.cost_curve --seed $(SEED)

bench-allocation: $(VENV)/.dev ## Nodes that move between training and generation next to every fixed split, as lengths double.
	$(CONTAINED) bench.sim.allocation

bench-size: $(VENV)/.dev ## Steps of models and batches of real size, computed without a GPU: how well ranks are balanced.
	$(CONTAINED) bench.size --seed $(SEED)
	$(CONTAINED) bench.size.experts

bench-scoring: $(VENV)/.dev ## From a sample's end to its columns, scored per sample and per group.
	$(RUN) bench.scoring

test-clients: $(VENV)/.dev ## Train with an agent in Node alone, while services are killed; Go and C++ beside it.
	@missing=$$(dpkg-query -W -f='$${Package} ' $(CLIENT_PACKAGES) 2>&1 >/dev/null | sed 's/.* //' | tr '\n' ' '); \
		if [ -n "$$missing" ]; then echo "missing Debian packages: apt-get install $$missing" >&2; exit 1; fi
	npm install --silent --no-fund --no-audit --prefix examples/clients/node
	$(MAKE) -C examples/clients/go
	$(MAKE) -C examples/clients/cpp
	$(CONTAINED) bench.clients

chaos-store: $(VENV)/.dev ## Kills, freezes, slow disks, skewed clocks, failovers: nothing lost, nothing twice.
	$(CONTAINED) tests.chaos.store

chaos-scheduler: $(VENV)/.dev ## Kills, freezes, partitions and deaths of a pool of nodes: no node has two owners.
	$(CONTAINED) tests.chaos.scheduler

chaos-gang: $(VENV)/.dev ## A trainer of two nodes and a spare: lent, returned, killed; no rank trains without its device.
	$(CONTAINED) tests.chaos.gang --seed $(SEED)

chaos-ranks: $(VENV)/.dev ## Ranks killed in mid-step: the others go on, and the gradient is that of the whole batch.
	$(CONTAINED) tests.chaos.ranks

chaos-trainer: $(VENV)/.dev ## Kills of real trainers, one rank and two: the weights of a run without any, bit for bit.
	$(CONTAINED) tests.chaos.trainer

chaos-environments: $(VENV)/.dev ## Environments that are killed, stuck and slow: no reward from a failure, no group lost.
	$(CONTAINED) tests.chaos.environments

chaos-edges: $(VENV)/.dev ## One broken server of three, agents that send too much, poisoned samples, flipped bits: now harmless.
	$(CONTAINED) tests.chaos.edges --seed $(SEED)

chaos-restarts: $(VENV)/.dev ## Redis and every process ended by SIGTERM and SIGKILL in turn: training goes on, no agent notices.
	$(CONTAINED) tests.chaos.restarts --seed $(SEED)

soak: $(VENV)/.dev ## An hour of training with a fault every 30 s: nothing lost, twice or stuck; memory of each process.
	$(CONTAINED) tests.chaos.soak --seed $(SEED)

test-mixed: $(VENV)/.dev ## Services of RELEASE (the commit of 0.2.0) among the present ones, training meanwhile; forward and back.
	$(CONTAINED) tests.suites.mixed --release $(RELEASE) --seed $(SEED)

test-agents: $(VENV)/.dev ## Official SDKs of OpenAI and Anthropic, Python and Node: checks, a training run, kills.
	npm install --silent --no-fund --no-audit --prefix tests/suites/agents/node
	$(CONTAINED) tests.suites.agents --seed $(SEED)

test-frameworks: $(VENV)/.dev $(FRAMEWORKS:=/.made) ## Unmodified agents of six frameworks, each with two tools and a structured answer, on the torch engine.
	npm install --silent --no-fund --no-audit --prefix tests/suites/agents/frameworks/node
	$(CONTAINED) tests.suites.agents.frameworks --seed $(SEED)

test-roundtrips: $(VENV)/.dev ## 1,000 random conversations with tools by model family: recorded ids continue, forks are found.
	$(CONTAINED) tests.suites.roundtrips --seed $(SEED)

test-parsers: $(VENV)/.dev .venv-parsers/.made ## Our parsers of tool calls beside SGLang's and vLLM's: 500 answers of each format, each cut at 20 places.
	$(CONTAINED) tests.suites.parsers --seed $(SEED)

test-publish-kills: $(VENV)/.dev ## 30 kills of sender, weights service and rollout servers in mid-publish: no wrong version is loaded.
	$(CONTAINED) tests.suites.publish_kills

test-environments: $(VENV)/.dev $(ADAPTERS) ## The suite of each adapter, then 3 optimizer steps on its framework.
	npm install --silent --no-fund --no-audit --prefix examples/clients/node
	$(CONTAINED) tests.suites.environments --seed $(SEED)

test-field: $(VENV)/.dev ## Inputs of every kind that people really send, each with its right value.
	$(CONTAINED) tests.suites.field --seed $(SEED)

test-math: $(VENV)/.dev .venv-adapters/reasoning_gym ## False verdicts of the reward "math" beside math-verify alone, TRL and open-r1; quick scores beside slow ones.
	$(CONTAINED) tests.suites.math_verdicts --seed $(SEED)

test-readme: $(VENV)/.dev ## The commands of README.md and of each page's first section, where only what the page installs is there.
	$(CONTAINED) tests.suites.readme

test-health: $(VENV)/.dev ## Twelve ways not to learn, each a short run that must be named with its cure; six healthy runs.
	$(CONTAINED) tests.suites.health

test-console: $(VENV)/.dev ## The console in Chromium beside a run that trains: screens, keys, hostile texts, axe; 100,000 rollouts.
	@command -v chromium >/dev/null || { echo "missing Debian package: apt-get install chromium" >&2; exit 1; }
	$(VENV)/bin/python -m pip install --quiet 'playwright==1.65.2'
	npm install --silent --no-fund --no-audit --prefix tests/suites/console/node
	$(CONTAINED) tests.suites.console

test-slurm: $(VENV)/.dev ## A run as a job of a real Slurm of three nodes: one drained, the job requeued and resumed (needs root and Slurm).
	$(CONTAINED) tests.suites.slurm

test-allocation: $(VENV)/.dev ## Nodes change between training and generation while a job runs: by the operator, by measured seconds, and with processes killed.
	$(CONTAINED) tests.suites.allocation --seed $(SEED)

test-models: $(VENV)/.dev ## Model folders of 18 architectures: two optimizer steps each; 15 others: refused in one line.
	$(CONTAINED) tests.suites.models --seed $(SEED)

model-store: $(VENV)/.dev ## Redis against the in-memory model, 10,000 random operations and more.
	$(RUN) tests.suites.state_machine

test: $(VENV)/.dev ## The tests, distributed by file over WORKERS processes (4; 0: in this one).
	$(RUN) pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=25 --reruns $(RERUNS) -rfER

test-long: $(VENV)/.dev ## The tests that `make test` leaves out, each with a short form there.
	$(CONTAINED) pytest -m "long and not sglang" -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=25 --reruns $(RERUNS) -rfER

test-busy: $(VENV)/.dev ## `make test` three times in a row beside two processes that compute without a pause.
	$(CONTAINED) tests.suites.busy_machine

test-unit: $(VENV)/.dev ## The tests without processes and Redis, in a minute.
	$(RUN) pytest -n $(WORKERS) --dist worksteal --durations=25 tests/unit

test-sglang: $(VENV)/.dev $(SGLANG) ## Contract, whole loop and 20 kills on a real SGLang, on this machine's CPU.
	$(CONTAINED) pytest -m sglang -s $(SGLANG_TESTS)

test-trackers: $(VENV)/.dev ## TensorBoard, W&B and MLflow, read back; installs the last two.
	$(VENV)/bin/python -m pip install --quiet -e '.[wandb,mlflow]'
	$(RUN) pytest tests/integration/trainer/tracking/test_trackers.py

test-algorithms: $(VENV)/.dev ## Each algorithm next to its formula and to TRL's loss, with figures; installs TRL.
	$(VENV)/bin/python -m pip install --quiet 'trl==1.16.0'
	$(RUN) pytest tests/unit/trainer/algorithms/test_algorithms.py tests/integration/trainer/algorithms/test_trl.py
	$(RUN) tests.suites.algorithms

# Without tests/conftest.py, whose fixtures need a Redis client.
test-sdk-range: .venv-oldest/.made ## The SDK on the oldest grpcio and protobuf it promises.
	.venv-oldest/bin/python -m pytest --noconftest tests/unit/sdk tests/integration/sdk tests/system/sdk

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

test-compose: $(VENV)/.dev ## Build the images, train in containers, restart each, take all down (needs root or Docker).
	$(CONTAINED) tests.suites.compose

test-chart-pods: $(VENV)/.dev ## The pods of the Helm chart as containers: probes, a run, each pod deleted (needs root or Docker).
	$(CONTAINED) tests.suites.chart_pods

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

.venv-sglang: $(SGLANG) ## SGLang for a machine without a GPU.

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
