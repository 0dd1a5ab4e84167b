"""`python -m deepen` is the command `deepen`."""

import sys

from deepen.cli import main

sys.exit(main())
