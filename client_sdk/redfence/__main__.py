"""Runs the console command by `python -m redfence`."""

import sys

from redfence._cli.main import main

if __name__ == "__main__":
    sys.exit(main())
