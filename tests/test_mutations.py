"""Files from elsewhere, damaged at random: every reader returns a result or raises one sentence,
within limits of time and memory.

Each file is truncated, has bits flipped, parts removed, repeated or replaced, or is nested deeply;
in JSON, values also get another type. The damage depends on a seed only. Read next:
nanogrpo/errors.py (`reading`), tests/run/test_resume.py (damage that must be found).
"""

import copy
import dataclasses
import json
import random
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from nanogrpo import Config
from nanogrpo.data import prompts
from nanogrpo.errors import UserError, read_json
from nanogrpo.extras.data.sources import Sources
from nanogrpo.extras.lora import adapters
from nanogrpo.extras.reward_model import RewardModel
from nanogrpo.extras.view.data import Run
from nanogrpo.model import checkpoint
from nanogrpo.model.tokenizer import Tokenizer
from nanogrpo.run import output
from tests.conftest import edit_json, write_rows
from tests.model.lora_models import loaded
from tests.model.tokenizer_folder import make_folder
from tests.run.test_resume import start

EACH = 40  # mutations of a file
SECONDS, BYTES = 10.0, 1 << 30  # of processor time per file, and of memory for all
ODD = [
    None,
    True,
    -1,
    0,
    1.5,
    1e400,
    10**30,
    10**400,
    "",
    "x",
    "\ud800",
    "\0",
    [],
    {},
    [[]],
    [None],
]


def mutations(data: bytes, rng: random.Random) -> Iterator[bytes]:
    """Yield damaged versions of a file, without end."""
    yield from (b"", b"[" * 200_000, b'{"a":' * 100_000, b"\0" * 64, data + data, b"\xff" + data)
    while True:
        a, b = sorted(rng.randrange(len(data) + 1) for _ in "ab")
        some = bytearray(data)
        for _ in range(rng.choice([1, 1, 1, 2, 32])):
            bit = rng.randrange(8 * len(data))
            some[bit // 8] ^= 1 << bit % 8
        yield bytes(some)
        yield data[:a]
        yield rng.choice(
            [
                data[:a] + data[b:],
                data[:b] + data[a:],
                data[:a] + rng.randbytes(min(b - a, 99)) + data[b:],
                data[:a] + b"\0" * (b - a) + data[b:],
            ]
        )
        try:
            yield json.dumps(odd(json.loads(data), rng)).encode()
        except ValueError:  # the file is not JSON
            continue


def odd(value: object, rng: random.Random) -> object:
    """Return JSON with another value at a random place, or nested deeply there."""
    value = copy.deepcopy(value)
    node, seen = value, []
    while isinstance(node, dict | list) and node:
        key = rng.choice([*node]) if isinstance(node, dict) else rng.randrange(len(node))
        seen.append((node, key))
        node = node[key]
    if not seen:
        return rng.choice(ODD)
    parent, key = rng.choice(seen)
    if rng.random() < 0.2 and isinstance(parent, dict):
        del parent[key]
    elif rng.random() < 0.1:
        for _ in range(rng.choice([100, 800])):
            parent[key] = [parent[key]]
    else:
        parent[key] = rng.choice(ODD)
    return value


# --- the readers: each writes a good file, and returns it with a function that reads it ---

Reader = tuple[Path, Callable[[], object]]


def use_tokenizer(folder: Path) -> object:
    tokenizer = Tokenizer(folder)
    chat = [{"role": "user", "content": "1+1="}]
    ids = [tokenizer.encode("1+1= ü", surround=True), tokenizer.encode_prompt(chat)]
    return ids, tokenizer.decode(ids[0]), tokenizer.template_variables


def of_model(name: str, base: Path, folder: Path) -> Reader:
    shutil.copytree(base, folder / "base")
    return folder / "base" / name, lambda: checkpoint.load_model(folder / "base")


def of_tokenizer(name: str, base: Path, folder: Path, **how) -> Reader:
    make_folder(folder / "chat", **how)
    return folder / "chat" / name, lambda: use_tokenizer(folder / "chat")


def index_of_weights(base: Path, folder: Path) -> Reader:
    path, read = of_model(checkpoint.INDEX, base, folder)
    (path.parent / checkpoint.WEIGHTS).rename(path.parent / "a.safetensors")
    names = checkpoint.load_model(base).state_dict()
    path.write_text(
        json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, "a.safetensors")})
    )
    return path, read


def of_adapter(name: str, base: Path, folder: Path) -> Reader:
    cfg = Config(model=str(base), lora_r=2)
    model = loaded(base, cfg)
    adapters.write(adapters.host_adapters(model), folder / "adapter", cfg)
    cfg = dataclasses.replace(cfg, lora_adapter=str(folder / "adapter"))
    return folder / "adapter" / name, lambda: adapters.load(model, folder / "adapter", cfg)


def base_of_adapter(base: Path, folder: Path) -> Reader:
    own, merged = folder / "own", folder / adapters.SUBFOLDER
    for path in own, merged:
        path.mkdir()
        (path / adapters.CONFIG).write_text(json.dumps({"base_model_name_or_path": path.name}))
    cfg = Config(lora_adapter=str(own))
    return own / adapters.CONFIG, lambda: adapters.check_base(folder, cfg)


ROWS = [
    {"prompt": "1+1=", "answer": "2", "tools": None, "level": [1, {"a": "b"}]},
    {"prompt": [{"role": "user", "content": "1+2="}], "answer": "3", "tools": [{"name": "f"}]},
]
TEXTS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(20)]


def loads_prompts(source: Path) -> Callable[[], object]:
    tokenizer = Tokenizer(make_folder(source.with_name("chat")))

    def read() -> object:
        found = prompts.load(Config(), tokenizer, [str(source)], [Sources(Config())])
        return output.hashed(found)

    return read


def jsonl(base: Path, folder: Path) -> Reader:
    path = write_rows(folder / "data.jsonl", ROWS)
    return path, loads_prompts(path)


def json_lines_of_one_row(base: Path, folder: Path) -> Reader:
    """A file that is JSON as a whole, so its values get other types."""
    path = folder / "data.json"
    path.write_text(json.dumps(ROWS[0]))
    return path, loads_prompts(path)


def csv(base: Path, folder: Path) -> Reader:
    path = folder / "data.csv"
    path.write_text("prompt,answer\n" + "".join(f'"{i}+1=",{i + 1}\n' for i in range(20)))
    return path, loads_prompts(path)


def parquet(base: Path, folder: Path) -> Reader:
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    path = folder / "data.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(TEXTS), path)
    return path, loads_prompts(path)


def saved(name: str, base: Path, folder: Path) -> Reader:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{**row, "tags": ["a", None]} for row in TEXTS])
    datasets.DatasetDict(train=rows).save_to_disk(folder / "saved")
    found = next((folder / "saved").glob(name))
    return found, loads_prompts(folder / "saved")


def of_checkpoint(name: str, base: Path, folder: Path) -> Reader:
    made = start(folder, base).advance(1).save()
    return made / name, lambda: start(folder, base, resume=True)


def log(base: Path, folder: Path) -> Reader:
    rows = [{"run": {}}, {"step": 0, "reward": 1.0}, {"step": 0, "eval/after": 1}]
    return write_rows(folder / "metrics.jsonl", rows), lambda: Run(folder).index()


def any_json(base: Path, folder: Path) -> Reader:
    (folder / "a.json").write_text('{"a": [1, "b", null]}')
    return folder / "a.json", lambda: read_json(folder / "a.json")


def reward_model(base: Path, folder: Path) -> Reader:
    shutil.copytree(base, folder / "judge")
    kind = ["Qwen3ForSequenceClassification"]
    edit_json(folder / "judge/config.json", architectures=kind, id2label={"0": "good"})
    weights = checkpoint.load_model(base).state_dict()
    del weights["lm_head.weight"]
    weights["score.weight"] = torch.ones(1, 48)
    checkpoint.save_file(weights, folder / "judge" / checkpoint.WEIGHTS)
    return folder / "judge" / "config.json", lambda: RewardModel.load(str(folder / "judge"))


READERS = {
    "JSON": any_json,
    "config.json": partial(of_model, "config.json"),
    "safetensors": partial(of_model, "model.safetensors"),
    "index of safetensors": index_of_weights,
    "tokenizer.json": partial(of_tokenizer, "tokenizer.json"),
    "tokenizer_config.json": partial(of_tokenizer, "tokenizer_config.json", in_config=True),
    "generation_config.json": partial(
        of_tokenizer, "generation_config.json", generation={"eos_token_id": 2}
    ),
    "chat template": partial(of_tokenizer, "chat_template.jinja"),
    "adapter_config.json": partial(of_adapter, "adapter_config.json"),
    "base of an adapter": base_of_adapter,
    "adapter_model.safetensors": partial(of_adapter, "adapter_model.safetensors"),
    "config.json of a reward model": reward_model,
    "JSONL": jsonl,
    "a row": json_lines_of_one_row,
    "CSV": csv,
    "Parquet": parquet,
    "Arrow": partial(saved, "train/*.arrow"),
    "state.json of a data set": partial(saved, "train/state.json"),
    "dataset_dict.json": partial(saved, "dataset_dict.json"),
    "state.json": partial(of_checkpoint, "state.json"),
    "tensors of a checkpoint": partial(of_checkpoint, "state/__0_0.distcp"),
    "index of a checkpoint": partial(of_checkpoint, "state/.metadata"),
    "metrics.jsonl": log,
}


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_gives_a_result_or_one_sentence(name, tiny_base, tmp_path):
    path, read = READERS[name](tiny_base, tmp_path)
    read()
    good, rng = path.read_bytes(), random.Random(name)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    sentences = 0
    for i, (bad, _) in enumerate(zip(mutations(good, rng), range(EACH))):
        path.write_bytes(bad)
        begun = time.process_time()
        sentence = ""
        try:
            read()
        except UserError as e:
            sentence = str(e)
            sentences += 1
        assert "\n" not in sentence, i
        places = str(tmp_path), path.name, "--data"
        assert not sentence or any(place in sentence for place in places), (i, sentence)
        assert time.process_time() - begun < SECONDS, i
    assert sentences > 3  # the damage does something
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    assert used < BYTES
    path.write_bytes(good)
    read()
