"""Pictures in data: every form of a picture, TRL's conventions for their places, and one sentence
for each mistake.

Read next: test_processor.py (from a picture to the encoder's input), test_train.py.
"""

import io
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile

from nanogrpo import Config
from nanogrpo.data import prompts as data
from nanogrpo.extras.vision.data import Picture, Reader
from tests.conftest import refused, said, write_rows
from tests.vision.base import picture, prompts, prompts_of, records
from tests.vision.tiny import png

ASK = said("3+4=")
SHOW = said([{"type": "image"}, {"type": "text", "text": "3+4="}])
IMAGE = picture(48, 32)


def pixels(source: bytes) -> bytes:
    return Image.open(io.BytesIO(source)).tobytes()


# --- the forms of a picture ---


def test_every_form_of_a_picture_gives_the_same_prompt(base, tokenizer, tmp_path):
    raw = png(IMAGE)
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(raw)
    here, there = "pictures/a.png", str(tmp_path / "pictures" / "a.png")
    forms = [IMAGE, raw, {"bytes": raw, "path": None}, {"bytes": None, "path": there}, there]
    shown = [*forms, Image.open(there), Path(there)]
    rows = {"prompt": SHOW, "image": here}, {"prompt": ASK, "images": [there]}
    filled = [{"type": "image", "image": IMAGE}, {"type": "text", "text": "3+4="}]
    sources = [
        [{"prompt": ASK, "image": form} for form in shown],
        [{"prompt": SHOW, "images": [form]} for form in shown],
        [{"prompt": said(filled)}],
        [{"prompt": "3+4=", "image": IMAGE}],  # becomes a user message
        [{"question": "3+4=", "image": IMAGE}],
        str(write_rows(tmp_path / "data.jsonl", rows)),
    ]
    found = [p for source in sources for p in prompts_of(source, tokenizer, base)]
    assert len(found) == 19
    for p in found:
        assert p.token_ids == found[0].token_ids
        assert p.inputs.grid == [(1, 4, 6)]
        assert [pixels(source) for source in p.inputs.sources] == [IMAGE.tobytes()]
        content = p.text[0]["content"]
        assert [part["type"] for part in content] == ["image", "text"]
        assert content[1]["text"] == "3+4="
    assert found[1].inputs.sources == [raw]  # a file stays as it is


def test_parquet_files_and_saved_data_sets_hold_pictures(base, tokenizer, tmp_path):
    """As the package datasets writes them, and as it gives them to a program."""
    datasets = pytest.importorskip("datasets")
    rows = {
        "prompt": [r["prompt"] for r in records(6)],
        "images": [r["images"] for r in records(6)],
    }
    text = datasets.Value("string")
    # Arrow gives every part both fields, of which one is null
    part = {"type": text, "text": text}
    features = datasets.Features(
        {
            "prompt": [{"role": text, "content": [part]}],
            "images": datasets.List(datasets.Image()),
        }
    )
    made = datasets.Dataset.from_dict(rows, features=features)
    made.save_to_disk(tmp_path / "saved")
    made.to_parquet(tmp_path / "data.parquet")
    expected = prompts(base, records(6))
    for source in (str(tmp_path / "saved"), str(tmp_path / "data.parquet"), made):
        found = prompts_of(source, tokenizer, base)
        for p, e in zip(found, expected, strict=True):
            assert p.token_ids == e.token_ids
            ours, theirs = (x.inputs.sources if x.inputs else [] for x in (p, e))
            assert list(map(pixels, ours)) == list(map(pixels, theirs))


def test_a_picture_is_decoded_once_before_training(base, tokenizer, monkeypatch):
    """Large data sets would otherwise take minutes longer to load."""
    raw, loaded, real = png(IMAGE), [], ImageFile.ImageFile.load
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda x: loaded.append(x) or real(x))
    prompts_of([{"prompt": ASK, "image": raw}] * 3, tokenizer, base)
    assert len(set(map(id, loaded))) == 3


def test_a_picture_is_small_in_a_pickle_and_comes_out_as_a_pil_image():
    raw = png(IMAGE)
    sent = pickle.dumps([Picture(raw, IMAGE.size)] * 8)
    assert len(sent) < len(raw) + 200
    images = pickle.loads(sent)
    assert {image.tobytes() for image in images} == {IMAGE.tobytes()}
    assert str(Picture(raw, IMAGE.size)) == "<picture 48×32>"


# --- TRL's conventions ---

TEXT = {"type": "text", "text": "3+4="}
SYSTEM = {"role": "system", "content": "Add."}
CASES = {
    "one": (ASK, 1),
    "several": (ASK, 3),
    "a system message": ([SYSTEM, *ASK], 2),
    "a place": (SHOW, 1),
    "places": (said([{"type": "image"}, TEXT, {"type": "image"}]), 2),
    "turns": ([*ASK, {"role": "assistant", "content": "7"}, {"role": "user", "content": "?"}], 1),
    "none": (SHOW[:0] + ASK, 0),
    "too many places": (SHOW, 0),
    "too few places": (SHOW, 2),
}


@pytest.mark.parametrize("name", CASES)
def test_pictures_get_the_places_that_trl_gives_them(base, name):
    if sys.version_info < (3, 11):
        pytest.skip("TRL needs Python 3.11")
    from trl.data_utils import prepare_multimodal_messages

    messages, count = CASES[name]
    given = [Picture(png(picture(16, 16 * (i + 1))), (16, 16 * (i + 1))) for i in range(count)]
    reader = Reader()
    try:
        expected = prepare_multimodal_messages(messages, given)
    except ValueError:
        with refused("make the two numbers equal"):
            reader.insert(messages, {"images": given}, base)
        return
    found, order = reader.insert(messages, {"images": given}, base)
    assert order == given
    if given:  # else the messages stay as they are in the data
        assert found == expected
    assert messages == CASES[name][0]  # the record itself is not changed


# --- mistakes ---


def row(**columns) -> dict:
    return {"prompt": SHOW, **columns}


TRUNCATED = png(IMAGE)[:-200]
WRITTEN = said("<|image_pad|>3+4=")
MISTAKES = {
    "missing": (row(image="none.png"), r"the picture none.png cannot be read \(No such file"),
    "an array": (row(image=np.zeros((8, 8, 3))), r"the picture is of type ndarray: give a path"),
    "a damaged file": (row(image="cut.png"), r"the picture cut.png cannot be decoded \("),
    "not a picture": (row(image=b"%!PS"), "the picture has none of the formats PNG, JPEG, "),
    "a long side": (
        row(image=picture(1601, 8)),
        "1601 × 8 pixels, but one side may be at most 200 ",
    ),
    "a bomb": (row(image=png(picture(80, 80))), r"decoded \(Image size \(6400 pixels"),
    "no picture": (row(), r"0 of its pictures are in columns, but its messages have 1 parts"),
    "two pictures": (row(images=[IMAGE, IMAGE]), r"2 of its pictures are in columns, but its mess"),
    "written": ({"prompt": WRITTEN}, r"there are 0 pictures but 1 image tokens"),
    "16 bits": (row(image=Image.new("F", (8, 8), 0.5)), r"its values have more than 8 bits"),
    "a video": (
        {"prompt": said([{"type": "video"}])},
        r"a part of a mess",
    ),
    "too large": (row(image=picture(64, 256)), r"has \d+ tokens but the limit is"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_gets_one_sentence_with_its_row(base, tokenizer, tmp_path, monkeypatch, name):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 90**2 // 2 if name == "a bomb" else 10**6)
    (tmp_path / "cut.png").write_bytes(TRUNCATED)
    monkeypatch.chdir(tmp_path)
    record, problem = MISTAKES[name]
    good = {"prompt": SHOW, "image": IMAGE}
    with refused(rf"^data, row 2: .*{problem}.*\.$"):
        prompts_of([good, record], tokenizer, base, max_prompt_length=60)


def test_a_model_that_reads_only_text_refuses_pictures(tiny_tokenizer):
    with refused("must be a string or a list"):
        data.load(Config(), tiny_tokenizer, [[row()]])
