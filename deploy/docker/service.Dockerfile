# One image for every process; the extra of pyproject.toml decides what is installed.
#   docker build -f deploy/docker/service.Dockerfile --build-arg EXTRA=weights -t seamflow/weights .
# For GPUs: --build-arg TORCH_INDEX_URL= (empty: pip's own index, whose torch brings its CUDA).
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS build
ARG EXTRA
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN ["python3", "-m", "venv", "/opt/seamflow"]
WORKDIR /src
COPY pyproject.toml deploy/docker/install.py ./
COPY deploy/sglang_cpu sglang_cpu
ARG SGLANG=
RUN ["/opt/seamflow/bin/python", "install.py"]
COPY README.md LICENSE ./
COPY sdk sdk
RUN ["/opt/seamflow/bin/python", "-m", "pip", "install", "--no-deps", "."]

# hadolint ignore=DL3006
FROM ${BASE_IMAGE}
ARG EXTRA
LABEL org.opencontainers.image.title="seamflow ${EXTRA}" \
      org.opencontainers.image.licenses="Apache-2.0"
ENV PATH=/opt/seamflow/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONPATH=/app \
    PYTHONSAFEPATH=1 \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    OMP_NUM_THREADS=1 \
    TOKENIZERS_PARALLELISM=false \
    HF_HUB_OFFLINE=1 \
    HOME=/tmp
# Mount points of volumes: a new volume inherits their owner.
RUN ["python3", "-c", "import os; [(os.makedirs(p), os.chown(p, 10001, 10001)) for p in ('/data', '/weights', '/cache')]"]
COPY --from=build /opt/seamflow /opt/seamflow
WORKDIR /app
COPY services services
COPY trajectory_manager trajectory_manager
COPY rollout rollout
COPY scheduler scheduler
COPY trainer trainer
COPY deploy deploy
COPY examples examples
USER 10001:10001
HEALTHCHECK --interval=5s --timeout=5s --start-period=60s --retries=6 \
    CMD ["python", "-m", "services.chassis.rpc.healthcheck", "127.0.0.1:9100"]
STOPSIGNAL SIGTERM
# Followed by the module and its flags, such as: services.weights --config weights.toml
ENTRYPOINT ["python", "-m"]
