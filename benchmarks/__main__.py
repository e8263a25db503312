"""`python -m benchmarks NAME [KEY=VALUE ...]`: `longtrain bench` with the suites of this folder."""

import sys
from pathlib import Path

from benchmarks import SUITES
from longtrain import cli
from longtrain.bench import suites

CONF = Path(__file__).parent / "conf"


def main() -> None:
    """Run the benchmark that the first word names; the other words are keys, as for `longtrain bench`."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    known = ", ".join(SUITES)
    if name in ("-h", "--help"):
        sys.stdout.write(f"python -m benchmarks NAME [KEY=VALUE ...]; NAME: {known} (benchmarks/README.md)\n")
        return
    if name not in SUITES:
        sys.exit(f"benchmarks: no measurement is named '{name}'; known: {known} (benchmarks/README.md)")
    suites.SUITES.update(SUITES)
    sys.argv[1:] = ["bench", "--config-dir", str(CONF), f"suite={name}", *sys.argv[2:]]
    cli.main()


if __name__ == "__main__":
    main()
