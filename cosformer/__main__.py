"""`python -m cosformer`."""

import sys

from cosformer.cli import main

if __name__ == "__main__":
    sys.exit(main())
