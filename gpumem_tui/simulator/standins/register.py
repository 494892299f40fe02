"""Stand-ins by shape: packages compiled for CUDA that can be imported on the simulated GPU, and what each is.

A package here that is not installed is found by `import`, `importlib.util.find_spec` and `importlib.metadata` all the
same; of one that is installed its Python part is used, and its compiled modules alone are stood in for. What stands in
is plain Python on tensors without data: it makes the outputs, what is saved for backward and the scratch that the
published source makes, in its order. Only a followed program on the simulated GPU finds any of it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, DistributionFinder
from types import ModuleType
from typing import Any

import torch

from gpumem_tui.simulator.device.gpu import backend


@dataclass(frozen=True)
class StandIn:
    """A package of which the compiled part is stood in for.

    Attributes:
        package, version: as pip knows them; the version whose source is followed.
        source: the files whose allocations are followed, within the package's repository.
        body: the file of this folder that has the functions.
        compiled: by compiled module its names, in words; stood in for wherever the package is installed or not.
            ``name=other`` is called `other` in `body`.
        layer: by module of its Python part its names; these stand in only where the package is not installed.
        passed_by: packages that take it where it is installed, unasked, and go on without: they do not find it.
    """

    package: str
    version: str
    source: str
    body: str
    compiled: Mapping[str, str]
    layer: Mapping[str, str]
    passed_by: tuple[str, ...] = ()

    @property
    def is_installed(self) -> bool:
        """Return whether its Python part is there without us."""
        return all(map(_is_on_path, {name.partition(".")[0] for name in self.layer}))

    @property
    def note(self) -> str:
        """Say what the result rests on."""
        where = "" if self.is_installed else "; it is not installed here, so its Python part is as well"
        return (
            f"{self.package} is not run: its kernels are stood in for by shape, as the source of {self.version} "
            f"allocates ({self.source}){where}"
        )


_FLASH_FUNCTIONS = "flash_attn_func"

STAND_INS: tuple[StandIn, ...] = (
    StandIn(
        package="flash-attn",
        version="2.8.3",
        source="csrc/flash_attn/flash_api.cpp",
        body="flash_attn",
        compiled={"flash_attn_2_cuda": "fwd bwd"},
        layer={"flash_attn": _FLASH_FUNCTIONS, "flash_attn.flash_attn_interface": _FLASH_FUNCTIONS},
    ),
)
"""All packages that are stood in for."""


def named(package: str) -> StandIn:
    """Return a package's stand-in."""
    return next(one for one in STAND_INS if one.package == package)


@contextmanager
def offered() -> Iterator[None]:
    """Have programs find the stand-ins within the context; what they have imported stays with them."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


@functools.cache
def _is_on_path(name: str) -> bool:
    return name in sys.modules or PathFinder.find_spec(name) is not None


class _Finder(DistributionFinder):
    """Finds modules and metadata of what is stood in for."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002 - the import system's protocol
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """Return the spec of a module that is stood in for; None of any other, and to whom it passes by."""
        for one in STAND_INS:
            if fullname in one.compiled:
                return _spec(fullname, one, one.compiled)
            if fullname in one.layer and not one.is_installed and _asking() not in one.passed_by:
                return _spec(fullname, one, one.layer)
        return None

    def find_distributions(self, context: Any = DistributionFinder.Context()) -> Iterator[Distribution]:  # noqa: B008
        """Yield metadata of packages that are not installed, under pip's name or the module's."""
        wanted = getattr(context, "name", None)
        for one in STAND_INS:
            names = {_normalized(name) for name in (one.package, *one.layer)}
            if (wanted is None or _normalized(wanted) in names) and not one.is_installed:
                yield _Metadata(one)


def _spec(name: str, one: StandIn, modules: Mapping[str, str]) -> ModuleSpec:
    is_package = any(other.startswith(f"{name}.") for other in modules)
    return ModuleSpec(name, _Loader(one, modules[name]), is_package=is_package, origin=f"{one.package}, stood in for")


def _asking() -> str:
    """Return the package whose code asks for a module, past the import system."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("importlib"):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _normalized(name: str) -> str:
    return name.replace("_", "-").lower()


class _Loader(Loader):
    """Fills a module with functions of a stand-in's body."""

    def __init__(self, one: StandIn, names: str) -> None:
        self._one = one
        self._names = names

    def exec_module(self, module: ModuleType) -> None:
        """Set each name, and the version."""
        body = import_module(f"gpumem_tui.simulator.standins.{self._one.body}")
        for name in self._names.split():
            public, _, own = name.partition("=")
            setattr(module, public, getattr(body, own or public))
        vars(module)["__version__"] = self._one.version


class _Metadata(Distribution):
    """What `importlib.metadata` answers of a package that is stood in for."""

    def __init__(self, one: StandIn) -> None:
        self._one = one

    def read_text(self, filename: str) -> str | None:
        """Return the file's text; None of those that are not there."""
        tops = sorted({name.partition(".")[0] for name in (*self._one.layer, *self._one.compiled)})
        return {
            "METADATA": f"Metadata-Version: 2.1\nName: {self._one.package}\nVersion: {self._one.version}\n",
            "top_level.txt": "\n".join(tops),
        }.get(filename)

    def locate_file(self, path: Any) -> Any:
        """Return a place where no file is."""
        return path


# What the bodies have in common


def kernel(package: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function stand for one of a package's compiled ones.

    Its body makes with torch what the compiled one makes (`torch.empty_like`, `x.new_empty`), in its order, and lets go
    of its scratch by returning. Values of what it returns are unknown. The result of the trace says that the package
    is stood in for.
    """

    def marked(body: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(body)
        def run(*args: Any, **kwargs: Any) -> Any:
            backend._gpu.notes[named(package).note] = None
            with torch.no_grad():
                return body(*args, **kwargs)

        return run

    return marked


def on_gpu(package: str, *tensors: torch.Tensor | None) -> None:
    """Raise as compiled code does of a tensor that does not lie on the GPU.

    Raises:
        RuntimeError: one lies elsewhere.
    """
    for tensor in tensors:
        if tensor is not None and not tensor.is_cuda:
            raise RuntimeError(f"{package}: input tensor must be on CUDA device, and is on {tensor.device}")
