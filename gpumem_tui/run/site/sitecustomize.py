"""Runs at the start of every Python process of a command whose memory is predicted or searched: takes part, hands over.

The interpreter imports the first `sitecustomize` on its path; the one that this hides is run as if it were not hidden.
"""

import importlib.util
import os
import sys
from importlib.machinery import PathFinder

TYPE_CHECKING = False  # as type checkers read it
if TYPE_CHECKING:
    from gpumem_tui.run.session import Reporter

_HERE = os.path.dirname(os.path.abspath(__file__))
_PACKAGE = os.path.dirname(os.path.dirname(_HERE))


def _take_part() -> None:
    """Load this very package, though it is not on the path: the path is that of the program's own environment."""
    directory = os.environ.get("GPUMEM_TUI_TRIAL")
    if not directory:
        return
    if sys.version_info < (3, 10):  # noqa: UP036  any interpreter may run the command
        sys.exit("Python " + sys.version.split()[0] + " is too old: 3.10 or newer is needed to follow the command")
    spec = importlib.util.spec_from_file_location(
        "gpumem_tui", os.path.join(_PACKAGE, "__init__.py"), submodule_search_locations=[_PACKAGE]
    )
    if spec is None or spec.loader is None:
        return
    sys.modules["gpumem_tui"] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    from gpumem_tui.run.session import begin

    begin(directory, _torch_imported)


def _torch_imported(reporter: "Reporter") -> None:
    from gpumem_tui.run.command_trial import take_part

    take_part(reporter)


def _hand_over() -> None:
    """Run the `sitecustomize` that would have run. The interpreter reports its errors as ever."""
    others = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != _HERE]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        sys.modules["sitecustomize"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


_take_part()
_hand_over()
