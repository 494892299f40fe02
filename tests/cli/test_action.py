"""The action for GitHub: each of its shell steps run as GitHub's runner does it, with `gh` and pip played."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml", reason="PyYAML reads the action")

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".github" / "actions" / "gpumem"
ACTION: dict[str, Any] = yaml.safe_load((FOLDER / "action.yml").read_text())
STEPS: list[dict[str, Any]] = ACTION["runs"]["steps"]

_GH = """#!{python}
import json, os, pathlib, sys
words, folder = sys.argv[1:], pathlib.Path(os.environ["PLAYED"])
with open(folder / "gh.jsonl", "a") as calls:
    body = [pathlib.Path(word[6:]).read_text() for word in words if word.startswith("body=@")]
    print(json.dumps({{"words": words, "body": body, "token": os.environ.get("GH_TOKEN")}}), file=calls)
state = json.loads((folder / "state.json").read_text())
is_writing = "--method" in words
if state["refuses"] == "all" or (is_writing and state["refuses"] == "writing"):
    print('{{"message":"Resource not accessible by integration","status":"403"}}')
    sys.exit("gh: Resource not accessible by integration (HTTP 403)")
if not is_writing:
    for page in state["pages"]:
        print(json.dumps(page), end="")
"""
_PYTHON = """#!{python}
import json, os, pathlib, sys
words, folder = sys.argv[1:], pathlib.Path(os.environ["PLAYED"])
if words[:1] == ["-c"]:
    os.execv({python!r}, [{python!r}, *words])
with open(folder / "python.jsonl", "a") as calls:
    print(json.dumps(words), file=calls)
if words[:2] == ["-m", "gpumem_tui"]:
    state = json.loads((folder / "state.json").read_text())
    print("### GPU memory: ok" if not state["code"] else "### GPU memory: over")
    sys.exit(state["code"])
"""


def value_of(expression: str, context: dict[str, Any]) -> Any:
    """Evaluate an expression as GitHub does: names, literals, `==`, `!=`, `&&` and `||` are all that the action has."""
    for operator in (" || ", " && "):
        if operator in expression:
            left, right = expression.split(operator, 1)
            found = value_of(left, context)
            return found if bool(found) is (operator == " || ") else value_of(right, context)
    for operator in (" == ", " != "):
        if operator in expression:
            left, right = expression.split(operator)
            return (value_of(left, context) == value_of(right, context)) is (operator == " == ")
    if expression.startswith("'"):
        return expression.strip("'")
    found = context
    for name in expression.strip().split("."):
        found = found.get(name, "") if isinstance(found, dict) else ""
    return found


def filled(text: str, context: dict[str, Any]) -> str:
    return re.sub(r"\$\{\{ (.*?) \}\}", lambda found: str(value_of(found[1], context)), text)


@dataclass
class Run:
    """A run of the action: the exit code of its first step that failed, what it wrote and whom it called."""

    folder: Path
    inputs: dict[str, str]
    number: int | None = 7
    code: int = 0
    refuses: str = ""
    pages: list[list[dict[str, Any]]] = field(default_factory=lambda: [[]])
    printed: str = ""
    failed: int = 0

    def __post_init__(self) -> None:
        for name, source in (("gh", _GH), ("python", _PYTHON)):
            played = self.folder / name
            played.write_text(source.format(python=sys.executable))
            played.chmod(0o755)
        state = {"code": self.code, "refuses": self.refuses, "pages": self.pages}
        (self.folder / "state.json").write_text(json.dumps(state))
        defaults = {name: one.get("default", "") for name, one in ACTION["inputs"].items()}
        pull = {} if self.number is None else {"pull_request": {"number": self.number}}
        context: dict[str, Any] = {
            "github": {"token": "ghs_token", "event": pull, "action_path": str(FOLDER)}, "env": {}, "steps": {},
        }  # fmt: skip
        context["inputs"] = {name: filled(text, context) for name, text in {**defaults, **self.inputs}.items()}
        for step in STEPS:
            if value_of(step.get("if", "'always'"), context) and not self._step(step, context):
                return

    def _step(self, step: dict[str, Any], context: dict[str, Any]) -> bool:
        output = self.folder / f"output-{step['name']}"
        output.touch()
        environment = {
            **os.environ, "PATH": f"{self.folder}:{os.environ['PATH']}", "PLAYED": str(self.folder),
            "GITHUB_OUTPUT": str(output), "GITHUB_STEP_SUMMARY": str(self.folder / "summary.md"),
            "GITHUB_REPOSITORY": "ada/nets", "RUNNER_TEMP": str(self.folder),
            **{name: filled(str(text), context) for name, text in step.get("env", {}).items()},
        }  # fmt: skip
        script = self.folder / "step.sh"
        script.write_text(step["run"])
        words = ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)]
        done = subprocess.run(words, env=environment, cwd=self.folder, capture_output=True, text=True, check=False)
        self.printed += done.stdout + done.stderr
        outputs = dict(line.split("=", 1) for line in output.read_text().splitlines())
        context["steps"][step.get("id", step["name"])] = {"outputs": outputs}
        self.failed = done.returncode
        return done.returncode == 0

    def calls(self, program: str) -> list[Any]:
        file = self.folder / f"{program}.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    @property
    def summary(self) -> str:
        return (self.folder / "summary.md").read_text()

    @property
    def predicted(self) -> list[str]:
        (words,) = [words for words in self.calls("python") if words[:2] == ["-m", "gpumem_tui"]]
        return list(words)

    @property
    def written(self) -> list[tuple[str, str]]:
        """The comments that were written: method and address."""
        calls = [call["words"] for call in self.calls("gh")]
        return [(words[2], words[3]) for words in calls if "--method" in words]


def comment(number: int, body: str, kind: str = "Bot") -> dict[str, Any]:
    """A comment as GitHub's API lists it, with the keys that are read."""
    return {"id": number, "body": body, "user": {"login": "github-actions[bot]", "type": kind}}


def test_inputs_reach_scripts_through_the_environment_alone() -> None:
    for step in STEPS:
        assert "${{" not in step["run"]
        assert step["shell"] == "bash"
        assert not {"eval", "uses"} & {*step["run"].split(), *step}


def test_a_step_within_budget_is_in_the_summary_and_in_a_comment(tmp_path: Path) -> None:
    run = Run(tmp_path, {"command": "python train.py --name 'a b'", "budget": "22GiB", "baseline": "memory.json"})
    assert (run.failed, run.summary) == (0, "### GPU memory: ok\n")
    assert run.predicted == [
        "-m", "gpumem_tui", "predict", "--gpu", "sim:a100-80gb", "--markdown", "--budget", "22GiB", "--baseline",
        "memory.json", "--", "python", "train.py", "--name", "a b",
    ]  # fmt: skip
    assert run.written == [("POST", "repos/ada/nets/issues/7/comments")]
    posted = run.calls("gh")[-1]
    assert posted["token"] == "ghs_token"
    assert re.fullmatch(r"<!-- gpumem-tui [0-9a-f]{12} -->\n### GPU memory: ok\n", posted["body"][0])


def test_the_comment_of_an_earlier_run_is_written_over(tmp_path: Path) -> None:
    first, second = tmp_path / "1", tmp_path / "2"
    first.mkdir()
    second.mkdir()
    (body,) = Run(first, {"command": "python train.py"}).calls("gh")[-1]["body"]
    others = [comment(1, "nice"), comment(2, body, "User"), comment(3, "<!-- gpumem-tui 0123456789ab -->\n")]
    run = Run(second, {"command": "python train.py"}, pages=[others, [comment(41, body), comment(42, body)]])
    assert run.written == [("PATCH", "repos/ada/nets/issues/comments/41")]


def test_over_budget_the_job_fails_once_the_comment_is_written(tmp_path: Path) -> None:
    run = Run(tmp_path, {"command": "python train.py", "budget": "1GiB"}, code=3)
    assert (run.failed, run.summary) == (3, "### GPU memory: over\n")
    assert run.written
    assert "::error title=GPU memory::over the budget" in run.printed


@pytest.mark.parametrize("refuses", ["writing", "all"])
def test_without_permission_the_summary_has_it_and_nothing_fails(tmp_path: Path, refuses: str) -> None:
    run = Run(tmp_path, {"command": "python train.py"}, refuses=refuses)
    assert run.failed == 0
    assert "::notice title=GPU memory::" in run.printed
    assert run.summary == "### GPU memory: ok\n"


@pytest.mark.parametrize(("inputs", "number"), [({"comment": "false"}, 7), ({}, None)])
def test_without_a_pull_request_or_if_not_wanted_no_comment_is_written(
    tmp_path: Path, inputs: dict[str, str], number: int | None
) -> None:
    assert Run(tmp_path, {"command": "python train.py", **inputs}, number=number).calls("gh") == []


def test_what_is_installed_is_this_checkout_and_what_is_asked_for(tmp_path: Path) -> None:
    run = Run(tmp_path, {"command": "python train.py", "install": "torch==2.13.0 -r requirements.txt"})
    install = run.calls("python")[0]
    assert install[:3] == ["-m", "pip", "install"]
    assert Path(install[3]).resolve() == ROOT
    assert install[4:] == ["torch==2.13.0", "-r", "requirements.txt"]


def test_a_prediction_that_fails_fails_the_job_and_says_where_the_reason_is(tmp_path: Path) -> None:
    run = Run(tmp_path, {"command": "python train.py", "install": "none"}, code=4)
    assert (run.failed, len(run.calls("python"))) == (4, 1)
    assert run.summary.startswith("### GPU memory: not known")


def test_a_command_with_a_quote_that_does_not_end_is_a_line_without_a_traceback(tmp_path: Path) -> None:
    run = Run(tmp_path, {"command": "python 'train.py --bs 8", "install": "none"})
    assert run.failed == 2
    assert run.printed.splitlines() == [
        "::error title=GPU memory::the input command is no command line; write one such as python train.py",
        "command: No closing quotation",
    ]


def test_an_input_cannot_run_a_command(tmp_path: Path) -> None:
    bad = "$(touch escaped); `touch escaped` && touch escaped"
    inputs = {"command": f"python train.py {bad}", "budget": bad, "baseline": bad, "gpu": bad, "install": bad}
    run = Run(tmp_path, inputs)
    assert not list(tmp_path.glob("**/escaped"))
    assert run.predicted[4] == bad
    (tmp_path / "empty").mkdir()
    assert Run(tmp_path / "empty", {"command": " "}).failed == 2


@pytest.mark.slow
def test_the_whole_action_predicts_a_command(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "net = torch.nn.Linear(4096, 4096).cuda()\n"
        "optimizer = torch.optim.AdamW(net.parameters())\n"
        "for _ in range(4):\n"
        "    net(torch.randn(64, 4096, device='cuda')).sum().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
    )
    inputs = {"command": f"{sys.executable} train.py", "python": sys.executable, "install": "none"}
    run = Run(tmp_path, {**inputs, "budget": "20GiB", "baseline": "memory.json"})
    assert (run.failed, run.summary.splitlines()[0]) == (0, "### GPU memory: ok")
    assert json.loads((tmp_path / "memory.json").read_text())["gpu"] == "a100-80gb"
    (tmp_path / "summary.md").unlink()
    run = Run(tmp_path, {**inputs, "budget": "300MiB"})
    assert (run.failed, run.summary.splitlines()[0]) == (3, "### GPU memory: over")
