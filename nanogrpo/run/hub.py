"""Upload the result of a run to the Hugging Face hub (--push-to-hub).

In: a finished checkpoint. Out: one commit with the files that transformers and vLLM load, or with
--no-save-merged those that peft loads, and a model card. The state for --resume stays on this
machine. Read before: state.py.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

from nanogrpo.config import Config
from nanogrpo.errors import UserError, first_sentence
from nanogrpo.model.adapters import SUBFOLDER

log = logging.getLogger("nanogrpo")


def check(cfg: Config) -> None:
    """Raise UserError before training if the upload could not log in."""
    if not cfg.push_to_hub:
        return
    from huggingface_hub import get_token

    if get_token() is None:
        raise UserError(
            "--push-to-hub needs a token of the hub: log in with `hf auth login` or set HF_TOKEN."
        )


def push(cfg: Config, folder: Path) -> None:
    """Upload a checkpoint. The run is complete, so a failure is only logged."""
    from huggingface_hub import CommitOperationAdd, HfApi

    name = cfg.hub_model_id or Path(cfg.output_dir).resolve().name
    root = folder if cfg.save_merged else folder / SUBFOLDER
    try:
        api = HfApi()
        # None: as the owner of the repository prefers
        private = True if cfg.hub_private_repo else None
        repo = api.create_repo(name, private=private, exist_ok=True).repo_id
        operations = [CommitOperationAdd("README.md", card(cfg, folder, repo).encode())]
        for path in sorted(root.rglob("*")):
            part = path.relative_to(root)
            if path.is_file() and part.parts[0] not in ("state", "state.json", "README.md"):
                operations.append(CommitOperationAdd(part.as_posix(), path))
        message = f"Upload {folder.name}, trained with nanogrpo"
        url = api.create_commit(repo, operations, commit_message=message).commit_url
    # the hub client raises errors from many libraries, and none of them may lose a finished run
    except Exception as e:
        log.warning(
            "the upload to %s failed (%s); the checkpoint is complete, upload it again with: "
            "hf upload %s %s --exclude 'state*'",
            *(name, first_sentence(e), name, root),
        )
    else:
        log.info("uploaded %s: %s", folder, url)


def card(cfg: Config, folder: Path, repo: str) -> str:
    """Return the model card. It names no folders of this machine."""
    on_hub = not Path(cfg.model).exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", cfg.model)
    library = "transformers" if cfg.save_merged else "peft"
    head = [f"library_name: {library}", "tags: [grpo, nanogrpo]"]
    head += [f"base_model: {cfg.model}"] if on_hub else []
    data = ", ".join(f"`{Path(name).name}`" for name in cfg.data)
    rewards = ", ".join(f"`{name.rpartition('/')[2]}`" for name in cfg.reward_funcs)
    steps = folder.name.removeprefix("checkpoint-")
    return "\n".join(
        [
            "---",
            *head,
            "---",
            "",
            f"# {repo.rpartition('/')[2]}",
            "",
            f"Trained from {f'`{cfg.model}`' if on_hub else 'a local checkpoint'} with"
            " [GRPO](https://arxiv.org/abs/2402.03300), using nanogrpo.",
            "",
            f"* {steps} steps of {cfg.generation_batch_size} completions, {cfg.num_generations} per"
            " prompt",
            f"* loss `{cfg.loss_type}`, beta {cfg.beta:g}, learning rate {cfg.learning_rate:g}",
            f"* data: {data}",
            f"* rewards: {rewards}",
            "",
        ]
    )
