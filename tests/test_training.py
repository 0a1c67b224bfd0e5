"""Settings, run folders, the loop and the monitor: what a run promises and what it refuses."""

import dataclasses
import errno
import os
import subprocess
import sys
import tomllib

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from minitransformer.checks.suite import GATE
from minitransformer.stochastic.schedules import Schedule
from minitransformer.training.checkpoints import (
    Checkpoint,
    RunError,
    RunFolder,
    encode_checkpoint,
    environment,
    plain,
    read_checkpoint,
    require_same,
    write_atomically,
)
from minitransformer.training.config import (
    FIELDS,
    PRESETS,
    Config,
    advice,
    drop_schedule,
    from_flat,
    load_config,
    random_mask,
    read_toml,
    to_flat,
    to_toml,
)

# ---- settings ------------------------------------------------------------------------------------


@st.composite
def changes(draw):
    """A few keys with values in their ranges."""
    values = {}
    for key in draw(st.lists(st.sampled_from(sorted(FIELDS)), max_size=6, unique=True)):
        f = FIELDS[key]
        low, high, choices = (f.metadata[name] for name in ("low", "high", "choices"))
        if choices:
            values[key] = draw(st.sampled_from(choices))
        elif f.type is bool:
            values[key] = draw(st.booleans())
        elif f.type is str:
            values[key] = draw(st.text(st.characters(exclude_categories=["Cs", "Cc"])))
        elif f.type is int:
            values[key] = draw(st.integers(low, 2**16 - 1 if high is None else high))
        else:
            values[key] = draw(st.floats(low, 1e3 if high is None else high))
    return values


@settings(GATE)
@given(values=changes())
def test_settings_survive_the_file(values, tmp_path_factory):
    try:
        config = from_flat(values)
    except ValueError:  # two keys that do not go together
        assume(False)
    path = tmp_path_factory.mktemp("settings") / "config.toml"
    path.write_text(to_toml(config), encoding="utf-8")
    assert load_config(path=path) == config
    assert from_flat(to_flat(config)) == config


@pytest.mark.parametrize("key", sorted(FIELDS))
def test_every_key_says_what_it_means_and_refuses_another_type(key):
    assert FIELDS[key].metadata["meaning"]
    with pytest.raises(ValueError, match=f"{key} must be"):
        from_flat({key: [1]})


@pytest.mark.parametrize("key", [k for k, f in FIELDS.items() if f.metadata["low"] is not None])
def test_a_value_below_the_range_names_the_key(key):
    f = FIELDS[key]
    with pytest.raises(ValueError, match=f"{key} must be (at least|between)"):
        from_flat({key: f.type(f.metadata["low"] - 1)})


@pytest.mark.parametrize("key", [k for k, f in FIELDS.items() if f.metadata["high"] is not None])
def test_a_value_above_the_range_names_the_key(key):
    f = FIELDS[key]
    with pytest.raises(ValueError, match=f"{key} must be between"):
        from_flat({key: f.type(f.metadata["high"] + 1)})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_is_finite(value):
    with pytest.raises(ValueError, match=r"training\.learning_rate must be finite"):
        from_flat({"training.learning_rate": value})


@pytest.mark.parametrize(
    "wrong, right",
    [
        ("rate", "stochastic.rate"),
        ("stochastic.rat", "stochastic.rate"),
        ("model.heads", "model.attention.heads"),
        ("training.lr", "training.learning_rate"),
        ("optimiser.weight_decay", "training.weight_decay"),
    ],
)
def test_an_unknown_key_gets_the_nearest_valid_one(wrong, right):
    with pytest.raises(ValueError, match=f"unknown setting '{wrong}': did you mean '{right}'"):
        from_flat({wrong: 1})


@pytest.mark.parametrize(
    "assignments, complaint",
    [
        (["stochastic.kind=blok"], "must be one of .* did you mean 'block'"),
        (["model.attention.heads=3"], r"width is 128, which model\.attention\.heads = 3"),
        (["model.attention.groups=3"], r"heads is 4, which model\.attention\.groups = 3"),
        (["training.steps=10"], r"training\.warmup is 100, more than training\.steps = 10"),
        (["stochastic.kind=gumbel", "stochastic.compensation=inverted"], "it cannot be inverted"),
        (
            ["model.positions=rope", "model.attention.heads=128"],
            r"model\.rope_width = 0 \(0: all\) has to be even and at most 1",
        ),
        (["model.positions=rope", "model.rope_width=34"], r"even and at most 32"),
        (["model.positions=rope", "model.rope_base=1"], r"model\.rope_base is 1"),
        (["model.positions=t5", "model.t5_max_distance=16"], r"t5_max_distance is 16, but half"),
        (["data.validation=0"], "both parts need some text"),
        (["training.steps"], "--set takes table.key=value"),
    ],
)
def test_an_assignment_that_cannot_be_is_explained(assignments, complaint):
    with pytest.raises(ValueError, match=complaint):
        load_config(assignments=assignments)


def test_assignments_need_no_quotes():
    config = load_config(
        assignments=["stochastic.kind = block", "data.text=/a b/c.txt", "stochastic.rate=0.4"]
    )
    assert (config.stochastic.kind, config.data.text) == ("block", "/a b/c.txt")
    assert config.stochastic.rate == 0.4


def test_the_model_is_given_what_the_settings_say():
    values = {"kind": "block", "tile": 8, "rate": 0.4, "widen_fraction": 0.5, "low": 0.2}
    config = from_flat({f"stochastic.{key}": value for key, value in values.items()})
    mask, schedule = random_mask(config.stochastic), drop_schedule(config.stochastic)
    assert (mask.kind, mask.tile, mask.rate, schedule.rate) == ("block", 8, 0.4, 0.4)
    assert (schedule.widen_fraction, schedule.low) == (0.5, 0.2)
    assert drop_schedule(Config().stochastic) == Schedule()  # two tables of defaults agree
    assert random_mask(from_flat({"stochastic.kind": "none"}).stochastic) is None


def test_the_later_source_wins(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text("[training]\nsteps = 500\nbatch = 2\n")
    config = load_config("demo", path, ["training.batch=3"])
    assert (config.model.width, config.training.steps, config.training.batch) == (64, 500, 3)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_legal_and_in_the_common_ranges(name):
    assert advice(load_config(name)) == []


def test_advice_is_given_where_a_setting_counts():
    unusual = ["stochastic.rate=0.9", "stochastic.tile=2", "stochastic.decay=0.1"]
    element = advice(load_config(assignments=unusual))
    assert [line.split()[0] for line in element] == ["stochastic.rate", "stochastic.decay"]
    block = advice(load_config(assignments=[*unusual, "stochastic.kind=block"]))
    assert "stochastic.tile is 2; 8 to 32 is common" in block
    assert advice(load_config(assignments=[*unusual, "stochastic.kind=none"])) == []


@pytest.mark.parametrize(
    "content, complaint",
    [
        (None, "cannot read"),
        (b"[model", "is not TOML"),
        (b"\xff\xfe", "is not TOML"),
        (b"version = 2", "has version 2, this release reads 1"),
    ],
)
def test_a_settings_file_that_cannot_be_read_is_named(tmp_path, content, complaint):
    path = tmp_path / "mine.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=complaint) as caught:
        read_toml(path)
    assert "mine.toml" in str(caught.value)


def test_the_written_settings_explain_themselves():
    text = to_toml(Config())
    assert 'kind = "element"  # what is dropped together' in text
    assert tomllib.loads(text)["version"] == 1


# ---- files ---------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path):
    with RunFolder.create(tmp_path / "run", Config()) as folder:
        yield folder


def checkpoint(step=3, **about):
    tensors = {
        "model.w": np.arange(6.0).reshape(2, 3).T,  # not contiguous
        "optimiser.step": np.array(step),
    }
    return Checkpoint(step, tensors, {"vocabulary": "abc", **about})


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path):
    written = checkpoint()
    path = tmp_path / "c.safetensors"
    write_atomically(path, encode_checkpoint(written))
    read = read_checkpoint(path)
    assert (read.step, read.about) == (written.step, written.about)
    for name, x in written.tensors.items():
        assert read.tensors[name].shape == x.shape
        assert read.tensors[name].dtype == x.dtype
        assert np.array_equal(read.tensors[name], x)


def test_equal_checkpoints_are_equal_files():
    assert encode_checkpoint(checkpoint()) == encode_checkpoint(checkpoint())


@settings(GATE)
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_truncated_checkpoint_is_refused(share, tmp_path_factory):
    data = encode_checkpoint(checkpoint())
    path = tmp_path_factory.mktemp("checkpoint") / "step_3.safetensors"
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(RunError, match=r"step_3\.safetensors' is truncated or no safetensors"):
        read_checkpoint(path)


def test_a_checkpoint_with_one_bit_flipped_is_refused(tmp_path):
    data = bytearray(encode_checkpoint(checkpoint()))
    data[-5] ^= 1
    path = tmp_path / "c.safetensors"
    path.write_bytes(data)
    with pytest.raises(RunError, match=r"c\.safetensors': the field 'digest' does not match"):
        read_checkpoint(path)


@pytest.mark.parametrize(
    "metadata, complaint",
    [
        (None, "is foreign: its metadata lacks the field 'minitransformer'"),
        ({"format": "pt"}, "is foreign: its metadata lacks the field 'minitransformer'"),
        ({"minitransformer": "{}"}, "the field 'minitransformer' lacks 'format'"),
        ({"minitransformer": "no JSON"}, "the field 'minitransformer' lacks"),
        (
            {"minitransformer": '{"format": "other.2", "step": 1, "digest": ""}'},
            "the field 'format' is 'other.2'",
        ),
    ],
)
def test_a_foreign_checkpoint_is_refused(tmp_path, metadata, complaint):
    path = tmp_path / "theirs.safetensors"
    save_file({"w": np.zeros(3)}, path, metadata)
    with pytest.raises(RunError, match=complaint) as caught:
        read_checkpoint(path)
    assert "theirs.safetensors" in str(caught.value)


def test_a_missing_checkpoint_is_named(tmp_path):
    with pytest.raises(RunError, match=r"cannot read checkpoint .*gone\.safetensors"):
        read_checkpoint(tmp_path / "gone.safetensors")


def test_the_field_that_differs_is_named(tmp_path):
    with pytest.raises(RunError, match=r"setting 'model\.width' is 64 in it, 128 here"):
        require_same(tmp_path, "setting", {"model.width": 64}, {"model.width": 128})
    with pytest.raises(RunError, match=r"tensor 'extra' is .* in it, absent here"):
        require_same(tmp_path, "tensor", {"extra": (3,)}, {})
    require_same(tmp_path, "setting", {"a": 1}, {"a": 1})


def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "precious"
    write_atomically(path, b"old")

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match=r"cannot write '.*precious'.*: No space left on device"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["precious"]


def test_json_has_no_nan():
    found = plain({"a": np.float32("nan"), "b": np.array([1.0, np.inf]), "c": (np.int64(3), True)})
    assert found == {"a": None, "b": [1.0, None], "c": [3, True]}


# ---- the run folder ------------------------------------------------------------------------------


def test_a_run_folder_says_how_it_was_made(run):
    assert run.config() == Config()
    assert run.environment() == environment()
    assert {"numpy", "python", "threads", "processor"} <= set(run.environment())


def test_a_folder_in_use_is_refused(run):
    code = f"""
from minitransformer.training.checkpoints import RunFolder
RunFolder.open({str(run.path)!r})
"""
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "is in use by another process" in other.stderr


def test_a_folder_that_holds_anything_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(RunError, match="is not empty and is left alone: choose another folder"):
        RunFolder.create(tmp_path, Config())
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_finished_start_is_not_started_again(run):
    run.close()
    with pytest.raises(RunError, match="resume it with --resume or choose another folder"):
        RunFolder.create(run.path, Config())


def test_a_start_killed_half_way_can_be_started_again(tmp_path):
    RunFolder.create(tmp_path / "run", Config()).close()
    (tmp_path / "run" / "config.toml").unlink()
    (tmp_path / "run" / ".config.toml.x1.tmp").write_text("half")
    RunFolder.create(tmp_path / "run", Config()).close()
    with RunFolder.open(tmp_path / "run") as folder:
        assert folder.config() == Config()


def test_a_file_is_no_run_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot create the run folder"):
        RunFolder.create(tmp_path / "file", Config())
    with pytest.raises(RunError, match=r"is no run folder: it has no config\.toml"):
        RunFolder.open(tmp_path / "file")


def test_only_the_last_checkpoints_are_kept(run):
    for step in (2, 9, 10, 100):
        run.save(checkpoint(step), keep=2)
    assert [p.stem for p in run.checkpoints()] == ["step_10", "step_100"]


def test_metrics_are_cut_back_to_the_checkpoint(run):
    for step in range(1, 6):
        run.append({"step": step, "loss": 1 / step})
    with open(run.metrics_path, "ab") as file:
        file.write(b'{"step": 6, "lo')  # killed in the middle of a line
    kept = run.cut_back(3)
    assert [r["step"] for r in kept] == [1, 2, 3]
    assert run.records() == kept
    assert run.metrics_path.read_bytes().count(b"\n") == 3


def test_metrics_without_a_checkpoint_start_anew(run):
    run.append({"step": 1, "loss": 2.0})
    assert run.cut_back(0) == []
    assert run.metrics_path.read_bytes() == b""


def test_missing_records_are_noticed(run):
    run.append({"step": 1})
    run.append({"step": 3})
    with pytest.raises(RunError, match=r"metrics\.jsonl' holds 2 records.*field 'step' should run"):
        run.cut_back(3)


def test_a_line_that_is_no_record_is_named(run):
    run.metrics_path.write_text('{"step": 1}\nnonsense\n')
    with pytest.raises(RunError, match=r"metrics\.jsonl', line 2: no record"):
        run.records()


def test_settings_cannot_be_changed_in_place():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().model.width = 3
