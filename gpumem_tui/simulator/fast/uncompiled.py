"""Does without torch's compiler and symbolic sizes until a program has use of them: both take long to load."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from functools import partial, reduce, wraps
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from types import ModuleType
from typing import Any, ClassVar

from gpumem_tui.simulator.torch_internals import ANSWERS, replace, without_replacements

_COMPILER = "torch._dynamo"
_CONFIG = f"{_COMPILER}.config"
_SIZES = "torch.fx.experimental.symbolic_shapes"
_FUNCTIONS = "torch.utils._sympy.functions"
_ALGEBRA = "sympy"
_DISTRIBUTED = "torch.distributed.tensor"
_PLAIN_TYPES = frozenset((bool, int, float, type(None)))


def leave_compiler_unloaded(torch: ModuleType) -> None:
    """Have ``import torch._dynamo`` load no more than its configuration until a program uses it.

    Fake tensors read that. The optimizers' calls at each step do nothing. Calls by which shape functions
    ask of symbolic sizes (whether one has a value) is answered without them, and without sympy, where sizes are
    numbers; whether a fake tensor is distributed, without the package of those.
    """
    if _COMPILER in sys.modules:
        return
    unloaded = _Unloaded(_COMPILER, [f"{path}/_dynamo" for path in torch.__path__])
    replace(torch, "_dynamo", unloaded)
    import_module(_CONFIG)
    unloaded.find_parts()
    if _SIZES not in sys.modules:
        replace(torch.fx.experimental, "symbolic_shapes", _PlainSizes(_SIZES))
    if _FUNCTIONS not in sys.modules:
        _Functions(_FUNCTIONS)
    spec = find_spec(_ALGEBRA) if _ALGEBRA not in sys.modules else None
    if spec is not None:
        algebra = _Algebra(_ALGEBRA, spec.submodule_search_locations)
        algebra.__spec__, algebra.__file__ = spec, spec.origin
        algebra.find_parts()
    if _DISTRIBUTED not in sys.modules:
        _leave_distributed_tensors_unloaded(torch)


def _leave_distributed_tensors_unloaded(torch: ModuleType) -> None:
    """Have torch's dispatcher ask `_DistributedTensors` of every tensor that has a class of its own whether it is one.

    It takes that from the package at its first such question and keeps it, so it is asked one here.
    """
    own = type("Own", (torch.Tensor,), {"__torch_dispatch__": classmethod(lambda *_: None)})
    sys.modules[_DISTRIBUTED] = package = ModuleType(_DISTRIBUTED)
    vars(package)["DTensor"] = _DistributedTensors()
    try:
        torch.neg(torch.Tensor._make_subclass(own, torch.empty(0)))
    finally:
        del sys.modules[_DISTRIBUTED]


class _DistributedTensors:
    """Stand-in for the class of all distributed tensors, where there may be none yet."""

    def __instancecheck__(self, instance: object) -> bool:
        found = vars(sys.modules.get(_DISTRIBUTED, ModuleType("none"))).get("DTensor")
        return isinstance(found, type) and isinstance(instance, found)

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(_DISTRIBUTED).DTensor, name)


def exclude_nothing(module: ModuleType) -> None:
    """Have functions that torch excludes from compilation, such as an optimizer's `zero_grad`, stay as they are.

    Args:
        module: ``torch._compile``, as yet unused.
    """
    replace(module, "_disable_dynamo", _kept)


def _kept(function: Callable[..., Any] | None = None, recursive: bool = True, **_: Any) -> Any:
    return partial(_kept, recursive=recursive) if function is None else function


class _Later(ModuleType):
    """Stand-in for a module, in `sys.modules` too; what is asked of it loads that.

    Args:
        path: of a package, where its modules are.
    """

    def __init__(self, name: str, path: list[str] | None = None) -> None:
        super().__init__(name)
        if path is not None:
            self.__path__ = path
        sys.modules[name] = self

    def find_parts(self) -> None:
        """Have who imports a part of this package load all of it first, perhaps with that part."""
        sys.meta_path.insert(0, _Parts(self))

    @property
    def stands(self) -> bool:
        """Return whether it was not loaded yet."""
        return sys.modules.get(self.__name__) is self

    def load(self) -> ModuleType:
        """Return the module itself; the first time it is loaded, and put where others have what stood for it."""
        if not self.stands:
            return sys.modules[self.__name__]
        del sys.modules[self.__name__]
        loaded = import_module(self.__name__)
        stood = {id(self): loaded}
        stood.update((id(value), getattr(loaded, name)) for name, value in vars(self).items() if _answers(value))
        for module in [*sys.modules.values()]:
            names = getattr(module, "__dict__", {})
            for name in [name for name, value in names.items() if id(value) in stood]:
                setattr(module, name, stood[id(names[name])])
        return loaded

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        return getattr(self.load(), name)


def _answers(value: Any) -> bool:
    """Return whether a value answers here in the place of a module's function."""
    return callable(value) and getattr(value, "__module__", "") == __name__


class _Unloaded(_Later):
    """Stand-in for the compiler."""

    def disable(self, function: Any = None, recursive: bool = True, **more: Any) -> Any:
        """Have the compiler, once it is there, leave a function alone with all that it calls."""
        if function is None:
            return partial(self.disable, recursive=recursive, **more)
        if not recursive or not callable(getattr(function, "__get__", None)):
            return self.load().disable(function, recursive, **more)

        @wraps(function)
        def alone(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        alone._torchdynamo_disable = True  # type: ignore[attr-defined]
        return alone

    @staticmethod
    def graph_break(*_: Any) -> None:
        """Do nothing: there is no graph."""

    @staticmethod
    def reset() -> None:
        """Do nothing, as nothing was compiled; torch's own asks a CUDA build for its graphs."""

    def load(self) -> ModuleType:
        """Return the compiler, which binds functions of symbolic sizes and knows them by what they are."""
        sizes = sys.modules.get(_SIZES)
        if isinstance(sizes, _Later):
            sizes.load()
        config = sys.modules.pop(_CONFIG, None) if self.stands else None
        with without_replacements(("*",), kept=ANSWERS):  # it knows functions of torch's by what they are
            compiler = super().load()
        plain = compiler.config.get_config_copy()
        for name, value in config.get_config_copy().items() if config is not None else ():
            if plain[name] != value:  # set by the program, before it was loaded
                setattr(compiler.config, name, value)
        replace(compiler, "reset", self.reset)
        return compiler


class _Parts(Loader):
    """Finds the parts of a package that is loaded by the first use of any.

    Args:
        package: what represents it.
    """

    def __init__(self, package: _Later) -> None:
        self._package = package

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        """Return the specification of a module that the loading has loaded; None for what others find."""
        if not name.startswith(f"{self._package.__name__}.") or not self._package.stands:
            return None
        self._package.load()
        sys.meta_path.remove(self)
        self._module = sys.modules.get(name)
        if self._module is None:
            return None
        self._spec = self._module.__spec__
        self._module.__spec__ = None  # importlib would take that instead of what is returned, and load it once more
        return spec_from_loader(name, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:  # noqa: ARG002 - Python's
        """Return the module, which is loaded already."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Run nothing: all was run as the module was loaded."""
        module.__spec__ = self._spec


# Symbolic sizes, of which none exist until a program compiles or exports


def _is_plain(value: Any) -> bool:
    """Return whether a value, a tensor's shape or what is in a list is no symbol's."""
    kind = type(value)
    if kind in _PLAIN_TYPES:
        return True
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    shape = getattr(value, "shape", None)
    return shape is not None and _is_plain(tuple(shape))


def _are_equal(one: Any, other: Any) -> bool:
    """Return whether two sizes or shapes are equal, for any kinds of sequences."""
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    return bool(one == other)


class _Algebra(_Later):
    """Stand-in for sympy, of which shape functions ask whether a number is an expression."""

    def __getattr__(self, name: str) -> Any:
        return _Expressions(self) if name == "Basic" and self.stands else super().__getattr__(name)


class _Expressions:
    """Stand-in for the class of all expressions, if missing yet."""

    def __init__(self, algebra: _Algebra) -> None:
        self._algebra = algebra

    def __instancecheck__(self, instance: object) -> bool:
        return not self._algebra.stands and isinstance(instance, self._algebra.load().Basic)

    def __mro_entries__(self, _bases: tuple[object, ...]) -> tuple[type, ...]:
        return (self._algebra.load().Basic,)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._algebra.load().Basic, name)


class _Functions(_Later):
    """Stand-in for torch's functions of expressions, one of which is imported to find out whether a tensor is dense."""

    def __getattr__(self, name: str) -> Any:
        is_asked_for_maximum = name == "Max" and self.stands
        return (lambda *values: self.load().Max(*values)) if is_asked_for_maximum else super().__getattr__(name)


class _NeverRaised(RuntimeError):
    """Stand-in for the error of a symbol of unknown value, where there are no symbols."""


class _PlainSizes(_Later):
    """Stand-in for the module of symbolic sizes; asking it for anything but plain sizes loads it, and sympy."""

    GuardOnDataDependentSymNode = _NeverRaised
    _KNOWN: ClassVar[dict[str, Callable[..., Any]]] = {
        **dict.fromkeys(
            ("guard_or_false", "guard_or_true", "statically_known_true", "expect_true", "guard_bool", "guard_int",
             "guard_size_oblivious"), lambda value, *_: value,
        ),
        **dict.fromkeys(("is_symbolic", "is_nested_int", "has_free_unbacked_symbols"), lambda _: False),
        **dict.fromkeys(("_iterate_exprs", "_iterate_nodes"), lambda _: iter(())),
        "has_guarding_hint": lambda _: True,
        "sym_and": lambda *values: reduce(operator.and_, values),
        "sym_or": lambda *values: reduce(operator.or_, values),
        "sym_eq": _are_equal,
    }  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        if not name.strip("_")[:1].islower() or name.startswith("__"):  # a class, or a constant
            return super().__getattr__(name)
        answer = self._KNOWN.get(name)

        def answered(*args: Any, **kwargs: Any) -> Any:
            if answer is not None and not kwargs and all(map(_is_plain, args)):
                return answer(*args)
            return getattr(self.load(), name)(*args, **kwargs)

        vars(self)[name] = answered
        return answered
