# Generates the secrets of a deployment; see deploy/generate_secrets.py.
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN ["python3", "-m", "venv", "/opt/seamflow"]
# hadolint ignore=DL3059
RUN ["/opt/seamflow/bin/python", "-m", "pip", "install", "cryptography>=44,<50"]

# hadolint ignore=DL3006
FROM ${BASE_IMAGE}
LABEL org.opencontainers.image.title="seamflow secrets" \
      org.opencontainers.image.licenses="Apache-2.0"
ENV PATH=/opt/seamflow/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
COPY --from=build /opt/seamflow /opt/seamflow
WORKDIR /app
COPY deploy/generate_secrets.py ./
# Mount points of volumes, one for each service: a new volume inherits their owner.
RUN ["python", "-c", "import os, generate_secrets as g; [(os.makedirs(p), os.chown(p, 10001, 10001)) for p in ('/authority', '/secrets', *(f'/secrets/{name}' for name in g.SERVICES))]"]
USER 10001:10001
HEALTHCHECK NONE
ENTRYPOINT ["python", "/app/generate_secrets.py", "--authority", "/authority", "--out", "/secrets"]
