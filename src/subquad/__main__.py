"""`python -m subquad` is the command `subquad`."""

from subquad.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
