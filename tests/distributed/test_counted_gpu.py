"""The count of a GPU program's kernels, bytes and FLOPs, on a program whose figures are counted by hand."""

import counted_gpu
from counted_gpu import kernels

from jaxrl_llm.distributed.hlo import Program

TEXT = """HloModule counted

%reads (stack: f32[10,8,16], row: s32[]) -> f32[8,16] {
  %stack = f32[10,8,16]{2,1,0} parameter(0)
  %row = s32[] parameter(1)
  %zero = s32[] constant(0)
  %part = f32[1,8,16]{2,1,0} dynamic-slice(%stack, %row, %zero, %zero), dynamic_slice_sizes={1,8,16}
  ROOT %flat = f32[8,16]{1,0} bitcast(%part)
}

%writes (stack: f32[10,8,16], new: f32[1,8,16], row: s32[]) -> f32[10,8,16] {
  %stack = f32[10,8,16]{2,1,0} parameter(0)
  %new = f32[1,8,16]{2,1,0} parameter(1)
  %row = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %whole = f32[10,8,16]{2,1,0} dynamic-update-slice(%stack, %new, %row, %zero, %zero)
}

ENTRY %main (stack: f32[10,8,16], w: f32[16,32], row: s32[]) -> f32[10,8,16] {
  %stack = f32[10,8,16]{2,1,0} parameter(0)
  %w = f32[16,32]{1,0} parameter(1)
  %row = s32[] parameter(2)
  %read = f32[8,16]{1,0} fusion(%stack, %row), kind=kLoop, calls=%reads
  %product = f32[8,32]{1,0} dot(%read, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %new = f32[1,8,16]{2,1,0} bitcast(%read)
  ROOT %write = f32[10,8,16]{2,1,0} fusion(%stack, %new, %row), kind=kLoop, calls=%writes
}
"""


def test_slices_and_updates_in_place_count_what_they_move():
    found = {one.name: one for one in kernels(Program(TEXT))}
    assert set(found) == {"read", "product", "write"}
    row = 8 * 16 * 4
    assert found["read"].bytes == 2 * row + 4  # the slice, the result and the index
    assert found["write"].bytes == 2 * row + 4  # the new row, read and written, and the index
    assert found["product"].bytes == row + 16 * 32 * 4 + 8 * 32 * 4
    assert (found["product"].flops, found["product"].dtype) == (2 * 8 * 16 * 32, "f32")


def test_a_kernel_takes_its_launch_and_the_longer_of_bytes_and_products(monkeypatch):
    monkeypatch.setattr(counted_gpu, "LAUNCH_S", 1.0)
    monkeypatch.setattr(counted_gpu, "BYTES_PER_S", 1024.0)
    monkeypatch.setattr(counted_gpu, "FLOPS_PER_S", {"f32": 1024.0})
    found = {one.name: one.seconds for one in kernels(Program(TEXT))}
    assert found["product"] == 1 + 8.0  # 8192 FLOPs; its bytes take 3.5 s
    assert found["read"] == 1 + (1024 + 4) / 1024
