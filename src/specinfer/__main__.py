"""The `specinfer` command, which is `python -m specinfer`, too."""

import sys


def main() -> int:
    """Run the command line that the process was given. Ctrl-C may come while it is still being imported."""
    try:
        from specinfer.cli.app import main as run

        return run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
