"""The pages of the course show the project's own lines, and what the experiments really print.

If a test fails after a change, look whether the text around the block is still true, and run
`python -m tests.docs`. Read next: docs.py.
"""

import re

import pytest

from exercises import check
from tests import docs

PAGES = {path.name: path.read_text() for path in sorted((docs.ROOT / "docs").glob("*.md"))}
EXPERIMENTS = {
    f"{name}-{i}": pair
    for name, page in PAGES.items()
    for i, pair in enumerate(docs.experiments(page))
}
COURSE = [PAGES[f"{name}.md"] for name in ("grpo", "choices", "walkthrough")]


@pytest.mark.parametrize("name", PAGES)
def test_quoted_code_is_the_code(name):
    for block in docs.blocks(PAGES[name]):
        if block.language == "python" and block.title:
            source = (docs.ROOT / block.title).read_text()
            assert docs.is_quoted(block.body, source), f"{block.title} does not have:\n{block.body}"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_prints_what_the_page_says(name):
    code, output = EXPERIMENTS[name]
    printed = docs.run(code.body)
    assert docs.agree(printed, output.body), f"it prints:\n{printed}"


def test_the_walkthrough_shows_all_that_its_program_prints():
    shown = [block for block in docs.blocks(COURSE[2]) if block.title == docs.WALKTHROUGH]
    printed = docs.sections(docs.walkthrough())
    assert [docs.NUMBER.sub("#", block.name) for block in shown] == [*printed]
    for block, section in zip(shown, printed.values()):
        assert docs.agree(section, block.body), f"it prints:\n{section}"


def test_the_course_has_quotes_and_experiments():
    """Without this, a change of the format of the blocks could turn every check off."""
    quotes = [b for page in COURSE for b in docs.blocks(page) if b.language == "python" and b.title]
    assert len(quotes) > 20
    assert all(len(docs.experiments(page)) >= 7 for page in COURSE[:2])


def test_the_map_of_equations_names_files_and_functions_that_exist():
    folders = [docs.ROOT, docs.ROOT / "nanogrpo", docs.ROOT / "nanogrpo/grpo"]
    code = [*docs.ROOT.glob("nanogrpo/**/*.py"), *docs.ROOT.glob("kernels/**/*.py")]
    source = "\n".join(path.read_text() for path in code)
    count = 0
    for line in PAGES["equations.md"].splitlines():
        if not line.startswith("|"):
            continue
        *_, functions, tests, _ = line.split("|")
        for name in re.findall(r"`([\w./]+)`", functions):
            count += 1
            if name.endswith(".py"):
                assert any((folder / name).exists() for folder in folders), name
            else:
                last = name.rpartition(".")[2]
                assert re.search(rf"^ *(def|class) {last}\b", source, re.MULTILINE), name
        for name in re.findall(r"`([\w./]+\.py)`", tests):
            count += 1
            places = (docs.ROOT / "tests" / name, docs.ROOT / "tests/grpo" / name)
            assert any(path.exists() for path in places), name
    assert count > 50


def test_the_sources_of_the_gap_are_as_large_as_the_page_says():
    assert check.load(docs.ROOT / "docs/img/gap.py").differing(2) == []
