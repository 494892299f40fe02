"""`python -m gpumem_tui`."""

import sys

NEEDED = (3, 10)


def run() -> None:
    """Run the program, unless its syntax is of a later Python than this one, which then reports it in one line."""
    if sys.version_info[:2] < NEEDED:
        this = f"{sys.executable} is {'.'.join(map(str, sys.version_info[:3]))}"
        print(f"gpumem-tui: needs Python {'.'.join(map(str, NEEDED))} or later, and {this}", file=sys.stderr)
        sys.exit(2)
    from gpumem_tui.cli import main

    main()


if __name__ == "__main__":
    run()
