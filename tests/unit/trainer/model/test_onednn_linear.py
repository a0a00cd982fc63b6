"""Linear layers by oneDNN: the same layer, with the same gradients."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.lib.trainer.ranks.gang_run import run_rank
from tests.lib.trainer.support import JOB_CONFIG, make_model
from trainer.model import load_model as module
from trainer.model.load_model import use_onednn

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(),  # type: ignore[no-untyped-call]
    reason="torch has no oneDNN here",
)

WIDE = (512, 96)
"""Tokens and inputs; with 64 outputs a product that oneDNN takes."""


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of what oneDNN multiplied."""
    shapes: list[tuple[int, ...]] = []
    plain = module._product

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        shapes.append(tuple(x.shape))
        return plain(x, weight, bias)

    monkeypatch.setattr(module, "_product", counted)
    return shapes


def gradients(layer: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    """The output, and gradients of the input and of all parameters."""
    x = x.clone().requires_grad_()
    output = layer(x)
    output.backward(grad)
    assert x.grad is not None
    return [output, x.grad, *(parameter.grad for parameter in layer.parameters())]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("batch", [(), (2,), (1, 2)])
def test_output_and_gradients_are_those_of_the_layer(
    bias: bool, batch: tuple[int, ...], products: list[tuple[int, ...]]
) -> None:
    """To float32's precision, against float64, whatever the batch's shape."""
    torch.manual_seed(1)
    layer = nn.Linear(WIDE[1], 64, bias=bias)
    exact = copy.deepcopy(layer).double()
    x, grad = torch.randn(*batch, *WIDE), torch.randn(*batch, WIDE[0], 64)
    use_onednn(layer)
    ours, expected = gradients(layer, x, grad), gradients(exact, x.double(), grad.double())
    assert len(products) == 3
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-4)


def test_only_what_needs_a_gradient_costs_a_product(products: list[tuple[int, ...]]) -> None:
    """For a frozen weight, or an input without gradient."""
    layer = nn.Linear(WIDE[1], 64, bias=False)
    use_onednn(layer)
    layer(torch.randn(WIDE)).sum().backward()
    assert len(products) == 2
    layer.requires_grad_(False)
    layer(torch.randn(WIDE, requires_grad=True)).sum().backward()
    assert len(products) == 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_and_small_products_stay_torchs(
    dtype: torch.dtype, products: list[tuple[int, ...]]
) -> None:
    """The control to the tests above: the same layer, and nothing is oneDNN's."""
    layer = nn.Linear(WIDE[1], 64)
    use_onednn(layer)
    small, plain = torch.randn(4, WIDE[1]), nn.Linear(WIDE[1], 64)
    plain.load_state_dict(layer.state_dict())
    assert torch.equal(layer(small), plain(small))
    wide = torch.randn(WIDE, dtype=dtype)
    assert torch.equal(layer.to(dtype)(wide), plain.to(dtype)(wide))
    assert products == []


def test_layers_keep_their_names_and_other_kinds_their_own_way() -> None:
    """A checkpoint of either loads into the other; a subclass may do more than multiply."""

    class Scaled(nn.Linear):
        """Not ours to change."""

    model = nn.Sequential(nn.Linear(4, 4), Scaled(4, 4), nn.Identity())
    names = list(model.state_dict())
    use_onednn(model)
    assert list(model.state_dict()) == names
    assert [isinstance(layer, nn.Linear) for layer in model] == [True, True, False]
    assert type(model[1]) is Scaled


def trained(model: Path, out: Path, setting: dict[str, Any]) -> dict[str, Tensor]:
    """Weights after three steps of a sharded model in float32."""
    config = {**JOB_CONFIG, "dtype": "float32", **setting}
    run_rank({"config": config, "model": str(model), "out": str(out), "steps": [1, 2, 3]})
    return load_file(out / "weights.safetensors")


@pytest.mark.parametrize(
    "setting",
    [{}, {"activation_checkpointing": True}, {"lora__rank": 4, "lora__targets": ["down_proj"]}],
    ids=str,
)
def test_a_sharded_model_learns_the_same(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    products: list[tuple[int, ...]],
    setting: dict[str, Any],
) -> None:
    """Its weights come and go around each block; a run is repeated to the last bit."""
    model = make_model(tmp_path / "model")
    plain = trained(model, tmp_path / "plain", setting)
    assert products == [], "the model is too small to gain"
    monkeypatch.setattr(module, "_SMALLEST", 0)
    ours, again = (trained(model, tmp_path / name, setting) for name in ("ours", "again"))
    assert len(products) > 100
    for name, tensor in plain.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=2e-4)
        assert torch.equal(ours[name], again[name])


def test_one_dimension_is_torchs(products: list[tuple[int, ...]], monkeypatch: Any) -> None:
    """There is no row to multiply by."""
    monkeypatch.setattr(module, "_SMALLEST", 0)
    layer = nn.Linear(8, 4)
    use_onednn(layer)
    layer(torch.randn(8)).sum().backward()
    assert products == []
