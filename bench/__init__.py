"""Each script in this folder is a benchmark that answers one question. All benchmarks write records
to bench/results/, from which all tables and plots are generated. Read first: common.py.
"""

import os

# Otherwise, transformers prints progress bars and messages between the rows of a table.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
