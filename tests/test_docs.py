"""The documentation says what the code does: generated parts are fresh, formulas and commands run,
options and links exist, and every metric is explained."""
import csv
import doctest
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tyro
from scripts import SCRIPTS, load

import common

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
LATER = {"docs/curves.png"}  # a picture that bench/ makes
OTHERS = {"--check", "--help", "--nproc-per-node", "--nnodes", "--node-rank",
          "--rdzv-endpoint"}  # options of make.py, of tyro, of torchrun


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


# -------------------------------------------------------------------- what is generated
def test_generated_parts_are_fresh():
    run = subprocess.run([sys.executable, "docs/make.py", "--check"], cwd=ROOT, text=True,
                         capture_output=True)
    assert run.returncode == 0, run.stderr


def test_check_notices_a_change(tmp_path):
    for name in ("README.md", "docs/make.py", "docs/algorithms.md", "docs/groups.png",
                 *(f"{script}.py" for script in SCRIPTS)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    dapo = tmp_path / "dapo.py"
    dapo.write_text(dapo.read_text("utf-8").replace("mask / num_tokens", "mask / 7"), "utf-8")
    run = subprocess.run([sys.executable, "docs/make.py", "--check"], cwd=tmp_path, text=True,
                         capture_output=True)
    assert run.returncode == 1 and "algorithms.md" in run.stderr


def test_memory_table_is_what_the_script_computes():
    table = runpy.run_path(str(ROOT / "bench" / "gpu_memory.py"))["table"]()
    [block] = re.findall(r"<!-- memory -->\n(.*?)\n<!-- /memory -->", read("README.md"), re.S)
    assert block == table, "run python bench/gpu_memory.py --write"


def test_tables_of_results_come_from_the_kept_runs(tmp_path):
    for name in ("bench", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name)
    made = ["bench/results/curves.csv", "bench/results/curves.md", "bench/results/claims.csv",
            "docs/results.md"]
    for name in made[:3]:
        (tmp_path / name).write_text("stale")
    for command in (["bench/curves.py", "--scripts"], ["bench/claims.py", "--jobs", "0"]):
        subprocess.run([sys.executable, *command], cwd=tmp_path, check=True, capture_output=True)
    for name in made:
        assert (tmp_path / name).read_text("utf-8") == read(name), f"{name}: run the scripts"


def test_every_variant_is_documented():
    assert {"grpo", *runpy.run_path(str(ROOT / "docs" / "make.py"))["VARIANTS"]} == set(SCRIPTS)


def test_readme_is_short():
    assert len(read("README.md").splitlines()) <= 200


# -------------------------------------------------------------------- what can be run
@pytest.mark.parametrize("page", PAGES)
def test_formulas(page):
    """FAULTS of other projects: docs with one formula, code with another. So these are run."""
    blocks = re.findall(r"^```python\n(.*?)^```", read(page), re.S | re.M)
    code = "\n".join(block for block in blocks if ">>>" in block)
    test = doctest.DocTestParser().get_doctest(code, {}, page, page, 0)
    report = []
    doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=report.append)
    assert not report, "".join(report)


def commands(page: str) -> list[tuple[str, list[str]]]:
    """(script, arguments) of every command on a page: in a code block, or between backticks."""
    text = read(page)
    if page.endswith(".py"):  # in a docstring two spaces and a remark follow
        found = [re.split(r"\s{2,}", line.strip())[0] for line in text.split('"""')[1].splitlines()]
    else:
        found = re.findall(r"^ {4}(.*)$|`((?:python|torchrun) [^`\n]+)`", text, re.M)
        found = ["".join(pair) for pair in found]
    result = []
    for line in found:
        if re.match(r"(?:python|torchrun) ", line):
            words = shlex.split(line, comments=True)
            place = next(i for i, word in enumerate(words) if word.endswith(".py"))
            result.append((words[place].removesuffix(".py"), words[place + 1:]))
    return result


@pytest.mark.parametrize("page", PAGES + [f"{name}.py" for name in SCRIPTS])
def test_commands_parse(page):
    for script, argv in commands(page):
        if script in SCRIPTS and "--help" not in argv:
            module, rest = load(script), list(argv)
            default = module.PRESETS[rest.pop(0) if rest and rest[0] in module.PRESETS else "tiny"]
            try:
                tyro.cli(module.Args, args=rest, default=default)
            except SystemExit:
                pytest.fail(f"{page}: python {script}.py {shlex.join(argv)}")
        else:
            assert (ROOT / f"{script}.py").exists(), f"{page}: {script}.py"


def test_there_are_commands():
    assert len(commands("README.md")) > 8 and all(commands(f"{name}.py") for name in SCRIPTS)


@pytest.mark.parametrize("page", PAGES)
def test_options_exist(page):
    """In a script's own section that script's options, elsewhere any script's."""
    def options(names):
        return {f"--{prefix}{field.replace('_', '-')}" for name in names for prefix in ("", "no-")
                for field in load(name).Args.__dataclass_fields__}

    for section in re.split(r"^(?=## )", read(page), flags=re.M):
        title = section.removeprefix("## ").split("\n", 1)[0]
        known = options([title] if title in SCRIPTS else SCRIPTS) | OTHERS
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", section))
        assert named <= known, f"{page}, {title}: {sorted(named - known)}"


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    def anchors(path):
        titles = re.findall(r"^#+ (.+)$", path.read_text("utf-8"), re.M)
        return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}

    for target in re.findall(r"\]\(([^)\s]+)\)", read(page)):
        if target.startswith("http") or target in LATER:
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.exists(), f"{page}: {target}"
        assert not anchor or anchor in anchors(path), f"{page}: {target}"


# -------------------------------------------------------------------- every metric is explained
def documented() -> list[str]:
    """The keys in the first column of docs/metrics.md's tables."""
    rows = re.findall(r"^\| (`.+?) \|", read("docs/metrics.md"), re.M)
    return [key for row in rows for key in re.findall(r"`([^`]+)`", row)]


def unknown(keys) -> set[str]:
    patterns = [re.sub("<[a-z]+>", r"\\w+", key) for key in documented()]
    return {key for key in keys if not any(re.fullmatch(pattern, key) for pattern in patterns)}


def test_metrics_of_a_step_are_documented():
    """The keys come from the code that writes them, on a rollout made up here."""
    args = load("grpo").Args(group_size=2, prompts_per_step=1)
    run = common.Run(args, ["correct", "format"], "grpo.py")
    run.start_step()
    run.learning_rate = args.learning_rate
    groups = [[common.Sample([1, 2], [3, 4], [-1.0, -1.0], rewards=[reward, 1.0])
               for reward in (1.0, 0.0)]]
    for phase in ("sample", "score", "learn", "sync"):
        run.lap(phase)
    rewards, mine = common.gather_rewards(groups, args, run)
    adv = load("grpo").advantages(rewards, args)
    common.set_advantages(groups, adv[mine])
    minibatches = common.minibatches(groups, args, run)
    for micro in sum(minibatches, []):
        micro.old_logp, micro.entropy = micro.sampler_logp, micro.sampler_logp * 0
    row = common.rollout_metrics(groups, minibatches, rewards, adv, args, run)
    assert len(row) > 25 and {"kl", "reward", "useful_groups", "time/step"} <= row.keys()
    assert not unknown(row)


def test_other_metrics_are_documented():
    """Those that only some runs have, as the sources spell them."""
    sources = "".join(read(name) for name in ("common.py", "answers.py", "dapo.py"))
    keys = set(re.findall(r'"((?:eval|dapo|sampling|time|completions)/[a-z_/]+)"', sources))
    keys |= {f"reward/{name}" for name in re.findall(r'"(checker_[a-z]+)"', read("answers.py"))}
    assert {"eval/accuracy", "dapo/share_kept", "reward/checker_timeout"} <= keys
    assert not unknown(keys)


def test_metrics_of_stored_runs_are_documented():
    paths = sorted((ROOT / "bench" / "results").rglob("*.jsonl"))
    rows = [json.loads(line) for path in paths for line in path.read_text("utf-8").splitlines()]
    keys = {key for row in rows if "time/step" in row for key in row}
    keys = {key for key in keys if key != "timed" and not key.startswith("bench/")}  # of bench/
    assert len(keys) > 30 and not unknown(keys)


def test_numbers_of_the_demo_are_those_of_the_stored_runs():
    runs = list(csv.DictReader((ROOT / "bench/results/curves.csv").open()))
    runs = [run for run in runs if run["script"] == "grpo"]
    assert sorted(run["seed"] for run in runs) == list("01234")
    of = lambda key: sorted(float(run[key]) for run in runs if run[key])  # noqa: E731
    text = " ".join(read("README.md").split())
    [seconds] = of("seconds")  # one seed was timed
    assert f"about {seconds:.0f} seconds of training" in text
    final = of("final")
    assert f"from {of('start')[0]:.3f} to between {final[0]:.3f} and {final[-1]:.3f}" in text
    means = [sum(of(key)) / 5 for key in ("length_first", "length_last")]
    assert f"from {means[0]:.0f} to {means[1]:.0f} tokens" in text


def test_documented_metrics_exist():
    sources = "".join(read(name) for name in ("common.py", "answers.py", "dapo.py"))
    for key in documented():
        last = key.rsplit("/", 1)[-1]
        assert "<" in key or key in sources or f'"{last}"' in sources, key
