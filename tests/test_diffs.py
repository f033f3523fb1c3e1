"""A script is a short, readable diff of grpo.py: how long it may be, and where it may differ."""
import ast
import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import SCRIPTS, load

ROOT = Path(__file__).resolve().parent.parent
VARIANTS = [name for name in SCRIPTS if name != "grpo"]
BUDGETS = {"dr_grpo": 45, "grpo2": 45, "gopo": 60, "gdpo": 65, "dapo": 130}  # others 50
# Sections of main() in which a script may differ, and by how many lines, grpo.py's and its own.
LOOP = {"dapo": {"set up": 6, "sample": 5, "score": 3, "sample and score": 2}}
RULER = re.compile(r"^# -{20,} (.+)$")
SECTION = re.compile(r"^ +# ---- ([a-z ]*[a-z])")


def read(name: str) -> str:
    return (ROOT / f"{name}.py").read_text(encoding="utf-8")


# -------------------------------------------------------------------- a script's regions
def args_class(tree: ast.Module) -> ast.ClassDef:
    return next(node for node in tree.body if isinstance(node, ast.ClassDef))


def regions(source: str) -> list[str]:
    """The region that each line lies in, by line number; the first line is at 1."""
    tree = ast.parse(source)
    options = args_class(tree)
    names = [node.target.id for node in options.body if isinstance(node, ast.AnnAssign)]
    fields = {}  # line -> field, its docstring included
    for node, text in zip(options.body, options.body[1:]):
        if isinstance(node, ast.AnnAssign):
            fields |= dict.fromkeys(range(node.lineno, text.end_lineno + 1), node.target.id)
    region, result = "", [""]
    for number, line in enumerate(source.splitlines(), 1):
        if RULER.match(line):
            region = RULER.match(line)[1]
        elif region.startswith("the loop") and SECTION.match(line):
            region = f"the loop: {SECTION.match(line)[1]}"
        elif line.startswith("if __name__"):
            region = "the last lines"
        if region:
            result.append(region)
        elif number <= tree.body[0].end_lineno:
            result.append("docstring")
        elif number < options.lineno - 1:
            result.append("imports")
        elif number in fields:
            own = names.index(fields[number]) > names.index("seed")
            result.append("own options" if own else f"field {fields[number]}")
        else:
            result.append("class Args" if number <= options.lineno else "presets and rewards")
    return result


def allowed(region: str, name: str, both: set[str]) -> bool:
    """Whether a line of this region may differ; `both`: the regions of both scripts."""
    if region.startswith("the loop: "):
        return region[len("the loop: "):] in LOOP.get(name, {})
    if region.startswith("field "):
        return region in both
    return region in ("docstring", "imports", "own options", "presets and rewards", "the algorithm")


# -------------------------------------------------------------------- diffs
def hunks(old: str, new: str) -> list[tuple[str, list[tuple[str, int]]]]:
    """`diff old new`: the text of each hunk, and its changed lines as (side, line number)."""
    run = subprocess.run(["diff", old, new], cwd=ROOT, capture_output=True, encoding="utf-8")
    assert run.returncode < 2, run.stderr
    result = []
    for line in run.stdout.splitlines():
        if head := re.match(r"(\d+)(?:,\d+)?[acd](\d+)", line):
            result.append((line, []))
            numbers = {"<": int(head[1]), ">": int(head[2])}
            continue
        text, lines = result[-1]
        result[-1] = (f"{text}\n{line}", lines)
        if line[0] in numbers:
            lines.append((line[0], numbers[line[0]]))
            numbers[line[0]] += 1
    return result


@pytest.mark.parametrize("name", VARIANTS)
def test_diff_is_within_its_budget(name):
    changed = sum(len(lines) for _, lines in hunks("grpo.py", f"{name}.py"))
    assert 0 < changed <= BUDGETS.get(name, 50), f"diff grpo.py {name}.py has {changed} lines"


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_is_short(name):
    lines = read(name).splitlines()
    assert len(lines) <= 300
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("name", VARIANTS)
def test_scripts_differ_only_where_they_may(name):
    where = {"<": regions(read("grpo")), ">": regions(read(name))}
    both = set(where["<"]) & set(where[">"])
    spent = {}
    for text, lines in hunks("grpo.py", f"{name}.py"):
        for side, number in lines:
            region = where[side][number]
            assert allowed(region, name, both), (
                f"{name}.py differs in {region!r}, line {number}:\n{text}")
            spent[region] = spent.get(region, 0) + 1
    for region, most in LOOP.get(name, {}).items():
        assert spent.get(f"the loop: {region}", 0) <= most, f"{name}.py differs too much: {region}"


def loop_sections(name: str) -> dict[str, list[str]]:
    """main(), as the lines of each of its sections."""
    source, result = read(name), {}
    for region, line in zip(regions(source)[1:], source.splitlines()):
        if region.startswith(("the loop", "the last lines")):
            result.setdefault(region.removeprefix("the loop: "), []).append(line)
    return result


@pytest.mark.parametrize("name", VARIANTS)
def test_main_is_the_same(name):
    """Section by section, in the same order, but for those named in LOOP."""
    mine, grpo = loop_sections(name), loop_sections("grpo")
    assert len(grpo) >= 9, "the sections of main() were not found"
    free = LOOP.get(name, {})
    assert [key for key in mine if key not in free] == [key for key in grpo if key not in free]
    for key in mine:
        assert key in free or mine[key] == grpo[key], f"{name}.py differs in main(): {key}"


# -------------------------------------------------------------------- options
@pytest.mark.parametrize("name", SCRIPTS)
def test_options_are_the_same_up_to_seed(name):
    """By name, type and order; a script's own come after."""
    mine, grpo = ([(field.name, field.type) for field in dataclasses.fields(load(script).Args)]
                  for script in (name, "grpo"))
    assert grpo[-1][0] == "seed"
    assert mine[:len(grpo)] == grpo


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_option_has_a_docstring(name):
    body = args_class(ast.parse(read(name))).body
    for node, after in zip(body, [*body[1:], None]):
        if isinstance(node, ast.AnnAssign):
            text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            assert text and after.value.value.strip(), f"{name}.py: {node.target.id}"


# Options that a script has only because all scripts have them; their docstrings say so.
UNUSED = {"sapo": {"clip_low", "clip_high"}}


def without_checks(source: str) -> str:
    """common.py less check_args: to refuse a value is not to use it."""
    lines = source.splitlines()
    node = next(node for node in ast.parse(source).body
                if isinstance(node, ast.FunctionDef) and node.name == "check_args")
    return "\n".join(lines[:node.lineno - 1] + lines[node.end_lineno:])


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_option_is_read(name):
    """F9: by the script or by common.py; a script's own by the script. If not, it says so."""
    names = [field.name for field in dataclasses.fields(load(name).Args)]
    silent = set(re.findall(r'^    (\w+): .*\n    """not used', read(name), re.M))
    assert silent == UNUSED.get(name, set())
    mine, shared = read(name), without_checks(read("common"))
    for place, option in enumerate(names):
        own = place > names.index("seed")
        used = re.search(rf"\bargs\.{option}\b", mine if own else mine + shared)
        assert bool(used) != (option in silent), f"{name}.py: what reads args.{option}?"


# -------------------------------------------------------------------- importing
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_only_defines(name):
    kinds = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef, ast.Assign)
    docstring, *body, last = ast.parse(read(name)).body
    assert isinstance(docstring, ast.Expr) and isinstance(docstring.value.value, str)
    assert all(isinstance(node, kinds) for node in body)
    assert isinstance(last, ast.If) and ast.unparse(last.test) == "__name__ == '__main__'"


def test_importing_runs_nothing(tmp_path):
    """No output, no file, and nothing that is slow to import."""
    code = (f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {', '.join(SCRIPTS)}; "
            "print([m for m in ('vllm', 'transformers', 'datasets', 'tyro') if m in sys.modules])")
    run = subprocess.run([sys.executable, "-B", "-c", code], cwd=tmp_path, capture_output=True,
                         text=True)
    assert (run.returncode, run.stdout, run.stderr) == (0, "[]\n", "")
    assert not list(tmp_path.iterdir())
