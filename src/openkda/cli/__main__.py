"""`python -m openkda.cli`, the form that torchrun can start on every rank."""

import sys

from openkda.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
