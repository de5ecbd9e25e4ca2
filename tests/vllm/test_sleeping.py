"""Sleep mode against the fake server, which refuses requests in a wrong order: trainer and server
take turns, and a server that sleeps can be lost and recovered.

With a real vLLM: test_real.py. Read next: test_gpus.py.
"""

from __future__ import annotations

import pytest
import torch

import train
from nanogrpo.errors import UserError
from nanogrpo.model.tokenizer import Tokenizer
from nanogrpo.run import setup
from nanogrpo.vllm import gpus
from nanogrpo.vllm.client import VLLMEngine
from nanogrpo.vllm.server import Server, ServerError, ServerLost
from nanogrpo.vllm.sleeping import SleepingEngine
from nanogrpo.vllm.sync import TORN
from tests.conftest import arguments, lines, timeless, tiny_config, tiny_model
from tests.vllm import pretend
from tests.vllm.fake import MODEL, PARAMS, PROMPTS, FakeVLLM, content, engine_of, wait_until

BOTH = {"weights", "kv_cache"}


def sleeping(fake: FakeVLLM, **options) -> SleepingEngine:
    client = engine_of(fake, sleeps=True, **options)
    return SleepingEngine(client, client)


def sample(engine) -> list[tuple]:
    return content(engine.sample(PROMPTS, 2, PARAMS, step=0))


def test_the_server_wakes_gets_the_weights_samples_and_sleeps(fake):
    expected = sample(engine_of(fake))
    fake.requests.clear()
    engine = sleeping(fake)
    assert fake.asleep == BOTH
    assert fake.label == TORN  # what is in its memory is nobody's
    assert sample(engine) == expected
    posts = [path for method, path, _ in fake.requests if method == "POST"]
    asleep = ["/update_weight_version", "/sleep"]
    update = ["/start_weight_update", "/update_weights", "/finish_weight_update"]
    awake = ["/wake_up", "/pause", "/update_weight_version", *update, "/wake_up", "/resume"]
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


def test_a_server_that_sleeps_is_not_mistaken_for_one_that_another_trainer_paused(fake, caplog):
    engine = sleeping(fake, interval=0.01)
    sample(engine)
    (server,) = engine.client.servers
    before = len(fake.requests)
    wait_until(lambda: [p for _, p, _ in fake.requests[before:]].count("/is_paused") > 5)
    assert (server.alive, server.error) == (True, None)
    assert "lost a server" not in caplog.text


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


@pytest.mark.parametrize("tags", [["kv_cache", "weights"], ["weights"], ["kv_cache"], []])
def test_the_fake_server_refuses_a_wrong_order(fake, tags):
    server = Server(fake.url)
    server.alive = True
    server.post("/sleep?level=2&mode=abort")
    for tag in tags:
        server.post(f"/wake_up?tags={tag}")
    if fake.asleep:
        with pytest.raises(ServerError, match="/resume with status 500"):
            server.post("/resume")
    with pytest.raises(ServerError, match="generate with status 500"):
        server.generate({"sampling_params": {"n": 1, "seed": 0, "max_tokens": 2}})
    assert fake.wrong[-1] == "/inference/v1/generate"


class Restarts:
    """A sidecar that loses everything when it is started again."""

    def __init__(self, fake: FakeVLLM):
        self.fake, self.starts, self.output = fake, 0, "serve.log"

    def start(self, timeout: float) -> Server:
        self.starts += 1
        self.fake.disturb = lambda *call: None
        self.fake.asleep, self.fake.garbage, self.fake.label = set(), True, "default"
        self.fake.running.set()
        return Server(self.fake.url, timeout=timeout)

    def stop(self) -> None:
        pass


@pytest.mark.parametrize("when", ["asleep", "waking", "sampling", "falling asleep"])
def test_a_server_that_is_lost_in_any_state_is_restarted_and_gets_the_weights(fake, when):
    sidecar = Restarts(fake)
    client = VLLMEngine(MODEL, max_len=32, transport="memory", sidecar=sidecar, sleeps=True)
    fake.engines.append(client)
    engine = SleepingEngine(client, client)
    engine.load(MODEL, 0)
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


def test_a_server_that_cannot_be_recovered_ends_the_run(fake):
    engine = sleeping(fake)
    sample(engine)
    fake.disturb = lambda m, path, b: 500 if path == "/wake_up" else None
    with pytest.raises(ServerLost, match="No vLLM server is left"):
        sample(engine)
    assert fake.wrong == []


def test_a_secret_is_needed_to_wake_a_server(fake):
    fake.secret = "another one"
    for path in ("/wake_up?tags=weights", "/sleep?level=2"):
        with pytest.raises(UserError, match="refuses the secret"):
            Server(fake.url, "x" * 32).post(path)


def test_a_run_in_sleep_mode_has_the_same_steps_and_evaluations(
    tiny_base, files, tmp_path, monkeypatch
):
    monkeypatch.setattr(gpus, "shares", lambda cfg, world: False)  # which refuses a CPU
    runs = {"awake": [], "asleep": ["--vllm-enable-sleep-mode"]}
    for name, options in runs.items():
        with FakeVLLM(tiny_config(vocab_size=Tokenizer(tiny_base).vocab_size)) as fake:
            monkeypatch.setattr(setup, "Sidecar", lambda *_, server=fake, **__: Restarts(server))
            options += ["--engine", "vllm", "--weight-transport", "memory", "--eval-steps", "2"]
            options += ["--eval-data", str(files / "uneven.jsonl"), "--max-resample-times", "1"]
            assert train.main(arguments(tiny_base, files, tmp_path / name, *options)) == 0
            assert (fake.wrong, fake.asleep) == ([], BOTH if name == "asleep" else set())
    records = [[timeless(row) for row in lines(tmp_path / name) if "step" in row] for name in runs]
    assert len(records[0]) == 3 + 3  # steps, and evaluations after 0, 2 and 3
    assert records[0] == records[1]


def test_two_servers_sleep_and_wake(fake):
    with FakeVLLM(tiny_config()) as other:
        client = engine_of(fake, other, sleeps=True)
        engine = SleepingEngine(client, client)
        assert fake.asleep == other.asleep == BOTH
        samples = sample(engine)
        assert len(samples) == 2 * len(PROMPTS)
        assert fake.asleep == other.asleep == BOTH
        assert fake.wrong == other.wrong == []
