"""Which layouts the machine text of kernels is written for, and what is said of others."""

from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="the kernels need triton")

from longtrain.kernels import devices, machine_text

LANES = "lane = [[4], [8], [16], [32], [64]]"
ORDERLY = f"linear<{{register = [[1], [2], [512], [1024]], {LANES}, warp = [[128], [256]], block = []}}>"
BLOCKED = "blocked<{sizePerThread = [4], threadsPerWarp = [32], warpsPerCTA = [4], order = [0]}>"


def ttgir(of_text, of_others=BLOCKED):
    """A kernel with a text of two inputs and an output, as triton writes it, and another operation."""
    return f"""
#other = #ttg.{of_others}
#own = #ttg.{of_text}
module attributes {{"ttg.num-warps" = 4 : i32}} {{
  %sums = tt.elementwise_inline_asm "{{\0Amov.f32 $0, $16;\0A}}" {{constraints = "=f,f", packed_element = 16 : i32, pure = true}} %x, %acc : tensor<2048xi32, #own>, tensor<2048xf32, #own> -> tensor<2048xf32, #own> loc(#loc1)
  %y = tt.elementwise_inline_asm "mov" {{constraints = "=f,f", packed_element = 1 : i32}} %z : tensor<64xf32, #other> -> tensor<64xf32, #other>
"""  # noqa: E501


@pytest.mark.parametrize("layout", [BLOCKED, ORDERLY])
def test_fours_in_order_are_what_texts_take(layout):
    assert machine_text.lays_out(ttgir(layout, "linear<{register = [[2]]}>"), 4)
    assert not machine_text.lays_out(ttgir(layout), 8), "of another number of warps"


def test_one_warp_has_no_bits_of_warps():
    alone = f"linear<{{register = [[1], [2], [128], [256]], {LANES}, warp = [], block = []}}>"
    assert machine_text.lays_out(ttgir(alone), 1) and not machine_text.lays_out(ttgir(alone), 2)


@pytest.mark.parametrize(
    "layout",
    [
        BLOCKED.replace("[4], t", "[2], t"),
        ORDERLY.replace("[[1], [2], ", "[[2], [1], "),
        ORDERLY.replace("[512], [1024]", "[1024], [512]"),
        ORDERLY.replace("[[4], [8], ", "[[8], [4], "),
        ORDERLY.replace("[[128], [256]]", "[[256], [128]]"),
        ORDERLY.replace("[2], [512]", "[128], [512]").replace("[[128], ", "[[2], "),
    ],
)
def test_another_order_is_refused(layout):
    """Registers, lanes or warps that change places would be multiplied with what is not theirs."""
    assert layout not in (BLOCKED, ORDERLY)
    assert not machine_text.lays_out(ttgir(layout), 4)


def test_one_tensor_in_another_order_is_enough():
    assert not machine_text.lays_out(
        ttgir(ORDERLY, "linear<{register = [[2]]}>").replace("xf32, #own> ->", "xf32, #other> ->"), 4
    )
    assert not machine_text.lays_out("module {}", 4), "there is no text"


def built(text, key, name="own_kernel"):
    return SimpleNamespace(hash=key, asm={"ttgir": text}, metadata=SimpleNamespace(name=name))


def test_a_kernel_in_another_order_is_told_once(monkeypatch, caplog):
    """Each kernel is looked at once, and the warning comes once a name."""
    monkeypatch.setattr(machine_text, "_sound", {})
    monkeypatch.setattr(devices, "_given_up", set())
    good, bad = ttgir(ORDERLY), ttgir(ORDERLY.replace("[[1], [2], ", "[[2], [1], "))
    assert machine_text.laid_out(built(good, "a"), 4) and not devices.given_up("own_kernel")
    assert machine_text.laid_out(None, 4) and machine_text.laid_out(SimpleNamespace(), 4), "interpreted"
    assert not caplog.records
    for key in ("b", "b", "c"):
        assert not machine_text.laid_out(built(bad, key), 4)
    assert machine_text.laid_out(built(good, "a"), 4), "each kernel of the name is looked at alone"
    assert devices.given_up("own_kernel")
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "fast kernel own_kernel" in record.getMessage()
