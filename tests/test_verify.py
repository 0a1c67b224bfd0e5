"""The suite, pointed at functions that are not ours: right ones pass, wrong ones are named; and
`minitransformer verify`, which does so from outside."""

import inspect
import json
import shlex
import shutil
import subprocess
import sys
import unittest
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

from minitransformer import cli
from minitransformer.attention.dense import attention_backward, attention_forward
from minitransformer.checks import conventions, detection, verify
from minitransformer.checks.diagnosis import Recorder, diagnose
from minitransformer.checks.gradients import assert_close, cotangent
from minitransformer.checks.strategies import normal
from minitransformer.checks.suite import PERSON, NotApplicable, suite
from minitransformer.positions.rope import rope_forward

DEFINITION = "the_output_is_the_definition"


def attention(q, k, v, *, keep=None, bias=None, scale=None, softcap=None, multiplier=None):
    """The reference as a plain function."""
    options = {"keep": keep, "bias": bias, "scale": scale, "softcap": softcap}
    return attention_forward(q, k, v, multiplier=multiplier, check_finite=False, **options)[0]


def backward(dout, q, k, v, **options):
    cache = attention_forward(q, k, v, check_finite=False, **options)[1]
    grads = attention_backward(dout, cache)
    return tuple(g for g in grads if g is not None)


def tiled_heads(q, k, v, **options):
    copies = q.shape[1] // k.shape[1]
    return attention(q, np.tile(k, (1, copies, 1, 1)), np.tile(v, (1, copies, 1, 1)), **options)


tiled_heads.__signature__ = inspect.signature(attention)  # it has the same options


def verdicts(function, operation="attention", only=None, **options):
    judged = verify.target(function, operation, **options)
    chosen = [s for s in verify.statements(operation) if only is None or s.name in only]
    return {s.name: verify.verdict(s, judged, profile="quick") for s in chosen}


def verdict(function, name=DEFINITION, **options):
    return verdicts(function, only=[name], **options)[name]


# ---- the judgement -------------------------------------------------------------------------------


def test_a_plain_function_is_judged_by_its_output():
    found = verdicts(attention)
    assert {v.status for v in found.values()} == {"pass", "not applicable"}
    assert found[DEFINITION].status == "pass"
    asked = found["gradients_agree_with_the_reference"]
    assert asked.status == "not applicable"
    assert "give its backward" in asked.message


def test_its_own_backward_is_judged_too():
    name = "gradients_agree_with_the_reference"
    assert verdict(attention, name, backward=backward).status == "pass"

    def halved(dout, *inputs, **options):
        return tuple(g / 2 for g in backward(dout, *inputs, **options))

    assert verdict(attention, name, backward=halved).status == "fail"


def test_a_function_that_tiles_its_heads_fails_and_is_named():
    found = verdict(tiled_heads)
    assert found.status == "fail"
    assert found.same_as == ("key heads tiled instead of repeated",)
    assert "case" in found.example
    assert found.ulps > 1e6
    assert verdict(tiled_heads, declared=["groups=tile"]).status == "pass"


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_narrow_function_is_judged_by_what_its_dtype_can_hold(dtype):
    found = verdicts(attention, dtype=dtype)
    assert {v.status for v in found.values()} <= {"pass", "not applicable"}
    assert verdict(tiled_heads, dtype=dtype).status == "fail"


def test_another_polarity_is_a_fault_until_it_is_declared():
    def ignoring(q, k, v, *, mask=None):
        return attention(q, k, v, keep=None if mask is None else ~mask)

    wrong = verdict(ignoring, "a_masked_pair_has_no_influence")
    assert wrong.status == "fail"
    assert wrong.same_as == ("mask polarity reversed",)
    assert verdict(ignoring, declared=["mask=ignore"]).status == "pass"


def test_a_crash_a_changed_argument_and_another_answer_each_time_are_findings():
    def crashing(q, k, v):
        raise RuntimeError("kernel launch failed")

    def greedy(q, k, v):
        q *= 1.5
        return attention(q / 1.5, k, v)

    rng = np.random.default_rng()

    def noisy(q, k, v):
        return attention(q, k, v) * (1 + 1e-14 * rng.random())

    assert verdict(crashing).message.startswith(
        "RuntimeError: kernel launch failed (test_verify.py, line "
    )
    assert "argument 0 was modified" in verdict(greedy).message
    found = verdict(noisy, "the_same_call_gives_the_same_bits")
    assert found.message == "the second answer differs from the first"


def test_in_somebodys_tests_a_statement_holds_fails_or_is_skipped_with_the_reason():
    right, wrong = (verify.target(f, "attention") for f in (attention, tiled_heads))
    verify.hold(verify.statement_of("attention", DEFINITION), right, profile="quick")
    with pytest.raises(AssertionError, match="out: at index"):
        verify.hold(verify.statement_of("attention", DEFINITION), wrong, profile="quick")
    asked = verify.statement_of("attention", "gradients_agree_with_the_reference")
    with pytest.raises(unittest.SkipTest, match="give its backward"):
        verify.hold(asked, right, profile="quick")


def test_what_makes_no_sense_is_answered_by_the_nearest():
    with pytest.raises(ValueError, match="did you mean dead_row="):
        conventions.parse(["deadrow=nan"])
    with pytest.raises(ValueError, match="dead_row must be one of zero, nan, mean, got 'one'"):
        conventions.parse(["dead_row=one"])
    with pytest.raises(ValueError, match="operation must be one of attention"):
        verify.target(attention, "atention")
    with pytest.raises(ValueError, match="did you mean the_output_is_the_definition"):
        verify.statement_of("attention", "the_output_is_a_definition")


@pytest.mark.parametrize("mechanism", ["attention.softmax", "attention.masks"])
def test_mistakes_are_named_by_their_answers(mechanism, own_errors):
    """Every mutant is named when it fails the property that it is declared to fail, but for those
    that only show in a call that the recorder cannot see (operators and tiles of a mask)."""
    found, named = suite(mechanism), 0
    for mutant in found.mutants:
        watched, killer = Recorder(mutant.target), mutant.killed_by[0]
        with pytest.raises(AssertionError), np.errstate(all="ignore"):
            found[killer].run(watched, PERSON)
        named += mutant.name in diagnose(mechanism, watched.calls, killer)
    assert named >= len(found.mutants) - 2


# ---- conventions that are found out --------------------------------------------------------------


def detected(function, operation="attention"):
    def make(answers):
        return verify.target(
            function, operation, declared=[f"{key}={answer}" for key, answer in answers.items()]
        )

    return detection.detect(make, operation, (), "float64")


def test_conventions_are_detected_together():
    def theirs(q, k, v, *, mask=None, is_causal=False):
        q, k, v = (np.swapaxes(x, 1, 2) for x in (q, k, v))
        keep = None if mask is None else ~mask
        if is_causal:
            keep = np.tri(q.shape[2], k.shape[2], dtype=np.bool_)
        return np.swapaxes(tiled_heads(q, k, v, keep=keep), 1, 2)

    expected = {
        "layout": "bnhd",
        "mask": "ignore",
        "groups": "tile",
        "causal": "upper_left",
        "dead_row": "zero",
    }
    assert detected(theirs) == expected


def test_a_question_that_does_not_concern_a_function_stays_open():
    def plain(q, k, v):
        return attention(q, k, v)

    assert detected(plain) == {"layout": "bhnd", "groups": "repeat"}


def test_the_dead_rows_of_a_plain_softmax_are_nan():
    def plain(scores):
        with np.errstate(invalid="ignore"):
            e = np.exp(scores - scores.max(axis=-1, keepdims=True))
            return e / e.sum(axis=-1, keepdims=True)

    assert detected(plain, "softmax") == {"dead_row": "nan"}


# ---- the command ---------------------------------------------------------------------------------

TARGETS = """
import os, signal, time
import numpy as np
from minitransformer.attention.dense import attention_forward

def right(q, k, v, *, keep=None, bias=None, scale=None):
    return attention_forward(q, k, v, keep=keep, bias=bias, scale=scale, check_finite=False)[0]

def doubled(q, k, v, *, keep=None, bias=None, scale=None):
    print("gigabytes " * 100_000)
    scale = 2 / q.shape[-1] ** 0.5 if scale is None else scale
    return right(q, k, v, keep=keep, bias=bias, scale=scale)

def first_dies(q, k, v):
    if q.shape[-3:] != k.shape[-3:]:
        os._exit(7)
    return right(q, k, v)

def dies(q, k, v):
    os.kill(os.getpid(), signal.SIGSEGV)

def hangs(q, k, v):
    time.sleep(1000)

def eats(q, k, v):
    return np.ones(2**36)
"""


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """`minitransformer verify` in a folder with targets.py: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    Path("targets.py").write_text(TARGETS, encoding="utf-8")

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["minitransformer", "verify", *map(str, words)])
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return run


ONE = ("--profile", "quick", "--only", DEFINITION)


def test_a_right_function_exits_with_0(command):
    code, out, _err = command("targets.py:right", *ONE)
    assert code == 0
    assert f"ok     {DEFINITION}" in out
    assert out.endswith("1 pass\n")


def test_a_wrong_function_exits_with_1_and_is_reported_in_every_form(command):
    code, out, err = command(
        "targets.py:doubled", *ONE, "--json", "--html", "page.html", "--junit", "junit.xml"
    )
    assert code == 1
    found = json.loads(out)
    assert found["counts"] == {"pass": 0, "fail": 1, "not applicable": 0, "known": 0}
    assert found["verdicts"][0]["message"].startswith("out: at index")
    assert "targets.py:doubled --as attention --profile quick" in found["command"]
    assert "FAIL" in err
    page = Path("page.html").read_text(encoding="utf-8")
    assert "<svg" in page and "http" not in page
    case = ET.parse("junit.xml").getroot().find("testcase")
    assert case.get("name") == DEFINITION
    assert case.find("failure").get("message").startswith("out: at index")


@pytest.mark.parametrize(
    "name, message",
    [
        ("dies", "the process died of SIGSEGV"),
        ("first_dies", "the process ended itself with exit code 7"),
        ("hangs", "no answer within 3 seconds"),
        ("eats", "MemoryError"),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="signals and limits of Linux")
def test_what_happens_to_the_process_is_a_finding_and_the_run_goes_on(command, name, message):
    code, out, _err = command(
        f"targets.py:{name}", *ONE, "--only", "huge_scores_pick_the_largest", "--timeout", 3
    )
    assert code == 1
    assert message in out
    assert "huge_scores_pick_the_largest" in out


def test_known_failures_are_no_failures_and_their_repair_is_one(command):
    Path("known.txt").write_text(f"# ours\n{DEFINITION}  # doubled scale\n", encoding="utf-8")
    code, out, _err = command("targets.py:doubled", *ONE, "--xfail", "known.txt")
    assert code == 0
    assert f"known  {DEFINITION}  (doubled scale)" in out
    code, out, _err = command("targets.py:right", *ONE, "--xfail", "known.txt")
    assert code == 1
    assert "expected to fail, and passes" in out


@pytest.mark.parametrize(
    "words, message",
    [
        ((), "which function?"),
        (("targets.py",), "must be module:function or path/file.py:function"),
        (("nowhere.py:f",), "there is no file 'nowhere.py'"),
        (("targets.py:rihgt",), "no function 'rihgt'; there are"),
        (("nowhere.at.all:f",), "No module named 'nowhere'"),
        (("torch:spda",), "there is no built-in 'torch:spda'"),
        (("targets.py:right", "--as", "atention"), "--as must be one of attention"),
        (("targets.py:right", "--only", "x"), "has no property 'x': did you mean"),
        (("targets.py:right", "--convention", "mask=no"), "mask must be one of keep, ignore"),
        (("targets.py:right", "--rename", "keep"), "--rename must be OURS=THEIRS"),
        (("targets.py:right", "--returns", "out,max"), "--returns must be one of out, lse"),
        (("targets.py:right", "--profile", "slow"), "--profile must be one of quick"),
        (("targets.py:right", "--xfail", "no.txt"), "--xfail: cannot read 'no.txt'"),
        (("targets.py:right", "--timeout", "0"), "--timeout and --memory must be positive"),
    ],
)
def test_a_command_that_makes_no_sense_is_one_sentence(command, words, message):
    code, _out, err = command(*words)
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_the_list_names_what_can_be_asked(command):
    code, out, _err = command("--list")
    assert code == 0
    for text in ("layer_norm", "torch:sdpa", "upper_left"):
        assert text in out


# ---- peers ---------------------------------------------------------------------------------------


def test_peer_pytorch_attention_is_right_but_for_what_is_known():
    pytest.importorskip("torch", reason="PyTorch is not installed: make verify-peers gets it")
    judged = verify.named_target("torch:sdpa", "attention")
    slow = "attention_backward_is_the_derivative"
    found = [
        verify.verdict(s, judged, profile="quick")
        for s in verify.statements("attention")
        if s.name != slow
    ]
    wrong = {v.statement for v in found if v.status == "fail"}
    # NaN in a masked value, or in the query of a dead row, reaches its output
    assert wrong <= {"what_nobody_may_read_changes_nothing", "nothing_comes_out_of_a_dead_row"}


@pytest.mark.parametrize("operation", sorted(verify.OPERATIONS))
def test_the_reference_is_right_as_every_operation(operation):
    """A property of each, asked through the same door as anybody's function."""
    judged = verify.named_target("numpy:reference", operation)
    asked = verify.statements(operation)
    assert asked
    assert verify.verdict(asked[0], judged, profile="quick").status == "pass"


def test_positions_of_others_are_judged_by_their_convention():
    def interleaved(x, cos, sin):
        return rope_forward(x, cos, sin, layout="interleaved")[0]

    name = "each_pair_turns_by_its_angle"
    assert detected(interleaved, "rope") == {"rope": "interleaved"}
    found = verdicts(interleaved, "rope", [name], declared=["rope=interleaved"])
    assert found[name].status == "pass"
    wrong = verdicts(interleaved, "rope", [name])[name]
    assert wrong.status == "fail"


# ---- a program in another language ---------------------------------------------------------------

EXAMPLE = Path(__file__).parent.parent / "docs" / "examples" / "attention.cpp"
PROGRAM = """
import sys
from safetensors import safe_open
from safetensors.numpy import save_file
from minitransformer.attention.dense import attention_backward, attention_forward

with safe_open(sys.argv[1], "np") as file:
    said, x = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}
if "softcap" in said:
    print("no softcap", file=sys.stderr)
    sys.exit(3)
options = {name: x[name] for name in ("keep", "bias", "multiplier") if name in x}
if "scale" in said:
    options["scale"] = float(said["scale"])
out, cache = attention_forward(x["q"], x["k"], x["v"], check_finite=False, **options)
found = {"out": out, "lse": cache.lse}
if said["pass"] == '"backward"':
    grads = attention_backward(x["dout"], cache)
    found = {f"d{name}": g for name, g in grads._asdict().items() if g is not None}
save_file(found, sys.argv[2])
"""


@pytest.mark.skipif(not shutil.which("c++"), reason="there is no C++ compiler here")
def test_the_example_in_cpp_is_right_and_stays_so_when_broken(command):
    source = EXAMPLE.read_text(encoding="utf-8")
    build = ["c++", "-O2", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-o"]
    Path("wrong.cpp").write_text(source.replace("h / (H / G)", "h % G"), encoding="utf-8")
    subprocess.run([*build, "right", EXAMPLE], check=True)
    subprocess.run([*build, "wrong", "wrong.cpp"], check=True)
    words = (*ONE, "--only", "a_row_with_no_key_is_zero")
    code, out, _ = command("--command", "./right {input} {output}", *words)
    assert code == 0
    assert out.endswith("2 pass\n")
    code, out, _ = command("--command", "./wrong {input} {output}", *words)
    assert code == 1
    assert "just like  key heads tiled instead of repeated" in out


def test_a_program_may_answer_the_backward_pass_too(tmp_path):
    """In this process: each call starts a Python, so a few must do."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM, encoding="utf-8")
    words = shlex.join([sys.executable, str(path), "{input}", "{output}"])
    judged = verify.named_target(words, "attention", command=True)
    q, k, v, bias = (normal(s, i) for i, s in enumerate([(2, 3, 2)] * 3 + [(2, 3, 3)]))
    keep = np.tri(3, dtype=np.bool_)
    out, cache = judged.attention_forward(q, k, v, keep=keep, bias=bias, scale=0.3)
    expected, right = attention_forward(q, k, v, keep=keep, bias=bias, scale=0.3)
    assert_close(out, expected)
    assert_close(cache.lse, right.lse)
    dout = cotangent(out, 1)
    pairs = zip(
        judged.attention_backward(dout, cache), attention_backward(dout, right), strict=True
    )
    for got, wanted in pairs:
        assert_close(got, wanted)
    with pytest.raises(NotApplicable, match="no softcap"):
        judged.attention_forward(q, k, v, softcap=3.0)


@pytest.mark.parametrize(
    "code, message",
    [
        ("raise SystemExit('no device')", "the program ended with exit code 1: no device"),
        ("", "the program wrote no output file"),
        ("open(sys.argv[2], 'w').write('hm')", "the output is no safetensors file"),
    ],
)
def test_what_a_program_does_wrong_is_a_sentence(tmp_path, code, message):
    path = tmp_path / "program.py"
    path.write_text(f"import sys\n{code}\n", encoding="utf-8")
    words = shlex.join([sys.executable, str(path), "{input}", "{output}"])
    judged = verify.named_target(words, "attention", command=True)
    with pytest.raises(AssertionError, match=message):
        judged.attention_forward(*(np.ones((1, 2, 2)) for _ in range(3)))


@pytest.mark.parametrize(
    "words, message",
    [
        (("--command", "prog {input}"), "--command needs {output}"),
        (("f.py:f", "--command", "prog {input} {output}"), "not both"),
        (("--command", "p {input} {output}", "--framework", "jax"), "--framework is for functions"),
        (("--command", "p {input} {output}", "--dtype", "bfloat16"), "--dtype must be one of"),
    ],
)
def test_a_program_that_cannot_be_called_is_one_sentence(command, words, message):
    code, _, err = command(*words)
    assert code == 2
    assert message in err
