"""`python -m torchtitan_mixle` is the command line tool."""

import sys

from torchtitan_mixle.cli.main import main

sys.exit(main())
