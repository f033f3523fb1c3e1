"""Writes what is generated in the documentation, so that it can't drift from the scripts.

    python docs/make.py            rewrite it
    python docs/make.py --check    only compare; exit 1, naming what is stale

- docs/algorithms.md, between `<!-- diff X -->` and `<!-- /diff -->`: X.py against grpo.py
- README.md, between `<!-- changed X -->` and `<!-- /changed -->`: how many lines that diff has
- docs/groups.png: the share of groups that teach something, over the pass rate
"""
import ast
import difflib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# A new script: its name here, a section with markers in docs/algorithms.md, a row in the README.
VARIANTS = ("dr_grpo", "dapo", "grpo2", "gdpo", "gopo", "gspo", "cispo", "sapo")
THREE = ("advantages", "token_weights", "token_loss")


# -------------------------------------------------------------------- the diffs
def script(name: str) -> list[str]:
    return (ROOT / f"{name}.py").read_text("utf-8").splitlines()


def functions(lines: list[str]) -> dict[str, list[str]]:
    """Name -> lines, of every function at the top level."""
    nodes = ast.parse("\n".join(lines)).body
    return {node.name: lines[node.lineno - 1:node.end_lineno] for node in nodes
            if isinstance(node, ast.FunctionDef)}


def defaults(lines: list[str]) -> dict[str, str]:
    """Option -> default value, and REWARDS."""
    nodes = ast.parse("\n".join(lines)).body
    found = {}
    for node in nodes:
        if isinstance(node, ast.ClassDef) and node.name == "Args":
            fields = [field for field in node.body if isinstance(field, ast.AnnAssign)]
            found |= {field.target.id: ast.unparse(field.value) for field in fields}
        if isinstance(node, ast.Assign) and node.targets[0].id == "REWARDS":
            found["REWARDS"] = ast.unparse(node.value)
    return found


def changed_lines(name: str) -> int:
    """Lines that start with < or > in `diff -d grpo.py X.py`: all but the longest common part."""
    old, new = script("grpo"), script(name)
    common = [0] * (len(new) + 1)  # row by row: length of the longest common subsequence
    for line in old:
        above, common = common, [0]
        for j, other in enumerate(new):
            common.append(above[j] + 1 if line == other else max(above[j + 1], common[j]))
    return len(old) + len(new) - 2 * common[-1]


def diff_block(name: str) -> str:
    """Defaults that differ, then every function that differs: whole, but main in excerpts."""
    old, new = script("grpo"), script(name)
    before, after = defaults(old), defaults(new)
    text = [f"`{key}` {before[key]} → {value}" for key, value in after.items()
            if key in before and before[key] != value]
    lines = ["Default values: " + ("; ".join(text) or "as in grpo.py") + "."]
    own = [f"`--{key.replace('_', '-')}` ({value})" for key, value in after.items()
           if key not in before]
    lines += [f"Its own options: {', '.join(own)}."] if own else []
    before, after = functions(old), functions(new)
    same = [f"`{key}`" for key in THREE if before[key] == after[key]]
    lines += [f"Unchanged: {', '.join(same)}."] if same else []
    hunks = []
    for key in (*THREE, *(key for key in after if key not in THREE)):
        context = 1 if key == "main" else 1000
        diff = list(difflib.unified_diff(before.get(key, []), after[key], n=context, lineterm=""))
        hunks += [re.sub("^@@.*", "@@ in main @@" if key == "main" else "", line)
                  for line in diff[2:]]
    return "\n".join(["", *lines, "", "```diff", *"\n".join(hunks).strip("\n").split("\n"), "```",
                      ""])


# -------------------------------------------------------------------- the picture
def draw_groups(path: Path) -> None:
    """1 − p^G − (1−p)^G over the pass rate p, which is on a log-odds scale: the ends matter."""
    import numpy as np
    from matplotlib.figure import Figure

    p = 1 / (1 + np.exp(-np.linspace(-4.75, 4.75, 400)))
    figure = Figure(figsize=(10, 5.6), layout="constrained")
    axis = figure.subplots()
    axis.axvspan(0.2, 0.8, color="0.94", zorder=0)
    axis.text(0.5, 0.03, "pass rate 20–80 %:\nthe prompts that teach most", ha="center",
              va="bottom", color="0.35", fontsize=12)
    # Okabe and Ito's colours, told apart by the colour-blind too; each line carries its name.
    for size, colour, at in ((2, "#0072B2", 0.5), (4, "#009E73", 0.115), (8, "#D55E00", 0.083),
                             (16, "#CC79A7", 0.0585), (32, "#000000", 0.039)):
        axis.plot(p, 1 - p**size - (1 - p)**size, color=colour, linewidth=2.8)
        axis.text(at, 1 - at**size - (1 - at)**size, f"G = {size}", color=colour, fontsize=13,
                  weight="bold", ha="center", va="center",
                  bbox={"color": "0.94" if size == 2 else "1", "pad": 2})
    axis.set_xscale("logit")
    ticks = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99)
    axis.set_xticks(ticks, [f"{100 * tick:.0f} %" for tick in ticks], fontsize=12)
    axis.set_xticks([], minor=True)
    axis.set_yticks((0, 0.25, 0.5, 0.75, 1), ("0 %", "25 %", "50 %", "75 %", "100 %"), fontsize=12)
    axis.set(xlim=(0.0085, 0.9915), ylim=(0, 1.04))
    axis.set_xlabel("pass rate p of the prompt (log-odds scale)", fontsize=13)
    axis.set_title("Share of groups with both right and wrong answers,  1 − p$^G$ − (1 − p)$^G$",
                   fontsize=15, loc="left", pad=12)
    axis.grid(axis="y", color="0.88", linewidth=0.8)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(length=0)
    figure.savefig(path, dpi=130, metadata={"Software": None})


# -------------------------------------------------------------------- writing and checking
def fill(path: Path, kind: str, content) -> str:
    """The text of a file, each variant's `kind` block filled with content(variant)."""
    text = path.read_text("utf-8")
    for name in VARIANTS:
        block = re.compile(rf"(<!-- {kind} {name} -->).*?(<!-- /{kind} -->)", re.S)
        if len(block.findall(text)) != 1:
            sys.exit(f"{path.name}: needs one <!-- {kind} {name} --> … <!-- /{kind} -->")
        new = content(name)
        text = block.sub(lambda match: match[1] + new + match[2], text)
    return text


def main() -> None:
    algorithms, readme, picture = (ROOT / name for name in (
        "docs/algorithms.md", "README.md", "docs/groups.png"))
    texts = {algorithms: fill(algorithms, "diff", diff_block),
             readme: fill(readme, "changed", lambda name: str(changed_lines(name)))}
    if sys.argv[1:] == ["--check"]:
        stale = [path.name for path, text in texts.items() if path.read_text("utf-8") != text]
        stale += [picture.name] * (not picture.exists())
        sys.exit(f"stale: {', '.join(stale)}; run python docs/make.py" if stale else 0)
    if sys.argv[1:]:
        sys.exit(__doc__)
    for path, text in texts.items():
        path.write_text(text, "utf-8")
    draw_groups(picture)


if __name__ == "__main__":
    main()
