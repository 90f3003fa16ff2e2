"""`python -m redfence`: the console command."""

import sys

from redfence._cli.main import main

if __name__ == "__main__":
    sys.exit(main())
