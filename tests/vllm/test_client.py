"""The client against a fake server (fake.py): its requests, the replies it accepts, and servers
that it refuses or loses.

Read next: test_server.py, test_real.py.
"""

import asyncio
import json
from types import SimpleNamespace

import pytest
import torch
import transformers

from nanogrpo.engine.base import SamplingParams, stream
from nanogrpo.extras.truncation import unpacked
from nanogrpo.vllm import auth
from nanogrpo.vllm.protocol import check_server
from nanogrpo.vllm.server import Server, ServerLost
from tests.conftest import refused
from tests.model.peers import CONFIGS
from tests.ranks import free_port
from tests.vision.tiny import vision_config
from tests.vllm.fake import MODEL, PARAMS, PROMPTS, content, engine_of, sample

# --- what is sent, and what becomes of it ---


def test_every_sampling_field_is_sent(fake):
    engine_of(fake).sample(PROMPTS[:1], 4, PARAMS, step=5)
    (body,) = fake.generated()
    assert body["token_ids"] == [1, 2, 3]
    assert body["sampling_params"] == {
        "n": 4,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "max_tokens": 8,
        "min_tokens": 0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logprobs": 0,
        "detokenize": False,
        "stop_token_ids": [7, 9],
        "ignore_eos": True,
        "seed": stream(3, 5, 0, 0) >> 1,
    }


def test_seeds_are_a_function_of_seed_step_prompt_and_sample(fake):
    engine = engine_of(fake, window=3)
    first = content(engine.sample(PROMPTS, 4, PARAMS, step=1))
    assert content(engine.sample(PROMPTS[::-1], 4, PARAMS, step=1)) == sorted(
        first, key=lambda s: (-s[0], s[1])
    )
    assert content(engine.sample(PROMPTS, 4, PARAMS, step=2)) != first
    assert content(engine.sample(PROMPTS, 4, SamplingParams(max_tokens=8, seed=4), step=1)) != first
    seeds = [b["sampling_params"]["seed"] + i for b in fake.generated() for i in range(4)]
    # the repeated step repeated its own, and no other seed occurs twice
    assert len(set(seeds)) == 3 * 6 * 4
    assert max(seeds) < 1 << 63
    assert {stopped for *_, stopped in first} == {True, False}
    assert all(stopped == (len(ids) < 8) for _, _, ids, _, stopped in first)


def test_a_greedy_completion_is_requested_once_per_group(fake):
    greedy = SamplingParams(temperature=0.0, max_tokens=4)
    samples = engine_of(fake).sample(PROMPTS[:1], 3, greedy, step=0)
    assert [s.index for s in samples] == [0, 1, 2]
    assert samples[0].token_ids == samples[2].token_ids
    assert fake.generated()[0]["sampling_params"]["n"] == 1


def test_each_token_has_the_set_that_the_filters_keep(fake):
    engine = engine_of(fake, masks=True, min_p=0.05)
    plain, greedy = SamplingParams(0.7, top_p=0.9, max_tokens=4), SamplingParams(0.0, max_tokens=4)
    (sample,) = engine.sample(PROMPTS[:1], 1, plain, step=0)
    engine.sample(PROMPTS[:1], 1, greedy, step=0)
    sent = [body["sampling_params"] for body in fake.generated()]
    # with masks, vLLM refuses 0
    assert [[p[x] for x in ("temperature", "top_k", "top_p", "min_p")] for p in sent] == [
        [0.7, 1 << 30, 0.9, 0.05],
        [1.0, 1, 1.0, 0.05],
    ]
    expected = fake.choice(0, sent[0])["sampling_mask"]
    assert [unpacked(x.kept).tolist() for x in sample.logp] == expected
    spoiled(fake, lambda choice: choice.update(sampling_mask=None))
    with refused("with --return-sampling-mask"):
        engine.sample(PROMPTS[:1], 1, plain, step=0)


def test_prefixes_of_other_weights_and_other_runs_are_never_reused(fake):
    for engine in (engine_of(fake), engine_of(fake)):
        for version in (0, 1):
            engine.load(MODEL, version)
            engine.sample(PROMPTS[:1], 1, PARAMS, step=0)
        engine.close()
    assert len({b["cache_salt"] for b in fake.generated()}) == 4


def test_weights_arrive_in_the_servers_dtype(fake):
    fake.facts["dtype"] = "bfloat16"
    engine_of(fake, transport="broadcast")
    assert all(
        torch.equal(fake.weights[n], p.detach().bfloat16()) for n, p in MODEL.named_parameters()
    )


# --- replies that cannot be trained on ---


def spoiled(fake, spoil, times=1000):
    """Let `spoil` change the first choice of the next `times` replies."""
    left = [times]

    def disturb(method, path, body):
        if path != "/inference/v1/generate" or not left[0]:
            return None
        left[0] -= 1
        reply = fake.answer(path, body)
        spoil(reply["choices"][0])
        return reply

    fake.disturb = disturb


def tokens(reason, *ids):
    def spoil(choice):
        choice.update(token_ids=[*ids], finish_reason=reason)
        choice["logprobs"]["content"] = [{"logprob": -1.0}] * len(ids)
        choice["weight_versions"][0]["end"] = len(ids)

    return spoil


BROKEN = {
    "aborted": (lambda c: c.update(finish_reason="abort"), r"an incomplete completion .*\(abort\)"),
    "log-prob missing": (lambda c: c["logprobs"]["content"].pop(), "an incomplete completion"),
    "no tokens": (lambda c: c.update(token_ids=[]), "an incomplete completion"),
    "no stop token": (tokens("stop", 1, 2), r"an incomplete completion .*\(stop\)"),
    "too short": (tokens("length", 1, 2), r"an incomplete completion .*\(length\)"),
    "tokens after a stop token": (tokens("stop", 1, 7, 2), "an incomplete completion"),
    "no version": (lambda c: c.update(weight_versions=[]), "an incomplete completion"),
    "no object": (lambda c: c.pop("token_ids"), r"a reply that cannot be read \(KeyError"),
    "other weights": (
        lambda c: c["weight_versions"][0].update(version="default"),
        "sampled from weights that this trainer did not send",
    ),
}


@pytest.mark.parametrize(("spoil", "sentence"), BROKEN.values(), ids=BROKEN)
def test_an_incomplete_reply_is_discarded_and_the_group_requested_again(fake, spoil, sentence):
    engine = engine_of(fake)
    expected = sample(engine)
    spoiled(fake, spoil, times=1)
    assert sample(engine) == expected
    assert engine.restarts == 1  # the server was taken for lost, and given the weights again
    spoiled(fake, spoil)
    with pytest.raises(ServerLost, match=rf"No vLLM server returns completions \(.*{sentence}"):
        engine.sample(PROMPTS[:1], 2, PARAMS, step=0)


@pytest.mark.parametrize("value", [-9999.0, float("nan"), float("-inf")])
def test_a_log_prob_that_is_not_finite_raises(fake, value):
    engine = engine_of(fake)
    spoiled(fake, lambda c: c["logprobs"]["content"][0].update(logprob=value))
    with pytest.raises(FloatingPointError, match="prompt 0 that is not finite at weight version 0"):
        engine.sample(PROMPTS[:1], 2, PARAMS, step=0)


@pytest.mark.parametrize("data", [b"<html>", b"", b"\xff\xfe", b"[]"])
@pytest.mark.parametrize("where", ["generate", "/pause", "/update_weights", "/resume"])
def test_an_answer_that_is_no_json_object_does_not_count_as_success(fake, where, data):
    """A proxy may answer with a page and status 200."""
    engine = engine_of(fake)
    fake.disturb = lambda m, path, b: data if where in path else None

    def use():
        engine.sample(PROMPTS[:1], 2, PARAMS, step=0)
        engine.load(MODEL, 1)

    with pytest.raises(ServerLost, match=f"answered .*{where}.* with status 200"):
        use()


# --- bad input: one sentence, which names the option ---


def test_an_address_without_a_server_is_reported():
    message = r"--server: http://127.0.0.1:\d+ did not answer /nanogrpo .*; start serve.py there"
    with refused(message):
        engine_of(f"http://127.0.0.1:{free_port()}", load=False)


@pytest.mark.parametrize(
    "url",
    ["ftp://x:1", "http://:8000", "http://127.0.0.1", "http://u@127.0.0.1:8000", "127.0.0.1:1/x"]
    + ["nowhere"],
)
def test_a_malformed_address_is_refused(url):
    with refused(f"^--server {url} is not an address: write it like http://127.0.0.1:8000"):
        Server(url)


@pytest.mark.parametrize(
    ("facts", "options", "sentence"),
    [
        ({"vocab_size": 77}, {}, "serves a different model: its vocab_size is 77, but --model has"),
        ({"model_type": "gemma"}, {}, "model_type 'gemma' is not supported; it must be"),
        ({"head_dtype": "float32"}, {}, "has --head-dtype float32, but the trainer has model"),
        (
            {},
            {"dtype": "float16"},
            "computes in float32, but the trainer in float16: start",
        ),
        ({}, {"head_dtype": "float32"}, "the trainer has float32: .* start serve.py with --hf-o"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            {},
            r"its rope_scaling is .*rope_type='linear'.*but --model has None",
        ),
        (
            {},
            {"max_len": 300},
            "has a context of 256 tokens, but prompt and completion need 300; start serve.py",
        ),
    ],
)
def test_a_server_of_another_model_is_refused(fake, facts, options, sentence):
    fake.facts["config"] |= facts
    with refused(f"--server {fake.url}.*{sentence}"):
        engine_of(fake, load=False, **options)


def test_servers_of_different_dtypes_are_refused(fake, other):
    other.facts["dtype"] = "bfloat16"
    with refused(r"--server: the servers use .*bfloat16.*; start all with the same --dtype"):
        engine_of(fake, other, load=False)


@pytest.mark.parametrize("reply", [404, 500, {"hello": "world"}, b"<html>", b"[]"])
def test_a_server_that_is_not_a_sidecar_or_whose_engine_has_died_is_refused(fake, reply):
    """Other paths may still be answered."""
    fake.disturb = lambda m, path, b: reply if path == auth.INFO else None
    with refused(rf"--server:? {fake.url} .*(start serve.py|is it a serve.py of this)"):
        engine_of(fake, load=False)


@pytest.mark.parametrize("name", [*CONFIGS, "qwen3_vl"])
def test_a_server_of_the_same_model_is_accepted(tmp_path, name):
    """A server describes the config that transformers has read, with all defaults filled in."""
    cfg = CONFIGS.get(name) or vision_config()
    (tmp_path / "config.json").write_text(json.dumps(cfg.to_dict()))
    found = transformers.AutoConfig.from_pretrained(tmp_path)
    model = SimpleNamespace(
        hf_config=found,
        dtype=torch.float32,
        max_model_len=64,
    )
    config = SimpleNamespace(
        model_config=model, parallel_config=SimpleNamespace(world_size_across_dp=1)
    )

    async def collective_rpc(method: str) -> list[dict]:
        assert method == "device_facts"
        return [{"gpu": gpu, "nccl": "2.29.7"} for gpu in ("A", "B")]

    client = SimpleNamespace(vllm_config=config, collective_rpc=collective_rpc)
    info = json.loads(json.dumps(asyncio.run(auth.describe(SimpleNamespace(engine_client=client)))))
    assert (info["gpus"], info["nccl"]) == (["A", "B"], "2.29.7")
    check_server("here", info, cfg, 64)
