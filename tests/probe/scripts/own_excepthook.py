"""Shows errors in its own way, as `rich.traceback.install` does, and wraps the one that memory ran out."""

import sys

import torch


def show(_kind: object, error: BaseException, _trace: object) -> None:
    print(f"own report: {error}", file=sys.stderr)


def main() -> None:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    try:
        torch.empty(1 << 48, dtype=torch.uint8)
    except RuntimeError as error:
        raise ValueError("the batch is too large") from error


sys.excepthook = show
main()
