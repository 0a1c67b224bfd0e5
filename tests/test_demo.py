"""The main job, made short: it proves, trains, and leaves a page that needs nothing else."""

import json
import re
import subprocess
import sys

import pytest

from minitransformer.checks.suite import suites

COMMAND = [sys.executable, "-m", "minitransformer", "demo"]
SHORT = ["--set", "training.steps=12", "--set", "training.warmup=4", "--set", "model.width=16"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "page"
    command = [*COMMAND, "--out", str(folder), "--json", *SHORT]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout), done.stderr


def test_the_demo_proves_every_mechanism_that_has_a_backward(finished):
    _, result, _ = finished
    proved = {row["mechanism"]: row for row in result["gradients"]}
    expected = {s.mechanism for s in suites() if any("derivative" in p.name for p in s.properties)}
    assert set(proved) == expected
    for row in proved.values():
        assert row["compared"] > 0
        assert row["worst"] <= row["limit"]


def test_the_demo_says_which_model_is_better(finished):
    _, result, told = finished
    bits = result["bits_per_character"]
    difference = bits["stochastic"] - bits["dense"]
    word = "worse" if difference > 0 else "better"
    assert word in result["verdict"]
    assert f"{abs(difference):.3f}" in result["verdict"]
    assert "trigram" in told


def test_the_page_needs_nothing_from_outside(finished):
    folder, result, _ = finished
    page = (folder / "index.html").read_text(encoding="utf-8")
    assert not re.findall(r'(?:src|href)="(?!data:|#)[^"]*"', page)
    assert result["verdict"] in page.replace("&#x27;", "'")
    pictures = {p.name for p in folder.glob("*.png")}
    assert {"masks.png", "schedule.png", "loss.png", "attention.png"} <= pictures
    assert page.count("data:image/png;base64,") == len(pictures)
    assert "$" not in re.sub(r"<pre>.*?</pre>", "", page, flags=re.DOTALL), "a field left open"


def test_the_demo_refuses_bad_settings_before_it_begins(tmp_path):
    command = [*COMMAND, "--out", str(tmp_path / "page"), "--set", "training.step=5"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "did you mean 'training.steps'?" in done.stderr
    assert not (tmp_path / "page").exists()
