"""The chart and the images of a deployment agree."""

from __future__ import annotations

import pytest

from tests.lib.deploy.chart import EXAMPLES, render
from tests.lib.deploy.support import IMAGES, compose


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_chart_runs_images_that_are_built(example: str) -> None:
    """By the names that `make images` gives them."""
    built = {each["image"].rsplit(":")[0] for each in compose(IMAGES)["services"].values()}
    for each in render(EXAMPLES[example]):
        if each["kind"] in ("Deployment", "StatefulSet", "Job"):
            (container,) = each["spec"]["template"]["spec"]["containers"]
            name = container["image"].rsplit(":")[0].rsplit("/")[-1]
            assert f"seamflow/{name}" in built, container["image"]
