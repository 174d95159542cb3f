"""``python -m services.cli``: the command line where ``pdmesh`` is not installed."""

import sys

from services.cli import main

if __name__ == "__main__":
    sys.exit(main())
