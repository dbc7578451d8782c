"""What a comparison with plain PyTorch says, without torch: its answer, its table, its JSON."""

from __future__ import annotations

import io
import json
import math

from rich.console import Console

from forebay.reporting.verdict import Check, Verdict, verdict_table

SAME = Check("loss", compared=6)
NEAR = Check("losses of the run", equal=False, worst_error=0.004, allowed=0.01, where="pass 3", compared=6)
SHOWN = Check("gradients", equal=False, worst_error=0.2, allowed=None, where="layers.0.weight", compared=9)
OFF = Check("gradients", equal=False, kept=False, worst_error=0.5, where="layers.1.weight, step 2", compared=9)
MISSING = Check("buffers", equal=False, kept=False, worst_error=math.inf, where="scale", compared=1)
SIGN = Check("loss", equal=False, kept=False, where="step 1", compared=1)


def verdict(*checks: Check, **more: tuple[str, ...]) -> Verdict:
    return Verdict("tiny", "stream", checks, **more)


def shown(made: Verdict) -> str:
    stream = io.StringIO()
    Console(file=stream, width=80).print(verdict_table(made))
    assert max(map(len, stream.getvalue().splitlines())) <= 80
    return " ".join(stream.getvalue().split())


def test_equal_is_about_bits_and_kept_about_the_promise() -> None:
    for checks, equal, kept in (((SAME,), True, True), ((SAME, NEAR, SHOWN), False, True), ((SAME, OFF), False, False)):
        assert (verdict(*checks).equal, verdict(*checks).kept) == (equal, kept)


def test_what_is_broken_is_named_with_its_worst_tensor() -> None:
    assert verdict(SAME, NEAR, SHOWN).broken == ()
    assert verdict(OFF, MISSING, SIGN).broken == (
        "gradients: 5.0e-01 (layers.1.weight, step 2)",
        "buffers: not of the same shape, missing or not finite (scale)",
        "loss: other bits of the same value (step 1)",
    )


def test_the_table_gives_the_answer() -> None:
    assert "Equal: every number is that of plain PyTorch, bit for bit." in shown(verdict(SAME))
    lossy = shown(verdict(SAME, NEAR, SHOWN, changes_numbers=("activations as 8 bits",), notes=("made-up data",)))
    assert "as near to plain PyTorch as the plan promises" in lossy
    assert "the numbers change: activations as 8 bits" in lossy and "made-up data" in lossy
    assert "losses of the run 6 no 4.0e-03 1.0e-02" in lossy and "gradients 9 no 2.0e-01 -" in lossy
    wrong = shown(verdict(SAME, OFF, MISSING, SIGN))
    assert "Not equal: gradients, buffers and loss." in wrong and "layers.1.weight, step 2" in wrong


def test_json_has_no_infinity() -> None:
    found = json.loads(json.dumps(verdict(SAME, MISSING).to_json_dict(), allow_nan=False))
    assert set(found) == {"equal", "kept", "policy", "checks", "changes_numbers", "notes"}
    assert (found["equal"], found["kept"]) == (False, False)
    same, missing = found["checks"]
    assert set(same) == {"name", "equal", "worst_error", "allowed", "kept", "where", "compared"}
    assert (same["worst_error"], same["allowed"], same["where"]) == (0.0, 0.0, None)
    assert missing["worst_error"] is None
