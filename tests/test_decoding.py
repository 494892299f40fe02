"""Decoding in threads: msgspec 0.22 crashes where two decode a type for the first time at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

_RACE = """
import dataclasses, sys, threading, types
import msgspec
from gpumem_tui.decoding import decodable

sys.setswitchinterval(1e-6)
module = sys.modules["kinds"] = types.ModuleType("kinds")
vars(module).update(dataclasses=dataclasses, msgspec=msgspec)
VALUE = dict(x=[dict(a=1, b=dict(k=[1]))], y=[], z=None, w=dict(q=dict(a=2, b={})))
for number in range(150):
    exec(f'''
{HEAD}
class Inner{number}{BASE}:
    a: int
    b: dict[str, list[int]]

{HEAD}
class Outer{number}{BASE}:
    x: list[Inner{number}]
    y: tuple[Inner{number}, ...]
    z: int | None
    w: dict[str, Inner{number}]
''', vars(module))
    kind, together, made = getattr(module, f"Outer{number}"), threading.Barrier(3), []

    def decode():
        together.wait()
        made.append(msgspec.convert(VALUE, decodable(kind)))

    threads = [threading.Thread(target=decode) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 3 and made[0] == made[1] == made[2], made
"""


@pytest.mark.parametrize(("head", "base"), [("@dataclasses.dataclass", ""), ("", "(msgspec.Struct)")])
def test_threads_that_decode_a_type_first_at_once_all_get_it(head: str, base: str) -> None:
    code = _RACE.replace("{HEAD}", head).replace("{BASE}", base)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
