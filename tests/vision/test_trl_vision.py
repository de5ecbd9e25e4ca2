"""TRL 1.16.0 with pictures, on the same completions: equal prompts, loss and gradients of all
weights.

TRL's own code prepares the pictures, with transformers' Qwen3VLProcessor. Only the part of that
processor that reads videos is left out, because it needs torchvision. Read next:
tests/grpo/test_trl_parity.py, the same without pictures.
"""

import random

import pytest
import torch
import transformers
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl import Qwen3VLProcessor
from trl.trainer.utils import add_fused_lm_head

from bench import trl_peer
from bench.trl_peer import REWARDS, config, give_rewards, make_samples, settings
from examples import pictures
from nanogrpo.extras.vision.model import VisionDecoder
from nanogrpo.model import checkpoint
from tests.conftest import said, set_logp
from tests.grpo.alike import assert_trains_alike
from tests.vision.base import prompts_of

# of TRL to transformers, not of ours
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


class Processor(Qwen3VLProcessor):
    """Without its video processor, which needs torchvision."""

    def check_argument_for_proper_class(self, name, argument):
        return None if argument is None else super().check_argument_for_proper_class(name, argument)


class Peer(trl_peer.Peer):
    """TRL's trainer, to which the pictures of each sample are given too."""

    is_deepspeed_enabled = False

    def __init__(self, folder, rows, *args):
        super().__init__(*args)
        self.rows, self.chat_template_kwargs = rows, {}
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.processing_class = Processor(
            Qwen2VLImageProcessorPil.from_pretrained(folder),
            tokenizer,
            None,
            chat_template=(folder / "chat_template.jinja").read_text(),
        )

    def batch(self) -> dict:
        batch = self._generate_and_score_completions([self.rows[s.prompt.id] for s in self.samples])
        updates = self.args.steps_per_generation // self.args.gradient_accumulation_steps
        batch["num_items_in_batch"] *= updates
        return batch


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A random model whose logits are spread like those of a trained one."""
    folder = tmp_path_factory.mktemp("vision")
    model, tokenizer = pictures.new_model(folder, seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=generator))
    checkpoint.export(model, folder, tokenizer)
    return folder


def rows() -> list[dict]:
    """Return two records: one with two pictures before its text, one with one between texts. The
    three pictures have different sizes.
    """
    rng = random.Random(0)
    dice = {colour: (i + 1, i) for i, colour in enumerate(pictures.COLOURS)}
    a, b, c = (
        pictures.picture(pictures.Problem((), size, dice), rng) for size in ((2, 3), (4, 2), (3, 3))
    )
    parts = [{"type": "text", "text": "1+1="}, {"type": "image"}, {"type": "text", "text": "red="}]
    return [
        {"prompt": said("red+blue="), "images": [a, b]},
        {"prompt": said(parts), "images": [c]},
    ]


@pytest.mark.parametrize("off_policy", [False, True], ids=["on-policy", "off-policy"])
def test_prompts_loss_and_gradient_of_every_parameter(base, off_policy):
    cfg = config(temperature=0.7, epsilon=0.02, mask_truncated_completions=True, token_budget=64)
    mine = checkpoint.load_model(base, kind=VisionDecoder)
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(
        base, dtype=torch.float32, attn_implementation="eager"
    )
    add_fused_lm_head(theirs, temperature=cfg.temperature, outputs=("log_probs", "entropy"))
    prompts = prompts_of(rows(), pictures.Tokenizer(base), base)
    samples = make_samples(vocab=97)
    for sample in samples:
        sample.prompt = prompts[sample.prompt.id]
    args = settings(cfg, off_policy=off_policy)
    peer = Peer(base, rows(), args, samples, REWARDS["plain"], theirs.train())
    batch = peer.batch()

    # the pictures and the expanded prompts of TRL's processor are ours
    pixels = torch.cat([torch.as_tensor(s.prompt.inputs.pixels) for s in samples])
    torch.testing.assert_close(batch["pixel_values"], pixels.float(), rtol=1e-5, atol=1e-6)
    grids = [list(grid) for s in samples for grid in s.prompt.inputs.grid]
    assert batch["image_grid_thw"].tolist() == grids
    assert len({tuple(grid) for grid in grids}) == 3
    for kinds, ids, sample in zip(batch["mm_token_type_ids"], batch["prompt_ids"], samples):
        n = len(sample.prompt.token_ids)
        assert ids.tolist()[-n:] == sample.prompt.token_ids
        marked = kinds[: len(ids)][-n:].nonzero().flatten().tolist()
        assert marked == list(sample.prompt.inputs.rows)

    give_rewards(samples, REWARDS["plain"], cfg)
    assert ("old_per_token_logps" in batch) == off_policy
    if off_policy:
        set_logp(mine, samples, "old_logp", cfg)
        for model in (mine, theirs):  # an update, the same on both sides
            with torch.no_grad():
                for name, p in model.named_parameters():
                    generator = torch.Generator().manual_seed(len(name))
                    p.add_(0.01 * torch.randn(p.shape, generator=generator))
    loss = peer._compute_loss(theirs, batch)
    loss.backward()
    expected = {name: p.grad for name, p in theirs.named_parameters()}
    assert len(assert_trains_alike(mine, samples, cfg, loss, expected)) > 1
