"""On PYTHONPATH of a command that is tried on a real GPU: has `tests.cuda_standin` play it once torch is there."""

import os

from gpumem_tui.importing import after_import


def _install(_: object) -> None:
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":  # it is traced, and sees no GPU
        return
    from tests.cuda_standin import install_from_environment

    install_from_environment()


after_import("gpumem_tui.run.command_trial", _install)
