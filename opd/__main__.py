"""`python -m opd …`, the same as the `opd` command; launchers such as torchrun start it by this name."""

from opd.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
