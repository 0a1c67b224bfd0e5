"""The program, run as a person runs it: what it refuses, what it survives, what it leaves."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from minitransformer import __version__, cli
from minitransformer.tasks.text import python_topics
from minitransformer.training.checkpoints import RunFolder, encode_checkpoint, read_checkpoint

posix = pytest.mark.skipif(os.name != "posix", reason="signals and limits of POSIX")
PROGRAM = [sys.executable, "-m", "minitransformer"]
STEPS = 150
TINY = {
    "model.layers": 2,
    "model.width": 16,
    "model.context": 16,
    "model.attention.heads": 2,
    "training.batch": 4,
    "training.steps": STEPS,
    "training.warmup": 10,
    "training.learning_rate": 0.01,
    "training.look_every": 20,
    "training.save_every": 7,
}


def tiny(**changes):
    values = TINY | {key.replace("__", "."): value for key, value in changes.items()}
    return [word for key, value in values.items() for word in ("--set", f"{key}={value}")]


class Ended:
    def __init__(self, code, out, err):
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def program(monkeypatch, capsys, tmp_path):
    """The entry point, run in this process in an empty folder: what it printed and its exit
    code."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["minitransformer", *map(str, words)])
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code or 0
        return Ended(code, *capsys.readouterr())

    return run


def assert_refused(ended, code, *parts):
    """One clear line on stderr, and the exit code that belongs to it."""
    assert ended.code == code, ended.err
    line = ended.err.splitlines()[-1]
    assert line.startswith("minitransformer: ")
    for part in parts:
        assert part in line
    assert "Traceback" not in ended.err
    assert ended.out == ""


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "some.txt"
    path.write_text(python_topics()[:20_000], encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
    """A finished run, and what it printed."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    ended = subprocess.run(
        [*PROGRAM, "train", *tiny(), "--text", text, "--run", folder, "--json"],
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    return folder, ended


@pytest.fixture
def finished(whole, tmp_path):
    """A copy of the finished run, to be spoiled."""
    return shutil.copytree(whole[0], tmp_path / "finished")


def outcome(folder):
    """Weights and optimiser, bit for bit, and every metric that no clock is behind."""
    run = RunFolder(folder)
    step, tensors, _ = read_checkpoint(run.checkpoints()[-1])
    bits = {name: (x.dtype, x.shape, x.tobytes()) for name, x in tensors.items()}
    records = [{k: v for k, v in r.items() if k != "clock"} for r in run.records()]
    return step, bits, records


# ---- help ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command", [[], ["train"], ["sample"], ["inspect"], ["doctor"]], ids=" ".join
)
def test_help_teaches_by_examples(program, command):
    ended = program(*command, "--help")
    assert ended.code == 0
    assert ended.out.count("\n  minitransformer " + " ".join(command)) >= 2


def test_help_needs_nothing_heavy():
    code = (
        "import sys, minitransformer.cli\n"
        "print([m for m in ('numpy', 'numba', 'matplotlib', 'rich.progress') if m in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stdout.strip() == "[]"


def test_it_says_its_version(program):
    assert program("--version").out.strip() == __version__


def test_an_unknown_command_and_option_are_bad_usage(program):
    assert program("trian").code == 2
    assert program("train", "--stepps", "3").code == 2


# ---- settings and texts --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, said",
    [
        (["--set", "training.lr=1"], "'training.lr': did you mean 'training.learning_rate'?"),
        (["--set", "stochastic.rate=1.5"], "stochastic.rate must be between 0 and 1, got 1.5"),
        (["--set", "stochastic.kind=blok"], "did you mean 'block'?"),
        (["--set", "training.steps"], "--set takes table.key=value, got 'training.steps'"),
        (["--preset", "large"], "unknown preset 'large': there are default, demo"),
        (["--config", "nowhere.toml"], "cannot read 'nowhere.toml': No such file"),
    ],
    ids=["unknown_key", "out_of_range", "no_choice", "no_value", "no_preset", "no_file"],
)
@pytest.mark.parametrize("command", ["train", "doctor"])
def test_a_setting_that_cannot_be_is_explained(program, tmp_path, command, words, said):
    assert_refused(program(command, *words), 2, said)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "content, said",
    [
        (None, "No such file"),
        (b"", "is empty"),
        (b"\x89PNG\r\n\x1a\n", "is not UTF-8: byte 0 is 0x89"),
        (b"zero\0" * 99, "is binary: character 4 is NUL"),
        (b"a few words", "is too short: its 11 characters"),
    ],
    ids=["missing", "empty", "binary", "zeros", "too_short"],
)
def test_a_text_that_cannot_serve_leaves_no_folder(program, tmp_path, content, said):
    path = tmp_path / "mine.txt"
    if content is not None:
        path.write_bytes(content)
    assert_refused(program("train", "--text", path, "--run", tmp_path / "run"), 2, "mine.txt", said)
    assert not (tmp_path / "run").exists()


def test_the_settings_can_be_shown_changed_and_given_back(program, tmp_path):
    first = program("train", "--preset", "demo", "--set", "stochastic.rate=0.4", "--show")
    (tmp_path / "mine.toml").write_text(first.out, encoding="utf-8")
    assert "rate = 0.4" in first.out
    assert program("train", "--config", "mine.toml", "--show").out == first.out


# ---- run folders ---------------------------------------------------------------------------------


def test_a_folder_that_holds_anything_is_left_alone(program, text, tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    ended = program("train", *tiny(), "--text", text, "--run", tmp_path)
    assert_refused(ended, 1, str(tmp_path), "is not empty and is left alone")
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_finished_run_is_not_overwritten(program, text, finished):
    before = outcome(finished)
    ended = program("train", *tiny(), "--text", text, "--run", finished)
    assert_refused(ended, 1, "resume it with --resume or choose another folder")
    assert outcome(finished) == before


def test_a_folder_in_use_is_refused(program, finished):
    with RunFolder.open(finished):
        ended = program("train", "--resume", "--run", finished)
    assert_refused(ended, 1, str(finished), "is in use by another process")


def test_nothing_cannot_be_resumed(program, tmp_path):
    assert_refused(program("train", "--resume", "--run", tmp_path / "gone"), 1, "is no run folder")
    assert not (tmp_path / "gone").exists()
    assert_refused(program("train", "--resume"), 2, "--resume needs --run DIR")


def test_a_run_keeps_its_settings(program, finished):
    ended = program("train", "--resume", "--run", finished, "--set", "training.steps=9999")
    assert_refused(ended, 2, "--resume takes no other settings", "config.toml")


def test_settings_changed_by_hand_are_noticed(program, finished):
    path = finished / "config.toml"
    path.write_text(path.read_text().replace("width = 16", "width = 32"))
    ended = program("train", "--resume", "--run", finished)
    assert_refused(ended, 1, "step_150.safetensors", "'model.width' is 16 in it, 32 here")


def test_another_text_is_noticed(program, finished, text, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text(text.read_text(encoding="utf-8").replace("Python", "Cython"))
    path, checkpoint = finished / "config.toml", RunFolder(finished).checkpoints()[-1]
    path.write_text(path.read_text().replace(str(text), str(other)))
    found = read_checkpoint(checkpoint)
    found.about["settings"]["data.text"] = str(other)  # as if the file itself had been edited
    checkpoint.write_bytes(encode_checkpoint(found))
    ended = program("train", "--resume", "--run", finished)
    assert_refused(ended, 1, "step_150.safetensors", "'text_sha256'")


def spoil_truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def spoil_bit(path):
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def spoil_foreign(path):
    save_file({"weight": np.zeros(3)}, path)


def spoil_shape(path):
    found = read_checkpoint(path)
    name = next(name for name in found.tensors if name.startswith("model."))
    found.tensors[name] = np.zeros((3, 3))
    path.write_bytes(encode_checkpoint(found))


@pytest.mark.parametrize(
    "spoil, said",
    [
        (spoil_truncate, "is truncated"),
        (spoil_bit, "the field 'digest' does not match"),
        (spoil_foreign, "is foreign: its metadata lacks the field 'minitransformer'"),
        (spoil_shape, "does not match: the array 'model."),
    ],
    ids=["truncated", "damaged", "foreign", "another_shape"],
)
def test_a_checkpoint_that_does_not_fit_is_refused(program, finished, spoil, said):
    last = RunFolder(finished).checkpoints()[-1]
    spoil(last)
    before = {p: p.read_bytes() for p in finished.rglob("*") if p.is_file()}
    ended = program("train", "--resume", "--run", finished)
    assert_refused(ended, 1, str(last), said, "delete it to resume from 'step_147.safetensors'")
    assert {p: p.read_bytes() for p in finished.rglob("*") if p.is_file()} == before


# ---- being stopped -------------------------------------------------------------------------------


def start(folder, text, *, resume=False, words=None, **options):
    """The program as a process of its own."""
    words = ["--resume"] if resume else [*(words or tiny()), "--text", text]
    return subprocess.Popen(
        [*PROGRAM, "train", *words, "--run", folder],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def wait_for_steps(process, folder, steps):
    """Until the running process has written at least so many records."""
    metrics = folder / "metrics.jsonl"
    while process.poll() is None:
        with contextlib.suppress(FileNotFoundError):
            if metrics.read_bytes().count(b"\n") >= steps:
                return
        time.sleep(0.001)


@posix
def test_killed_at_any_moment_and_resumed_it_ends_with_the_same_bits(whole, text, tmp_path):
    folder, moments = tmp_path / "run", random.Random()
    killed_after = []
    for _ in range(3):
        process = start(folder, text, resume=(folder / "config.toml").exists())
        done = len(RunFolder(folder).records()) if folder.exists() else 0
        wait_for_steps(process, folder, moments.randint(done, STEPS))
        time.sleep(moments.uniform(0, 0.02))
        process.kill()
        process.communicate()
        killed_after.append(len(RunFolder(folder).records()))
    process = start(folder, text, resume=True)
    _, err = process.communicate()
    assert process.returncode == 0, (killed_after, err)
    assert outcome(folder) == outcome(whole[0]), killed_after


@posix
def test_killed_while_it_starts_it_can_be_started_again(whole, text, tmp_path):
    for i, moment in enumerate(np.linspace(0.3, 1.5, 3)):
        folder = tmp_path / str(i)
        process = start(folder, text)
        time.sleep(moment)
        process.kill()
        process.communicate()
    process = start(folder, text, resume=(folder / "config.toml").exists())
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert outcome(folder) == outcome(whole[0])


@posix
def test_ctrl_c_saves_and_says_how_to_go_on(whole, text, tmp_path):
    folder = tmp_path / "run"
    process = start(folder, text)
    wait_for_steps(process, folder, 20)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130, err
    assert out == ""
    step = len(RunFolder(folder).records())
    assert 20 <= step < STEPS
    assert f"stopped and saved after step {step}" in err
    assert err.splitlines()[-1] == f"  minitransformer train --resume --run {folder}"
    assert RunFolder(folder).checkpoints()[-1].name == f"step_{step}.safetensors"
    process = start(folder, text, resume=True)
    _, err = process.communicate()
    assert f"going on after step {step}" in err
    assert outcome(folder) == outcome(whole[0])


@posix
@pytest.mark.parametrize("full", ["metrics", "checkpoint"])
def test_a_full_disk_stops_the_run_and_spoils_nothing(whole, text, tmp_path, full):
    """No file may grow beyond a limit, which is what a full disk looks like from inside."""
    resource = pytest.importorskip("resource")
    run, folder = RunFolder(whole[0]), tmp_path / "run"
    if full == "checkpoint":
        limit, save_every = run.checkpoints()[-1].stat().st_size - 1, 7
    else:  # no checkpoint before half of the metrics are written
        limit, save_every = run.metrics_path.stat().st_size // 2, STEPS

    def little_room():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    words = tiny(training__save_every=save_every)
    process = start(folder, text, words=words, preexec_fn=little_room)
    out, err = process.communicate()
    assert_refused(Ended(process.returncode, out, err), 1, full, "cannot write", "File too large")
    assert not [*folder.rglob("*.tmp")]
    process = start(folder, text, resume=True)
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert outcome(folder) == outcome(whole[0])


# ---- what a run leaves ---------------------------------------------------------------------------


def test_a_run_ends_with_its_result(whole):
    folder, ended = whole
    result = json.loads(ended.stdout)
    bits = result["bits_per_character"]
    assert list(bits) == ["model", "unigram", "bigram", "trigram"]
    assert 0 < bits["model"] < 8
    assert result["steps"] == STEPS
    assert result["skipped_steps"] == 0
    last = RunFolder(folder).records()[-1]
    assert last["validation"] / np.log(2) == pytest.approx(bits["model"])
    for path in result["figures"]:
        assert Path(path).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert {p.stem for p in (folder / "figures").iterdir()} == {
        "loss",
        "fluctuation",
        "schedule",
        "entropy",
    }


def test_the_loss_falls_and_the_records_are_complete(whole):
    records = RunFolder(whole[0]).records()
    assert [r["step"] for r in records] == list(range(1, STEPS + 1))
    assert np.mean([r["loss"] for r in records[-20:]]) < records[0]["loss"] - 0.3
    looks = [r["look"] for r in records if "look" in r]
    assert len(looks) == STEPS // 20 + 1
    for look in looks:
        assert {name: np.shape(x) for name, x in look["heads"].items()} == {
            "entropy": (2, 2),
            "weight_norm": (2, 2),
            "output_norm": (2, 2),
        }
    assert all(len(r["mask_density"]) == len(r["drop_rates"]) == 2 for r in records)


def test_a_finished_run_says_its_result_again(program, finished):
    before = outcome(finished)
    ended = program("train", "--resume", "--run", finished)
    assert ended.code == 0
    assert "this Transformer" in ended.out
    assert "trigram, interpolated" in ended.out
    assert f"minitransformer sample {finished}" in ended.out.replace("\n", " ")
    assert outcome(finished) == before


def test_a_run_that_diverges_says_so(program, text, tmp_path):
    wild = tiny(training__learning_rate=1e30, training__steps=20, training__look_every=5)
    ended = program("train", *wild, "--text", text, "--run", tmp_path / "run")
    assert_refused(
        ended, 1, "the loss is not a number any more", "steps were skipped", "learning_rate"
    )
    records = RunFolder(tmp_path / "run").records()
    assert len(records) == 20
    assert records[-1]["skipped_so_far"] == sum(r["skipped"] for r in records) > 0


def test_a_machine_that_rounds_differently_is_noticed(program, finished):
    about = finished / "environment.json"
    then = json.loads(about.read_text())
    about.write_text(json.dumps(then | {"threads": 64}))
    ended = program("train", "--resume", "--run", finished)
    said = f"note: not bit for bit from here: threads was 64, is {then['threads']}"
    assert said in ended.err.splitlines()
    assert ended.err.count("not bit for bit") == 1


def test_runs_are_numbered(program, text, tmp_path):
    for _ in range(2):
        few = tiny(training__steps=1, training__warmup=0)
        assert program("train", *few, "--text", text).code == 0
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == ["1", "2"]


def test_a_text_is_found_again_from_another_folder(program, text, tmp_path, monkeypatch):
    shutil.copy(text, tmp_path / "here.txt")
    few = tiny(training__steps=1, training__warmup=0)
    assert program("train", *few, "--text", "here.txt", "--run", "run").code == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert program("train", "--resume", "--run", "../run").code == 0


# ---- sample and doctor ---------------------------------------------------------------------------


def test_a_trained_model_writes(program, whole):
    first = program("sample", whole[0], "--length", 50, "--prompt", "The ", "--seed", 3)
    again = program("sample", whole[0], "--length", 50, "--prompt", "The ", "--seed", 3)
    other = program("sample", whole[0], "--length", 50, "--prompt", "The ", "--seed", 4)
    assert first.code == 0, first.err
    assert first.out.startswith("The ")
    assert len(first.out) == 4 + 50 + 1
    assert first.out == again.out != other.out


@pytest.mark.parametrize(
    "words, code, said",
    [
        (["--prompt", "日本"], 2, "character '日' (position 0) is not among"),
        (["--prompt", ""], 2, "the prompt is empty"),
        (["--temperature", "-1"], 2, "temperature must be finite and at least 0"),
        (["--length", "-5"], 2, "length must be at least 0"),
    ],
)
def test_what_cannot_be_written_is_explained(program, whole, words, code, said):
    assert_refused(program("sample", whole[0], *words), code, said)


def test_a_run_without_a_checkpoint_cannot_write(program, finished, tmp_path):
    shutil.rmtree(finished / "checkpoints")
    assert_refused(program("sample", finished), 1, "has no checkpoint yet")
    assert_refused(program("sample", tmp_path / "gone"), 1, "is no run folder")


def test_the_heads_of_a_run_are_inspected(program, finished):
    ended = program("inspect", finished)
    assert ended.code == 0 and ended.err == ""
    for word in ("bits/char", "0.1", "1.0", "head", "figure:"):
        assert word in ended.out
    assert (finished / "figures" / "heads.png").exists()
    picture = finished / "elsewhere" / "heads.png"
    ended = program("inspect", finished, "--json", "--dead", "1.5", "--figure", picture)
    said = json.loads(ended.out)
    assert said["figure"] == str(picture) and picture.exists()
    assert len(said["heads"]) == 4 and said["thresholds"]["dead"] == 1.5
    assert "dead" in {found["kind"] for found in said["findings"]}
    assert all(found["because"] and found["advice"] for found in said["findings"])


def test_a_run_without_a_checkpoint_cannot_be_inspected(program, finished):
    shutil.rmtree(finished / "checkpoints")
    assert_refused(program("inspect", finished), cli.FAILED, "has no checkpoint yet")
    assert_refused(program("inspect", finished / "no"), cli.FAILED, "is no run folder")


def test_the_doctor_says_what_it_found(program):
    ended = program("doctor", "--set", "stochastic.rate=0.9", "--json")
    assert ended.code == 0
    findings = {f["topic"]: f for f in json.loads(ended.out)}
    assert findings["compiler"]["state"] == "ok"
    assert findings["settings"]["text"] == "stochastic.rate is 0.9; 0.3 to 0.6 is common"
    assert "ok      python" in program("doctor").out
