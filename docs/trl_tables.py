"""Print the tables of docs/trl.md from nanogrpo/extras/trl_names.py.

    python docs/trl_tables.py

In: nothing. Out: Markdown. Read next: nanogrpo/extras/trl_names.py.
"""

from __future__ import annotations

from nanogrpo.config import dashed
from nanogrpo.extras import trl_names


def tables() -> str:
    renamed = {theirs: f"`--{dashed(ours)}`" for theirs, ours in trl_names.RENAMED.items()}
    out = ""
    for title, head, table in (
        ("Understood under TRL's name", "here", renamed | trl_names.TRANSLATED),
        ("Another option instead", "here", trl_names.INSTEAD),
        ("Accepted and ignored", "because", trl_names.IGNORED),
        ("Not supported", "because", trl_names.UNSUPPORTED),
        ("Names in other libraries", "here", trl_names.SYNONYMS),
    ):
        out += f"## {title}\n\n| TRL | {head} |\n| --- | --- |\n"
        for names, text in table.items():
            names = ", ".join(f"`{name}`" for name in names.split())
            out += f"| {names} | {text} |\n"
        out += "\n"
    return out


if __name__ == "__main__":
    print(tables(), end="")
