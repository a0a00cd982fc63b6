# Every process, on two shared bases: `chassis` holds what all need, `torch` also what all need that
# compute with a model. An image is the extra of pyproject.toml that it names, on one of them:
#   docker build -f deploy/docker/service.Dockerfile --build-arg EXTRA=weights -t seamflow/weights .
#   … --build-arg EXTRA=trainer --build-arg SHARED=torch -t seamflow/trainer .
# `make images` builds all of deploy/compose.images.yml, each base once.
# From a mirror of the package index: --build-arg PIP_INDEX_URL=https://…
# For GPUs: --build-arg TORCH_INDEX_URL= (empty: pip's own index, whose torch brings its CUDA).
ARG BASE_IMAGE=python:3.11-slim-bookworm
ARG SHARED=chassis
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu

FROM ${BASE_IMAGE} AS chassis
ARG PIP_INDEX_URL
ENV PATH=/opt/seamflow/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONPATH=/app \
    PYTHONSAFEPATH=1 \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    OMP_NUM_THREADS=1 \
    TOKENIZERS_PARALLELISM=false \
    HF_HUB_OFFLINE=1 \
    HOME=/tmp \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1
RUN ["python3", "-m", "venv", "/opt/seamflow"]
WORKDIR /opt/build
COPY pyproject.toml deploy/docker/install.py ./
RUN ["python", "install.py", "chassis"]

# Seamflow itself comes last, so that a change of it downloads nothing again.
FROM chassis AS sdk
ARG PIP_INDEX_URL
COPY README.md LICENSE ./
COPY sdk sdk
RUN ["python", "-m", "pip", "wheel", "--no-deps", "--wheel-dir", "/wheels", "."]

# What scoring needs, trainers and rollout servers need too.
FROM chassis AS torch
ARG PIP_INDEX_URL
ARG TORCH_INDEX_URL
RUN ["python", "install.py", "scoring"]

# hadolint ignore=DL3006
FROM ${SHARED}
ARG EXTRA
ARG PIP_INDEX_URL
ARG TORCH_INDEX_URL
ARG SGLANG=
COPY deploy/sglang_cpu sglang_cpu
RUN ["python", "install.py"]
# "yes" makes the quickstart's model, which changes with these two files alone.
ARG START=
COPY examples/quickstart/prepare.py examples/quickstart/task.py /app/examples/quickstart/
COPY deploy/docker/start.py ./
RUN ["python", "start.py"]
COPY --from=sdk /wheels /wheels
RUN ["python", "-m", "pip", "install", "--no-deps", "--no-index", "--find-links", "/wheels", "seamflow"]
LABEL org.opencontainers.image.title="seamflow ${EXTRA}" \
      org.opencontainers.image.licenses="Apache-2.0"
WORKDIR /app
COPY services services
COPY trajectory_manager trajectory_manager
COPY rollout rollout
COPY scheduler scheduler
COPY trainer trainer
COPY deploy deploy
COPY examples examples
# The root is read-only when it runs: without this every start would compile all modules again.
RUN ["python", "-m", "compileall", "-q", "/app"]
RUN ["python", "-m", "deploy.docker.mount_points"]
USER 10001:10001
HEALTHCHECK --interval=5s --timeout=5s --start-period=60s --retries=6 \
    CMD ["python", "-m", "services.chassis.rpc.healthcheck", "127.0.0.1:9100"]
STOPSIGNAL SIGTERM
# Followed by the module and its flags, such as: services.weights --config weights.toml
ENTRYPOINT ["python", "-m"]
