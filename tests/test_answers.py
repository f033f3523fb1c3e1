r"""answers.py: hand-written answers, then faults A1-A30 and I1-I6 that users of other trainers met.

answer_cases.jsonl holds the (completion, gold, verdict) triples. They stand in a file, not in
Python strings, so that no backslash gets lost on the way (`\frac` -> form feed, "rac").
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import answers
from answers import correct, extract, format_ok, normalize, reduce_gold

ROOT = pathlib.Path(answers.__file__).parent
CASES = [
    json.loads(line) for line in (ROOT / "tests/answer_cases.jsonl").read_text("utf-8").splitlines()
]
HANG = r"\boxed{9^{9^{9^{9}}}+1}"  # no exact comparison settles it, and sympy never ends with it
posix = pytest.mark.skipif(os.name != "posix", reason="signals")
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def boxed(answer):
    return rf"\boxed{{{answer}}}"


@pytest.fixture
def fresh():
    """No worker, no remembered verdict and no count, before and after."""
    for _ in range(2):
        answers.close()
        answers._ask.cache_clear()
        answers.counts.clear()
        if not _:
            yield


@pytest.fixture
def stub(fresh, tmp_path, monkeypatch):
    """Puts a math_verify of one's own in the workers' way."""

    def write(verify):
        code = """
            class LatexExtractionConfig:
                def __init__(self, *args): pass
            def parse(text, *args): return ["parsed " + text]
        """
        (tmp_path / "math_verify.py").write_text(textwrap.dedent(code) + textwrap.dedent(verify))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    yield write
    monkeypatch.undo()


def alive(pid):
    try:
        os.kill(pid, 0)
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def gone(pid, seconds=30):
    end = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not alive(pid)


# ---- verdicts ----


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_case(case):
    assert correct(case["text"], case["gold"]) is case["correct"], case["why"]


def test_A13_no_fixture_lost_a_backslash():
    for path in (ROOT / "tests/answer_cases.jsonl", pathlib.Path(__file__)):
        text = path.read_text("utf-8")
        assert not set(text) & set("\f\b\v\a"), path
    for case in CASES:
        assert not set(case["text"] + case["gold"]) & set("\f\b\v\a\t"), case["id"]


def test_cases_are_many_and_told_apart():
    assert len({case["id"] for case in CASES}) == len(CASES) >= 43 + 80
    assert 0.3 < sum(case["correct"] for case in CASES) / len(CASES) < 0.7


# ---- extraction ----


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{1} and \boxed{2}", "2"),
        (r"\boxed{\boxed{2}}", r"\boxed{2}"),
        (r"\boxed{2} and \boxed{3", "2"),
        (r"\boxed{3", None),
        (r"\boxed{}", None),
        (r"\boxed{1} then \boxed{}", None),
        (r"\boxed 5", "5"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1\}}", r"\{1\}"),
        (r"<think> \boxed{8}", None),
        (r"<think> \boxed{8} </think> 9", None),
        (r"\boxed{8} </think> \boxed{9}", "9"),
        ("<answer>6</answer> Human: <answer>7", "6"),
        ("<answer>6</answer><answer>7</answer>", "7"),
        ("a <answer> b <answer>7</answer> c", "7"),
        ("#### 42\nMore text. The answer is 43.", "42"),
        ("#### Answer: 42", "42"),
        ("Final Answer: **73**", "73"),
        ("**Final Answer:** 73", "73"),
        ("The answer is B because a car moves", "B"),
        ("The answer is 2 1/4.", "2 1/4"),
        ("The answer is $5$.", "$5$"),
        ("I counted 5 apples.", None),
        ("The answer", None),
        ("", None),
        (None, None),
        (5, None),
        (b"\\boxed{5}", None),
    ],
)
def test_extract(text, answer):
    assert extract(text) == answer


@pytest.mark.parametrize(
    ("text", "ok"),
    [
        (r"So \boxed{4}.", True),
        (r"So \fbox{4}.", True),  # A18
        (r"steps </think> \boxed{4}", True),  # A22: the prompt opened the tag
        (r"<think>steps</think> \boxed{4}", True),
        (r"steps </think> 4", False),
        (r"<think>steps \boxed{4}", False),  # A22: it never closes
        (r"\boxed{4} <think>", False),
        (r"\boxed{4} </think> 4", False),
        (r"<answer>\boxed{4}</answer>", True),
        (r"<answer>\boxed{4}</answer> <answer>4</answer>", False),  # A25
        (r"\boxed{4", False),
        (r"\boxed{}", False),
        (r"\boxed{ }", False),
        (r"\boxed 4", False),
        ("4", False),
        ("", False),
        (None, False),
    ],
)
def test_format_ok(text, ok):
    assert format_ok(text) is ok


# ---- golds ----


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("3 * 5 = 15\n#### 1,200", "1200"),
        (r"First \boxed{1}, so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\frac{63}{400}", r"\frac{63}{400}"),
        ("1331, 1728", "1331, 1728"),
        ("(1,234)", "(1,234)"),
        ("1,234,567.50", "1234567.50"),
        ("dog", "dog"),
        ("B", "B"),
        ("New York", "New York"),
        ("blue whale", "blue whale"),
        ("None of the above", "None of the above"),
        ("The answer is 7.", "7"),
        ("There are 5 apples left in the basket.", "5"),
        ("There are 5 apples and 6 pears in the basket.", None),
        (72, "72"),
        (0, "0"),
        (0.5, "0.5"),
        ("see the figure", None),
        ("The proof is left to the reader.", None),
        ("Answers will vary.", None),
        (r"\boxed{4", None),
        (r"\boxed{}", None),
        ("####", None),
        ("<answer></answer>", None),
        ("", None),
        (" \n", None),
        ("...", None),
        ("nan", None),
        (float("nan"), None),
        (None, None),
        (True, None),
        (["5"], None),
    ],
)
def test_A1_reduce_gold(answer, gold):
    assert reduce_gold(answer) == gold


@pytest.mark.parametrize("gold", ["", " ", None, "...", "$", 5, ["5"]])
def test_A1_A21_no_answer_equals_an_empty_gold(gold):
    for text in (
        "",
        r"\boxed{}",
        r"\boxed{ }",
        "<answer></answer>",
        "####",
        r"\boxed{5}",
        r"\boxed{...}",
        r"\boxed{\$}",
    ):
        assert correct(text, gold) is False


# ---- normal form ----


@pytest.mark.parametrize(
    ("answer", "normal"),
    [
        ("007", "7"),
        ("70,000.00", "70000"),
        ("$70,000.00", "70000"),
        (r"2{,}500", "2500"),
        (r"2\,500", "2500"),
        ("1 000 000", "1000000"),
        ("18.50", "37/2"),
        (r"-\dfrac{1}{2}", "-1/2"),
        ("2½", "5/2"),
        ("−７", "-7"),
        ("+7", "7"),
        ("25%", "25"),
        (r"60^\circ", "60"),
        (r"42~\mathrm{cm}^2", "42"),
        (r"\text{(B)}", "B"),
        ("**B.**", "B"),
        (r"\left( 1 , 2 \right)", "(1,2)"),
        ("Blue  Whale", "blue whale"),
        ("AB", "AB"),
        ("2x", "2x"),
        ("2 x", "2 x"),
        (r"\pi r", r"\pi r"),
        (r"\sqrt 2", r"\sqrt{2}"),
        (r"x \leq 2", r"x\le 2"),
        ("2 <= x", r"2\le x"),
        ("1" * 2000, "1" * 2000),
    ],
)
def test_normalize(answer, normal):
    assert normalize(answer) == normal


def test_normalize_does_not_truncate_long_numbers():
    assert not correct(boxed("1" * 1500 + "2"), "1" * 1500 + "3")
    assert correct(boxed("1" * 1500 + "2"), "1" * 1500 + "2")


# ---- faults ----


def test_A2_A5_a_bare_gold_is_boxed_before_it_is_parsed():
    assert correct(boxed(r"\frac{64}{400}"), r"\frac{64}{400}")
    assert not correct(boxed(r"\frac{64}{400}"), r"\frac{63}{400}")
    assert correct(boxed(r"\frac{2\pi}{3}"), r"2\pi/3")
    assert not correct(boxed(r"\frac{2\pi}{3}"), "2")
    assert not correct(boxed(r"\frac{2}{3}"), "2")


def test_A4_gold_goes_first(stub, tmp_path):
    stub(f"""
        def verify(gold, answer, *args, **kwargs):
            print("false")  # what a library prints is no verdict
            open({str(tmp_path / "order")!r}, "a").write(f"{{gold}}|{{answer}}\\n")
            return True
    """)
    assert correct(boxed("x+3"), "x+4") is True  # it is the stub that says so
    gold, answer = (tmp_path / "order").read_text().splitlines()[-1].split("|")
    assert gold == r"parsed \boxed{x+4}" and answer == r"parsed \boxed{x+3}"


def test_A6_A8_A9_A10_A12():
    assert correct(boxed(r"2\frac{1}{4}"), "9/4") and correct("The answer is 2 1/4.", "9/4")
    assert not correct("The answer is 2 1/4.", "1/4")
    assert not correct(boxed("3x+4y+14=0"), "3x-y+13=0")
    assert not correct(boxed("1728"), "1331, 1728") and correct(boxed("1728, 1331"), "1331, 1728")
    assert correct("Final Answer: **73**", "73")
    assert not correct(boxed(r"4\sqrt(2)"), "4")


def test_A14_a_checker_that_raises_is_a_counted_no(stub):
    stub("def verify(*args, **kwargs): raise TypeError('odd inequality')")
    assert correct(boxed("x+3"), "x+4") is False
    assert answers.counts == {"checker_error": 1}
    assert correct(boxed("x+3"), "x+4") is False  # remembered, and counted again
    assert answers.counts == {"checker_error": 2}
    (worker,) = answers._started
    assert worker.poll() is None  # it need not be started anew for that
    assert correct(boxed("3"), "3")


def test_A14_a_checker_that_dies_is_a_counted_no(stub):
    stub("import os\ndef verify(*args, **kwargs): os._exit(3)")
    for _ in range(2):
        assert correct(boxed("x+3"), "x+4") is False
    assert answers.counts["checker_error"] == 2


def test_A14_a_missing_checker_is_a_counted_no(stub, capfd):
    stub("raise ImportError('math-verify is not installed')")
    assert correct(boxed("x+3"), "x+4") is False and answers.counts["checker_error"] == 1
    assert "math-verify is not installed" in capfd.readouterr().err


def test_A16_a_long_answer_and_one_that_is_too_long():
    terms = "+".join(rf"\frac{{{i}}}{{x_{{{i}}}}}" for i in range(1, 30))
    assert len(terms) > 400 and correct(boxed(terms), terms)
    assert correct(boxed("a " * 1900), "a " * 1900)
    assert not correct(boxed("a" * 5000), "a" * 5000)


def test_A17_A30_without_a_marker_there_is_no_answer():
    assert extract("We add 40 and 2, which gives 42.") is None
    assert not correct("We add 40 and 2, which gives 42.", "42")


def test_A18_one_idea_of_a_box():
    assert (
        correct(r"\fbox{42}", "42")
        and format_ok(r"\fbox{42}")
        and reduce_gold(r"\fbox{42}") == "42"
    )


def test_A20_A21_A24_A25_A26():
    assert correct(boxed("$70,000.00"), "70000") and not correct(boxed("18.50"), "18")
    assert not correct("<answer></answer>", "dog") and not correct("<answer>1420</answer>", "14")
    assert correct("<answer> 66 </answer>Human: next question ... 4 rows", "66")
    assert correct("<answer>1</answer><answer>2</answer>", "2")
    assert not correct(boxed(r"\text{None of the above}"), "A") and correct(
        boxed(r"\text{(E)}"), "E"
    )
    assert correct("not B, the answer is D", "D") and not correct("not B, the answer is D", "B")
    assert correct("The answer is B because a car moves", "B") and not correct(
        "The answer is a car", "A"
    )


@pytest.mark.parametrize("text", [None, 5, 1.5, b"x", [], {}, float("nan"), object(), True])
def test_A29_odd_types_are_wrong_not_an_error(text):
    assert correct(text, "5") is False and correct(boxed("5"), text) is False
    assert correct(text, text) is False and format_ok(text) is False


# ---- bounded time and memory, worker processes ----


def test_I1_a_check_that_hangs_is_killed_and_counted_and_later_ones_are_fine(fresh):
    assert correct(boxed("x+1"), "1+x")
    (before,) = answers._started
    start = time.monotonic()
    assert correct(HANG, "16") is False
    assert time.monotonic() - start < 30  # bounded, however loaded the machine is
    assert answers.counts == {"checker_timeout": 1} and before.poll() is not None
    assert correct(boxed("x+2"), "2+x")
    (after,) = answers._started
    assert after.pid != before.pid and after.poll() is None
    assert correct(HANG, "16") is False  # the group's other completions
    assert answers.counts == {"checker_timeout": 2}
    assert after.poll() is None


def test_I1_a_hanging_gold(fresh):
    assert correct(boxed("16"), "9^{9^{9^{9}}}+1") is False and answers.counts == {
        "checker_timeout": 1
    }


@pytest.mark.parametrize(
    "answer",
    [
        "5^{5^{5^{5^{5}}}} - 4",
        "99999999!",
        "10^{10^{10}}",
        "(10^{10})!!",
        "(" * 1900 + "1" + ")" * 1900,
        "9^" * 900 + "9",
    ]
    + [
        "\\frac{1}{" * 300 + "x" + "}" * 300,
        "\\sqrt{" * 300 + "x" + "}" * 300,
        "1," * 1900 + "1",
        "x^2*" * 900 + "x",
    ]
    + [
        "-" * 3900 + "1",
        "x<" * 1900 + "x",
        "$" * 3900,
        "cm " * 1300,
        "5" + " apples" * 550,
        "1,234," * 600,
        "|" * 3900,
    ],
    ids=lambda answer: answer[:12],
)
def test_I1_every_answer_takes_bounded_time(answer):
    correct(boxed("x+1"), "1+x")  # a worker's start apart
    start = time.monotonic()
    assert correct(boxed(answer), "16") is False
    assert time.monotonic() - start < 30  # under 2 on an idle machine
    assert correct(boxed("x+3"), "3+x")


@pytest.mark.parametrize(
    "unit",
    [
        "{",
        "}",
        r"\boxed{",
        r"\boxed 5 ",
        "\\",
        "<answer>",
        "</answer>",
        "<think>",
        "</think>",
        "####",
        "answer is ",
        "answer ",
    ]
    + [
        "answer*** ",
        "$",
        "**",
        "\n",
        " ",
        "(",
        "1,234,",
        "answer:         ",
        "<answer>a</answer>",
        r"\boxed{}",
        "٣",
    ],
)
def test_extraction_is_linear(unit):
    text = unit * (300_000 // len(unit))  # 0.2 s on an idle machine; quadratic takes minutes
    for whole in (text, boxed(text), "The answer is " + text):
        start = time.monotonic()
        correct(whole, "16"), format_ok(whole)
        assert time.monotonic() - start < 30


def test_I2_any_thread_gets_the_same_verdict(fresh):
    cases = [case for case in CASES if len(case["text"]) < 60][::4]
    verdicts = {}

    def work(part):
        for case in part:
            verdicts[case["id"]] = correct(case["text"], case["gold"])

    threads = [threading.Thread(target=work, args=(cases[i::6],)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert verdicts == {case["id"]: case["correct"] for case in cases}
    assert len(answers._started) <= 4


def test_no_code_in_an_answer_is_run(tmp_path):
    path = tmp_path / "ran"
    for code in (
        f"open('{path}','w')",
        f"__import__('os').system('touch {path}')",
        f"x+open('{path}','w').write('1')",
    ):
        for text in (boxed(code), f"<answer>{code}</answer>", f"#### {code}"):
            assert correct(text, "1") is False
            correct(text, code), correct(boxed("1"), code)
    assert not path.exists()


def test_close_ends_the_workers_and_a_later_check_starts_one(fresh):
    assert correct(boxed("x+1"), "1+x")
    (worker,) = answers._started
    answers.close()
    assert worker.poll() is not None and not answers._started
    assert correct(boxed("x+2"), "2+x")
    answers.close(), answers.close()


def test_memory_is_limited(stub):
    stub("def verify(*args, **kwargs): return len(bytearray(3 << 30)) > 0")
    if sys.platform == "linux":
        assert correct(boxed("x+3"), "x+4") is False and answers.counts == {"checker_error": 1}


SCRIPT = r"""
import sys
sys.path.insert(0, {root!r})
import answers
{prelude}
if __name__ == "__main__":
    assert answers.correct(r"\boxed{{x+1}}", "1+x")
    print(*(worker.pid for worker in answers._started), flush=True)
    {end}
"""


def script(tmp_path, end="pass", prelude=""):
    """A process with an idle worker that then does `end`; (process, the worker's pid)."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(root=str(ROOT), prelude=prelude, end=end))
    pipe = subprocess.PIPE
    # An engine that ran in this process before has set LD_PRELOAD to torch's libgomp.
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    process = subprocess.Popen(
        [sys.executable, str(path)],
        stdout=pipe,
        stderr=pipe,
        text=True,
        start_new_session=True,
        env=env,
    )
    return process, int(process.stdout.readline())


@linux
def test_a_worker_holds_no_torch_even_where_the_main_script_does(tmp_path):
    pytest.importorskip("torch")
    process, pid = script(
        tmp_path, "sys.stdin.read()", "import torch\nassert 'torch' in sys.modules"
    )
    maps = pathlib.Path(f"/proc/{pid}/maps").read_text()
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    assert process.wait(60) == 0 and gone(pid)
    assert "torch" not in maps and "numpy" not in maps
    assert "Threads:\t1\n" in status
    assert int(status.split("VmHWM:")[1].split()[0]) < 200_000  # kB


def test_importing_answers_is_light():
    code = (
        "import sys, answers; print({'torch', 'sympy', 'numpy', 'math_verify'} & set(sys.modules))"
    )
    assert (
        subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True).strip()
        == "set()"
    )


@linux
@pytest.mark.parametrize(
    ("end", "code"),
    [("pass", 0), ("raise ValueError", 1), ("sys.exit(3)", 3), ("import os; os._exit(4)", 4)],
)
def test_I6_no_worker_is_left_when_the_parent_ends(tmp_path, end, code):
    process, pid = script(tmp_path, end)
    assert process.wait(120) == code and gone(pid)


@linux
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_I6_no_worker_is_left_when_the_parent_is_killed(tmp_path, how):
    process, pid = script(tmp_path, "import time; time.sleep(60)")
    assert alive(pid)
    process.send_signal(how)
    process.wait(120)
    assert gone(pid)


@linux
def test_I6_a_worker_in_a_hanging_check_ends_after_its_parent_was_killed(tmp_path):
    process, pid = script(tmp_path, f"answers.TIME_LIMIT = 2; answers.correct({HANG!r}, '16')")
    time.sleep(0.5)
    process.kill()
    process.wait(120)
    assert alive(pid)  # it computes: no end of input can stop it
    assert gone(pid, 20)


@linux
def test_I6_ctrl_c_in_the_terminal_shows_no_traceback_of_a_worker(tmp_path):
    for end in (
        "import time; time.sleep(60)",
        f"answers.TIME_LIMIT = 30; answers.correct({HANG!r}, '16')",
    ):
        process, pid = script(tmp_path, end)
        time.sleep(0.5)
        os.killpg(process.pid, signal.SIGINT)
        process.wait(120)
        error = process.stderr.read()
        assert error.count("Traceback") == 1 and error.strip().endswith("KeyboardInterrupt"), error
        assert gone(pid)


@linux
def test_a_parent_that_handles_ctrl_c_keeps_its_worker(tmp_path):
    end = """
    import time
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        assert answers.correct(r"\\boxed{x+2}", "2+x") and not answers.counts
        print(*(worker.pid for worker in answers._started), flush=True)
    """
    process, pid = script(tmp_path, end.strip())
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)
    assert int(process.stdout.readline()) == pid
    assert process.wait(120) == 0 and gone(pid)


@posix
def test_a_forked_child_does_not_share_its_parents_worker(fresh):
    assert correct(boxed("x+1"), "1+x")
    (worker,) = answers._started
    child = os.fork()
    if not child:  # replies that cross over would be wrong ones; the parent's worker must survive
        right = all(
            correct(boxed(f"x+{i}"), f"{i + i % 2}+x") is (i % 2 == 0) for i in range(10, 40)
        )
        answers.close()
        os._exit(0 if right else 1)
    assert all(correct(boxed(f"y+{i}"), f"{i + i % 2}+y") is (i % 2 == 0) for i in range(10, 40))
    assert os.waitpid(child, 0)[1] == 0
    assert worker.poll() is None and worker in answers._started


# ---- fuzzing ----

PIECES = [
    *"{}()[].,;:!?$%^_=<>|+-*/ '\n",
    *"0123456789",
    *"xyzABeimst",
    "12",
    "0.5",
    "1,234",
    "²",
    "½",
    "−",
    "٣",
    "７",
    "°",
    "π",
]
PIECES += [
    r"\boxed{",
    r"\fbox{",
    r"\frac",
    r"\frac{1}{2}",
    r"\sqrt",
    r"\pi",
    r"\pm",
    r"\le",
    r"\infty",
    r"\text{",
    r"\left(",
]
PIECES += [
    r"\right)",
    r"\{",
    r"\}",
    r"\%",
    r"\$",
    r"\,",
    r"\\",
    r"\circ",
    r"\cup",
    " and ",
    " or ",
    " cm",
    " apples",
    "None",
]
PIECES += [
    "<think>",
    "</think>",
    "<answer>",
    "</answer>",
    "####",
    "answer is ",
    "Answer:",
    "**",
    "\x00",
    "\ud800",
    "\u202e",
]
soup = st.lists(st.sampled_from(PIECES), max_size=12).map("".join) | st.text(max_size=30)
quiet = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=300, **quiet)
@given(soup)
def test_fuzz_normalize_is_idempotent(text):
    assert normalize(normalize(text)) == normalize(text)


@settings(max_examples=300, **quiet)
@given(soup, soup)
def test_fuzz_correct_never_raises_and_pays_only_what_it_found(text, gold):
    answer, verdict = extract(text), correct(text, gold)
    assert verdict is False or (verdict is True and answer)
    assert isinstance(format_ok(text), bool) and answer != ""
    assert reduce_gold(text) is None or normalize(reduce_gold(text))
    assert correct(text, "") is False


@settings(max_examples=100, **quiet)
@given(soup, soup)
def test_fuzz_boxed_soup(answer, gold):
    assert correct(boxed(answer), gold) in (True, False)
    assert correct(f"<answer>{answer}</answer>", answer) in (True, False)


@settings(max_examples=100, **quiet)
@given(
    st.integers(-99, 99),
    st.integers(1, 30),
    st.integers(-99, 99),
    st.integers(1, 30),
    st.integers(0, 4),
)
def test_fuzz_fractions_are_exact(a, b, c, d, shape):
    answer = (
        rf"\frac{{{a}}}{{{b}}}",
        f"{a}/{b}",
        rf"\dfrac{{{a}}}{{{b}}}",
        rf"${a}/{b}$",
        rf"x = {a}/{b}",
    )[shape]
    assert correct(boxed(answer), f"{c}/{d}") is (a * d == b * c)
    assert correct(boxed(rf"\frac{{{a}}}{{{b}}}\pi"), rf"\frac{{{c}\pi}}{{{d}}}") is (
        a * d == b * c
    )


@settings(max_examples=100, **quiet)
@given(st.lists(st.integers(-3, 3), max_size=4), st.lists(st.integers(-3, 3), max_size=4))
def test_fuzz_lists_are_multisets_and_tuples_are_not(answer, gold):
    texts = [", ".join(map(str, items)) for items in (answer, gold)]
    assert correct(boxed(texts[0]), texts[1]) is (sorted(answer) == sorted(gold) != [])
    if len(gold) > 1:
        assert correct(boxed(f"({texts[0]})"), f"({texts[1]})") is (answer == gold)
