"""The tokenizer gives the ids and rendered chats of transformers, from a folder that both load.

In: a small byte-level BPE folder (tokenizer_folder.py). Read next: tests/data/test_prompts.py.
"""

import base64
import importlib.util
import itertools
import json
import struct
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from nanogrpo.model.tokenizer import Tokenizer
from tests.conftest import edit_json, refused, said
from tests.model.tokenizer_folder import CHATML, QWEN3_LIKE, make_folder

CHATS = [
    said("3+4="),
    [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": "Was heißt „ü“? <b> & 'q'\n\n"},
    ],
    [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\n4"},
        {"role": "user", "content": "{{ 7*7 }}{% raw %}", "name": None},
    ],
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Ours and transformers' tokenizer of one folder."""
    from transformers import AutoTokenizer

    folder = make_folder(tmp_path_factory.mktemp("qwen3_like"))
    return Tokenizer(folder), AutoTokenizer.from_pretrained(folder)


@given(st.text(max_size=60))
@settings(max_examples=60)
def test_encode_and_decode_equal_transformers(pair, text):
    ours, theirs = pair
    ids = ours.encode(text)
    assert ids == theirs.encode(text, add_special_tokens=False)
    assert (
        ours.decode(ids, skip_special_tokens=False)
        == text
        == theirs.decode(ids, clean_up_tokenization_spaces=False)
    )


def test_the_template_of_a_processor_is_read_and_saved(tmp_path):
    """Vision-language models have it in a file of its own."""
    folder = make_folder(tmp_path / "model", None)
    (folder / "chat_template.json").write_text(
        json.dumps({"chat_template": "a{{ messages[0].b }}"})
    )
    tokenizer = Tokenizer(folder)
    assert tokenizer.render([{"b": "c"}]) == "ac"
    (tmp_path / "saved").mkdir()
    tokenizer.save(tmp_path / "saved")
    assert Tokenizer(tmp_path / "saved").render([{"b": "c"}]) == "ac"


@pytest.mark.parametrize("template", [CHATML, QWEN3_LIKE], ids=["chatml", "qwen3-like"])
@pytest.mark.parametrize("in_config", [False, True])
def test_render_equals_transformers(tmp_path, template, in_config):
    compare(make_folder(tmp_path, template, in_config=in_config))


def compare(folder: Path) -> None:
    """Compare what the template of a folder makes of all chats with transformers."""
    from transformers import AutoTokenizer

    ours, theirs = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    function = {"name": "add", "description": "a < b & 'ü'", "parameters": {"z": 1, "a": [1.5]}}
    switches = [{"enable_thinking": False}, {"enable_thinking": True}]
    switches += [{}, {"tools": [{"type": "function", "function": function}]}]
    for chat, prompt_too, switch in itertools.product(CHATS, (True, False), switches):
        options = {"add_generation_prompt": prompt_too, **switch}
        want = theirs.apply_chat_template(chat, tokenize=False, **options)
        assert ours.render(chat, **options) == want, folder
        want = theirs.apply_chat_template(chat, return_dict=False, **options)
        assert ours.encode_prompt(chat, **options) == want


def test_the_published_qwen_templates_render_as_in_transformers(tmp_path):
    """Uses TRL's copies of Qwen's templates, with its training variants ({% generation %})."""
    trl = importlib.util.find_spec("trl")  # not imported, because only its files are needed
    if trl is None:
        pytest.skip("TRL needs Python 3.11")
    files = sorted((Path(trl.origin).parent / "chat_templates").glob("qwen[23]*.jinja"))
    assert {"qwen2_5.jinja", "qwen3.jinja", "qwen3_training.jinja"} <= {path.name for path in files}
    for path in files:
        compare(make_folder(tmp_path / path.stem, path.read_text(encoding="utf-8")))


def test_special_tokens_are_skipped_and_thoughts_are_not(pair):
    ours, theirs = pair
    ids = ours.encode("<think>a</think>b<|im_end|>")
    assert ids[-1] == ours.stop_token_ids[0]
    assert len(ids) == 5  # each tag is one id
    assert ours.decode(ids) == "<think>a</think>b"
    assert ours.decode(ids, skip_special_tokens=False) == "<think>a</think>b<|im_end|>"
    assert ours.encode("") == []
    # text from outside
    assert (
        ours.decode(plain := ours.encode(text := "a<|im_end|><|im_start|>b", special=False)) == text
    )
    assert plain == theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert max(ids) < ours.vocab_size == max(ours._tokenizer.get_vocab().values()) + 1


def test_stop_ids_come_from_the_tokenizer_and_the_generation_config(tmp_path):
    def stops(generation):
        return Tokenizer(make_folder(tmp_path, generation=generation))

    assert stops(None).stop_token_ids == [2]
    assert stops({"eos_token_id": 0}).stop_token_ids == [2, 0]
    assert stops({"eos_token_id": [2, 0]}).stop_token_ids == [2, 0]
    assert stops({}).stop_token_ids == [2]


def test_stop_ids_come_from_the_model_config_if_there_is_no_generation_config(tmp_path):
    """As in transformers, which makes its generation config from config.json then."""
    folder = make_folder(tmp_path)
    (folder / "config.json").write_text('{"eos_token_id": [0, 2]}')
    assert Tokenizer(folder).stop_token_ids == [2, 0]
    for unknown in (302, -1):
        (folder / "config.json").write_text(f'{{"eos_token_id": {unknown}}}')
        with refused("has no end token, or one that is not in tokenizer"):
            Tokenizer(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": 0}')
    assert Tokenizer(folder).stop_token_ids == [2, 0]


def test_a_text_prompt_gets_the_tokens_that_the_tokenizer_adds_and_messages_do_not(tmp_path):
    """As in TRL, which calls the tokenizer with a text and its chat template with messages."""
    from transformers import AutoTokenizer

    folder = make_folder(tmp_path, CHATML, config={"bos_token": "<|endoftext|>"})
    saved = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    saved.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    saved.save(str(folder / "tokenizer.json"))
    ours, theirs = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for text in ("3+4=", "", "<|im_start|>3"):
        assert ours.encode_prompt(text) == theirs(text=[text])["input_ids"][0]
        assert ours.encode_prompt(text)[0] == 0
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
    for chat in CHATS:
        want = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert ours.encode_prompt(chat) == want
        assert 0 not in want


def test_special_tokens_map_supplies_tokens_that_the_config_lacks(tmp_path):
    folder = make_folder(tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": config.pop("eos_token")})
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer(folder).stop_token_ids == [2]


def test_truncation_settings_in_tokenizer_json_are_ignored(tmp_path):
    folder = make_folder(tmp_path)
    saved = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    saved.enable_truncation(4)
    saved.enable_padding(length=8)
    saved.save(str(folder / "tokenizer.json"))
    ours = Tokenizer(folder)
    assert ours.decode(ours.encode("a b c d e f g h i j")) == "a b c d e f g h i j"
    assert len(ours.encode("a")) == 1


def test_save_copies_the_files_byte_for_byte_even_if_the_source_is_gone(tmp_path):
    source = make_folder(tmp_path / "a", generation={"eos_token_id": [2]})
    (source / "model.safetensors").write_bytes(b"not ours to copy")
    before = {
        path.name: path.read_bytes() for path in source.iterdir() if path.suffix != ".safetensors"
    }
    ours = Tokenizer(source)
    for path in source.iterdir():
        path.unlink()
    (tmp_path / "b" / "c").mkdir(parents=True)
    ours.save(tmp_path / "b" / "c")
    assert {path.name: path.read_bytes() for path in (tmp_path / "b" / "c").iterdir()} == before
    assert len(before) == 4
    assert Tokenizer(tmp_path / "b" / "c").render(CHATS[0]) == ours.render(CHATS[0])


def test_the_default_template_is_chosen(tmp_path):
    several = [
        {"name": "rag", "template": "T"},
        {"name": "default", "template": "D{{ bos_token }}{{ strftime_now is defined }}"},
        {"name": "default", "template": "not the first"},
    ]
    ours = Tokenizer(make_folder(tmp_path, several, in_config=True))
    assert ours.render(CHATS[0]) == "DFalse"  # a null bos_token is empty, not "None"


@pytest.mark.parametrize(
    "template",
    [
        # it cannot change the messages or leave its sandbox
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ 1 // 0 }}",
        # not every jinja2 raises an error in the first half
        "{{ 'x' | int(base=99) }}{{ messages[0].content.index('z') }}",
        "{{ messages[0].content | tojson(indent={}) }}{{ messages[0].content.index('z') }}",
    ],
)
def test_a_template_that_fails_rejects_the_messages(tmp_path, template):
    ours = Tokenizer(make_folder(tmp_path, template))
    with refused(rf"{tmp_path} rejects the messages or columns \(.+\): change them"):
        ours.render(CHATS[0])


LOOPS = "".join(f"{{% for i{n} in messages %}}" for n in range(60)) + "{% endfor %}" * 60


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"config": {"eos_token": None}}, "has no end token, or one that is not in"),
        ({"config": {"eos_token": "<eos>"}}, "has no end token, or one that is not in"),
        ({"generation": [1]}, r"/generation_config\.json must contain a JSON object"),
        ({"template": "{% if %}"}, r"the chat template of \S+ cannot be compiled"),
        ({"template": LOOPS}, "cannot be compiled"),
    ],
)
def test_a_folder_that_is_no_tokenizers_is_reported_in_one_sentence(tmp_path, how, message):
    """Damage at random is in tests/test_mutations.py."""
    with refused(message):
        Tokenizer(make_folder(tmp_path, **how))


def test_the_template_for_tools_is_chosen_as_in_transformers(tmp_path):
    from transformers import AutoTokenizer

    several = [
        {"name": "default", "template": "D{{ messages[0].content }}"},
        {"name": "tool_use", "template": "T{{ tools | tojson }}{{ namespace is defined }}"},
    ]
    for named in (several, several[:1]):
        folder = make_folder(tmp_path / str(len(named)), named, in_config=True)
        ours, theirs = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
        for tools in ([{"type": "function", "function": {"name": "f"}}], None):
            want = theirs.apply_chat_template(CHATS[0], tools=tools, tokenize=False)
            assert ours.render(CHATS[0], tools=tools, add_generation_prompt=False) == want
        assert ours.template_variables == ({"tools"} if named is several else set())
    qwen = Tokenizer(make_folder(tmp_path / "qwen"))
    assert qwen.template_variables == {"tools", "enable_thinking"}


def test_a_panic_of_the_tokenizer_is_a_user_error(tmp_path):
    """A damaged table makes the Rust library panic, which is no Exception in Python."""
    folder = make_folder(tmp_path)
    file = folder / "tokenizer.json"
    table = base64.b64encode(struct.pack("<II", 4, 0xFFFFFC00) + b"abc\0").decode()
    raw = edit_json(file, normalizer={"type": "Precompiled", "precompiled_charsmap": table})
    message = r"tokenizer\.json {} \(index out of bounds.*\): .*copy it again from the model\.$"
    with refused(message.format("cannot be read")):
        Tokenizer(folder)
    for token in raw["added_tokens"]:
        token["normalized"] = False  # so the table is used later
    edit_json(file, **raw)
    ours = Tokenizer(folder)
    with refused(message.format("cannot encode the text 'abc'")):
        ours.encode("abc")
    with refused(r"cannot encode the text '.ud800' .*write valid characters"):
        Tokenizer(make_folder(tmp_path / "sound")).encode("\ud800")


def test_a_template_may_reject_the_messages_and_may_be_absent(tmp_path):
    ours = Tokenizer(make_folder(tmp_path / "a", CHATML))
    with refused("unknown role critic"):
        ours.render([{"role": "critic", "content": "x"}])
    with refused(r"rejects the messages or columns \(Expecting value.*\): change them"):
        ours.render(CHATS[0], tools="calculator")
    bare = Tokenizer(make_folder(tmp_path / "b", None))
    assert not bare.has_chat_template
    assert bare.encode_prompt("3+4=") == bare.encode("3+4=")
    with refused("no chat template"):
        bare.encode_prompt(CHATS[0])
