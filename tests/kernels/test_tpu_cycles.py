"""Reading the TPU compiler's estimates from a compiled program's text."""

import pytest

from jaxrl_llm.kernels import tpu_cycles

TEXT = """
  %sums.1 = (f32[8,1024]) custom-call(%h, %w), custom_call_target="tpu_custom_call", backend_config={"bundle_analysis_data":{"estimated_cycles":"74150"}}
  %fusion = f32[4] fusion(%x), backend_config={"bundle_analysis_data":{"estimated_cycles":"99"}}
  %dz.2 = bf16[8192,1024] custom-call(%h, %w), custom_call_target="tpu_custom_call", backend_config={"bundle_analysis_data":{"estimated_cycles":"80430"}}
"""


def test_pallas_calls_alone_are_counted_in_their_order():
    assert tpu_cycles.pallas_cycles(TEXT) == [74150, 80430]


def test_the_compilers_own_flags_are_kept(monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--of_the_user=1")
    flags = tpu_cycles.environment("/folder")["LIBTPU_INIT_ARGS"].split()
    assert flags == ["--of_the_user=1", "--xla_jf_dump_static_llo_profile_to=/folder"]


def test_an_unknown_chip_is_refused_by_name(capsys):
    with pytest.raises(SystemExit):
        tpu_cycles.main(["--chips=v9"])
    assert "unknown chip 'v9': use some of v6e, v5p, v5e" in capsys.readouterr().err
