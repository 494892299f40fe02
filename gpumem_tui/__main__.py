"""`python -m gpumem_tui`."""

from gpumem_tui.cli import main

if __name__ == "__main__":
    main()
