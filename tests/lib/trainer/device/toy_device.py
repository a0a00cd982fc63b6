"""A device that is not the host: tensors of type "toy", whose values are computed on the CPU.

It runs under a dispatch mode: below autograd each operation gets the CPU tensors that toy tensors
wrap. As on a GPU, an operation on toy and host tensors together is an error unless the host's is
one number, and what makes the host wait for the device is noted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

Given = Mapping[str, Any] | None
DEVICE = "toy"
_COPIES = ("aten::copy_", "aten::_to_copy")
_WAITS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero")


class MixedDevicesError(RuntimeError):
    """Toy and host tensors met in one operation."""


class ToyTensor(torch.Tensor):
    """A tensor of the toy device."""

    raw: torch.Tensor

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> ToyTensor:
        """Wrap a tensor of the CPU, which it shares."""
        made: ToyTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device(DEVICE, 0),
            requires_grad=False,
        )
        made.raw = raw
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """As that of the values."""
        return f"ToyTensor({self.raw!r})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        call: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Outside of the mode, as in backward passes that its threads run."""
        assert ToyDevice.active is not None, "a toy tensor outside of toy_device()"
        return ToyDevice.active.run(call, args, dict(kwargs or {}))


class ToyDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Carries out all operations within; see `toy_device`."""

    active: ToyDevice | None = None

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.waits: list[str] = []
        """Operations for whose result the host had to wait, in order."""

    def __torch_dispatch__(
        self,
        call: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Each operation within."""
        return self.run(call, args, dict(kwargs or {}))

    def run(self, call: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Carry out one operation."""
        given, _ = tree_flatten((args, kwargs))
        tensors = [each for each in given if isinstance(each, torch.Tensor)]
        toys = [each for each in tensors if isinstance(each, ToyTensor)]
        asked = kwargs.get("device")
        to_toy = asked is not None and torch.device(asked).type == DEVICE
        to_host = asked is not None and not to_toy
        if not toys and not to_toy:
            return call(*args, **kwargs)
        name = call._schema.name
        if name not in _COPIES:
            _check(name, tensors)
        self._note(name, args, toys, to_host=to_host)
        if to_toy:
            kwargs["device"] = torch.device("cpu")
        found = call(*_raw(args), **_raw(kwargs))
        if to_host or (name == "aten::copy_" and not isinstance(args[0], ToyTensor)):
            return args[0] if name == "aten::copy_" else found
        wrapped = tree_map_only(torch.Tensor, ToyTensor, found)
        return return_and_correct_aliasing(  # type: ignore[no-untyped-call]
            call, tuple(args), kwargs, wrapped
        )

    def _note(self, name: str, args: Sequence[Any], toys: Sequence[Any], *, to_host: bool) -> None:
        from_toy = name == "aten::copy_" and toys and not isinstance(args[0], ToyTensor)
        masks = name.startswith("aten::index") and any(
            each.dtype == torch.bool for each in _tensors(args[1:2])
        )
        if name in _WAITS or masks or from_toy or (to_host and toys):
            self.waits.append(name.removeprefix("aten::"))


class _Numbers(TorchFunctionMode):
    """What fills or reads a tensor below any dispatch: it goes through a tensor of the host."""

    def __torch_function__(
        self,
        call: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Each function of torch."""
        given = dict(kwargs or {})
        device = given.get("device")
        if call is torch.tensor and device is not None and torch.device(device).type == DEVICE:
            return call(*args, **{**given, "device": "cpu"}).to(DEVICE)
        if call is torch.Tensor.tolist and isinstance(args[0], ToyTensor):
            return args[0].to("cpu").tolist()
        return call(*args, **given)


def _check(name: str, tensors: Sequence[torch.Tensor]) -> None:
    on_host = [each for each in tensors if not isinstance(each, ToyTensor) and each.dim()]
    if on_host:
        shape = tuple(on_host[0].shape)
        raise MixedDevicesError(
            f"{name} got a host tensor of shape {shape} beside those of {DEVICE}"
        )


def _tensors(given: Any) -> list[torch.Tensor]:
    return [each for each in tree_flatten(given)[0] if isinstance(each, torch.Tensor)]


def _raw(given: Any) -> Any:
    return tree_map_only(ToyTensor, lambda each: each.raw, given)


@contextmanager
def toy_device() -> Iterator[ToyDevice]:
    """The device exists within."""
    if torch._C._get_privateuse1_backend_name() != DEVICE:
        _setup_privateuseone_for_python_backend(DEVICE)
    with _Numbers(), ToyDevice() as device:
        ToyDevice.active = device
        try:
            yield device
        finally:
            ToyDevice.active = None


def moved(model: torch.nn.Module) -> torch.nn.Module:
    """The model with all parameters and buffers on the toy device; what is tied stays tied."""
    made: dict[int, Any] = {}

    def toy(tensor: torch.Tensor, wrap: Callable[[torch.Tensor], Any]) -> Any:
        return made.setdefault(id(tensor), wrap(ToyTensor(tensor.detach())))

    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = toy(parameter, torch.nn.Parameter)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = toy(buffer, lambda each: each)
    return model
