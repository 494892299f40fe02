"""Start of a fork server: makes this copy of gpumem_tui importable in any interpreter, then runs `fork_server.serve`.

Run as a script by path, possibly by a Python that has never heard of the package. Nothing else of the installation this
file lies in becomes importable there.
"""

import importlib.util
import os
import sys


def _import_package() -> None:
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    spec = importlib.util.spec_from_file_location(
        "gpumem_tui", os.path.join(package, "__init__.py"), submodule_search_locations=[package]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpumem_tui"] = module
    spec.loader.exec_module(module)


if __name__ == "__main__":
    if sys.version_info < (3, 10):  # noqa: UP036  any interpreter may be given with --python
        sys.exit(f"Python {sys.version.split()[0]} is too old to train under: 3.10 or newer is needed")
    sys.path[0] = os.getcwd()
    _import_package()
    from gpumem_tui.search.fork_server import serve

    serve(int(sys.argv[1]), simulated=sys.argv[2] == "simulated")
