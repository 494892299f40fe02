"""Where GPU memory goes while a neural network trains, how large a batch fits, and what would make a larger one fit."""

__version__ = "0.1.0"


def attach() -> None:
    """Let gpumem-tui watch this training process: parameters, gradients, optimizer state, the allocator's figures.

    One line anywhere in the program, before or after the model is made. Never raises, has no thread, and costs nothing
    that can be measured; see `gpumem_tui.probe`.
    """
    from gpumem_tui.probe.entry import attach

    attach("call")
