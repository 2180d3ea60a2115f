"""`python -m gradfit`: the command line."""

import sys

from gradfit.cli import main

if __name__ == "__main__":
    sys.exit(main())
