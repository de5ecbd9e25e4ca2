"""`python -m nanogrpo` is the same as the command `nanogrpo` (extras/commands.py)."""

import sys

from nanogrpo.extras.commands import main

sys.exit(main())
