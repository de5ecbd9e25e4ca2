"""`python -m nanogrpo` is the same as the command `nanogrpo` (commands.py)."""

import sys

from nanogrpo.commands import main

sys.exit(main())
