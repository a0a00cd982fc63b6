"""Lets SGLang load on a host without a GPU: names it imports from kernels that are not there.

SGLang imports `triton`, `torchvision` and `sgl_kernel` while its modules load, and on a CPU without
AMX then runs layers written in plain torch. Their wheels are CUDA builds of several hundred
megabytes, so in this environment the three are inert: any name of theirs can be imported, decorate,
annotate and be inherited from; calling one as a kernel raises.

A `.pth` file next to this module imports it when the interpreter starts, hence also in SGLang's
spawned children. Nothing happens before `sglang` itself is imported.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType

INERT = {"triton": "3.7.1", "torchvision": "0.0.0", "sgl_kernel": "0.0.0"}
"""Package -> the version it claims; SGLang compares triton's."""


class MissingKernel:
    """A function that only a GPU build has: it can be configured, but not called."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getitem__(self, grid: object) -> MissingKernel:
        return self

    def __call__(self, *args: object, **kwargs: object) -> None:
        raise NotImplementedError(
            f"{self.__name__} is a GPU kernel; this is SGLang's CPU environment"
        )


class Inert:
    """Stands for any name: a decorator with or without arguments, a type, a base, a constant."""

    __iter__ = None  # its `__getitem__` would make it an endless sequence

    def __call__(self, *args: object, **kwargs: object) -> object:
        decorated = args[0] if len(args) == 1 and not kwargs else None
        if isinstance(decorated, FunctionType):
            return MissingKernel(decorated.__qualname__)
        return decorated if isinstance(decorated, MissingKernel | type) else self

    def __getattr__(self, name: str) -> Inert:
        if name.startswith("__") or name == "active":  # triton.runtime.driver.active: no GPU
            raise AttributeError(name)
        return self

    def __getitem__(self, key: object) -> Inert:
        return self

    def __or__(self, other: object) -> Inert:
        return self

    __ror__ = __or__

    def __mro_entries__(self, bases: tuple[type, ...]) -> tuple[type, ...]:
        return ()

    def __instancecheck__(self, instance: object) -> bool:
        return False


class InertModule(ModuleType):
    """A package whose submodules and names all exist."""

    def __getattr__(self, name: str) -> Inert:
        if name.startswith("__"):
            raise AttributeError(name)
        return Inert()


class InertFinder:
    """Finds the inert packages, from the moment `sglang` is imported."""

    def __init__(self) -> None:
        self._active = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        root = name.partition(".")[0]
        if root == "sglang" and not self._active:
            self._active = True
            let_torch_find_no_triton()
            let_torch_register_no_memory()
        if root in INERT and self._active:
            return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return InertModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ in INERT:
            module.__version__ = INERT[module.__name__]  # type: ignore[attr-defined]


def let_torch_find_no_triton() -> None:
    """torch asks once whether there is a triton, and remembers; it must not see the inert one."""
    hidden = [finder for finder in sys.meta_path if isinstance(finder, InertFinder)]
    sys.meta_path[:] = [finder for finder in sys.meta_path if finder not in hidden]
    importlib.import_module("torch.utils._triton").has_triton_package()
    importlib.import_module("torch._inductor.runtime.triton_compat")
    sys.meta_path[:0] = hidden


class PlainHostMemory:
    """Answers for the CUDA runtime that host memory is registered: no device reads it here."""

    @staticmethod
    def cudaHostRegister(address: int, size: int, flags: int) -> int:  # noqa: N802 -- CUDA's name
        return 0


def let_torch_register_no_memory() -> None:
    """SGLang registers the record of routed experts with CUDA, also where there is none."""
    torch = importlib.import_module("torch")
    if torch.version.cuda is None:
        torch.cuda.cudart = lambda: PlainHostMemory


os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
sys.meta_path.insert(0, InertFinder())  # type: ignore[arg-type]
