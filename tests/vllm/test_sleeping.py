"""Sleep mode against the fake server, which refuses requests in a wrong order: trainer and server
take turns, and a server that sleeps can be lost and recovered.

With a real vLLM: test_real.py. Read next: test_gpus.py.
"""

from functools import partial

import pytest
import torch

import train
from nanogrpo.vllm import feature, gpus
from nanogrpo.vllm.sleeping import SleepingEngine
from tests.conftest import arguments, lines, timeless, tiny_config, tiny_model
from tests.vllm import pretend
from tests.vllm.fake import PARAMS, PROMPTS, FakeSidecar, FakeVLLM, engine_of, sample

BOTH = {"weights", "kv_cache"}


def sleeping(fake: FakeVLLM, **options) -> SleepingEngine:
    client = engine_of(fake, sleeps=True, **options)
    return SleepingEngine(client, client)


def test_the_server_wakes_gets_the_weights_samples_and_sleeps(fake):
    expected = sample(engine_of(fake))
    fake.requests.clear()
    engine = sleeping(fake)
    assert fake.asleep == BOTH
    assert sample(engine) == expected
    posts = [path for method, path, _ in fake.requests if method == "POST"]
    asleep = ["/sleep"]
    update = ["/start_weight_update", "/update_weights", "/finish_weight_update"]
    awake = ["/wake_up", "/pause", *update, "/wake_up", "/resume"]
    generate = ["/inference/v1/generate"] * len(PROMPTS)
    connect = ["/init_weight_transfer_engine"]
    assert posts == [*asleep, *connect, *awake, *generate, *asleep]
    tags = [body["tags"] for _, path, body in fake.requests if path == "/wake_up"]
    assert tags == ["weights", "kv_cache"]
    assert (fake.asleep, fake.wrong) == (BOTH, [])


def test_the_weights_and_their_label_are_there_after_each_sleep(fake):
    """After an evaluation they have not changed, but the server has lost them."""
    engine, model = sleeping(fake), tiny_model()
    seen = []
    choice = fake.choice
    fake.choice = lambda i, params: (
        seen.append((fake.label, dict(fake.weights))) or choice(i, params)
    )
    for version in (0, 0, 1):
        engine.load(model, version)
        samples = engine.sample(PROMPTS[:1], 1, PARAMS, step=0)
        assert samples[0].versions == [version] * len(samples[0].token_ids)
        assert (engine.version, fake.weights) == (version, {})
        label, weights = seen.pop()
        assert label == engine.client.sync.label(version)
        assert all(torch.equal(weights[n], p) for n, p in model.named_parameters())
        with torch.no_grad():
            model.model.norm.weight.add_(1)
    assert fake.wrong == []


def test_the_trainer_frees_its_cached_memory_before_the_server_wakes(fake):
    fake.facts |= {"gpus": ["A"], "nccl": "2.29.7"}
    freed = []
    with pretend.cuda("A") as called:
        engine = sleeping(fake, world=pretend.WORLD)
        fake.disturb = lambda m, p, b: freed.append(called.empty_cache) if "wake" in p else None
        sample(engine)
    assert freed == [1, 1]
    assert fake.wrong == []


@pytest.mark.parametrize("path", ["/wake_up", "/pause", "/update_weights", "/finish_weight_update"])
@pytest.mark.parametrize("when", [0, 1])
def test_a_sync_that_fails_halfway_is_repeated_in_the_right_order(fake, path, when):
    """A server whose KV cache is not there must not resume."""
    engine = sleeping(fake, patience=60.0)
    expected = sample(engine)
    calls = []

    def disturb(method, called, body):
        if called == path:
            calls.append(called)
            return 500 if len(calls) == when + 1 else None

    fake.disturb = disturb
    assert sample(engine) == sample(engine) == expected
    assert len(calls) > when + 1
    assert (fake.asleep, fake.wrong) == (BOTH, [])


@pytest.mark.parametrize("when", ["asleep", "waking", "sampling", "falling asleep"])
def test_a_server_that_is_lost_in_any_state_is_restarted_and_gets_the_weights(fake, when):
    sidecar = FakeSidecar(fake)
    client = sidecar.engine(sleeps=True)
    engine = SleepingEngine(client, client)
    expected = sample(engine)
    where = {"waking": "/wake_up", "sampling": "generate", "falling asleep": "/sleep"}.get(when, "")

    def dies(method, path, body):
        if where in path:
            fake.disturb = lambda *call: 500
            return 500

    fake.disturb = dies
    assert sample(engine) == expected
    assert sample(engine) == expected
    assert (sidecar.starts, client.restarts, fake.wrong) == (2, 1, [])
    engine.close()


def test_a_run_in_sleep_mode_has_the_same_steps_and_evaluations(
    tiny_base, tiny_tokenizer, files, tmp_path, monkeypatch
):
    monkeypatch.setattr(gpus, "shares", lambda cfg, world: False)  # which refuses a CPU
    runs = {"awake": [], "asleep": ["--vllm-enable-sleep-mode"]}
    for name, options in runs.items():
        with FakeVLLM(tiny_config(vocab_size=tiny_tokenizer.vocab_size)) as fake:
            monkeypatch.setattr(feature, "Sidecar", partial(FakeSidecar, fake))
            options += ["--engine", "vllm", "--weight-transport", "memory", "--eval-steps", "2"]
            options += ["--eval-data", str(files / "uneven.jsonl"), "--max-resample-times", "1"]
            assert train.main(arguments(tiny_base, files, tmp_path / name, *options)) == 0
            assert (fake.wrong, fake.asleep) == ([], BOTH if name == "asleep" else set())
    records = [[timeless(row) for row in lines(tmp_path / name) if "step" in row] for name in runs]
    assert len(records[0]) == 3 + 3  # steps, and evaluations after 0, 2 and 3
    assert records[0] == records[1]
