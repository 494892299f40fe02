"""Tells errors of code that is compiled for CUDA, and names the cause and the remedy. Standard library only.

There is no GPU that runs it, so nobody knows what it allocates. Well-known packages are stood in for instead
(`gpumem_tui/simulator/standins`).
"""

from __future__ import annotations

import ast
import linecache
import os
import re
import sys
from collections.abc import Iterable, Iterator
from types import FrameType, ModuleType, TracebackType
from typing import Any

REMEDY = (
    "without a GPU only what PyTorch computes itself can be followed: choose PyTorch's own implementation (such as "
    "sdpa for attention), or run on a real GPU with --gpu 0"
)

_MODULES = re.compile(
    r"""_cuda(_\w+)?$|^_cuda\b|^(
    amp_C|apex_C|xformers|flash_attn\w*|gsplat|diff_\w*gaussian\w*|simple_knn|tinycudann|nvdiffrast|kaolin|spconv|
    torchsparse|MinkowskiEngine|pointnet2_ops|pytorch3d|curope|DCNv2|dcn_v2|mmcv\._ext|detectron2\._C|raymarching|
    gridencoder|exllama\w*|selective_scan\w*|mamba_ssm|causal_conv1d|transformer_engine\w*|cupy|natten|fused_ssim
    )(\.|$)""",
    re.VERBOSE,
)
"""Modules that are compiled for CUDA: a name's end, or the well-known ones (their repositories have .cu sources)."""

_LIBRARIES = re.compile(r"lib(cuda|cudart|cublas\w*|cudnn\w*|cusparse\w*|cufft|curand|nvrtc|c10_cuda|torch_cuda)\.so")
"""Libraries of CUDA, and of torch's build for it, that such a module loads."""

_WANTS_GPU = re.compile(
    r"(must be|should be|expected to be|is not|expects?|requires?|only supports?)( \w+){0,3} (CUDA|cuda|GPU)\b",
)
"""Errors of compiled code for a tensor that is not on CUDA in C++: on the simulated GPU none is."""

_NO_POINTER = (
    "Cannot access data pointer of Tensor",
    "The tensor has a non-zero number of elements, but its data is not",
)
_NO_DRIVER = ("numba.cuda", "cupy")
_NO_PART = re.compile(r"'NoneType' object has no attribute")
_ASKED_OF = re.compile(r"^cannot import name '(\w+)'")
CUDA_SOURCES = (".cu", ".cuh")
STOOD_IN = ", stood in for"
"""How the origin ends, in a module's spec, of what is stood in for, after the package's name."""

_MOST_FILES = 4000


class CompiledForCuda(RuntimeError):
    """A program asks for code that is compiled for CUDA. One line, without its place."""

    def __init__(self, name: str, sources: Iterable[object]) -> None:
        files = ", ".join(dict.fromkeys(os.path.basename(str(source)) for source in sources))
        super().__init__(f"{name} is compiled for CUDA{f' ({files})' if files else ''}; {REMEDY}")


def of_cuda(error: BaseException) -> str:
    """Return a sentence about code compiled for CUDA where that is behind an error; empty where it is not."""
    for one in _chain(error):
        if isinstance(one, CompiledForCuda):
            return str(one)
        words = " ".join(str(one).split())
        if missing := _missing_in_stand_in(one):
            return f"{missing}; {REMEDY}"
        if isinstance(one, (ImportError, OSError)) and (library := _LIBRARIES.search(words)):
            name = getattr(one, "name", None) or _library_in(words) or "the module"
            return f"{name} is compiled for CUDA, whose {library[0]} is not here; {REMEDY}"
        if isinstance(one, ModuleNotFoundError) and one.name and _MODULES.search(one.name):
            return f"{words}; it is compiled for CUDA, and {REMEDY}"
        if isinstance(one, ImportError) and _MODULES.search(one.name or ""):
            return f"{words}; {one.name} is compiled for CUDA, and {REMEDY}"
        if type(one).__module__.startswith(_NO_DRIVER):
            return f"{words}; {type(one).__module__.partition('.')[0]} compiles for CUDA itself, and {REMEDY}"
        if isinstance(one, RuntimeError) and (_WANTS_GPU.search(words) or words.startswith(_NO_POINTER)):
            name = _compiled_callee(one.__traceback__)
            if name:
                reads = (
                    "takes the address of a tensor, which has no data here" if words.startswith(_NO_POINTER) else words
                )
                return f"{name} is compiled code that works on the GPU's memory ({reads}); {REMEDY}"
        if isinstance(one, AttributeError) and _NO_PART.search(words):
            sources = _cuda_sources(one.__traceback__)
            if sources:
                return f"{words}: its package is compiled for CUDA ({sources}), and that part is missing; {REMEDY}"
    return ""


def _missing_in_stand_in(error: BaseException) -> str:
    """Name the package and what its stand-in lacks where a program asks for that; empty of any other error."""
    if isinstance(error, AttributeError) and isinstance(error.obj, ModuleType):
        module, missing = error.obj.__name__, f"{error.obj.__name__}.{error.name}"
    elif isinstance(error, ImportError) and error.name:
        asked = _ASKED_OF.search(str(error))
        module, missing = error.name, f"{error.name}.{asked[1]}" if asked else error.name
    else:
        return ""
    while module:
        origin = getattr(getattr(sys.modules.get(module), "__spec__", None), "origin", None) or ""
        if origin.endswith(STOOD_IN):
            package = origin.removesuffix(STOOD_IN)
            return f"{package} is compiled for CUDA, and what represents it by shape here has no {missing}"
        module = module.rpartition(".")[0]
    return ""


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those that it was raised from, the first of them first; one that was handled if it is ours."""
    found = [error]
    while True:
        behind = found[-1].__cause__
        if behind is None and isinstance(found[-1].__context__, CompiledForCuda):
            behind = found[-1].__context__
        if behind is None or behind in found:
            break
        found.append(behind)
    yield from reversed(found)


def _library_in(words: str) -> str:
    """Return the file that could not be loaded, as the loader's error begins with what it lacks."""
    found = [word.strip("':,()") for word in words.split() if word.endswith((".so", ".so:", ".so'"))]
    return next((os.path.basename(word) for word in found if not _LIBRARIES.search(word)), "")


# Which function of machine code a line calls


def _compiled_callee(trace: TracebackType | None) -> str:
    """Return the compiled function that the innermost line calls, with its module; empty where none is."""
    frame, number = _innermost(trace)
    if frame is None:
        return ""
    try:
        tree = ast.parse(linecache.getline(frame.f_code.co_filename, number).strip().rstrip(":"))
    except SyntaxError:
        return _called_anywhere(frame, number)
    return next((name for call in ast.walk(tree) if isinstance(call, ast.Call) if (name := _compiled(call, frame))), "")


def _called_anywhere(frame: FrameType, number: int) -> str:
    """Look for it in the whole file, where a call spans lines."""
    try:
        tree = ast.parse("".join(linecache.getlines(frame.f_code.co_filename)))
    except SyntaxError:
        return ""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    here = [call for call in calls if call.lineno <= number <= (call.end_lineno or call.lineno)]
    return next((name for call in reversed(here) if (name := _compiled(call, frame))), "")


def _compiled(call: ast.Call, frame: FrameType) -> str:
    """Return the name of what a call calls if it is machine code of a module outside of torch; else empty."""
    function = _value(call.func, frame)
    if function is None or getattr(function, "__code__", None) is not None or isinstance(function, type):
        return ""
    owner = _value(call.func.value, frame) if isinstance(call.func, ast.Attribute) else None
    file = str(getattr(owner, "__file__", ""))
    module = getattr(owner, "__name__", "") if file.endswith((".so", ".pyd")) else getattr(function, "__module__", "")
    if not module or str(module).partition(".")[0] in ("torch", "builtins", "numpy", "math"):
        return ""
    return f"{module}.{getattr(function, '__name__', ast.unparse(call.func))}"


def _value(node: ast.expr, frame: FrameType) -> Any:
    """Return what a name, or an attribute of one, represents in a frame; None where that is not known."""
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    if isinstance(node, ast.Attribute):
        owner = _value(node.value, frame)
        return None if owner is None else getattr(owner, node.attr, None)
    return None


def _innermost(trace: TracebackType | None) -> tuple[FrameType | None, int]:
    if trace is None:
        return None, 0
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame, trace.tb_lineno


def _cuda_sources(trace: TracebackType | None) -> str:
    """Return a CUDA source that comes with the package in which an error arose; empty where none does."""
    frame, _ = _innermost(trace)
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0] if frame is not None else ""
    root = f"{os.sep}{package}{os.sep}"
    file = frame.f_code.co_filename if frame is not None else ""
    if not package or root not in file:
        return ""
    seen = 0
    for folder, _, names in os.walk(file[: file.rindex(root) + len(root)]):
        seen += len(names)
        found = next((name for name in sorted(names) if name.endswith(CUDA_SOURCES)), "")
        if found:
            return os.path.relpath(os.path.join(folder, found), file[: file.rindex(root) + 1])
        if seen > _MOST_FILES:
            return ""
    return ""
