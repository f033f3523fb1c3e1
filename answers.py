r"""Is this text the right answer? Extraction, normal form, comparison; imports no torch.

A wrong answer must never be paid: whatever is in doubt is refused. Policies, pinned by tests:
- Numbers are exact: 0.333 is not 1/3, 31.4 is not 10\pi, 18.50 is not 18; but 70,000.00 is 70000,
  2 1/4 is 9/4, 007 is 7. 101_2 is neither 101 nor 5: a base belongs to the answer.
- A unit, currency or percent sign counts only where both sides have one: 42 cm^2 is 42, but 5 cm is
  not 5 m, nor 1 m 100 cm. 25\% is 25, as it is mostly meant, and also 0.25, its value.
- Lists, sets: order free, none missing, none extra; \pm 3 is 3, -3. (a, b), [a, b): order, brackets
  count. x = 5 is 5, where one side only names a variable. Equations are equal up to a factor, an
  inequality equals its interval. The rest (words, clock times, ratios) must agree as text, in any
  case. A choice letter may be wrapped or lead its option: \text{(B)}, (B) 12.
"""

import atexit
import functools
import json
import queue
import re
import signal
import sys
import threading
import unicodedata
from collections import Counter
from fractions import Fraction
from subprocess import PIPE, Popen

MAX_LENGTH = 4000  # characters of an answer; a longer one is refused
TIME_LIMIT = 1.2  # seconds for one check by math-verify
MEMORY_LIMIT = 1 << 30  # bytes of address space of a worker, which needs about 80 MB
counts = Counter()  # "checker_timeout", "checker_error": answers refused for that reason so far

# ---- extraction ----------------------------------------------------------------------------------
_ANSWER = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.I | re.S)
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s{0,9}(?:(\{)|([^\s\\{}$]+))|\\.|[{}]", re.S)
_MARKER = re.compile(r"\banswer[*_]{0,3}\s{0,9}(?::|is\b)[*_]{0,3}\s{0,9}:?", re.I)
# Where an answer in running text ends: with its sentence, or before a clause that explains it.
_END = re.compile(r"[.;?](?=\s|$)|,?\s(?=(?:because|since|so|which|where|as|but|Human|User)\b)")


def _read(text):
    """(text after the thinking, did that close?, the box's content or None, has the box braces?)"""
    text = re.split(r"</think(?:ing)?>", text if isinstance(text, str) else "", flags=re.I)[-1]
    text, *thinking = re.split(r"<think(?:ing)?>", text, flags=re.I)
    box, braced, stack = None, False, []
    for token in _BOX.finditer(text):  # one pass, so that any heap of brackets takes linear time
        if token[2]:
            box, braced = token[2].rstrip(".,"), False
        elif token[1] or token[0] == "{":
            stack.append(token[1] and token.end())
        elif token[0] == "}" and stack and (start := stack.pop()):
            box, braced = text[start : token.start()], True  # of nested boxes the outer, in the end
    return text, not thinking, box, braced


def extract(text):
    r"""The final answer of a completion, or None.

    Where it is: in the last balanced \boxed{} or \fbox{} after the last closing think tag; else in
    the last <answer>...</answer>; else after the last `####`, "answer is" or "Answer:". `\boxed 5`
    counts. A box that never closes is none, an empty last one is no answer, nor is what follows a
    think tag that never closes. Where the prompt ends in a think tag, put that before `text`.
    """
    text, _, answer, _ = _read(text)
    if answer is None and (answers := _ANSWER.findall(text)):
        answer = answers[-1]
    elif answer is None and ("####" in text or _MARKER.search(text)):
        tail = text.rpartition("####")[2] if "####" in text else _MARKER.split(text)[-1]
        line = _MARKER.split(tail.strip().split("\n", 1)[0], 1)[-1]  # also of `#### Answer: 42`
        answer = _END.split(line, 1)[0].strip("*_` \t")  # of `**B** because a car moves.`
    return (answer or "").strip() or None


def format_ok(text):
    r"""A non-empty, balanced \boxed{...} after thinking that closed, and at most one <answer>."""
    text, closed, box, braced = _read(text)
    return closed and braced and box.strip() != "" and len(_ANSWER.findall(text)) <= 1


def reduce_gold(answer):
    r"""The gold of a data row, or None when the row is unusable.

    A text with a box, tag or marker is reduced as by `extract`; thousands commas go. Numbers, terms
    and phrases stay: at most five words and, from three on, none of a sentence's (`None of the
    above`, not `see the figure`). Of a longer text, a single number. Else it holds no answer.
    """
    answer = str(answer) if type(answer) in (int, float) else answer
    if not isinstance(answer, str) or answer.strip().lower() in ("nan", "null", "n/a", "inf"):
        return None
    gold = extract(answer)
    if gold is None and not re.search(r"\\boxed|\\fbox|####|</?(?:answer|think)", answer):
        gold = answer.strip()
        words = re.findall(r"(?<!\\)\b[^\W\d_]{2,}", gold.lower())
        verbs = "see refer figure diagram proof solution vary is are was were has have will can"
        if len(words) > 5 or len(words) > 2 and set(words) & set(verbs.split()):
            numbers = re.findall(r"-?\d+(?:[.,/]\d+)*", gold)
            gold = numbers[0] if len(numbers) == 1 else ""
    gold = _THOUSANDS.sub(lambda m: m[0].replace(",", ""), gold or "")
    return gold if re.search(r"\w", normalize(gold)) else None


# ---- normal form: the ways to write an answer become one string ----------------------------------
_SIGNS = dict.fromkeys("−–—‐‑‒", "-") | dict.fromkeys("\u200b\u2060\ufeff", "") | {
    "÷": "/", "⁄": "/", "∶": ":", "′": "'", "’": "'", "°": " degree ", "√": r"\sqrt ", "±": r"\pm ",
    "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ",
    "π": r"\pi ", "∞": r"\infty ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ",
}  # fmt: skip
_THOUSANDS = re.compile(r"(?<![\w.,(\[])\d{1,3}(?:,\d{3})+(?![\w,)\]])")
_RULES = [  # (pattern, replacement); in this order, and again until nothing changes
    (r"\\(?:boxed|fbox)\s*(?:\{([^{}]*)\}|(?=\{))", r"\1"), (r"\\[dtc]frac", r"\\frac"),
    (r"\\!|\\(?:left|right|[bB]igg?[lr]?|displaystyle)(?![A-Za-z])", ""), (r"\{,\}", ","),
    (r"\\(?:text|math|mbox|operatorname)(?:bf|it|rm|sf|normal)?\s*\{([^{}]*)\}", r" \1 "),
    (r"\\[,;:\s]|~|\\q?quad(?![A-Za-z])|\s+", " "), (r"\\([$%#&])", r"\1"),
    (r"^(\$\$?)\s*([^$]*[^$\s])\s*\1$", r"\2"), (r"\\[()\[\]]", ""),  # $5$ is maths, $5 is money
    (r"(?<![\w)}\]*])\*\*([^*]+)\*\*(?![\w({\[*\\])|^`([^`]*)`$", r"\1\2"),  # but a power: 2**3**2
    (r"\*\*", "^"), (r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![A-Za-z])", " degree "),
    (r"\\frac\s*(\d)\s*(?=[\d{])", r"\\frac{\1}"), (r"(\\frac\{[^{}]*\})\s*(\d)", r"\1{\2}"),
    (r"(?<![\\A-Za-z])(sqrt|pi|infty)(?![A-Za-z])", r"\\\1 "), (r"(^|[(,])\+", r"\1"),
    (r"\\sqrt\s*(?:\(([^()]*)\)|([0-9A-Za-z]))", r"\\sqrt{\1\2}"), (r"^\((\d+)\)\s*_", r"\1_"),
    (r"<=", r"\\le "), (r">=", r"\\ge "), (r"\\([lg])eq(?:slant)?(?![A-Za-z])", r"\\\1e "),
    (r"\\varnothing|^\\\{ ?\\\}$", r"\\emptyset "), (r"([\^_])\s*\{\s*(\w)\s*\}", r"\1\2"),
    (r"^\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}$", r"\1"), (r"(?<![.\s])\s*[.,;:]$", ""),
    (r"^(?:[Oo]ption |[Cc]hoice )?[(\[]?([A-Z])[)\]]?$", r"\1"), (r"\b(?:dollars?|USD) ?$", "$"),
    (r"^-?\d{1,3}(?: \d{3})+(?=$| ?[^\d/ ])", lambda m: m[0].replace(" ", "")),
    (_THOUSANDS, lambda m: m[0].replace(",", "")), (r"\b(?:square|sq) ([a-z]+) ?$", r"\1^2"),
    (r"\bpercent ?$", "%"), (r"^\s+|\s+$|\s+(?![A-Za-z0-9\s])|(?<![A-Za-z0-9\s])\s+", ""),
    # Words in lower case, but not what may be a product of variables or points: AB is not ab.
    (r"(?<![\\A-Za-z])([A-Z][a-z]{2,}|[A-Za-z]{4,}|YES|N[oO])(?![A-Za-z])", lambda m: m[0].lower()),
]  # fmt: skip
# A unit, or things counted (12 apples); but 5 millions is not 5, nor 3 halves 3, and 5m may be 5*m.
_UNIT = re.compile(
    r"(?:[%$€£¥¢]|/?(?<![\\A-Za-z])(?!\w*(?:hundred|thousand|illion|dozen|ten|halve|third|quarter|th)s"
    r"|plus|minus|less)(?:[mck]m|[mk]g|ml|in|ft|yd|mi|lb|oz|hr|min|sec|mph|foot|feet|inch|people|men"
    r"|(?:centi|milli|kilo)?(?:met|lit)(?:er|re)|mile|pound|hour|minute|day|year|cent|euro|degree|unit"
    r"|cup|[ap]\.?m|[a-z]{3,}s|(?<=[ /])(?:[mglshCFL]|per|cubic))s?)(?:\^?\{?[23]\}?)?$"
)


def _number(text):
    """The exact value of an integer, decimal, fraction or mixed number, or None."""
    text = re.sub(r"\\frac\{(-?[\d.]+)\}\{(-?[\d.]+)\}$", r" \1/\2", text).strip()
    part = r"(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?"
    parts = rf"([+-]?) ?(?:(\d+) )?(-?{part})(?:/(-?(?=[\d.]*[1-9]){part}))?"
    if len(text) > 1000 or not (m := re.fullmatch(parts, text)):
        return None
    value = Fraction(m[3]) / Fraction(m[4] or 1)
    mixed = 0 < value < 1 and "." not in text and "-" not in text[1:]  # not `2 5/4` or `2 5`
    return Fraction(m[1] + "1") * (int(m[2] or 0) + value) if mixed or not m[2] else None


@functools.lru_cache(maxsize=4096)
def _parse(answer):
    """(normal form, unit) of an answer. A unit is what follows an expression in numbers."""
    text, unit = answer.strip(), ""
    if re.fullmatch(r"0|-?[1-9]\d{0,2}(?:\d{0,99}|(?:,\d{3})+)", text) or len(text) > MAX_LENGTH:
        return text.replace(",", ""), ""
    for _ in range(20):
        before = text
        if not text.isascii():  # superscripts first: NFKC makes 52 of 5², and 21/2 of 2½
            text = re.sub("[⁰¹²³⁴-⁹⁻]+", r"^{\g<0>}", re.sub("[₀-₉]+", r"_{\g<0>}", text))
            text = unicodedata.normalize("NFKC", re.sub("[¼-¾⅐-⅞]", r" \g<0>", text))
            text = "".join(_SIGNS.get(c, str(unicodedata.decimal(c, c))) for c in text)
        for pattern, replacement in _RULES:
            text = re.sub(pattern, replacement, text)
        whole = rest = re.sub(r"^([+-]?)(?:US)?([$€£¥])(.+)$", r"\1\3\2", text)  # $5 -> 5$
        while m := _UNIT.search(rest, max(0, len(rest) - 30)):
            rest = rest[: m.start()].rstrip()
        value = re.sub(r"^[A-Za-z]=|\\[A-Za-z]+", "", rest)
        if re.search(r"\d", value) and not re.search(r"[A-Za-z]|[-+*/=<>,]$", value):
            unit, text = unit or re.sub(r"[\s{}^.]|(?<=\w\w)s\b", "", whole[len(rest) :]), rest
        text = text if (value := _number(text)) is None else str(value)
        if text == before:
            break
    return text, unit


def normalize(answer):
    """The normal form of an answer, without its unit, as it is compared first; idempotent."""
    return _parse(answer)[0]


# ---- comparison, in a worker ---------------------------------------------------------------------
_NAME = re.compile(  # `x=`, `f(x)=` or `x_1\in` where the text, or an item of a list, begins
    r"(^|[,;]|and |or )((?:\\theta|[A-Za-z])(?:_\{?\w+\}?)?(?:\([A-Za-z]\))?)(?:=|\\in\b)"
)
_TOKEN = re.compile(r"\\?[{}]|[,;](?:and|or)?(?![a-z])|(?<![A-Za-z])(?:and|or)(?![a-z])|\\?.", re.S)
_COMMAND = re.compile(
    r"\\(?:frac|sqrt|pi|cdot|times|div|infty|le|ge|ne|cup|cap|setminus|emptyset|mathbb|sin|cos|tan"
    r"|log|ln|exp|binom|alpha|beta|gamma|delta|theta|lambda|mu|phi|omega)(?![A-Za-z])|\\[{}]"
)
# What math-verify misreads: words, 101_2, 3 4 (as 7), 0.3..., a = b = c, 1e5.
_MISREAD = re.compile(
    r"[A-Za-z]{3}|^[A-Za-z]{2,}$|[\d)}]_|\d\s+\d|\.\d*\.|=.*=|\d[eE]\d|[^\w\s.,+\-*/^=<>!|()\[\]{}]"
)


def _split(text, kind=""):
    r"""`[1,x)` -> ("[)", ["1", "x"]); `1 or 2`, `\{1,2\}`, `\pm 3` -> ("", both)."""
    if text.count(r"\pm") == 1 and "," not in text:
        return "", [text.replace(r"\pm", "+"), text.replace(r"\pm", "-")]
    if not kind and (m := re.fullmatch(r"([(\[]|\\\{)(.*?)(\\?[)\]}])", text)):
        kind, items = _split(m[2], m[1][-1] + m[3][-1])
        if items:
            single = kind == "()" and len(items) == 1  # which may have brackets within
            return _split(m[2]) if single else (kind.replace("{}", ""), items)
    depth, items = 0, [""]
    for token in _TOKEN.findall(text):
        depth += (token[-1] in "([{") - (token[-1] in ")]}")
        if depth < 0:  # unbalanced, or not one pair of brackets: (x+1)(x-1)
            return "", []
        separates = depth == 0 and (token[0] in ",;" or token in ("and", "or"))
        items = [*items, ""] if separates else [*items[:-1], items[-1] + token]
    return kind, [item.strip() for item in items] if depth == 0 else []


def _same_maths(gold, answer):
    """math-verify's verdict, guarded, on two expressions, equations, inequalities or sets."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify
    from sympy import Eq, Expr, N, Rational, simplify

    config = LatexExtractionConfig(False, 0, NormalizationConfig(malformed_operators=True))
    letters, found = set(_COMMAND.sub("", gold + answer)), []
    for s in (gold, answer):
        if _MISREAD.search(_COMMAND.sub("*", s)) or re.search(r"\d\\frac\{\d+\}\{\d+\}", s):
            return False
        s = re.sub(r"(?<=\d)(?=\(|\\frac)", r"\\cdot ", s)  # 2(3) is not the mixed number 5
        s = re.sub(r"\d*\.\d+", lambda m: r"{\frac{%d}{%d}}" % Fraction(m[0]).as_integer_ratio(), s)
        found += parse(rf"\boxed{{{s}}}", [config], "no_fallback", "first_match", None)[:1]
    if len(found) < 2 or any(c.isupper() and c.lower() in letters for c in letters):
        return False  # math-verify takes X for x
    g, a = found
    if isinstance(g, Eq) or isinstance(a, Eq):
        ratio = type(g) is type(a) and simplify((g.lhs - g.rhs) / (a.lhs - a.rhs))
        return ratio and g.free_symbols and ratio.is_number and ratio.is_finite
    if isinstance(g, Expr) and isinstance(a, Expr):
        # A second opinion, at some point: verify() takes 10^{-20} for 2 * 10^{-20}.
        point = {x: Rational(sum(x.name.encode()), 97) for x in g.free_symbols | a.free_symbols}
        x, y = N(g.subs(point), 30), N(a.subs(point), 30)
        if not abs(x - y) <= 1e-20 * (abs(x) + abs(y)):
            return False
    return verify(g, a, 15, timeout_seconds=None, allow_set_relation_comp=True)


def _same(gold, answer):
    """Are two normal forms equal?"""
    names = [{m[2] for m in _NAME.finditer(text)} for text in (gold, answer)]
    if max(map(len, names)) == 1 and (names[0] == names[1] or "=" not in gold or "=" not in answer):
        gold, answer = _NAME.sub(r"\1", gold), _NAME.sub(r"\1", answer)
    elif max(map(len, names)) > 1 and set() in names:
        return False  # x = 1, y = 2 is not 1, 2
    if gold == answer:
        return gold != ""
    (kind, items), (a_kind, others) = _split(gold), _split(answer)
    if (kind, len(items)) == (a_kind, len(others)) == ("", 1):
        return _same_maths(items[0], others[0])
    if (kind, len(items)) != (a_kind, len(others)):  # at best an inequality and its interval
        relation = items and others and re.search(r"[<>]|\\([lgn]e|mathbb)", gold + answer)
        return relation and _same_maths(gold, answer)
    for item in items:  # in order, or in any order where there are no brackets
        match = next((other for other in others[: 1 if kind else None] if _same(item, other)), None)
        if match is None:
            return False
        others.remove(match)
    return bool(items)


# ---- the verdict ---------------------------------------------------------------------------------
# A worker is a plain process on pipes. multiprocessing (and so Pebble) would fork a parent that
# holds torch's threads and a GPU, or import its main script, and torch with it, once more.
_started, _idle = set(), queue.LifoQueue()
_idle.queue += [None] * 4  # so many workers at most, of which none is yet started


@functools.lru_cache(maxsize=4096)  # the completions of a group often share an answer
def _ask(gold, answer):
    """The worker's verdict; None where math-verify raised, "timeout" where it took too long."""
    worker, questions, reply = _idle.get(), [(gold, answer, TIME_LIMIT)], ""
    try:
        if worker is None or worker.poll() is not None:
            args = {"stdin": PIPE, "stdout": PIPE, "text": True, "start_new_session": True}
            worker = Popen([sys.executable, __file__], **args)  # in its session Ctrl-C misses it
            _started.add(worker)
            questions.insert(0, ("x^2-1", "(x-1)(x+1)", 60))  # imports and warms up
        for question in questions:
            reply, timer = "", threading.Timer(question[2], worker.kill)
            timer.daemon = True
            timer.start()
            print(json.dumps(question), file=worker.stdin, flush=True)
            reply = worker.stdout.readline()  # "" where the worker died
            timer.cancel()
        return "timeout" if not reply and worker.wait() == -9 else json.loads(reply)
    finally:
        if worker and not reply:  # also after Ctrl-C: what owes a reply is of no use
            worker.kill()
            worker.wait()
            _started.discard(worker)
        _idle.put(worker)


def correct(text, gold):
    """Is the final answer of the completion `text` equal to `gold`? Any thread may ask.

    Exact comparison of the normal forms; what that leaves open goes to math-verify (a library from
    github.com/huggingface), gold first and boxed, in a worker with limits of time and memory. Never
    raises, takes two seconds at most; what is too slow or fails is refused, counted in `counts`.
    """
    try:
        answer = extract(text)
        if answer is None or not isinstance(gold, str) or max(len(answer), len(gold)) > MAX_LENGTH:
            return False
        (a, a_unit), (g, g_unit) = _parse(answer), _parse(gold)
        if not re.search(r"\w", a) or not g or (a_unit and g_unit and a_unit != g_unit):
            return False
        x, y = _number(a), _number(g)
        if x is not None and y is not None:
            return x == y or x * (100 if g_unit == "%" else 1) == y * (100 if a_unit == "%" else 1)
        option = re.match(r"\(([A-H])\)(?!.*\b[A-H]\b)|([A-H])[.:)](?!.*\b[A-H]\b)", a)
        verdict = a == g or bool(option and g in option.groups()) or _ask(g, a)
    except Exception:
        verdict = None
    if not isinstance(verdict, bool):
        counts["checker_timeout" if verdict else "checker_error"] += 1
    return verdict is True


@atexit.register
def close():
    """End the workers; the next check starts one again."""
    while _started:
        (worker := _started.pop()).kill()
        worker.wait()


if __name__ == "__main__":  # a worker: [gold, answer, seconds] in; true, false, null (raised) out
    import math_verify  # noqa: F401  fails here, in sight, where it is not installed

    reply, sys.stdout, sys.stderr = sys.stdout, None, None  # what a library prints is no verdict
    if sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    for line in sys.stdin:  # ends when the parent does, however that came about ...
        gold, answer, seconds = json.loads(line)
        getattr(signal, "alarm", id)(int(seconds) + 2)  # ... even where this check hangs
        try:
            verdict = bool(_same(gold, answer))
        except Exception:
            verdict = None
        print(json.dumps(verdict), file=reply, flush=True)
        getattr(signal, "alarm", id)(0)
