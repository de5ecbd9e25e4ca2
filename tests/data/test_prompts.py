"""Prompts from files: each kind of record becomes a prompt, and each bad record is reported.

Read next: test_order.py (which prompts a step draws), tests/rewards/test_rewards.py (the other
columns).
"""

import csv
import json
from pathlib import Path

import pytest

from nanogrpo import Config
from nanogrpo.data import prompts
from nanogrpo.data.prompts import system_prompt
from nanogrpo.extras.data.sources import Sources
from nanogrpo.model.tokenizer import Tokenizer
from tests.conftest import refused, said, write_rows
from tests.model.tokenizer_folder import make_folder

SOURCES = Sources(Config())
GSM8K = Path(__file__).parent / "assets" / "gsm8k_tiny.jsonl"


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    return Tokenizer(make_folder(tmp_path_factory.mktemp("chat")))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return Tokenizer(make_folder(tmp_path_factory.mktemp("plain"), None))


def load(source, tokenizer, split="train", **options):
    cfg, data = Config(**options), source if isinstance(source, list) else [source]
    return prompts.load(cfg, tokenizer, data, [Sources(cfg)], split=split)


def one(record, tokenizer, system="", features=(SOURCES,), **options):
    cfg = Config(**options)
    return prompts.from_record(record, tokenizer, 0, "record", cfg, system, features, Path())


def fields(found):
    """Everything but the ids."""
    return [(p.text, p.token_ids, p.columns) for p in found]


def write(path, *lines):
    path.write_bytes(
        b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines)
    )
    return str(path)


# --- records ---


def test_plain_and_conversational_records_keep_every_other_column(tmp_path, chat):
    messages = said("3+4=")
    rows = [
        # a line separator inside a text does not end the line
        {"prompt": "3+4=", "solution": "a\u2028b\u0085c", "level": None},
        {"prompt": messages, "tags": ["a", {"b": 1}]},
    ]
    path = write(
        tmp_path / "data.jsonl",
        "\ufeff" + json.dumps(rows[0], ensure_ascii=False),
        "",
        "  ",
        json.dumps(rows[1]) + "\r",
        "",
    )
    first, second = load(path, chat, enable_thinking=False)
    columns = {"solution": "a\u2028b\u0085c", "level": None}
    assert (first.id, first.text, first.columns) == (0, "3+4=", columns)
    assert first.token_ids == chat.encode("3+4=")
    assert (second.id, second.text, second.columns) == (1, messages, {"tags": ["a", {"b": 1}]})
    assert second.token_ids == chat.encode(chat.render(messages, enable_thinking=False))
    assert chat.decode(second.token_ids).endswith("</think>\n\n")
    again = [one(row, chat, enable_thinking=False) for row in rows]
    assert fields(again) == fields([first, second])
    # the caller's records are not changed
    assert rows[0] == {"prompt": "3+4=", **columns}


def test_gsm8k_records_become_messages_or_text_and_a_solution(chat, plain):
    conversational, text = load(str(GSM8K), chat), load(str(GSM8K), plain)
    assert len(conversational) == len(text) == 12
    for a, b in zip(conversational, text):
        assert a.text == said(b.text)
        assert a.columns == b.columns
        assert set(a.columns) == {"answer", "solution"}
        assert a.columns["answer"].endswith("#### " + a.columns["solution"])


@pytest.mark.parametrize(
    ("column", "more"),
    [
        ("problem", {"solution": "It is \\boxed{2}.", "level": 1}),
        ("question", {"answer": "two"}),
        ("question", {"answer": "#### 1", "solution": "one"}),  # which is not overwritten
        ("prompt", {"question": "q", "answer": "#### 1"}),  # it comes before a question
    ],
)
def test_the_columns_of_prompts_are_known_and_the_others_stay(chat, plain, column, more):
    message, text = (one({column: "1+1?", **more}, tokenizer) for tokenizer in (chat, plain))
    assert text.text == "1+1?"
    if column != "prompt":
        assert message.text == said("1+1?")
    assert message.columns == text.columns == more


def test_the_columns_of_prompt_and_answer_can_be_named(chat):
    row = {"prompt": "no", "query": "1+1?", "gold": "So\n#### 2 ", "solution": "long"}
    prompt = one(row, chat, prompt_column="query", answer_column="gold")
    assert prompt.text == said("1+1?")
    assert prompt.columns == {"prompt": "no", "gold": "So\n#### 2 ", "solution": "2"}
    messages = said("1+1?")
    assert one({"chat": messages}, chat, prompt_column="chat").text == messages
    assert one({"prompt": "1+1="}, chat, prompt_column="prompt").text == "1+1="
    number = one({"prompt": "1+1=", "n": 2}, chat, answer_column="n")
    assert number.columns == {"n": 2, "solution": 2}
    # a column with a name that only reward functions must not see can hold the prompt
    assert one({"prompts": "1+1="}, chat, prompt_column="prompts").columns == {}
    for option in ("prompt_column", "answer_column"):
        message = "^record: it has no column 'c' but 'prompt', 'b'; name one of these with --"
        with refused(f"{message}{option.replace('_', '-')}.$"):
            one({"prompt": "a", "b": 1}, chat, **{option: "c"})


def test_a_system_prompt_comes_before_each_prompt(chat, plain):
    system = {"role": "system", "content": "Be brief."}
    user = {"role": "user", "content": "1+1?"}
    for row in ({"prompt": "1+1?"}, {"question": "1+1?"}, {"prompt": [user]}):
        prompt = one(row, chat, system="Be brief.")
        assert prompt.text == [system, user]
        assert prompt.token_ids == chat.encode(chat.render([system, user]))
        if row["prompt" if "prompt" in row else "question"] != [user]:
            assert one(row, plain, system="Be brief.").text == "Be brief.\n\n1+1?"
    for role in ("system", "developer"):
        row = {"prompt": [{"role": role, "content": "Be long."}, user]}
        with refused(r"have a system message already; leave --system-prompt"):
            one(row, chat, system="Be brief.")


def test_the_system_prompt_is_a_text_or_a_file(tmp_path):
    file = tmp_path / "system.txt"
    file.write_text("Denke „gut“ nach.\nThen answer.\n\n", encoding="utf-8")
    assert system_prompt(str(file)) == "Denke „gut“ nach.\nThen answer."
    for text in ("", "Be brief.", "no/such/folder", "See notes.txt for it in a.txt", "a\n" * 5000):
        assert system_prompt(text) == text.strip()
    latin = tmp_path / "latin"
    latin.write_bytes(b"\xff")
    for option, message in [
        (str(tmp_path / "none.txt"), r"none\.txt is not a file: correct the path"),
        (str(latin), r"latin cannot be read \(.*: give UTF-8"),
    ]:
        with refused(message):
            system_prompt(option)


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def test_a_column_can_be_a_variable_of_the_chat_template(chat):
    """TRL's column `tools`, for example."""
    user = said("1+1?")
    want = chat.encode(chat.render(user, tools=[TOOL]))
    assert '"name": "add"' in chat.decode(want)
    filled = {**TOOL, "strict": None}  # as Arrow returns it if another schema has the field
    for row in ({"prompt": user}, {"prompt": "1+1?"}, {"question": "1+1?"}):
        for tools in ([TOOL], [filled], json.dumps([TOOL])):
            own = one({**row, "tools": tools}, chat)
            assert (own.token_ids, own.text) == (want, user)
            assert own.columns == {"tools": tools}
    # in JSON lines, too
    assert one({"prompt": user, "tools": json.dumps([TOOL])}, chat, features=()).token_ids == want
    for none in (None, [], ""):
        assert one({"prompt": "1+1=", "tools": none}, chat).text == "1+1="
    silent = one({"prompt": user, "enable_thinking": False}, chat)
    assert silent.token_ids == chat.encode(chat.render(user, enable_thinking=False)) != want


def test_variables_of_the_chat_template_are_passed_on(tmp_path):
    template = "{{ messages[0].content }} {{ style | default('plain') }}"
    tokenizer = Tokenizer(make_folder(tmp_path, template))
    row = {"prompt": said("hi")}
    styled = one(row, tokenizer, chat_template_kwargs={"style": "terse"})
    assert tokenizer.decode(styled.token_ids) == "hi terse"
    assert tokenizer.decode(one(row, tokenizer).token_ids) == "hi plain"


# --- files and records ---


def test_records_are_accepted_in_place_of_a_name(plain):
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": f"{i}+1=", "solution": str(i + 1)} for i in range(4)]
    saved = datasets.Dataset.from_list(rows)
    both = datasets.DatasetDict(train=saved, test=saved.select([2]))
    for source in (rows, tuple(rows), iter(rows), saved, both, {"train": rows}):
        assert fields(load([source], plain)) == fields(one(row, plain) for row in rows)
    for split in ("eval", "held out"):
        assert [p.text for p in load(both, plain, split)] == ["2+1="]
    assert load([rows, saved], plain, "held out") == []
    assert [p.id for p in load([rows, saved], plain)] == list(range(8))
    for source, message in [
        ([], "data holds no prompts"),
        (Path("x"), "data cannot be read .TypeError: 'PosixPath' object is not iterable.: write"),
        ([{"prompt": "a"}, {"prompt": 3}], r"^data, row 2: `prompt` must be"),
        (["arithmetic"], "data, row 1: a record must be an object"),
        (datasets.DatasetDict(a=saved), "data has no split 'train', only 'a'"),
    ]:
        with refused(message):
            load([source], plain)


# --- mistakes ---


GOOD = '{"prompt": "a"}'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{'prompt': 'a'}", "not JSON"),
        ('{"prompt": "a"', "not JSON"),
        (b'{"prompt": "\xff"}', "not JSON .*utf-8"),
        ('{"prompt": ' + "[" * 200_000 + "]" * 200_000 + "}", "not JSON .*recursion"),
        ("{}", "it has no column 'prompt' but no columns at all; name"),
        ('{"query": "q", "a": 1}', "no column 'prompt' but 'query', 'a'; .* --prompt-column"),
        ('{"prompt": 3}', "`prompt` must be"),
        ('{"prompt": ["a"]}', "`prompt` must be"),
        ('{"prompt": [{"role": "user"}]}', "`prompt` must be"),
        ('{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}', "`prompt` must be"),
        ('{"prompt": ""}', "the prompt is empty"),
        ('{"prompt": "a\\ud800b"}', "cannot encode the text"),
        ('{"prompt": "a", "completions": 1}', "argument 'completions'"),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path, chat, line, message):
    path = write(tmp_path / "d.jsonl", GOOD, "", line, GOOD)
    with refused(f"^{path}:3: .*{message}"):
        load(path, chat)


def test_a_file_that_is_not_a_data_set_is_reported(tmp_path, chat, plain):
    for path, message in [
        (write(tmp_path / "d.tsv", "a,b"), r"d\.tsv is not a \.jsonl file"),
        (write(tmp_path / "blank.jsonl", "", "  "), r"blank\.jsonl holds no prompts"),
    ]:
        with refused(message):
            load(path, chat)
    with refused(r"d\.jsonl:1: .* no chat template"):
        load(write(tmp_path / "d.jsonl", '{"prompt": [{"role": "user", "content": "a"}]}'), plain)


def test_long_prompts_are_reported_or_on_request_dropped_and_counted(tmp_path, plain, caplog):
    path = write(tmp_path / "d.jsonl", GOOD, '{"prompt": "@@@@@@"}', '{"prompt": "b"}')
    assert len(load(path, plain, max_prompt_length=6)) == 3
    message = rf"^{path}:2: the prompt has 6 tokens but the limit is 5; raise --max-prompt-length, "
    with refused(f"{message}remove the record, or use --long-prompts drop"):
        load(path, plain, max_prompt_length=5)
    drop = {"max_prompt_length": 5, "long_prompts": "drop"}
    with caplog.at_level("INFO"):
        kept = load(path, plain, **drop)
    # an id is a position in the file, so the random numbers of the others do not change
    assert [(p.id, p.text) for p in kept] == [(0, "a"), (2, "b")]
    assert caplog.messages == [f"{path}: 1 of 3 prompts have more than 5 tokens and are dropped."]


# --- several sources, and other files ---


def test_ids_are_unique_and_stable_over_sources(tmp_path, plain):
    a = str(write_rows(tmp_path / "a.jsonl", ({"prompt": f"a{i}"} for i in range(3))))
    b = str(write_rows(tmp_path / "b.jsonl", ({"prompt": t} for t in ("b0" * 10, "b1"))))
    alone, both = load(a, plain), load([a, b], plain)
    assert [p.id for p in both] == list(range(5))
    assert [vars(p) for p in both[:3]] == [vars(p) for p in alone]
    dropped = load([b, a], plain, max_prompt_length=4, long_prompts="drop")
    assert [(p.id, p.text) for p in dropped] == [(1, "b1"), (2, "a0"), (3, "a1"), (4, "a2")]


def test_csv_gives_the_same_prompts_as_jsonl(tmp_path, chat):
    rows = [
        {"question": 'Is "1, 2"\na pair?', "answer": "Yes.\n#### 1,200", "level": ""},
        {"question": "ü?", "answer": "7", "level": "003"},
    ]
    with (tmp_path / "d.csv").open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    lines = str(write_rows(tmp_path / "d.jsonl", rows))
    assert fields(load(str(tmp_path / "d.csv"), chat)) == fields(load(lines, chat))
    for text, message in [
        (
            "prompt,a\nx,1\n\ny\n",
            r"d\.csv:4: the line has more or fewer fields than the first line",
        ),
        ("prompt,a\nx,1,2\n", r"d\.csv:2: the line has more or fewer fields than the first line"),
        ('prompt,a\nx,"1\n', r":2: not CSV in UTF-8 \(unexpected end of data\)"),
        (b"prompt,a\nx,\xff\n", r"not CSV in UTF-8 .*utf-8"),
        ("prompt,a\n", r"d\.csv holds no prompts"),
        ("", r"d\.csv holds no prompts"),
        ("a,b\n1,2\n", r"d\.csv, row 1: it has no column 'prompt' but 'a', 'b'"),
    ]:
        with refused(message):
            load(write(tmp_path / "d.csv", text), chat)


def test_parquet_and_saved_data_sets_give_the_same_prompts_as_jsonl(tmp_path, chat):
    datasets = pytest.importorskip("datasets")
    rows = [
        {
            "prompt": said(f"{i}+1="),
            "solution": str(i + 1),
            "n": {"x": i, "y": None},
        }
        for i in range(5)
    ]
    lines = load(str(write_rows(tmp_path / "d.jsonl", rows)), chat)
    whole = datasets.Dataset.from_list(rows)
    whole.to_parquet(tmp_path / "d.parquet")
    whole.select([4, 1]).save_to_disk(tmp_path / "some", num_shards=2)
    datasets.DatasetDict(train=whole, test=whole.select([2])).save_to_disk(tmp_path / "both")
    for name in ("d.parquet", "both"):
        assert [vars(p) for p in load(str(tmp_path / name), chat)] == [vars(p) for p in lines]
    assert len(load(str(tmp_path / "both"), chat, dataset_train_split="test")) == 1
    some = str(tmp_path / "some")
    for split in ("train", "eval"):
        assert [p.columns["solution"] for p in load(some, chat, split)] == ["5", "2"]
    for name, split, test, count in [
        ("some", "held out", "test", 0),
        ("d.parquet", "held out", "test", 0),
        ("both", "held out", "test", 1),
        ("both", "held out", "train", 0),  # they are those to train on
        ("both", "held out", "dev", 0),
        ("both", "eval", "train", 5),
        ("d.jsonl", "held out", "test", 0),
        ("d.jsonl", "eval", "test", 5),
    ]:
        found = load(str(tmp_path / name), chat, split, dataset_test_split=test)
        assert len(found) == count
    with refused(r"both has no split 'dev', only 'train', 'test': name one"):
        load(str(tmp_path / "both"), chat, "eval", dataset_test_split="dev")
    with refused(r"some, row 1: the prompt has \d+ tokens"):
        load(some, chat, max_prompt_length=3)
    (tmp_path / "not.parquet").write_bytes(b"hello")
    (tmp_path / "some" / "state.json").write_text("{")
    for name, message in [("not.parquet", "cannot be read as Parquet"), ("some", "cannot load")]:
        with refused(message):
            load(str(tmp_path / name), chat)
