"""Find the final answer in a text, and compare two answers where no algebra is needed.

In: the text of a completion, and a reference. Out: `extract_answer` returns the answer as written,
or None; `compare` returns True, False, or None if it takes algebra to decide. Most answers of
GSM8K-like data are decided here, in microseconds. Read next: rewards/symbolic.py, which asks
math-verify about the rest.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from typing import NamedTuple

# A longer text is no answer. It is equal to the same text only.
MAX_LENGTH = 500

# --- extracting ---

BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[{}]|[{}]")
ANSWER_TAG = re.compile(r"<(/?)answer>")
# A formula in a sentence. The bound on its length keeps the time linear in the length of the text.
FORMULA = re.compile(
    r"(?<!\\)(?:\$\$([^$]{1,500})\$\$|\$([^$\n]{1,500})\$)"
    r"|\\\(((?:(?!\\\)).){1,500})\\\)|\\\[((?:(?!\\\]).){1,500})\\\]"
    r"|(-?\\[dt]?frac\{-?\d{1,50}\}\{-?\d{1,50}\})",
    re.DOTALL,
)
ANSWER_IS = re.compile(r"answer.{0,50}\Z", re.IGNORECASE | re.DOTALL)
# The text between two answers that are given together: "or", "and", a comma, "or maybe x =".
TOGETHER = re.compile(
    r"(?:[\s$*~.]|\\[()\[\],;! ]|</?answer>)*"
    r"(?:[,;/&]|\b(?:or|and|alternatively)\b|\\(?:text|mathrm)\s*\{\s*,?\s*(?:or|and)\s*\})"
    r"(?:[\s$*~,]|\\[()\[\],;! ]|</?answer>|[a-zA-Z]\s*="
    r"|\b(?:or|and|maybe|possibly|perhaps|also|even|else|either|it|is|could|be|the)\b)*",
    re.IGNORECASE,
)


def extract_answer(text: str) -> str | None:
    """Return the final answer in a text, or None.

    This is the last \\boxed{…}, else the last <answer>…</answer>, else the rest of the line after
    the last ####, else the formula that follows the last "answer" in a sentence. Answers joined by
    "or", "and" or a comma are returned together, "3, 5", because one of them alone is not the
    answer. Results tried while thinking are not answers either: only the text after </think>
    counts, and nothing after a <think> that is never closed. The time is linear in the length of
    the text, even for a degenerate completion that repeats an unclosed \\boxed{ up to the length
    limit.
    """
    text = text.rpartition("</think>")[2].partition("<think>")[0]
    for spans in (_boxes(text), _tags(text)):
        if spans:
            return _last_together(text, spans)
    _, mark, rest = text.rpartition("####")
    if mark:
        return rest.strip().partition("\n")[0].strip()
    formulas = [m.span(m.lastindex or 0) for m in FORMULA.finditer(text)]
    ends = [0, *(end for _, end in formulas)]
    announced = (
        i
        for i, (start, _) in enumerate(formulas)
        if ANSWER_IS.search(text[max(ends[i], start - 70) : start])
    )
    last = max(announced, default=-1)
    # Those that follow it directly belong to it.
    while 0 <= last < len(formulas) - 1 and _together(text, formulas[last], formulas[last + 1]):
        last += 1
    return _last_together(text, formulas[: last + 1]) if last >= 0 else None


def extract_reference(text: str) -> str:
    """Return the answer in a reference: a bare answer, or a solution with a marked answer.

    A text without a mark, but with words around formulas, ends with its last formula.
    """
    if (answer := extract_answer(text)) is not None:
        return answer
    spans = [m.span(m.lastindex or 0) for m in FORMULA.finditer(text)]
    has_words = spans and re.search(r"[a-zA-Z]{2}", FORMULA.sub("", text))
    return _last_together(text, spans) if has_words else text.strip()


def _boxes(text: str) -> list[tuple[int, int]]:
    """Return (start, end) of the content of each closed box, in the order of the starts."""
    found = []
    open_braces: list[tuple[int, bool]] = []  # (start of the content, whether it is a box)
    for match in BRACES.finditer(text):
        if match[0].endswith("{") and match[0] != r"\{":
            open_braces.append((match.end(), match[0] != "{"))
        elif match[0] == "}" and open_braces:
            start, is_box = open_braces.pop()
            if is_box:
                found.append((start, match.start()))
    return sorted(found)


def _tags(text: str) -> list[tuple[int, int]]:
    """Return (start, end) of the content of each <answer>…</answer>."""
    found, start = [], -1
    for match in ANSWER_TAG.finditer(text):
        if match[1] and start >= 0:
            found.append((start, match.start()))
        start = -1 if match[1] else match.end()
    return found


def _together(text: str, first: tuple[int, int], second: tuple[int, int]) -> bool:
    between = text[first[1] : second[0]].removeprefix("}")
    between = re.sub(r"\\(?:boxed|fbox)\s*\{\Z", "", between)
    return len(between) <= 60 and bool(TOGETHER.fullmatch(between))


def _last_together(text: str, spans: list[tuple[int, int]]) -> str:
    """Return the last span, after those it is joined with."""
    first = len(spans) - 1
    while first > 0 and _together(text, spans[first - 1], spans[first]):
        first -= 1
    return ", ".join(dict.fromkeys(text[start:end].strip() for start, end in spans[first:]))


# --- one way of writing ---

UNICODE = str.maketrans(
    {
        **dict.fromkeys("−–‐‑﹣－", "-"),
        **dict.fromkeys("€£¥₹＄", " "),
        "×": r"\times ",
        "⋅": r"\cdot ",
        "·": r"\cdot ",
        "÷": r"\div ",
        "°": r"^\circ ",
        "º": r"^\circ ",
        "π": r"\pi ",
        "∞": r"\infty ",
        "≤": r"\le ",
        "≥": r"\ge ",
        "≠": r"\ne ",
        "∪": r"\cup ",
        "∩": r"\cap ",
        "∈": r"\in ",
        "∅": r"\emptyset ",
        "±": r"\pm ",
        "θ": r"\theta ",
        "⁄": "/",
        "∕": "/",
        **{c: f"^{d}" for d, c in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")},
    }
)
ROOT = re.compile(r"√\s*(\d+|[a-zA-Z]|\([^()]*\)|\{[^{}]*\})")
FONT = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mathsf|boldsymbol|bm|mbox|emph|underline)"
    r"\s*\{([^{}]*)\}"
)
# Group 1, a new row of a matrix, stays. The rest is space: LaTeX's own, $, and \( \) \[ \].
SPACE = re.compile(
    r"(\\\\)|\\(?:left|right|displaystyle|quad|qquad|big|Big)(?![a-zA-Z])|\\[!,;: $()\[\]]|[$~]"
)
DEGREE = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![a-zA-Z])")
FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{\s*([^{}]*?)\s*\}|(\w))\s*(?:\{\s*([^{}]*?)\s*\}|(\w))")


def plain(text: str) -> str:
    """Return an answer without what does not change its meaning: fonts, spacing, delimiters."""
    if not text.isascii():
        text = "".join(map(_unfraction, ROOT.sub(r"\\sqrt{\1}", text))).translate(UNICODE)
        text = unicodedata.normalize("NFKC", text)
        text = "".join(str(unicodedata.decimal(c, c)) for c in text)
    if any(c in text for c in "\\$~{"):
        text = text.replace("{,}", ",").replace(r"\%", "%")
        text = re.sub(r"(?<=\d)\\[,!;: ](?=\d{3}(?!\d))", "", text)  # 1\,234
        text = SPACE.sub(lambda m: m[1] or " ", FONT.sub(r" \1 ", FONT.sub(r" \1 ", text)))
        text = FRACTION.sub(r"\\frac{\1\2}{\3\4}", DEGREE.sub(" degrees ", text))
    return re.sub(r"\s+", " ", text).strip(" *_`").rstrip(".").rstrip()


def _unfraction(character: str) -> str:
    """Return " 1/2" for ½, and other characters unchanged."""
    kind, _, codes = unicodedata.decomposition(character).partition(" ")
    if kind != "<fraction>":
        return character
    return " " + "".join(chr(int(code, 16)) for code in codes.split())


def canonical(text: str) -> str:
    """Return a plain answer without spaces and with the shortest braces, to compare as a text."""
    text = re.sub(r"([\^_])\s*\{\s*(\w)\s*\}", r"\1\2", text)
    text = re.sub(r"\\sqrt\s*(\w)", r"\\sqrt{\1}", text)
    text = re.sub(r"(?<!\d) | (?!\d)", "", text)  # except between digits: "1 2" is not 12
    # Remove commas only where they group thousands: "1,2" is a pair.
    return text.replace(",", "") if re.fullmatch(r"[+-]?\d{1,3}(,\d{3})+(\.\d*)?", text) else text


# --- numbers ---


class Quantity(NamedTuple):
    """A number as it is written, with its unit."""

    value: Fraction
    percent: bool
    unit: str  # the usual abbreviation of a common unit, or "": any other, or none
    decimals: int  # number of digits after the point; -1: written as a fraction


NUMBER = r"\d{1,3}(?:,\d{3})+(?:\.\d*)?|\d{1,3}(?: \d{3})+(?:\.\d*)?|\d+\.?\d*|\.\d+"
QUANTITY = re.compile(
    r"(?:(?:the )?(?:final )?answer(?: is)?\s*[:=]?\s*"  # "Answer: 18"
    r"|[a-zA-Z]+(?:_\w|_\{\w+\}|\(\w+\))?\s*=\s*(?=[^=]))?"  # "x = 18"
    r"(?P<sign>[+-]?)\s*"
    r"(?:(?:(?P<whole>\d+)\s*)?\\frac\{(?P<upper_sign>-?)\s*(?P<upper>\d[\d,]*)\}"
    r"\{(?P<lower_sign>-?)\s*(?P<lower>\d[\d,]*)\}"
    r"|(?:(?P<whole2>\d+) +)?(?P<upper2>\d+) ?/ ?(?P<lower2>\d+)(?![\d.,])"
    rf"|(?P<number>{NUMBER})"
    r"(?: ?(?:\\times|\\cdot|\*) ?10 ?\^ ?\{? ?(?P<power>[+-]?\d{1,3}) ?\}?)?)"
    r"(?P<scale> ?(?:hundred|thousand|million|billion|trillion)\b)?"
    r"(?P<percent> ?(?:%|(?:percent|per cent|percentage|pct)\b))?"
    r"(?P<unit>.*)",
    re.IGNORECASE,
)
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
# Common units. Other words after a number are accepted as units too, but any two of those count as
# the same.
UNITS = {
    name: unit
    for unit, names in {
        "mm": "mm millimeter millimeters millimetre millimetres",
        "cm": "cm centimeter centimeters centimetre centimetres",
        "m": "m meter meters metre metres",
        "km": "km kilometer kilometers kilometre kilometres",
        "in": "in inch inches",
        "ft": "ft foot feet",
        "yd": "yd yard yards",
        "mi": "mi mile miles",
        "mg": "mg milligram milligrams",
        "g": "g gram grams",
        "kg": "kg kilogram kilograms",
        "oz": "oz ounce ounces",
        "lb": "lb lbs pound pounds",
        "ml": "ml milliliter milliliters millilitre millilitres",
        "l": "l liter liters litre litres",
        "s": "s sec secs second seconds",
        "min": "min mins minute minutes",
        "h": "h hr hrs hour hours",
        "day": "day days",
        "week": "week weeks",
        "month": "month months",
        "year": "year years",
        "am": "am",
        "pm": "pm",
        "cent": "cent cents",
        "dollar": "dollar dollars",
    }.items()
    for name in names.split()
}
# These words are no unit: they change the number, or they name another one.
NO_UNIT = re.compile(
    r"\b(?:or|and|less|more|than|times|plus|minus|over|to|not|if|but|maybe|perhaps|possibly|either"
    r"|sin|cos|tan|cot|csc|log|ln|lg|exp|pi|sqrt|mod|choose|half|dozen|hundred|thousand|million"
    r"|billion|trillion)\b",
    re.IGNORECASE,
)


def quantity(text: str) -> Quantity | None:
    """Return the number that a plain answer states, or None if it is anything else.

    A word after the number is its unit, and so is a common abbreviation attached to it: "18 eggs",
    "18cm", but not "18x".
    """
    # No answer has so many digits, and Python refuses to parse an integer of more than 4300.
    match = QUANTITY.fullmatch(text) if len(text) <= 200 else None
    if match is None:
        return None
    number, upper = match["number"], match["upper"] or match["upper2"]
    if number is not None:
        value = Fraction(number.replace(",", "").replace(" ", "").rstrip("."))
        value *= Fraction(10) ** int(match["power"] or 0)
        decimals = len(number.partition(".")[2])
    else:
        lower, whole = match["lower"] or match["lower2"], match["whole"] or match["whole2"]
        signs = (match["upper_sign"] or "") + (match["lower_sign"] or "")
        top, bottom = int(upper.replace(",", "")), int(lower.replace(",", ""))
        if bottom == 0 or (whole and (signs or top >= bottom)):  # 1/0; not a mixed number
            return None
        value, decimals = Fraction(top, bottom) * (-1) ** len(signs) + int(whole or 0), -1
    if match["scale"]:
        value *= 10 ** SCALES[match["scale"].strip().lower()]
    unit = _unit(match["unit"])
    if unit is None:
        return None
    sign = -1 if match["sign"] == "-" else 1
    return Quantity(sign * value, bool(match["percent"]), unit, decimals)


def _unit(text: str) -> str | None:
    """Return the unit that follows a number, "" if it has none or an unknown one; None: no unit."""
    if not text.strip():
        return ""
    words = re.sub(r"\^ ?\{? ?-?\d ?\}?|\\cdot|[ /.()'-]", " ", text).split()
    if not words or len(words) > 5 or not all(word.isalpha() for word in words):
        return None
    if NO_UNIT.search(text):
        return None
    first, known = words[0], UNITS.get(words[0].lower(), "")
    if text[0] in " /":  # "18 eggs", "18/day", but not "18 x" or "18/x"
        return known if known or len(first) > 2 else None
    return known if known and len(first) > 1 else None  # "18cm", but not "18m" or "18eggs"


def _same_quantity(a: Quantity, b: Quantity) -> bool:
    if a.unit and b.unit and a.unit != b.unit:
        return False
    if a.value == b.value:
        return True
    if a.percent != b.percent:  # 50% is 50, where only the unit is missing, and 0.5
        ratio, other = (a.value, b.value) if a.percent else (b.value, a.value)
        return ratio / 100 == other
    # A fraction may be written as a decimal of at least six places, correctly rounded.
    places = max(a.decimals, b.decimals)
    is_rounded = min(a.decimals, b.decimals) < 0 and places >= 6
    return is_rounded and abs(a.value - b.value) * 2 * 10**places <= 1


# --- comparing ---

LABEL = re.compile(r"\(([A-Z])\)(?P<rest>.*)|([A-Z])(?:[).:](?P<rest2>.*))?")
# Digits joined by operators. A power is a value, and so is a quotient: 2^{10}, 1/2.
ONLY_DIGITS = re.compile(r"(?:[\d.,+\-*/=(){}^ ]|\\frac|\\cdot|\\times|\\div)+")
CALCULATION = re.compile(
    r"[\d)}] ?(?:[+\-*=]|\\cdot|\\times|\\div) ?[-+({\\\d]|[)}] ?\(|\d ?\(|\)\d"
)
SEPARATED = re.compile(r",(?!\d{3})|[;<>]|\b(?:or|and)\b")


def compare(answer: str, reference: str) -> bool | None:
    """Return whether two answers are equal, or None if it takes algebra to decide.

    Numbers are compared exactly, in any notation. Units are dropped, but two different common ones
    differ: 18 cm is 18 and "18 centimeters", but not 18 m. A percentage equals the same number with
    and without the %, and a hundredth of it. Other answers are compared as texts, and words of at
    least three letters regardless of case. A label of a multiple-choice question may be followed by
    the text of the choice. A calculation such as 3+3 is not an answer to a question whose answer is
    a number, because otherwise leaving the last calculation out would pay off.
    """
    if max(len(answer), len(reference)) > MAX_LENGTH:
        return answer.strip() == reference.strip()
    a, b = plain(answer), plain(reference)
    given, wanted = quantity(a), quantity(b)
    if given and wanted:
        return _same_quantity(given, wanted)
    short, short_b = canonical(a), canonical(b)
    if short == short_b:
        return True
    if not (short and short_b) or len(short) == len(short_b) == 1:
        return False
    if wanted:
        if "=" in a and ONLY_DIGITS.fullmatch(a):
            return _is_equation_for(wanted, a)
        if SEPARATED.search(a) or not re.search(r"\d|\\", a):
            return False
        if ONLY_DIGITS.fullmatch(a) and (CALCULATION.search(a) or not re.search(r"[\^({]", a)):
            return False
    label = LABEL.fullmatch(b)
    if label and label["rest"]:  # "(B) 12": either part is the answer
        return compare(answer, label[1]) or compare(answer, label["rest"])
    if label and not label["rest2"]:
        chosen = LABEL.fullmatch(a)
        if chosen is None:
            return None if re.search(r"[\d\\]", a) else False
        rest = (chosen["rest"] or chosen["rest2"] or "").strip()
        is_one = not re.match(r"(?:or|and)\b|[,;/&(]", rest) and not re.search(r"\([A-Z]\)", rest)
        return is_one and (chosen[1] or chosen[3]) == (label[1] or label[3])
    if is_words(short) and is_words(short_b):
        # Few letters may be variables, whose product has no order.
        few = len(short) <= 4 and sorted(short) == sorted(short_b)
        return None if few else short.casefold() == short_b.casefold()
    return None


def _is_equation_for(wanted: Quantity, text: str) -> bool:
    """Return whether an equation without variables states the number: "3 + 4 = 7", "7 = 3 + 4"."""
    sides = [side.strip() for side in text.split("=")]
    numbers = [number for side in sides if (number := quantity(side))]
    calculations = [
        side for side in sides if CALCULATION.search(side) and side[-1] in "0123456789)}"
    ]
    return (
        len(numbers) + len(calculations) == len(sides)
        and len(numbers) > 0
        and all(_same_quantity(number, wanted) for number in numbers)
    )


def is_words(text: str) -> bool:
    return len(text) > 2 and all(c.isalpha() or c in "-'&." for c in text)
