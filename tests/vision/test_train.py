"""Training on prompts with pictures: complete runs, the memory estimate and the files of a run.

tests/configurations.py has the rows for resuming and for two ranks. Read next: test_engine.py.
"""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image, ImageStat
from safetensors.torch import load_file

import train
from nanogrpo import Config
from nanogrpo.distributed import fsdp
from nanogrpo.errors import read_json
from nanogrpo.extras.lora import adapters
from nanogrpo.extras.vision.feature import Vision
from nanogrpo.run import output
from tests.conftest import SOLO, arguments, read_rows, refused, said
from tests.vision.base import load, prompts, records, write_data

# --- complete runs ---


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "data.jsonl")


def argv(base: Path, data: Path, output: Path, *options: str) -> list[str]:
    reward = f"{Path(__file__).parents[1] / 'ranks.py'}:even"
    files = ["--data", str(data), "--reward-funcs", reward]
    return arguments(base, data.parent, output, *files, *options)


@pytest.mark.parametrize("options", [["--freeze-vision-tower"], ["--lora-r", "2"]])
def test_the_encoder_can_stay_as_it_is(base, data, tmp_path, options):
    assert train.main(argv(base, data, tmp_path, *options, "--max-steps", "1")) == 0
    last = tmp_path / "checkpoint-1"
    after, before = (load_file(folder / "model.safetensors") for folder in (last, base))
    changed = {name for name in before if not torch.equal(after[name], before[name])}
    assert changed
    assert not any(".visual." in name for name in changed)
    if options == ["--freeze-vision-tower"]:
        assert changed == {name for name in before if ".visual." not in name}
    expected = read_json(base / "config.json")
    assert read_json(last / "config.json") == {
        **expected,
        "dtype": "float32",
        "torch_dtype": "float32",
    }
    name = "preprocessor_config.json"
    assert (last / name).read_bytes() == (base / name).read_bytes()


# --- what rewards and people see ---


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


def test_rewards_receive_pil_images_and_logs_have_small_copies(base, tmp_path, capsys):
    data = write_data(tmp_path / "data.jsonl")
    Image.effect_noise((900, 300), 60).convert("RGB").save(tmp_path / "data-1-0.png")
    (tmp_path / "reward.py").write_text(REWARD)
    options = ["--reward-funcs", f"{tmp_path}/reward.py:first_pixel", "--max-steps", "1"]
    options += ["--log-completions", "--eval-data", str(data), "--eval-steps", "1"]
    options += ["--num-completions-to-print", "4"]
    assert train.main(argv(base, data, tmp_path / "run", *options)) == 0
    assert "<picture" in capsys.readouterr().err
    folder, words = tmp_path / "run" / "completions", set()
    for path in folder.glob("*.jsonl"):
        for row in read_rows(path):
            words.add(row["prompt"][0]["content"])
            i = row["prompt"][0]["content"].rpartition(">")[2].partition("+")[0]
            files = sorted(tmp_path.glob(f"data-{i}-*.png"))
            shown = [Image.open(file) for file in files]
            assert row["first_pixel"] == (shown[0].getpixel((0, 0))[0] if shown else None)
            for name, picture in zip(row.get("images", []), shown, strict=True):
                small = Image.open(folder / name)
                mean = pytest.approx(ImageStat.Stat(picture).mean, abs=4)
                assert ImageStat.Stat(small).mean == mean
                assert small.size == ((256, 85) if picture.width == 900 else picture.size)
    assert {"<picture 900×300>1+1=", "<picture 16×64><picture 32×32>2+2=", "3+3="} <= words


# --- memory, and what cannot be used ---


def test_a_resumed_run_notices_other_pictures_and_settings(base):
    found = prompts(base, records(1))
    before, images = output.hashed(found), found[0].inputs
    other = dataclasses.replace(images.settings, image_mean=(0.1, 0.1, 0.1))
    for changed in ({"settings": other}, {"sources": prompts(base, records(5))[4].inputs.sources}):
        found[0].inputs = dataclasses.replace(images, **changed)
        assert output.hashed(found) != before


def test_a_reward_model_refuses_pictures(base):
    cfg, vision = Config(reward_funcs=("model:judge",)), Vision(base)
    parts = said([{"type": "text", "text": "3+4="}])
    for found in (prompts(base), prompts(base, [{"prompt": parts}])):
        inputs = SimpleNamespace(prompts=found, eval_prompts=[])
        with refused(r"works with text, but the messages of prompt 0"):
            vision.settings(cfg, inputs)
    plain = prompts(base, [{"prompt": "3+4="}])
    vision.settings(cfg, SimpleNamespace(prompts=plain, eval_prompts=plain))


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


def test_peft_is_told_to_keep_the_encoder_out_of_four_bits(base, data, tmp_path):
    from transformers.quantizers.quantizers_utils import should_convert_module

    cfg = Config(model=str(base), lora_r=2, load_in_4bit=True)
    names = [
        "model.visual.blocks.0.attn.qkv.lora_A",
        "model.language_model.layers.0.mlp.up_proj.lora_A",
    ]
    adapters.write({adapters.peft_name(n): torch.zeros(2, 64) for n in names}, tmp_path / "a", cfg)
    how = read_json(tmp_path / "a" / "quantization_config.json")
    kept = [
        should_convert_module(n.removesuffix(".lora_A"), how["llm_int8_skip_modules"])
        for n in names
    ]
    assert kept == [False, True]
