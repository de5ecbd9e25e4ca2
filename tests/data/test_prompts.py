"""Prompts from files: each kind of record becomes a prompt, and each bad record is reported.

Read next: test_order.py (which prompts a step draws), tests/rewards/test_rewards.py (the other
columns).
"""

import json
from pathlib import Path

import pytest

from nanogrpo.data.prompts import from_record, load_all
from nanogrpo.data.sources import holds_out
from nanogrpo.errors import UserError
from nanogrpo.model.tokenizer import Tokenizer
from nanogrpo.rewards.builtin import same_answer
from tests.model.tokenizer_folder import make_folder

GSM8K = Path(__file__).parent / "assets" / "gsm8k_tiny.jsonl"


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    return Tokenizer(make_folder(tmp_path_factory.mktemp("chat")))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return Tokenizer(make_folder(tmp_path_factory.mktemp("plain"), None))


def load(source, tokenizer, **options):
    return load_all([source], tokenizer, **options)[0]


def fields(prompts):
    """Everything but the ids."""
    return [(p.text, p.token_ids, p.columns) for p in prompts]


def write(path, *lines):
    path.write_bytes(
        b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines)
    )
    return str(path)


# --- records ---


def test_plain_and_conversational_records_keep_every_other_column(tmp_path, chat):
    messages = [{"role": "user", "content": "3+4="}]
    rows = [
        {"prompt": "3+4=", "solution": 7, "level": None},
        {"prompt": messages, "tags": ["a", {"b": 1}]},
    ]
    path = write(
        tmp_path / "data.jsonl",
        "\ufeff" + json.dumps(rows[0]),
        "",
        "  ",
        json.dumps(rows[1]) + "\r",
        "",
    )
    first, second = load(path, chat, enable_thinking=False)
    assert (first.id, first.text, first.columns) == (0, "3+4=", {"solution": 7, "level": None})
    assert first.token_ids == chat.encode("3+4=")
    assert (second.id, second.text, second.columns) == (1, messages, {"tags": ["a", {"b": 1}]})
    assert second.token_ids == chat.encode(chat.render(messages, enable_thinking=False))
    assert chat.decode(second.token_ids).endswith("</think>\n\n")
    again = [from_record(row, chat, enable_thinking=False) for row in rows]
    assert fields(again) == fields([first, second])
    # the caller's records are not changed
    assert rows[0] == {"prompt": "3+4=", "solution": 7, "level": None}


def test_a_line_separator_inside_a_text_does_not_end_the_line(tmp_path, plain):
    text = "a\u2028b\u0085c"
    assert (
        load(write(tmp_path / "d.json", json.dumps({"prompt": text}, ensure_ascii=False)), plain)[
            0
        ].text
        == text
    )


def test_gsm8k_records_become_messages_or_text_and_a_solution(chat, plain):
    conversational, text = load(str(GSM8K), chat), load(str(GSM8K), plain)
    assert len(conversational) == len(text) == 12
    for a, b in zip(conversational, text):
        assert a.text == [{"role": "user", "content": b.text}]
        assert a.columns == b.columns
        assert set(a.columns) == {"answer", "solution"}
        assert a.columns["answer"].endswith("#### " + a.columns["solution"])
    solutions = [p.columns["solution"] for p in text]
    assert solutions == [
        "22",
        "80",
        "1,200",
        "12.5",
        "-5",
        "26",
        "270",
        "18",
        "350",
        "30",
        "1320",
        "16",
    ]


def test_the_arithmetic_of_the_gsm8k_file_is_right():
    for line in GSM8K.read_text(encoding="utf-8").splitlines():
        steps = [
            part.split(">>")[0].split("=") for part in json.loads(line)["answer"].split("<<")[1:]
        ]
        for term, result in steps:
            assert eval(term, {"__builtins__": {}}) == float(result), line
        assert same_answer(json.loads(line)["answer"].rpartition("####")[2], steps[-1][1])


def test_a_solution_column_is_not_overwritten_and_a_prompt_comes_before_a_question(plain):
    rows = [
        {"question": "q", "answer": "#### 1", "solution": "one"},
        {"prompt": "p", "question": "q", "answer": "#### 1"},
    ]
    first, second = (from_record(row, plain) for row in rows)
    assert first.columns == {"answer": "#### 1", "solution": "one"}
    assert (second.text, second.columns) == ("p", {"question": "q", "answer": "#### 1"})


def test_parquet_gives_the_same_prompts_as_jsonl(tmp_path, chat):
    # in the test extra; nanogrpo runs without it
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    rows = [
        {"prompt": [{"role": "user", "content": f"{i}+1="}], "solution": str(i + 1)}
        for i in range(5)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    lines = write(tmp_path / "d.jsonl", *(json.dumps(row) for row in rows))
    assert [vars(p) for p in load(str(tmp_path / "d.parquet"), chat)] == [
        vars(p) for p in load(lines, chat)
    ]
    with pytest.raises(UserError, match=r"d\.parquet, row 1: the prompt has \d+ tokens"):
        load(str(tmp_path / "d.parquet"), chat, max_prompt_length=3)
    (tmp_path / "not.parquet").write_bytes(b"hello")
    with pytest.raises(UserError, match=r"not\.parquet cannot be read as Parquet"):
        load(str(tmp_path / "not.parquet"), chat)


# --- mistakes ---

GOOD = '{"prompt": "a"}'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{'prompt': 'a'}", "not JSON"),
        ('{"prompt": "a"', "not JSON"),
        (b'{"prompt": "\xff"}', "not JSON .*utf-8"),
        ('{"prompt": ' + "[" * 200_000 + "]" * 200_000 + "}", "not JSON .*recursion"),
        ('["a"]', "a record must be an object .* not a list"),
        ("{}", "it has no `prompt`"),
        ('{"question": "q", "answer": "42"}', "it has no `prompt`"),
        ('{"prompt": 3}', "`prompt` must be"),
        ('{"prompt": null}', "`prompt` must be"),
        ('{"prompt": []}', "`prompt` must be"),
        ('{"prompt": ["a"]}', "`prompt` must be"),
        ('{"prompt": [{"role": "user"}]}', "`prompt` must be"),
        ('{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}', "`prompt` must be"),
        ('{"prompt": ""}', "the prompt is empty"),
        ('{"prompt": "a\\ud800b"}', "cannot be encoded"),
        ('{"prompt": "a", "completions": 1}', "argument 'completions'"),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path, chat, line, message):
    path = write(tmp_path / "d.jsonl", GOOD, "", line, GOOD)
    with pytest.raises(UserError, match=message) as caught:
        load(path, chat)
    assert str(caught.value).startswith(f"{path}:3: ")
    assert "\n" not in str(caught.value)


def test_a_long_prompt_is_reported_with_its_line_its_length_and_the_limit(tmp_path, plain):
    path = write(tmp_path / "d.jsonl", GOOD, '{"prompt": "@@@@@@"}')
    assert len(load(path, plain, max_prompt_length=6)) == 2
    with pytest.raises(UserError) as caught:
        load(path, plain, max_prompt_length=5)
    assert str(caught.value) == (
        f"{path}:2: the prompt has 6 tokens but the limit is 5; raise --max-prompt-length, remove "
        "the record, or use --long-prompts drop."
    )


def test_a_file_that_is_not_a_data_set_is_reported(tmp_path, chat, plain):
    for path, message in [
        (str(tmp_path / "none.jsonl"), r"none\.jsonl is not a file"),
        (str(tmp_path), r"state\.json is missing"),
        (write(tmp_path / "d.csv", "a,b"), "the format '.csv' is unknown"),
        (write(tmp_path / "empty.jsonl"), r"empty\.jsonl holds no prompts"),
        (write(tmp_path / "blank.jsonl", "", "  "), r"blank\.jsonl holds no prompts"),
    ]:
        with pytest.raises(UserError, match=message):
            load(path, chat)
    with pytest.raises(UserError, match=r"d\.jsonl:1: .* no chat template"):
        load(write(tmp_path / "d.jsonl", '{"prompt": [{"role": "user", "content": "a"}]}'), plain)


def test_long_prompts_are_dropped_on_request_and_counted(tmp_path, plain, caplog):
    path = write(tmp_path / "d.jsonl", GOOD, '{"prompt": "@@@@@@"}', '{"prompt": "b"}')
    with caplog.at_level("INFO"):
        kept = load(path, plain, max_prompt_length=5, long_prompts="drop")
    # an id is a position in the file, so the random numbers of the others do not change
    assert [(p.id, p.text) for p in kept] == [(0, "a"), (2, "b")]
    assert caplog.messages == [f"{path}: 1 of 3 prompts have more than 5 tokens and are dropped."]
    with pytest.raises(
        UserError,
        match=r"d\.jsonl: all 3 prompts have more than 0 tokens; raise --max-prompt-length",
    ):
        load(path, plain, max_prompt_length=0, long_prompts="drop")


# --- several sources, and folders of `datasets` ---


def test_ids_are_unique_and_stable_over_sources(tmp_path, plain):
    a = write(tmp_path / "a.jsonl", *(json.dumps({"prompt": f"a{i}"}) for i in range(3)))
    b = write(
        tmp_path / "b.jsonl",
        "",
        *(json.dumps({"prompt": f"b{i}" * (1 + 9 * (i == 0))}) for i in range(2)),
    )
    alone, both = load_all([a], plain), load_all([a, b], plain)
    assert [p.id for part in both for p in part] == list(range(5))
    assert [vars(p) for p in both[0]] == [vars(p) for p in alone[0]]
    dropped = load_all([b, a], plain, max_prompt_length=4, long_prompts="drop")
    assert [(p.id, p.text) for part in dropped for p in part] == [
        (1, "b1"),
        (2, "a0"),
        (3, "a1"),
        (4, "a2"),
    ]


def test_a_saved_data_set_gives_the_records_that_datasets_reads(tmp_path, chat):
    # it comes with TRL; nanogrpo reads the folders without it
    datasets = pytest.importorskip("datasets")
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{i}+1="}],
            "solution": str(i + 1),
            "tags": ["a"] * i,
            "n": {"x": i, "y": None},
        }
        for i in range(7)
    ]
    whole = datasets.Dataset.from_list(rows)
    whole.shuffle(seed=3).select(range(5)).save_to_disk(tmp_path / "some", num_shards=2)
    theirs = datasets.load_from_disk(tmp_path / "some").to_list()
    ours = load(str(tmp_path / "some"), chat)
    assert fields(ours) == fields(from_record(row, chat) for row in theirs)
    assert [p.id for p in ours] == list(range(5))
    assert [row["solution"] for row in theirs] != [str(i + 1) for i in range(5)]  # shuffled
    datasets.DatasetDict(train=whole, test=whole.select([2, 4])).save_to_disk(tmp_path / "both")
    both = str(tmp_path / "both")
    assert [p.columns["solution"] for p in load(both, chat, split="test")] == ["3", "5"]
    assert fields(load(both, chat)) == fields(from_record(row, chat) for row in rows)
    assert [holds_out(both, split) for split in ("test", "train", "eval")] == [True, True, False]
    assert not holds_out(str(tmp_path / "some"), "test")
    assert holds_out("arithmetic", "any")

    with pytest.raises(UserError, match=r"both has no split 'eval' but 'train', 'test'"):
        load(both, chat, split="eval")
    with pytest.raises(UserError, match=r"some, row 1: the prompt has \d+ tokens"):
        load(str(tmp_path / "some"), chat, max_prompt_length=3)
    (tmp_path / "some" / "data-00001-of-00002.arrow").write_bytes(b"hello")
    with pytest.raises(UserError, match=r"data-00001-of-00002\.arrow cannot be read as Arrow"):
        load(str(tmp_path / "some"), chat)
    (tmp_path / "some" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(UserError, match=r"data-00001-of-00002\.arrow cannot be read as Arrow"):
        load(str(tmp_path / "some"), chat)
    for content, message in (
        ("{", "is not valid JSON"),
        ("[]", "holds no JSON object"),
        ('{"_data_files": [3]}', "names no data files"),
    ):
        (tmp_path / "some" / "state.json").write_text(content)
        with pytest.raises(UserError, match=message):
            load(str(tmp_path / "some"), chat)
    for content in ("{", '{"splits": 3}'):
        (tmp_path / "both" / "dataset_dict.json").write_text(content)
        with pytest.raises(
            UserError, match=r"dataset_dict\.json (is not valid JSON|names no splits)"
        ):
            load(both, chat)
