"""A run that an earlier release began goes on in this one.

`old_run/` was written before positions, attention and activations became settings: 8 of its 16
steps, and in `after_16_steps.json` what that release made of the rest.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from minitransformer.runs import build_run, load_trained
from minitransformer.tasks.generate import generate
from minitransformer.tasks.text import load_corpus
from minitransformer.training.checkpoints import RunError, RunFolder
from minitransformer.training.config import FIELDS, read_toml

OLD = Path(__file__).parent / "old_run"
AFTER = json.loads((OLD / "after_16_steps.json").read_text(encoding="utf-8"))


@pytest.fixture
def old(tmp_path, monkeypatch):
    """A copy of the run, and its folder as the current one: the settings name `text.txt`."""
    folder = shutil.copytree(OLD, tmp_path / "run")
    monkeypatch.chdir(folder)
    return folder


def test_the_old_settings_lack_some_of_today():
    assert set(read_toml(OLD / "config.toml")) < set(FIELDS)


def test_an_old_run_goes_on_and_ends_where_it_ended_then(old):
    with RunFolder.open(old) as folder:
        config = folder.config()
        run = build_run(config, load_corpus("text.txt", validation=0.1, context=8), folder)
        run.restore()
        assert run.trainer.step == 8
        *_, last = run
    assert last["validation"] == pytest.approx(AFTER["validation"], rel=1e-9)
    state = run.trainer.state()
    found = {k: float(np.linalg.norm(v)) for k, v in state.items() if k.startswith("model.")}
    assert found == pytest.approx(AFTER["norms"], rel=1e-9, abs=1e-9)

    trained = load_trained(old)
    prompt = trained.vocabulary.encode("the road")
    for name, options in (("greedy", {"temperature": 0.0}), ("sampled", {"seed": 3})):
        written = list(generate(trained.model, prompt, 24, context=8, **options))
        assert trained.vocabulary.decode(np.array(written)) == AFTER[name]


def test_a_new_setting_that_differs_is_still_noticed(old):
    config = old / "config.toml"
    changed = config.read_text(encoding="utf-8").replace(
        "[model.attention]", "rope_base = 500.0\n\n[model.attention]"
    )
    config.write_text(changed, encoding="utf-8")
    with RunFolder.open(old) as folder:
        corpus = load_corpus("text.txt", validation=0.1, context=8)
        run = build_run(folder.config(), corpus, folder)
        with pytest.raises(RunError, match=r"'model\.rope_base' is 10000\.0 in it, 500\.0"):
            run.restore()
