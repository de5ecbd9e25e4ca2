"""vLLM samples for prompts with pictures: what is sent, and the encoder's part of the weight sync.

The first half uses a fake server. The second half, marked `vllm`, uses a real one: its log-probs
are the trainer's, before and after every sync. Read next: tests/vllm/test_real.py.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import io
import json
import math
import socket
from collections.abc import Iterator, Sequence

import pytest
import torch
from PIL import Image

import train
from nanogrpo.errors import UserError
from nanogrpo.model import checkpoint
from nanogrpo.types import Prompt
from nanogrpo.vision.processor import Settings, prepare
from nanogrpo.vllm import client, protocol
from nanogrpo.vllm.auth import GENERATE, SECRET
from nanogrpo.vllm.buckets import Layout
from nanogrpo.vllm.server import Server, ServerLost
from nanogrpo.vllm.sleeping import SleepingEngine
from nanogrpo.vllm.sync import WeightSync
from tests.conftest import arguments, steps, tiny_model
from tests.ranks import run
from tests.vision import base as own
from tests.vision import tiny
from tests.vllm.fake import PARAMS, FakeVLLM, engine_of
from tests.vllm.real import Real, gap, params, raw, sidecar, train_a_little

# --- a fake server ---


@pytest.fixture
def fake() -> Iterator[FakeVLLM]:
    with FakeVLLM(tiny.vision_config()) as server:
        server.disturb = functools.partial(expanding, server)
        yield server


def shown(body: dict) -> list[Image.Image]:
    """Return the pictures in a request."""
    parts = [part["url"].partition(";base64,")[2] for part in body["content_parts"]]
    return [Image.open(io.BytesIO(base64.b64decode(part))) for part in parts]


def expanding(server: FakeVLLM, method: str, path: str, body: dict) -> dict | None:
    """Reply as vLLM does if a request has pictures: with the ids of the prompt, in which an image
    token is repeated for every 8 × 8 pixels of its picture.
    """
    if "content_parts" not in body:
        return None
    pictures, ids = iter(shown(body)), []
    for i in body["token_ids"]:
        count = math.prod(next(pictures).size) // 8**2 if i == tiny.TOKEN else 1
        ids += [i] * count
    return server.answer(path, body) | {"prompt_token_ids": ids}


def pictured(*parts: int | tuple[int, int], id: int = 0) -> Prompt:
    ids, images = tiny.prompt(*parts, seed=id)
    return Prompt(id, "", ids, images=images)


MODEL = tiny_model(tiny.vision_config())


def test_pictures_are_sent_as_the_model_sees_them_with_one_token_each(fake):
    engine = engine_of(fake, model=MODEL, max_len=128)
    prompt = pictured(2, (16, 24), 1, (90, 70), 3)  # the second one is resized
    assert prompt.token_ids.count(tiny.TOKEN) > 20
    engine.sample([prompt], 2, PARAMS, step=0)
    (body,) = fake.generated()
    without = [i for i in prompt.token_ids if i != tiny.TOKEN]
    assert [i for i in body["token_ids"] if i != tiny.TOKEN] == without
    assert body["token_ids"][2] == body["token_ids"][4] == tiny.TOKEN
    assert len(body["token_ids"]) == len(without) + 2
    assert body["return_token_ids"] is True
    for picture, (_, h, w) in zip(shown(body), prompt.images.grid):
        assert (picture.mode, picture.size) == ("RGB", (4 * w, 4 * h))
    # what vLLM gets has the pixels that the trainer computes with, without another resize
    files = [tiny.png(picture) for picture in shown(body)]
    again = dataclasses.replace(prompt.images, sources=files)
    assert torch.equal(again.pixels, prompt.images.pixels)


def test_a_prompt_without_pictures_is_sent_as_by_a_text_model(fake):
    engine = engine_of(fake, model=MODEL)
    engine.sample([pictured(9)], 2, PARAMS, step=0)
    (body,) = fake.generated()
    assert body.keys() == {"token_ids", "sampling_params", "cache_salt"}


def test_the_name_of_a_picture_depends_on_its_pixels_and_on_the_weights(fake):
    """vLLM caches by this name what its encoder has computed."""
    engine = engine_of(fake, model=MODEL, max_len=128)
    prompts = [pictured(2, (16, 16), 1, (16, 24), 2), pictured(2, (16, 16), 3)]
    prompts[1].images.sources = prompts[0].images.sources[:1]
    engine.sample(prompts, 1, PARAMS, step=0)
    engine.load(MODEL, 1)
    engine.sample(prompts[:1], 1, PARAMS, step=0)
    names = [[part["uuid"] for part in body["content_parts"]] for body in fake.generated()]
    names.sort(key=lambda found: (engine.sync.label(1) in found[0], -len(found)))
    (a, b), (c,), (d, e) = names
    assert a == c
    assert len({a, b, d, e}) == 4


def test_other_image_tokens_than_the_trainers_are_reported(fake):
    """As if the server resized pictures to other sizes."""
    expand, fake.disturb = fake.disturb, lambda *call: shorter(expand(*call))
    engine = engine_of(fake, model=MODEL, max_len=128)
    message = r"a prompt with other image tokens than ours: its preprocessor_config.json differs"
    with pytest.raises(ServerLost, match=message):
        engine.sample([pictured(2, (16, 16), 3)], 2, PARAMS, step=0)


def shorter(reply: dict | None) -> dict | None:
    return reply and reply | {"prompt_token_ids": reply["prompt_token_ids"][1:]}


def test_more_pictures_than_the_server_allows_are_refused(fake):
    engine = engine_of(fake, model=MODEL, max_len=128)
    prompt = pictured(1, (8, 8), 1, (8, 8), 1, (8, 8), 1, id=7)
    message = (
        r"^Prompt 7 has 3 pictures, but the vLLM server allows 2; start it with "
        r"--limit-mm-per-prompt.image 3\.$"
    )
    with pytest.raises(UserError, match=message):
        engine.sample([pictured(3), prompt], 2, PARAMS, step=0)
    assert not fake.generated()


def test_a_server_of_a_text_model_is_refused(fake):
    fake.facts["model"]["model_type"] = "qwen3"
    message = "its model_type is 'qwen3', but --model has 'qwen3_vl_text'; start serve.py with the"
    with pytest.raises(UserError, match=message):
        engine_of(fake, model=MODEL, load=False)


@pytest.mark.parametrize("field", ["num_heads", "deepstack_visual_indexes", "mrope_section"])
def test_a_server_with_another_encoder_is_refused(fake, field):
    fake.facts["vision"][field] = 7
    message = f"serves another model: its vision_config.{field} is 7, but --model has"
    with pytest.raises(UserError, match=message):
        engine_of(fake, model=MODEL, load=False)


# --- the encoder in a sync ---


def test_the_encoder_has_buckets_of_its_own_before_all_others():
    entries = [(n, "float32", list(p.shape)) for n, p in MODEL.named_parameters()]
    for size in (1 << 10, 1 << 14, 1 << 30):
        layout = Layout(entries, size)
        assert 0 < layout.encoder < len(layout.sizes)
        assert all((".visual." in s.name) == (s.bucket < layout.encoder) for s in layout.slots)
    assert Layout([("a", "float32", [2])]).encoder == 0


def trained(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Return the model with a frozen encoder, after something like a step."""
    model.model.visual.requires_grad_(False)
    train_a_little(model.model.language_model, seed)
    return model


def firsts(requests: Sequence[tuple[str, str, dict]]) -> list[int]:
    """Return the first bucket that each sync has sent. The first sync sends all of them."""
    bodies = [body["update_info"] for _, path, body in requests if path == "/update_weights"]
    counts = [len(body["checksums"]) for body in bodies]
    return [counts[0] - count for count in counts]


@pytest.mark.parametrize("transport", ["broadcast", "memory"])
def test_a_frozen_encoder_is_sent_once_to_each_server(fake, transport):
    model = trained(tiny_model(tiny.vision_config()))
    engine = engine_of(fake, model=model, transport=transport)
    for version in (1, 2):
        engine.load(trained(model, version), version)
        weights = dict(model.named_parameters())
        assert fake.weights.keys() == weights.keys()
        assert all(torch.equal(fake.weights[name], p) for name, p in weights.items())
    engine.servers[0].alive = False  # as if the server had been lost
    engine.load(model, 3)
    only = engine.sync.layout.encoder
    assert firsts(fake.requests) == [0, only, only, 0]
    with torch.no_grad():
        model.model.visual.merger.norm.bias.add_(1)
    engine.load(model, 4)
    name = "model.visual.merger.norm.bias"
    assert torch.equal(fake.weights[name] + 1, model.get_parameter(name))  # it was not sent


def test_an_encoder_that_is_trained_or_has_adapters_is_always_sent(fake):
    model = tiny_model(tiny.vision_config())
    engine_of(fake, model=model).load(model, 1)
    assert firsts(fake.requests) == [0, 0]
    for name, p in trained(model).named_parameters():
        p.requires_grad_(name == "model.visual.merger.linear_fc1.weight")
    engine_of(fake, model=model).load(model, 1)
    assert firsts(fake.requests) == [0, 0, 0, 0]


def test_a_server_that_slept_gets_a_frozen_encoder_again(fake):
    model = trained(tiny_model(tiny.vision_config()))
    engine = engine_of(fake, model=model, sleeps=True, max_len=128)
    for version in (0, 0, 1):
        engine.load(model, version)
        SleepingEngine(engine, engine).sample([pictured(2, (16, 16), 3)], 2, PARAMS, step=0)
    assert firsts(fake.requests) == [0, 0, 0]
    assert fake.wrong == []


# --- a real server ---


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> Iterator[Real]:
    folder = own.write_base(tmp_path_factory.mktemp("real") / "base")
    limit = ["--limit-mm-per-prompt.image", "3", "--limit-mm-per-prompt.video", "0"]
    process = sidecar(folder, folder.parent / "serve.log", *limit)
    yield Real(folder, process, process.start(60.0))
    process.stop()


@pytest.fixture(scope="module")
def prompts(real) -> list[Prompt]:
    """One picture, several, one that is resized, and none."""
    return own.prompts(real.folder)


@pytest.fixture
def requests(monkeypatch) -> list[tuple]:
    """The requests of this process, except those for completions."""
    found: list[tuple] = []
    post = Server.post

    def spy(self: Server, path: str, body: dict | None = None, timeout: float | None = None):
        found.append(("POST", path, body))
        return post(self, path, body, timeout)

    monkeypatch.setattr(Server, "post", spy)
    return found


def seen(samples: Sequence) -> list:
    """Return the samples whose prompts have pictures."""
    return [s for s in samples if s.prompt.images]


@pytest.mark.vllm
@pytest.mark.parametrize("transport", ["broadcast", "memory"])
def test_log_probs_agree_before_and_after_every_sync(real, prompts, transport):
    """After the first sync only the encoder changes, so cached features would show."""
    model = checkpoint.load_model(real.folder)
    engine = real.engine(model, transport=transport)
    for version in range(3):
        engine.load(model, version)
        for temperature in (1.0, 0.7, 0.0):
            samples = engine.sample(prompts, 4, params(temperature), step=version)
            assert len(samples) == 4 * len(prompts)
            assert gap(model, samples, temperature) <= 1e-5
        again = engine.sample(prompts[::-1], 4, params(0.0), step=version)
        assert [s.token_ids for s in again[-4:]] == [s.token_ids for s in samples[:4]]
        train_a_little(model if version else model.model.visual, seed=version)
        assert gap(model, seen(samples), 0.0) > 1e-3
    engine.close()


@pytest.mark.vllm
def test_the_pictures_matter(real, prompts):
    """The bounds above would also hold if neither side looked."""
    model = checkpoint.load_model(real.folder)
    engine = real.engine(model)
    engine.load(model, 0)
    samples = engine.sample(prompts, 2, params(1.0), step=0)
    for sample in seen(samples):
        black = [own.encoded(Image.new("RGB", p.size)) for p in pictures(sample.prompt)]
        blind = dataclasses.replace(sample.prompt.images, sources=black)
        sample.prompt = dataclasses.replace(sample.prompt, images=blind)
        assert gap(model, [sample], 1.0) > 1e-3
    engine.close()


def pictures(prompt: Prompt) -> list[Image.Image]:
    return [Image.open(io.BytesIO(source)) for source in prompt.images.sources]


@pytest.mark.vllm
def test_without_the_label_in_their_names_features_would_outlive_a_sync(real, prompts, monkeypatch):
    fields = protocol.pictures
    monkeypatch.setattr(protocol, "pictures", lambda prompt, label: fields(prompt, "always"))
    model = checkpoint.load_model(real.folder)
    engine = real.engine(model)
    engine.load(model, 0)
    assert gap(model, engine.sample(prompts, 2, params(1.0), step=0), 1.0) <= 1e-5
    train_a_little(model.model.visual, seed=0)
    engine.load(model, 1)
    assert gap(model, seen(engine.sample(prompts, 2, params(1.0), step=0)), 1.0) > 1e-3
    engine.close()


@pytest.mark.vllm
@pytest.mark.parametrize("transport", ["broadcast", "memory"])
def test_a_frozen_encoder_that_is_sent_once_stays_the_trainers(
    real, prompts, transport, requests, monkeypatch
):
    """Even if an earlier trainer of the server had another one."""
    monkeypatch.setattr(client, "WeightSync", functools.partial(WeightSync, bucket_bytes=1 << 14))
    for seed in (0, 1):
        model = checkpoint.load_model(real.folder)
        train_a_little(model.model.visual, seed)
        engine = real.engine(trained(model, seed), transport=transport)
        for version in range(3):
            engine.load(trained(model, version), version)
            samples = engine.sample(prompts, 2, params(1.0), step=0)
            assert gap(model, samples, 1.0) <= 1e-5
        engine.close()
    only = engine.sync.layout.encoder
    assert only > 1
    assert firsts(requests) == [0, only, only] * 2


@pytest.mark.vllm
def test_what_the_server_does_not_take_is_said_in_one_sentence(real, prompts):
    model = checkpoint.load_model(real.folder)
    engine = real.engine(model)
    engine.load(model, 0)
    engine.patience = 0.0
    found = Settings.read(real.folder)
    assert found
    first = next(p for p in prompts if p.images)
    many = dataclasses.replace(first.images, sources=first.images.sources * 4)
    with pytest.raises(UserError, match="but the vLLM server allows 3; start it with"):
        engine.sample([dataclasses.replace(first, images=many)], 2, params(1.0), step=0)
    source = own.encoded(own.picture(32, 32))
    larger = dataclasses.replace(found, min_pixels=4 * 32**2)
    ids, images = prepare([5, found.image_token_id, 6], [source], larger)
    images.settings = found  # so the picture is sent as it is, but the prompt has more tokens
    with pytest.raises(ServerLost, match="a prompt with other image tokens than ours"):
        engine.sample([Prompt(0, "", ids, images=images)], 2, params(1.0), step=0)
    engine.close()


@pytest.mark.vllm
@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/hostname",
        "/etc/hostname",
        "data:image/png;base64,AAAA",
        "data:image/png;base64,%",
        "data:image/png,x",
        "",
        None,
        7,
    ],
)
def test_a_request_with_a_bad_picture_gets_an_answer_and_harms_nothing(real, prompts, url):
    first = next(p for p in prompts if p.images)
    body = protocol.body(first, 1, params(1.0), 0) | protocol.pictures(first, "x")
    body["content_parts"][0]["url"] = url
    assert 400 <= raw(real.server, GENERATE, json.dumps(body).encode()) < 600
    assert real.server.get("/is_paused") == {"is_paused": False}


@pytest.mark.vllm
def test_the_server_fetches_no_picture(real, prompts):
    first = next(p for p in prompts if p.images)
    body = protocol.body(first, 1, params(1.0), 0) | protocol.pictures(first, "x")
    with socket.create_server(("127.0.0.1", 0)) as web:
        web.setblocking(False)
        body["content_parts"][0]["url"] = f"http://127.0.0.1:{web.getsockname()[1]}/picture.png"
        assert 400 <= raw(real.server, GENERATE, json.dumps(body).encode()) < 600
        with pytest.raises(BlockingIOError):  # nobody has connected
            web.accept()


@pytest.mark.vllm
def test_more_pictures_than_fit_into_a_step_or_the_cache(real):
    """24 prompts with three pictures of 64 tokens exceed vLLM's 2,048 tokens per step."""
    model = checkpoint.load_model(real.folder)
    engine = real.engine(model)
    engine.load(model, 0)
    many = own.prompts(real.folder, own.records(24, [[(128, 128)] * 3]))
    assert min(len(p.token_ids) for p in many) > 3 * 64
    samples = engine.sample(many, 2, params(1.0, max_tokens=2), step=0)
    assert gap(model, samples, 1.0) <= 1e-5
    assert engine.restarts == 0
    engine.close()


@pytest.mark.vllm
@pytest.mark.slow
def test_complete_runs_with_pictures(real, files, tmp_path, requests, monkeypatch):
    """On one rank, on two, where rank 0 sends the pictures of both, and with a frozen encoder."""
    monkeypatch.setenv(SECRET, real.process.secret)
    options = ["--data", str(own.write_data(tmp_path / "data.jsonl"))]
    options += ["--engine", "vllm", "--server", real.server.url]
    found = {}
    for name, more in {"one": [], "two": [], "frozen": ["--freeze-vision-tower"]}.items():
        argv = arguments(real.folder, files, tmp_path / name, *options, *more)
        if name == "two":
            assert run(2, train.main, argv, **{SECRET: real.process.secret}) == [0, 0]
        else:
            assert train.main(argv) == 0
        found[name] = steps(tmp_path / name)
        assert all(row["sampling/sampling_logp_difference/max"] <= 1e-5 for row in found[name])
    for one, two in zip(found["one"], found["two"], strict=True):
        assert one["reward"] == pytest.approx(two["reward"], abs=1e-6)
        assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-4)
    assert firsts(requests) == [0, 0, 0, 0, 1, 1]
