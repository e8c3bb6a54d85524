"""`python -m relayquant` is the command `relayquant`."""

import sys

from relayquant.cli import main

if __name__ == "__main__":
    sys.exit(main())
