"""A real S3 server over HTTP in this process: moto's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import s3fs
from moto.server import ThreadedMotoServer

from tests.lib.redis_server import free_port
from trainer import object_path
from trainer.object_path import ObjectPath


@contextmanager
def s3_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectPath]:
    """A folder in an empty bucket; the environment has its address and credentials."""
    port = free_port()
    server = ThreadedMotoServer("127.0.0.1", port=port, verbose=False)
    server.start()
    environment = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/nowhere",
        "AWS_SHARED_CREDENTIALS_FILE": "/nowhere",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    try:
        forget_connections()
        bucket = f"checkpoints-{port}"
        s3fs.S3FileSystem().mkdir(bucket)
        yield ObjectPath(f"s3://{bucket}/run")
    finally:
        forget_connections()
        server.stop()


def forget_connections() -> None:
    """The next use reads the environment."""
    s3fs.S3FileSystem.clear_instance_cache()
    object_path._filesystem.cache_clear()
