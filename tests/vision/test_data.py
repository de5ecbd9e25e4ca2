"""Pictures in data: every form of a picture, TRL's conventions for their places, and one sentence
for each mistake.

Read next: test_processor.py (from a picture to the encoder's input), test_train.py.
"""

import io
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import train
from nanogrpo.data import prompts as data
from nanogrpo.errors import UserError
from nanogrpo.vision.data import Picture, Reader
from tests.conftest import arguments
from tests.vision.base import encoded, picture, prompts, records

ASK = [{"role": "user", "content": "3+4="}]
SHOW = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "3+4="}]}]
IMAGE = picture(48, 32)


def load(source, tokenizer, base, **how) -> list:
    (out,) = data.load_all([source], tokenizer, vision=base, **how)
    return out


def pixels(source: bytes) -> bytes:
    return Image.open(io.BytesIO(source)).tobytes()


# --- the forms of a picture ---


def jsonl(folder, rows):
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_every_form_of_a_picture_gives_the_same_prompt(base, tokenizer, tmp_path):
    raw = encoded(IMAGE)
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(raw)
    here, there = "pictures/a.png", str(tmp_path / "pictures" / "a.png")
    forms = [IMAGE, raw, {"bytes": raw, "path": None}, {"bytes": None, "path": there}, there]
    shown = [*forms, Image.open(there), Path(there)]
    filled = [{"type": "image", "image": IMAGE}, {"type": "text", "text": "3+4="}]
    sources = [
        [{"prompt": ASK, "image": form} for form in shown],
        [{"prompt": SHOW, "images": [form]} for form in shown],
        [{"prompt": [{"role": "user", "content": filled}]}],
        [{"prompt": "3+4=", "image": IMAGE}],  # becomes a user message
        [{"question": "3+4=", "image": IMAGE}],
        jsonl(tmp_path, [{"prompt": SHOW, "image": here}, {"prompt": ASK, "images": [there]}]),
    ]
    found = [p for source in sources for p in load(source, tokenizer, base)]
    assert len(found) == 19
    for p in found:
        assert p.token_ids == found[0].token_ids
        assert p.images.grid == [(1, 4, 6)]
        assert [pixels(source) for source in p.images.sources] == [IMAGE.tobytes()]
        content = p.text[0]["content"]
        assert [part["type"] for part in content] == ["image", "text"]
        assert content[1]["text"] == "3+4="
    assert found[1].images.sources == [raw]  # a file stays as it is


def test_parquet_files_and_saved_data_sets_hold_pictures(base, tokenizer, tmp_path):
    """As the package datasets writes them, and as it gives them to a program."""
    datasets = pytest.importorskip("datasets")
    rows = {
        "prompt": [r["prompt"] for r in records(6)],
        "images": [r["images"] for r in records(6)],
    }
    features = datasets.Features(
        {
            "prompt": [{"role": datasets.Value("string"), "content": [PART(datasets)]}],
            "images": datasets.List(datasets.Image()),
        }
    )
    made = datasets.Dataset.from_dict(rows, features=features)
    made.save_to_disk(tmp_path / "saved")
    made.to_parquet(tmp_path / "data.parquet")
    expected = prompts(base, records(6))
    for source in (str(tmp_path / "saved"), str(tmp_path / "data.parquet"), made):
        found = load(source, tokenizer, base)
        for p, e in zip(found, expected, strict=True):
            assert p.token_ids == e.token_ids
            ours, theirs = (x.images.sources if x.images else [] for x in (p, e))
            assert list(map(pixels, ours)) == list(map(pixels, theirs))


def PART(datasets):
    """Arrow gives every part both fields, of which one is null."""
    return {"type": datasets.Value("string"), "text": datasets.Value("string")}


def test_records_without_a_picture_stay_texts(base, tokenizer):
    nothing = [{"image": None}, {"images": []}, {"images": None, "image": ""}, {}]
    for p in load([{"prompt": ASK, **row} for row in nothing], tokenizer, base):
        assert p.images is None
        assert p.text == ASK
    (p,) = load([{"prompt": "3+4=", "images": []}], tokenizer, base)
    assert (p.text, p.token_ids) == ("3+4=", tokenizer.encode("3+4="))


def test_a_file_that_several_records_show_is_in_memory_once(base, tokenizer, tmp_path):
    IMAGE.save(tmp_path / "a.png")
    source = jsonl(tmp_path, [{"prompt": ASK, "image": "a.png"}] * 3)
    first, *others = load(source, tokenizer, base)
    assert all(p.images.sources[0] is first.images.sources[0] for p in others)
    assert [p.columns["image"] for p in others] == [first.columns["image"]] * 2


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "CMYK", "1", "I;16"])
def test_every_kind_of_picture_becomes_rgb_and_upright(base, mode):
    """An EXIF tag turns the picture by 90 degrees, so its sides change places."""
    image = IMAGE.convert("I").convert(mode) if mode == "I;16" else IMAGE.convert(mode)
    kind = "JPEG" if mode == "CMYK" else "PNG"
    exif = Image.Exif()
    exif[0x0112] = 6
    for options in ({}, {"exif": exif}):
        read = Reader(base).read(encoded(image, kind, **options), base)
        decoded = Image.open(io.BytesIO(read.data))
        assert (decoded.mode, decoded.size) == ("RGB", read.size)
        assert decoded.getexif().get(0x0112, 1) == 1
        assert decoded.size == ((32, 48) if options else (48, 32))


def test_a_picture_is_decoded_once_before_training(base, tokenizer, monkeypatch):
    """Large data sets would otherwise take minutes longer to load."""
    raw, opened, real = encoded(IMAGE), [], Image.open
    monkeypatch.setattr(Image, "open", lambda file: opened.append(file) or real(file))
    load([{"prompt": ASK, "image": raw}] * 3, tokenizer, base)
    assert len(opened) == 3


def test_a_picture_is_small_in_a_pickle_and_comes_out_as_a_pil_image():
    import pickle

    raw = encoded(IMAGE)
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
    "places": ([{"role": "user", "content": [{"type": "image"}, TEXT, {"type": "image"}]}], 2),
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
    given = [Picture(encoded(picture(16, 16 * (i + 1))), (16, 16 * (i + 1))) for i in range(count)]
    reader = Reader(base)
    try:
        expected = prepare_multimodal_messages(messages, given)
    except ValueError:
        with pytest.raises(UserError, match="make the numbers equal"):
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


TRUNCATED = encoded(IMAGE)[:-200]
LONG = [{"role": "user", "content": "9" * 40}]
WRITTEN = [{"role": "user", "content": "<|image_pad|>3+4="}]
MISTAKES = {
    "missing": (row(image="none.png"), r"the picture none.png cannot be read \(No such file"),
    "a URL": (
        row(image="https://x.org/a.png"),
        r"\(No such file or directory\): give its path, abs",
    ),
    "a folder": (row(image="."), r"the picture . cannot be read \(it is not a file\): give its"),
    "a pipe": (
        row(image="pipe"),
        r"the picture pipe cannot be read \(it is not a file\): give its",
    ),
    "base64": (
        row(image="iVBORw0K" * 99),
        r"the picture iVB.{97} cannot be read \(File name too lo",
    ),
    "an array": (row(image=np.zeros((8, 8, 3))), r"the picture is of type ndarray: give a path"),
    "truncated": (row(image=TRUNCATED), r"the picture cannot be decoded \(.*truncated.*\): save"),
    "a damaged file": (row(image="cut.png"), r"the picture cut.png cannot be decoded \("),
    "not a picture": (row(image=b"GIF"), r"the picture has no format that Pillow reads: save it"),
    "a number": (
        row(image=7),
        r"the picture is of type int: give a path, the bytes of a file, or a PIL",
    ),
    "an empty entry": (row(images=[None]), r"the picture is of type NoneType: give a path"),
    "a long side": (row(image=picture(1601, 8)), r"one side may be at most 200 times"),
    "a bomb": (
        row(image=encoded(picture(80, 80))),
        r"cannot be decoded \(Image size \(6400 pixels",
    ),
    "a worse bomb": (row(image=encoded(picture(96, 96))), r"cannot be decoded \(Image size \(9216"),
    "no picture": (
        row(),
        r"row 2: 0 of its pictures are in columns, but its messages have 1 parts",
    ),
    "two pictures": (
        row(images=[IMAGE, IMAGE]),
        r"2 of its pictures are in columns, but its messages have 1 parts",
    ),
    "written": (
        {"prompt": WRITTEN},
        r"the number of pictures is 0, but that of image tokens is 1: write none in texts, and use",
    ),
    "16 bits": (
        row(image=Image.fromarray(np.full((8, 8), 256, np.uint16))),
        r"cannot be decoded \(its values have more than 8 bits",
    ),
    "fractions": (row(image=Image.new("F", (8, 8), 0.5)), r"values have more than 8 bits"),
    "a video": (
        {"prompt": [{"role": "user", "content": [{"type": "video"}]}]},
        r"a part of a mess",
    ),
    "a bare text": (
        {"prompt": [{"role": "user", "content": ["x"]}]},
        r"a part of a message is 'x'",
    ),
    "no user": (
        {"prompt": [SYSTEM], "image": IMAGE},
        r"1 of its pictures are in columns, but its messages have 0 parts",
    ),
    "too large": (
        row(image=picture(64, 256)),
        r"has \d+ tokens \(64 of pictures\) but the limit is",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_gets_one_sentence_with_its_row(base, tokenizer, tmp_path, monkeypatch, name):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 90**2 // 2 if "bomb" in name else 10**6)
    (tmp_path / "cut.png").write_bytes(TRUNCATED)
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)
    record, problem = MISTAKES[name]
    good = {"prompt": SHOW, "image": IMAGE}
    with pytest.raises(UserError, match=problem) as e:
        load([good, record], tokenizer, base, max_prompt_length=60)
    assert str(e.value).startswith("data, row 2: ")
    assert "\n" not in str(e.value)
    assert str(e.value).endswith(".")


def test_a_picture_that_does_not_fit_can_be_dropped(base, tokenizer):
    rows = [row(image=IMAGE), row(image=picture(64, 256)), row(image=IMAGE)]
    found = load(rows, tokenizer, base, max_prompt_length=60, long_prompts="drop")
    assert [p.id for p in found] == [0, 2]


def test_a_mistake_in_a_file_ends_a_run_with_one_sentence(base, files, tmp_path, capsys):
    (tmp_path / "cut.png").write_bytes(TRUNCATED)
    path = jsonl(tmp_path, [{"prompt": ASK}, row(image="cut.png")])
    assert train.main(arguments(base, files, tmp_path / "out", "--data", path)) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"error: {path}:2: the picture cut.png cannot be decoded (")


PICTURES = {
    "a path": {"prompt": "3+4=", "image": "a.PNG"},
    "paths": {"prompt": "3+4=", "images": ["a.jpeg"]},
    "bytes": {"prompt": "3+4=", "image": {"bytes": b"x", "path": None}},
    "an object": {"prompt": "3+4=", "image": IMAGE},
    "a place": {"prompt": SHOW},
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_model_that_reads_only_text_refuses_pictures(tiny_tokenizer, name):
    with pytest.raises(
        UserError, match=r"^data, row 1: it has a picture, but the model reads only"
    ):
        data.load_all([[PICTURES[name]]], tiny_tokenizer)


def test_a_text_about_a_picture_is_a_text(tiny_tokenizer):
    """Columns of these names may be there for reward functions, too."""
    rows = [
        {"prompt": "Describe a.png", "image": "ubuntu:22.04", "images": None},
        {"prompt": [{"role": "user", "content": "Write to a.png"}], "image": 3},
    ]
    (found,) = data.load_all([rows], tiny_tokenizer)
    assert [p.columns["image"] for p in found] == ["ubuntu:22.04", 3]
    assert [p.images for p in found] == [None, None]
