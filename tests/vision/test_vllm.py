"""vLLM samples for prompts with pictures: what is sent, and its log-probs.

The first half uses a fake server. The second half, marked `vllm`, uses a real one: its log-probs
are the trainer's, before and after every sync. Read next: tests/vllm/test_real.py.
"""

import base64
import dataclasses
import functools
import io
import json
import math
import socket
from collections.abc import Iterator

import pytest
import torch
from PIL import Image

import train
from nanogrpo.extras.vision.model import VisionDecoder
from nanogrpo.model import checkpoint
from nanogrpo.types import Prompt
from nanogrpo.vllm import protocol
from nanogrpo.vllm.auth import GENERATE, SECRET
from nanogrpo.vllm.server import ServerLost
from tests.conftest import arguments, refused, steps, tiny_model
from tests.ranks import run
from tests.vision import base as own
from tests.vision import tiny
from tests.vllm.fake import PARAMS, FakeVLLM, engine_of
from tests.vllm.real import Real, check_syncs, params, raw, serve

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
    return Prompt(id, "", ids, inputs=images)


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
    for picture, (_, h, w) in zip(shown(body), prompt.inputs.grid):
        assert (picture.mode, picture.size) == ("RGB", (4 * w, 4 * h))
    # what vLLM gets has the pixels that the trainer computes with, without another resize
    files = [tiny.png(picture) for picture in shown(body)]
    again = dataclasses.replace(prompt.inputs, sources=files)
    assert torch.equal(again.pixels, prompt.inputs.pixels)


def test_the_name_of_a_picture_depends_on_its_pixels_and_on_the_weights(fake):
    """vLLM caches by this name what its encoder has computed."""
    engine = engine_of(fake, model=MODEL, max_len=128)
    prompts = [pictured(2, (16, 16), 1, (16, 24), 2), pictured(2, (16, 16), 3)]
    prompts[1].inputs.sources = prompts[0].inputs.sources[:1]
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
    message = r"image tokens differ from ours: the server's preprocessor_config.json differs"
    with pytest.raises(ServerLost, match=message):
        engine.sample([pictured(2, (16, 16), 3)], 2, PARAMS, step=0)


def shorter(reply: dict | None) -> dict | None:
    return reply and reply | {"prompt_token_ids": reply["prompt_token_ids"][1:]}


@pytest.mark.parametrize("field", ["num_heads", "deepstack_visual_indexes", "image_token_id"])
def test_a_server_with_another_encoder_is_refused(fake, field):
    config = fake.facts["config"]
    (config if field in config else config["vision_config"])[field] = 7
    with refused(f"serves a different model: its vision is .*{field}=7.*, but --model has"):
        engine_of(fake, model=MODEL, load=False)


# --- a real server ---


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> Iterator[Real]:
    folder = own.write_base(tmp_path_factory.mktemp("real") / "base")
    limit = ["--limit-mm-per-prompt.image", "3", "--limit-mm-per-prompt.video", "0"]
    yield from serve(folder, *limit)


@pytest.fixture(scope="module")
def prompts(real) -> list[Prompt]:
    """One picture, several, one that is resized, and none."""
    return own.prompts(real.folder)


@pytest.mark.vllm
@pytest.mark.parametrize("transport", ["broadcast", "memory"])
def test_log_probs_agree_before_and_after_every_sync(real, prompts, transport):
    """After the first sync only the encoder changes, so cached features would show."""
    model = checkpoint.load_model(real.folder, kind=VisionDecoder)
    engine = real.engine(model, transport=transport)
    ordered = sorted(prompts, key=lambda p: p.inputs is None)  # those with pictures come first
    check_syncs(engine, model, ordered, first=model.model.visual, bound=1e-5)


@pytest.mark.vllm
def test_the_server_fetches_no_picture(real, prompts):
    """A request with a picture that is not in it gets an answer and harms nothing."""
    first = next(p for p in prompts if p.inputs)
    body = protocol.body(first, 1, params(1.0), 0) | protocol.pictures(first, "x")
    with socket.create_server(("127.0.0.1", 0)) as web:
        web.setblocking(False)
        address = f"http://127.0.0.1:{web.getsockname()[1]}/picture.png"
        for url in (address, "file:///etc/hostname", "data:image/png;base64,AAAA", 7):
            body["content_parts"][0]["url"] = url
            assert 400 <= raw(real.server, GENERATE, json.dumps(body).encode()) < 600
            assert real.server.get("/is_paused") == {"is_paused": False}
        with pytest.raises(BlockingIOError):  # nobody has connected
            web.accept()


@pytest.mark.vllm
@pytest.mark.slow
def test_complete_runs_with_pictures(real, files, tmp_path, monkeypatch):
    """On one rank, and on two, where rank 0 sends the pictures of both."""
    monkeypatch.setenv(SECRET, real.process.secret)
    options = ["--data", str(own.write_data(tmp_path / "data.jsonl"))]
    options += ["--engine", "vllm", "--server", real.server.url]
    found = {}
    for name in ("one", "two"):
        argv = arguments(real.folder, files, tmp_path / name, *options)
        if name == "two":
            assert run(2, train.main, argv, **{SECRET: real.process.secret}) == [0, 0]
        else:
            assert train.main(argv) == 0
        found[name] = steps(tmp_path / name)
        assert all(row["sampling/sampling_logp_difference/max"] <= 1e-5 for row in found[name])
    for one, two in zip(found["one"], found["two"], strict=True):
        assert one["reward"] == pytest.approx(two["reward"], abs=1e-6)
        assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-4)
