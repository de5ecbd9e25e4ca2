"""TRL 1.16.0 with PEFT and bitsandbytes, on the same completions: equal loss and gradients of the
adapters on a base in four bits.

Read next: tests/grpo/test_trl_parity.py, the same comparison for all weights;
tests/model/test_nf4.py.
"""

import peft
import pytest
from trl.trainer.utils import add_fused_lm_head

from bench.trl_peer import REWARDS, Peer, config, give_rewards, make_samples, settings
from nanogrpo.extras.lora import adapters
from tests.conftest import write_base
from tests.grpo.alike import assert_trains_alike
from tests.model.lora_models import loaded, nudge
from tests.model.test_nf4 import KINDS, SHAPE, bitsandbytes_model

# of TRL to transformers, not of ours
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.mark.parametrize(("loss_type", "kind"), [("dapo", "plain"), ("grpo", "biases")])
def test_loss_and_gradients_of_the_adapters(tmp_path, loss_type, kind):
    base = write_base(tmp_path / "base", **SHAPE, **KINDS[kind])
    cfg = config(
        loss_type=loss_type,
        temperature=0.7,
        mask_truncated_completions=True,
        token_budget=24,
        lora_r=4,
        lora_alpha=10.0,
        load_in_4bit=True,
    )
    mine = nudge(loaded(base, cfg))
    adapters.write(adapters.host_adapters(mine), tmp_path / "adapter", cfg)

    theirs = bitsandbytes_model(base)
    add_fused_lm_head(theirs, temperature=cfg.temperature, outputs=("log_probs", "entropy"))
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter", is_trainable=True)

    samples = make_samples(vocab=100)
    peer = Peer(settings(cfg), samples, REWARDS["plain"], theirs.train())
    batch = peer.batch()
    give_rewards(samples, REWARDS["plain"], cfg)
    (loss,) = peer.losses(batch)
    loss.backward()
    expected = {
        name.replace(".default", ""): p.grad
        for name, p in theirs.named_parameters()
        if p.grad is not None
    }
    assert_trains_alike(mine, samples, cfg, loss, expected, adapters.peft_name)
