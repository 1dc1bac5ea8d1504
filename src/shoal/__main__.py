"""`python -m shoal` is `shoal`."""

import sys

from shoal.cli import main

sys.exit(main())
