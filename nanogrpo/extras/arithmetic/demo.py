"""See a tiny model learn, in one to five minutes on two CPU cores.

    nanogrpo demo [FOLDER]

In: nothing. Out: three things in FOLDER (runs/demo): a base model that has learned arithmetic from
examples (warmup.py), a run that trains this model with GRPO on the task `arithmetic`, and the page
of `nanogrpo view`. A second demo in the same folder replaces the run, but keeps the base model.
Read next: train.py.
"""

from nanogrpo.extras import api, commandline
from nanogrpo.extras.arithmetic import warmup
from nanogrpo.extras.view import server

OPTIONS = """
    --data arithmetic --max-steps 60 --generation-batch-size 128 --max-concurrent 128
    --max-completion-length 48 --learning-rate 5e-5 --eval-steps 5 --save-steps 5
    --load-best-model-at-end --metric-for-best-model accuracy_reward
    --log-completions --log-tokens --overwrite-output-dir
"""


def main(argv: list[str]) -> None:
    folder = argv[0] if argv else "runs/demo"
    print("First, a small model learns to write solutions. This takes one to four minutes.")
    warmup.main([f"{folder}/base"])
    given = f"--model={folder}/base", f"--output-dir={folder}"
    api.train(commandline.parse([*OPTIONS.split(), *given]))
    server.main([folder])
