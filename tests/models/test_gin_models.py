"""The model files under gin/models build policies of the sizes that their names promise."""

from pathlib import Path

import gin
import jax
import pytest

from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.models.sizes import SHAPES
from jaxrl_llm.models.sources import PolicySource

FOLDER = Path(__file__).parents[2] / "gin" / "models"
# Parameters as the model cards count them (safetensors metadata); the tiny one is counted by hand:
# 320*160 + 4*(160*32*(4+2+2+4) + 3*160*480 + 2*32 + 2*160) + 160.
PARAMETERS = {
    "qwen3_tiny": 51_200 + 4 * (61_440 + 230_400 + 64 + 320) + 160,
    # 4 layers: attention, 8 experts of 3*160*144, router, norms.
    "qwen3_moe_tiny": 51_200 + 4 * (61_440 + 8 * 69_120 + 1_280 + 64 + 320) + 160,
    # 4 layers: MLP, norms; one attends, with gates beside its queries; three hold a state: two projections, output, strengths and rates,
    # convolution of 4 taps, decays, norm.
    "qwen3_5_tiny": 51_200
    + 4 * (230_400 + 320)
    + (81_920 + 64)
    + 3 * (61_440 + 2 * 20_480 + 1_280 + 4 * 384 + 8 + 32)
    + 160,
    # By hand: 24 MLPs of 3*1024*3584, 6 layers that attend of 7,340,544, and 18 with a state of 10,543,264.
    "qwen3_5_0p8b": 254_279_680 + 24 * (11_010_048 + 2_048) + 6 * 7_340_544 + 18 * 10_543_264 + 1_024,
    # As qwen3_5_tiny, with fewer key heads, and 8 experts and a shared one of 3*160*144 in each layer.
    "qwen3_next_tiny": 51_200
    + 4 * (9 * 69_120 + 1_280 + 160 + 320)
    + (81_920 + 64)
    + 3 * (61_440 + 1_280 + 20_480 + 4 * 256 + 8 + 32)
    + 160,
    # 40 layers of 256 experts and a shared one of 3*2048*512, router and gate; 10 attend, 30 hold a state.
    "qwen3_5_35b_a3b": 1_017_118_720
    + 40 * (257 * 3_145_728 + 524_288 + 2_048 + 4_096)
    + 10 * 27_263_488
    + 30 * 33_718_464
    + 2_048,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen2p5_0p5b": 494_032_768,
    "qwen2p5_1p5b": 1_543_714_304,
    "qwen3_0p6b": 596_049_920,
    "llama3p2_1b": 1_235_814_400,
    "smollm2_135m": 134_515_008,
    "ministral_8b": 8_019_808_256,
}


def source(name, *bindings):
    gin.parse_config_files_and_bindings([str(FOLDER / f"{name}.gin")], list(bindings))
    return gin.get_configurable("MODEL/gin.macro")()


def test_every_model_file_is_counted_here():
    assert {file.stem for file in FOLDER.glob("*.gin")} == {*PARAMETERS, "pretrained"}


@pytest.mark.parametrize("name", list(PARAMETERS))
def test_a_model_file_builds_a_policy_of_its_size(name):
    policy = source(name).policy(Partitioner.create(MeshConfig(fsdp=1), jax.devices()[:1]))
    assert sum(leaf.size for leaf in jax.tree.leaves(policy.abstract())) == PARAMETERS[name]


def test_one_layer_in_four_of_ministral_sees_everything():
    windows = source("ministral_8b").architecture.windows
    assert windows == (None, 32768, 32768, 32768) * 9


def test_a_pretrained_model_is_named_by_one_macro():
    assert source("pretrained", "PRETRAINED = 'owner/name'") == PolicySource(
        pretrained="owner/name", compute_dtype="bfloat16", remat="full"
    )


def test_a_pretrained_model_without_a_name_is_refused():
    with pytest.raises(ValueError, match=r"PRETRAINED.* set to `%gin.REQUIRED`"):
        source("pretrained")


def test_the_benchmark_of_experts_has_the_sizes_of_the_model_file():
    assert SHAPES["qwen3-30b-a3b"] == source("qwen3_30b_a3b").architecture


def test_the_benchmark_of_recurrent_layers_has_the_sizes_of_the_model_file():
    assert SHAPES["qwen3.5-0.8b"] == source("qwen3_5_0p8b").architecture
