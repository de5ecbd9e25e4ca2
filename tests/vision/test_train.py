"""Training on prompts with pictures: packing, complete runs with the options that reach into a
strip, two ranks, resuming, the memory estimate and the files of a run.

Read next: test_engine.py. The ranks import this module, so it must not import transformers.
"""

from __future__ import annotations

import dataclasses
import json
import pickle
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import train
from nanogrpo import api
from nanogrpo.config import Config
from nanogrpo.distributed import fsdp
from nanogrpo.errors import UserError
from nanogrpo.grpo import loss as grpo
from nanogrpo.logs import view_data
from nanogrpo.logs.completions import Completions
from nanogrpo.model import adapters, lora
from nanogrpo.run import memory, output, plan
from nanogrpo.types import Prompt, Sample
from tests.conftest import SOLO, arguments, packed, steps
from tests.distributed.training import differ
from tests.ranks import run
from tests.vision.base import load, prompts, records, write_data
from tests.vision.text_run import imported

LIMIT = 1e-9


def completions(found: list[Prompt], group: int = 4) -> list[Sample]:
    rng, out = random.Random(0), []
    for prompt in found:
        for j in range(group):
            ids = [rng.randrange(90) for _ in range(rng.choice([1, 3, 9]))]
            s = Sample(prompt, j, ids, [-1.0] * len(ids), True, [0] * len(ids))
            s.advantage = rng.gauss(0, 1)
            out.append(s)
    return out


def gradient(base: Path, samples: list[Sample], **options) -> dict[str, torch.Tensor]:
    """Return the gradient of one update, in float64."""
    cfg, model = Config(model=str(base), num_generations=4, **options), load(base).double()
    for batch in packed(samples, cfg):
        model.forward_packed(batch, grpo.objective(batch, cfg)).loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


# --- packing ---


def test_a_strip_names_the_row_of_each_prompt_with_pictures(base):
    found = prompts(base)
    (batch,) = packed(completions(found), Config(num_generations=4))
    assert len(batch.images) == sum(p.images is not None for p in found)
    for row, images in batch.images:
        (prompt,) = (p for p in found if p.images is images)
        assert batch.tokens[row : row + len(prompt.token_ids)].tolist() == prompt.token_ids
        assert batch.positions[row] == 0


@pytest.mark.parametrize("token_budget", [10_000, 60])
def test_sharing_a_prompt_encodes_its_pictures_once_and_keeps_the_gradient(
    base, token_budget, monkeypatch
):
    """One by one, each of four completions encodes the pictures of its prompt again."""
    from nanogrpo.vision.model import Encoder

    samples, encoded, forward = completions(prompts(base)), [], Encoder.forward
    monkeypatch.setattr(
        Encoder, "forward", lambda self, x, grid: encoded.append(grid) or forward(self, x, grid)
    )
    alone = gradient(base, samples, share_prompts=False, token_budget=10_000)
    (each,) = encoded
    encoded.clear()
    shared = gradient(base, samples, token_budget=token_budget)
    assert differ(alone, shared) < LIMIT
    if token_budget == 10_000:
        assert [len(grid) for grid in encoded] == [len(each) // 4] == [6]
    assert shared["model.visual.blocks.0.attn.qkv.weight"].norm() > 1e-4


def test_pictures_change_the_gradient_of_the_decoder(base):
    samples = completions(prompts(base))
    seen = gradient(base, samples)
    for s in samples:
        s.prompt.images = None
    blind = gradient(base, samples)
    name = "model.language_model.layers.1.mlp.up_proj.weight"
    assert differ({name: seen[name]}, {name: blind[name]}) > 0.1
    # without a picture, the encoder has a gradient, which is 0 (AdamW counts the updates)
    assert all(not blind[n].any() for n in blind if ".visual." in n)


# --- complete runs ---


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "data.jsonl")


def argv(base: Path, data: Path, output: Path, *options: str) -> list[str]:
    reward = f"{Path(__file__).parents[1] / 'ranks.py'}:even"
    files = ["--data", str(data), "--reward-funcs", reward]
    return arguments(base, data.parent, output, *files, *options)


def weights(output: Path, step: int = 3) -> dict[str, torch.Tensor]:
    return load_file(output / f"checkpoint-{step}" / "model.safetensors")


SEVERAL = ["--num-iterations", "2", "--steps-per-generation", "2", "--beta", "0.1"]
SEVERAL += ["--max-resample-times", "1"]


def two_ranks(base: Path, data: Path, output: Path, options: list[str]) -> int:
    return train.main(argv(base, data, output, *options))


@pytest.mark.parametrize("options", [[], [*SEVERAL, "--token-budget", "60"]])
def test_two_ranks_train_as_one_does(base, data, tmp_path, options):
    """With a small budget, samples move to the other rank with their pictures."""
    assert train.main(argv(base, data, tmp_path / "one", *options)) == 0
    assert run(2, two_ranks, base, data, tmp_path / "two", options) == [0, 0]
    for one, two in zip(steps(tmp_path / "one"), steps(tmp_path / "two"), strict=True):
        for name in ("reward", "loss", "grad_norm", "entropy", "completions/mean_length"):
            assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize(
    "options",
    [SEVERAL, ["--lora-r", "2", "--lora-target-modules", "q_proj", "attn.qkv", "linear_fc2"]],
    ids=["off_policy", "adapters"],
)
def test_a_resumed_run_repeats_the_uninterrupted_one(base, data, tmp_path, options):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train.main(argv(base, data, whole, *options)) == 0
    assert train.main(argv(base, data, parts, *options, "--max-steps", "1")) == 0
    assert train.main(argv(base, data, parts, *options, "--resume")) == 0
    assert steps(parts) == steps(whole)
    a, b, before = weights(whole), weights(parts), load_file(base / "model.safetensors")
    assert all(torch.equal(a[name], b[name]) for name in a)
    changed = {name for name in a if not torch.equal(a[name], before[name])}
    assert any(name.endswith("blocks.1.attn.qkv.weight") for name in changed)
    assert (len(changed) == len(a)) == (options is SEVERAL)


def test_a_resumed_run_refuses_other_pictures(base, tmp_path, capsys):
    data = write_data(tmp_path / "data.jsonl")
    assert train.main(argv(base, data, tmp_path / "run", "--max-steps", "1")) == 0
    picture = tmp_path / "data-1-0.png"
    picture.write_bytes((tmp_path / "data-7-0.png").read_bytes())  # of the same size
    assert train.main(argv(base, data, tmp_path / "run", "--resume")) == 2
    assert "was written with other prompts" in capsys.readouterr().err


def test_a_resumed_run_notices_other_settings_of_the_processor(base):
    cfg, found = Config(model=str(base)), prompts(base, records(1))
    before = output.origin(cfg, SOLO, found)
    images = found[0].images
    images.settings = dataclasses.replace(images.settings, image_mean=(0.1, 0.1, 0.1))
    assert output.origin(cfg, SOLO, found) != before


@pytest.mark.parametrize("options", [["--freeze-vision-tower"], ["--lora-r", "2"]])
def test_the_encoder_can_stay_as_it_is(base, data, tmp_path, options):
    assert train.main(argv(base, data, tmp_path, *options)) == 0
    after, before = weights(tmp_path), load_file(base / "model.safetensors")
    changed = {name for name in before if not torch.equal(after[name], before[name])}
    assert changed
    assert not any(".visual." in name for name in changed)
    if options == ["--freeze-vision-tower"]:
        assert changed == {name for name in before if ".visual." not in name}
    expected = json.loads((base / "config.json").read_text())
    found = json.loads((tmp_path / "checkpoint-3" / "config.json").read_text())
    assert found["vision_config"] == expected["vision_config"]
    settings = (tmp_path / "checkpoint-3" / "preprocessor_config.json").read_bytes()
    assert settings == (base / "preprocessor_config.json").read_bytes()


def test_a_frozen_encoder_has_no_gradient_and_no_moments(base):
    cfg, model = Config(model=str(base), freeze_vision_tower=True), load(base)
    from nanogrpo.run.setup import freeze_vision_tower

    freeze_vision_tower(model, cfg)
    trained, every = lora.sizes(model)
    visual = sum(p.numel() for p in model.model.visual.parameters())
    assert every - trained == visual > 0


# --- what a run writes ---


def test_logs_show_a_picture_as_one_word(base, data, tmp_path, capsys):
    options = ["--log-completions", "--num-completions-to-print", "2", "--log-tokens"]
    assert train.main(argv(base, data, tmp_path, *options)) == 0
    rows = [
        json.loads(line)
        for path in (tmp_path / "completions").glob("completions_*.jsonl")
        for line in path.read_text().splitlines()
    ]
    shown = {row["prompt"][0]["content"] for row in rows}
    assert "<picture 48×32>1+1=" in shown
    assert "<picture 16×64><picture 32×32>2+2=" in shown
    assert "<|image_pad|>" not in json.dumps(rows)
    assert "<picture" in capsys.readouterr().err
    previews = view_data.Run(tmp_path).index()["prompts"]
    assert "<picture 48×32>1+1=" in previews


def shown_pictures(output: Path) -> dict[str, list[tuple[int, int, int]]]:
    """Return the last word of each prompt, and the mean colours of its logged pictures."""
    from PIL import Image, ImageStat

    found = {}
    for path in sorted((output / "completions").glob("*.jsonl")):
        for row in map(json.loads, path.read_text().splitlines()):
            files = [output / "completions" / name for name in row.get("images", [])]
            means = [ImageStat.Stat(Image.open(file)).mean for file in files]
            found[row["prompt"][0]["content"].rpartition(">")[2]] = means
    return found


def test_logs_have_a_small_copy_of_each_picture(base, tmp_path):
    from PIL import Image, ImageStat

    data = write_data(tmp_path / "data.jsonl")
    large = Image.effect_noise((900, 300), 60).convert("RGB")
    large.save(tmp_path / "data-1-0.png")
    options = ["--log-completions", "--eval-data", str(data), "--eval-steps", "1"]
    assert train.main(argv(base, data, tmp_path / "one", *options)) == 0
    assert run(2, two_ranks, base, data, tmp_path / "two", options) == [0, 0]
    found = shown_pictures(tmp_path / "one")
    assert shown_pictures(tmp_path / "two") == found
    assert len(found) == 12
    for text, means in found.items():
        i = text.partition("+")[0]
        files = sorted(tmp_path.glob(f"data-{i}-*.png"))
        for mean, file in zip(means, files, strict=True):
            assert mean == pytest.approx(ImageStat.Stat(Image.open(file)).mean, abs=4)
    sizes = {Image.open(p).size for p in (tmp_path / "one").glob("completions/pictures/*")}
    assert (256, 85) in sizes
    assert max(max(size) for size in sizes) == 256
    (tmp_path / "three/completions").mkdir(parents=True)
    (tmp_path / "three/completions/pictures").write_text("no folder")
    found = prompts(base, records(2))
    log = Completions(
        Config(model="-", output_dir=str(tmp_path / "three"), log_completions=True), SOLO, 1
    )
    with pytest.raises(UserError, match=r"pictures/.*could not be written"):
        log.log(1, completions(found))
    names = {p.name for p in (tmp_path / "one").glob("completions/pictures/*")}
    assert {p.name for p in (tmp_path / "two").glob("completions/pictures/*")} == names


REWARD = '''
from PIL import Image

def first_pixel(images, prompts, completions, **kwargs):
    """Return the red part of the first pixel, from the column and from the prompt."""
    rewards = []
    for shown, prompt in zip(images, prompts):
        parts = [part for part in prompt[0]["content"] if part["type"] == "image"]
        assert [part["image"].size for part in parts] == [image.size for image in shown]
        assert all(isinstance(image, Image.Image) for image in shown)
        rewards.append(shown[0].getpixel((0, 0))[0] if shown else None)
    return rewards
'''


@pytest.mark.parametrize("timeout", ["60", "0"])
def test_reward_functions_receive_pil_images(base, data, tmp_path, timeout):
    """In a process of their own, and in the trainer's."""
    from PIL import Image

    (tmp_path / "reward.py").write_text(REWARD)
    options = ["--reward-funcs", f"{tmp_path}/reward.py:first_pixel", "--reward-timeout", timeout]
    options += ["--max-steps", "1", "--log-completions"]
    assert train.main(argv(base, data, tmp_path / "run", *options)) == 0
    text = (tmp_path / "run" / "completions" / "completions_00001.jsonl").read_text()
    for row in map(json.loads, text.splitlines()):
        number = row["prompt"][0]["content"].rpartition(">")[2].partition("+")[0]
        path = data.parent / f"data-{number}-0.png"
        expected = Image.open(path).getpixel((0, 0))[0] if path.exists() else None
        assert row["first_pixel"] == expected


def test_a_program_passes_pil_images_and_gets_them_back(base, tmp_path):
    def red(images, **kwargs):
        return [sum(image.getpixel((0, 0))[0] for image in shown) for shown in images]

    cfg = Config(model=str(base), output_dir=str(tmp_path), device="cpu", max_steps=1)
    cfg = dataclasses.replace(cfg, generation_batch_size=48, num_generations=4)
    cfg = dataclasses.replace(cfg, max_completion_length=4, log_completions=True)
    found = records(12)
    api.train(cfg, reward_funcs=red, train_dataset=found)
    text = (tmp_path / "completions" / "completions_00001.jsonl").read_text()
    rewards = {
        int(r["prompt"][0]["content"].rpartition(">")[2].partition("+")[0]): r["red"]
        for r in map(json.loads, text.splitlines())
    }
    assert rewards == dict(enumerate(red([record["images"] for record in found])))


# --- memory, and what cannot be used ---


@pytest.mark.parametrize("kind", ["none", "full"])
@pytest.mark.parametrize("frozen", [False, True])
def test_the_estimate_covers_what_the_encoder_keeps(base, kind, frozen):
    model = load(base)
    model.model.visual.requires_grad_(not frozen)
    cfg = Config(gradient_checkpointing=kind)
    fsdp.prepare(model, SOLO, cfg)
    tokens, kept = 40, {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(x):
        if x.untyped_storage().data_ptr() not in weights:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes(), x
        return x

    pixels = torch.randn(4 * tokens, model.cfg.vision.patch_values)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        features = model.model.visual(pixels, [(1, 16, 10)])
    assert features[0].requires_grad != frozen
    found = sum(size for size, _ in kept.values())
    estimate = tokens * model.model.visual.activation_bytes(4, kind)
    assert found < estimate
    if kind == "none" and not frozen:
        assert estimate < 1.3 * found


def test_the_memory_table_has_the_pictures(base):
    model = load(base)
    cfg = Config(num_generations=4, generation_batch_size=16, max_completion_length=8)
    rows = {row.name: row.bytes for row in memory.table(model, cfg, SOLO, 20)}
    assert rows["pictures of 80 tokens"] == 80 * model.model.visual.activation_bytes(4, "none")
    weights = sum(p.nbytes for p in model.parameters())
    assert rows["parameters"] == rows["engine: weights"] == weights


def test_a_plan_counts_the_encoder(base, capsys, caplog):
    assert plan.main([str(base), "--completion-length", "8", "--max-completion-length", "16"]) == 0
    assert "pictures of" in capsys.readouterr().out
    assert "leave out the vision encoder" in caplog.text


def test_peft_is_told_to_keep_the_encoder_out_of_four_bits(base, data, tmp_path):
    from transformers.quantizers.quantizers_utils import should_convert_module

    cfg = Config(model=str(base), lora_r=2, load_in_4bit=True)
    names = [
        "model.visual.blocks.0.attn.qkv.lora_A",
        "model.language_model.layers.0.mlp.up_proj.lora_A",
    ]
    adapters.write({adapters.peft_name(n): torch.zeros(2, 64) for n in names}, tmp_path / "a", cfg)
    how = json.loads((tmp_path / "a" / "quantization_config.json").read_text())
    kept = [
        should_convert_module(n.removesuffix(".lora_A"), how["llm_int8_skip_modules"])
        for n in names
    ]
    assert kept == [False, True]


def test_a_prompt_that_moves_to_another_rank_is_small(base):
    """It has the files of its pictures, not their patches."""
    for prompt in prompts(base):
        if prompt.images:
            prompt.images.pixels  # noqa: B018 (computes and caches them)
            files = sum(map(len, prompt.images.sources))
            assert len(pickle.dumps(prompt)) < 2 * files + 2000


def mistake(args: list[str], capsys) -> str:
    assert train.main(args) == 2
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    return line


def test_mistakes_get_one_sentence(base, tiny_base, data, tmp_path, capsys):
    out = tmp_path / "out"
    frozen = argv(tiny_base, data, out, "--freeze-vision-tower")
    assert "--freeze-vision-tower is for a vision encoder, which --model" in mistake(frozen, capsys)
    adapted = argv(tiny_base, data, out, "--lora-r", "2", "--lora-target-modules", "linear_fc1")
    assert "--lora-target-modules linear_fc1 is for a vision" in mistake(adapted, capsys)
    both = argv(base, data, out, "--freeze-vision-tower", "--lora-r", "2")
    assert "no effect with --lora-r" in mistake(both, capsys)
    assert not out.exists() or not [*out.glob("checkpoint-*")]


@pytest.mark.parametrize("option", ["reward_funcs", "environment_factory"])
def test_options_that_only_read_text_refuse_pictures(base, option):
    from nanogrpo.run.setup import check_pictures

    value = {"reward_funcs": ("model:judge",), "environment_factory": "room.py:Room"}[option]
    parts = [{"role": "user", "content": [{"type": "text", "text": "3+4="}]}]
    for found in (prompts(base), prompts(base, [{"prompt": parts}])):
        with pytest.raises(UserError, match=r"with texts only, but the messages of prompt 0 have"):
            check_pictures(Config(**{option: value}), found)
    check_pictures(Config(**{option: value}), prompts(base, [{"prompt": "3+4="}]))


def test_a_run_that_reads_text_imports_nothing_for_pictures(tiny_base, files, tmp_path):
    assert run(1, imported, tiny_base, files, tmp_path) == [[]]
