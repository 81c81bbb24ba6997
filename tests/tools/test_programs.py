"""What is read from a compiled program beside what its compiler estimates."""

from jaxrl_llm.distributed import hlo
from jaxrl_llm.tools import programs

KERNELS = """HloModule m
%condition (p: (s32[])) -> pred[] {
  %limit = s32[]{:T(128)} constant(28)
}

%body (p: (s32[])) -> (s32[]) {
  %read = f32[8]{0} custom-call(%x), custom_call_target="tpu_custom_call", backend_config={"custom_call_config":{"cost_estimate":{"flops":"9","transcendentals":"2","bytes_accessed":"1000","remote_bytes_transferred":"0"}}}
  %known = f32[8]{0} custom-call(%x), custom_call_target="tpu_custom_call", backend_config={"bundle_analysis_data":{"estimated_cycles":"50"},"cost_estimate":{"bytes_accessed":"7"}}
  %silent = f32[8]{0} custom-call(%x), custom_call_target="tpu_custom_call"
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %loop = (s32[]) while(%t), condition=%condition, body=%body
}
"""


def test_a_kernel_without_cycles_counts_by_the_bytes_that_it_states_and_one_with_cycles_does_not():
    program = hlo.Program(KERNELS)
    assert program.cycles == 28 * 50
    assert programs.stated_bytes(program) == 28 * 1000
