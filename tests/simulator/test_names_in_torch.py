"""Each name of torch's compiler that the register states was checked on a version of torch is there in that version.

The interpreters are those of `tests/command/test_torch_versions.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

import gpumem_tui

PYTHONS = [path for path in os.environ.get("GPUMEM_TUI_PYTHONS", "").split(os.pathsep) if path]
pytestmark = [
    pytest.mark.versions,
    pytest.mark.skipif(not PYTHONS, reason="GPUMEM_TUI_PYTHONS names no interpreter"),
    pytest.mark.parametrize("python", PYTHONS),
]

_OF_THE_COMPILER = ("_dynamo", "_inductor", "_functorch", "_prims.rng", "torch.compile", "custom_ops", "fx.")
_NOT_EVERYWHERE = {
    "torch._dynamo.eval_frame._torchdynamo_inline": "an attribute of functions",
    "torch._dynamo.eval_frame._torchdynamo_wrapper_id": "an attribute of functions",
    "torch._dynamo.eval_frame.OptimizedModule._orig_mod": "an attribute of its instances",
    "torch._library.custom_ops.CustomOpDef._backend_fns": "an attribute of its instances",
    "torch._inductor.scheduler.SchedulerNode._body": "an annotation of its instances",
    "torch.fx.Graph._find_nodes_lookup_table": "an attribute of its instances",
    "torch._C._dynamo.eval_frame.*": "read by the probe where it is there",
}
"""Names that are no attributes of a module or a class."""

_LOOK = """
import fnmatch, importlib, json, sys
import torch, torch._dynamo, torch._inductor.compile_fx, torch.distributed.device_mesh

def there(name):
    owner, rest = sys.modules["torch"], name.split(".")[1:]
    for place, part in enumerate(rest):
        if "*" in part:
            return any(fnmatch.fnmatchcase(found, part) and there_in(getattr(owner, found), rest[place + 1 :])
                       for found in dir(owner))
        try:
            owner = getattr(owner, part)
        except AttributeError:
            try:
                owner = importlib.import_module(f"{owner.__name__}.{part}")
            except (ImportError, AttributeError):
                return False
    return True

def there_in(owner, rest):
    for part in rest:
        if not hasattr(owner, part):
            return False
        owner = getattr(owner, part)
    return True

names = json.loads(sys.stdin.read())
print(json.dumps([".".join(torch.__version__.split(".")[:2]), [name for name in names if not there(name)]]))
"""


def checked() -> dict[str, tuple[str, ...]]:
    """The versions that each of these names was checked on, by name."""
    register = json.loads((Path(gpumem_tui.__file__).parent / "torch_internals.json").read_text())
    entries = [entry for section in ("replaced", "read") for entry in register[section]]
    return {
        name: tuple(entry.get("checked_on", register["checked_on"]))
        for entry in entries
        for name in entry["names"]
        if any(part in name for part in _OF_THE_COMPILER) and name not in _NOT_EVERYWHERE
    }


def test_each_name_is_there(python: str) -> None:
    names = checked()
    assert len(names) >= 50
    done = subprocess.run(
        [python, "-c", _LOOK], input=json.dumps(list(names)), capture_output=True, text=True, check=True
    )
    version, missing = json.loads(done.stdout.splitlines()[-1])
    assert [name for name in missing if version in names[name]] == []
