"""`python -m specinfer` is the `specinfer` command."""

import sys

from specinfer.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
