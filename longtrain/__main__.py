"""`python -m longtrain` is the same program as the `longtrain` command."""

from longtrain.cli import main

if __name__ == "__main__":
    main()
