"""Experts on their way from a learner to vLLM: every number of every expert arrives once, where vLLM keeps it, whatever divides the server."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from published import SERVED, write_version
from served_model import RMSNorm, kind
from stand_in_worker import Worker, on_every_rank
from test_cuda_ipc import HostMemory
from test_vllm_plugin import staged

from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.models.architecture import Experts
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.models.qwen3_moe import Qwen3MoE
from jaxrl_llm.publication import cuda_ipc, vllm_experts
from jaxrl_llm.publication.forward import differences, forward_of
from jaxrl_llm.publication.held_weights import WrongWeights, compare, tensor_sum
from jaxrl_llm.publication.manifest import Manifest, TensorEntry, checksum, partial_sum
from jaxrl_llm.publication.parts import Target
from jaxrl_llm.publication.reader import BadVersion
from jaxrl_llm.publication.vllm_targets import held_by, targets_of
from jaxrl_llm.samplers.servers.publisher import exported, named

STEM = "model.layers.0.mlp.experts"
RANKS = [
    (1, False),
    (2, False),
    (4, False),
    (2, True),
    (3, True),
    (4, True),
]  # how many, and whether experts are divided


class Layer(torch.nn.Module):
    """vLLM's module of a layer's experts on one rank, with its loader: `load` takes one matrix of one expert, whole."""

    def __init__(self, sizes, rank=0, ranks=1, by_expert=False, dtype=torch.float32, backend="TRITON"):
        super().__init__()
        count, width, inner = sizes
        self.rank, self.shares = (0, 1) if by_expert else (rank, ranks)
        own = np.array_split(np.arange(count), ranks)[rank] if by_expert else np.arange(count)
        places = torch.full((count,), -1, dtype=torch.int32)
        places[torch.from_numpy(own)] = torch.arange(len(own), dtype=torch.int32)
        self.expert_map = places if by_expert else None
        self.global_num_experts, self.hidden_size = count, width
        self.intermediate_size_per_partition = inner // self.shares
        parallel = SimpleNamespace(enable_eplb=False)
        self.moe_config = SimpleNamespace(tp_size=self.shares, tp_rank=self.rank, moe_parallel_config=parallel)
        self.quant_method = SimpleNamespace(unquantized_backend=SimpleNamespace(name=backend), moe_kernel=None)
        rows = inner // self.shares
        for name, shape in (("w13_weight", (len(own), 2 * rows, width)), ("w2_weight", (len(own), width, rows))):
            self.register_parameter(name, torch.nn.Parameter(torch.full(shape, 7.0, dtype=dtype)))
        self.most = 0

    @torch.no_grad()
    def load(self, name, matrix):
        expert, part = int(name.split(".")[-3]), name.split(".")[-2]
        place = expert if self.expert_map is None else int(self.expert_map[expert])
        assert place >= 0, "of another rank's expert"
        self.most = max(self.most, matrix.numel())
        rows = self.intermediate_size_per_partition
        mine = slice(self.rank * rows, (self.rank + 1) * rows)
        if part == "down_proj":
            self.w2_weight[place] = matrix[:, mine]
        else:
            first = 0 if part == "gate_proj" else rows
            self.w13_weight[place, first : first + rows] = matrix[mine]


class Model(torch.nn.Module):
    """A model of one layer: a router, experts and a norm."""

    def __init__(self, *place, **fields):
        super().__init__()
        sizes = place[0]
        gate = kind("GateLinear")("weight", output_size=sizes[0], input_size=sizes[1])
        runner = torch.nn.ModuleDict({"routed_experts": Layer(*place, **fields)})
        mlp = torch.nn.ModuleDict({"gate": gate, "experts": runner})
        layer = torch.nn.ModuleDict({"mlp": mlp, "input_layernorm": RMSNorm()})
        self.model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([layer])})

    @property
    def experts(self):
        return self.model["layers"][0]["mlp"]["experts"]["routed_experts"]


def numbers(sizes):
    """Leaves of a layer's experts, [E, D, 2, M] and [E, M, D], in which no number is there twice."""
    count, width, inner = sizes
    gate_up = np.arange(count * width * 2 * inner, dtype=np.float32).reshape(count, width, 2, inner)
    return gate_up, -1 - np.arange(count * inner * width, dtype=np.float32).reshape(count, inner, width)


def tensors(sizes):
    """The same as a learner publishes them, by name."""
    gate_up, down = numbers(sizes)
    params = {"layers": {"mlp": {"gate_up": jnp.asarray(gate_up[None]), "down": jnp.asarray(down[None])}}}
    return {name: np.asarray(x) for name, x in named(params).items()}


def kept(sizes, rank, ranks, by_expert):
    """What vLLM keeps on a rank, from the leaves: gate over up, transposed, of its experts or of its rows."""
    gate_up, down = numbers(sizes)
    own = np.array_split(np.arange(sizes[0]), ranks)[rank] if by_expert else np.arange(sizes[0])
    mine = np.arange(sizes[2]) if by_expert else np.array_split(np.arange(sizes[2]), ranks)[rank]
    w13 = [np.concatenate([gate_up[e, :, 0, mine], gate_up[e, :, 1, mine]]) for e in own]
    return np.array(w13).reshape(len(own), -1, sizes[1]), np.array([down[e, mine].T for e in own])


def test_a_learner_publishes_two_tensors_a_layer_and_their_checksums():
    model = Qwen3MoE(
        vocabulary_size=32, width=16, layers=4, heads=2, kv_heads=1, head_width=8, mlp_width=24,
        experts=Experts(count=4, chosen=2, width=8, layers=(False, True)),
    )  # fmt: skip
    for mesh in ({"fsdp": 1}, {"fsdp": 2, "expert": 2}):
        devices = jax.devices()[: int(np.prod(list(mesh.values())))]
        policy = Policy(model, Partitioner.create(MeshConfig(**mesh), devices))
        params = policy.init(jax.random.key(0))
        found, sums = exported(params, policy=policy, dtype="bfloat16")
        mlp = jax.tree.map(np.asarray, params["layers_1"]["mlp"])
        assert sum(".experts." in name for name in found) == 4
        for row, layer in enumerate((1, 3)):
            stem = f"model.layers.{layer}.mlp.experts"
            both = np.asarray(found[f"{stem}.gate_up_proj"], np.float32)
            want = np.asarray(jnp.asarray(mlp["gate_up"][row], jnp.bfloat16), np.float32)
            assert np.array_equal(both, np.stack([want[:, :, 0].swapaxes(1, 2), want[:, :, 1].swapaxes(1, 2)], axis=1))
            assert found[f"{stem}.down_proj"].shape == (4, 16, 8)
        for name, x in found.items():
            assert f"{int(sums[name]):08x}" == checksum(np.asarray(x)), name


def draws(count=12):
    rng = np.random.default_rng(5)
    for number in range(count):
        ranks, by_expert = RANKS[number % len(RANKS)]
        experts, width = int(rng.integers(max(ranks, 2), 9)), int(rng.integers(1, 12))
        yield (experts, width, int(rng.integers(1, 6)) * (1 if by_expert else ranks)), ranks, by_expert


@pytest.mark.parametrize(("sizes", "ranks", "by_expert"), draws(), ids=str)
def test_every_number_arrives_once_where_vllm_keeps_it(sizes, ranks, by_expert):
    published, counted = tensors(sizes), {}
    for rank in range(ranks):
        model = Model(sizes, rank, ranks, by_expert)
        targets = {name: t for name, t in targets_of(model).items() if ".experts." in name}
        assert {name: t.shape for name, t in targets.items()} == {name: x.shape for name, x in published.items()}
        for name, target in targets.items():
            counted.setdefault(name, np.zeros(target.shape, int))[target.box] += 1
            part = torch.from_numpy(np.ascontiguousarray(published[name][target.box]))
            for matrix, tensor in vllm_experts.from_host(name, part, target):
                model.experts.load(matrix, tensor)
        w13, w2 = kept(sizes, rank, ranks, by_expert)
        assert np.array_equal(model.experts.w13_weight.detach().numpy(), w13)
        assert np.array_equal(model.experts.w2_weight.detach().numpy(), w2)
        assert model.experts.most == sizes[1] * sizes[2], "one matrix of one expert at a time"
        held = held_by(model)
        for name, target in targets.items():
            assert np.array_equal(held[name].numpy(), published[name][target.box])
    assert all(np.all(times == 1) for times in counted.values())


@pytest.mark.parametrize(("ranks", "by_expert"), RANKS)
def test_a_worker_stages_commits_and_compares_its_experts(ranks, by_expert, tmp_path, monkeypatch):
    sizes = (5, 16, 8)
    rng = np.random.default_rng(0)
    rest = {"model.layers.0.mlp.gate.weight": rng.normal(size=(5, 16)).astype(np.float32)}
    rest["model.layers.0.input_layernorm.weight"] = np.ones(16, np.float32)
    path = write_version(tmp_path, 1, tensors(sizes) | rest)
    workers = [Stand(sizes, rank, ranks, by_expert) for rank in range(ranks)]
    for worker in workers:
        status = staged(worker, path, 1)
        assert status["state"] == "staged", status
    answers = on_every_rank(monkeypatch, workers, "commit", "1")
    for rank, (worker, answer) in enumerate(zip(workers, answers)):
        # Two tensors of experts and the norm were compared; the router's matrix is packed, as on a CPU.
        assert (answer["version"], answer["error"], answer["checked"], answer["unchecked"]) == (1, "", 3, 1)
        w13, w2 = kept(sizes, rank, ranks, by_expert)
        assert np.array_equal(worker.experts.w13_weight.detach().numpy(), w13)
        assert np.array_equal(worker.experts.w2_weight.detach().numpy(), w2)


class Stand(Worker):
    """A worker that serves `Model`, through vLLM's loader for experts."""

    def __init__(self, *place):
        super().__init__()
        model = Model(*place)
        self.experts = model.experts
        self.model_runner = SimpleNamespace(get_model=lambda: model)

    def reload_weights(self, weights_iterator):
        for name, tensor in weights_iterator:
            if ".experts." in name:
                self.experts.load(name, tensor)


def test_one_changed_number_of_one_expert_is_found():
    sizes = (4, 6, 8)
    model, published = Model(sizes, 1, 2, False), tensors(sizes)
    targets = {name: t for name, t in targets_of(model).items() if ".experts." in name}
    sums = {}
    for name, target in targets.items():
        part = np.ascontiguousarray(published[name][target.box])
        origin = tuple(axis.start for axis in target.box)
        sums[name] = ("float32", partial_sum(part, origin, target.shape))
        for matrix, tensor in vllm_experts.from_host(name, torch.from_numpy(part), target):
            model.experts.load(matrix, tensor)
    held = {name: x for name, x in held_by(model).items() if name in targets}
    assert compare(held, targets, sums).checked == 2
    with torch.no_grad():  # two rows of one expert change places
        model.experts.w13_weight[2, [0, 1]] = model.experts.w13_weight[2, [1, 0]].clone()
    with pytest.raises(WrongWeights, match=rf"1 of 2 tensors .*{STEM}.gate_up_proj"):
        compare(held, targets, sums)


@pytest.mark.parametrize("box", [(slice(0, 3), slice(0, 2), slice(0, 4), slice(0, 5)), (slice(1, 3), slice(0, 2), slice(2, 4), slice(1, 4)), (slice(2, 2), slice(0, 2), slice(0, 4), slice(0, 5))])  # fmt: skip
def test_torch_and_numpy_give_a_part_of_four_axes_one_sum(box):
    whole = np.random.default_rng(1).normal(size=(3, 2, 4, 5)).astype(np.float32)
    part = np.ascontiguousarray(whole[box])
    got = int(tensor_sum(torch.from_numpy(part), Target(shape=whole.shape, box=box), "float32"))
    assert got == partial_sum(part, tuple(axis.start for axis in box), whole.shape)


def test_weights_that_a_kernel_rewrote_are_not_compared():
    for backend in ("FLASHINFER_CUTLASS", "CPU"):
        held = held_by(Model((4, 6, 8), backend=backend))
        assert held[f"{STEM}.gate_up_proj"] is None and held[f"{STEM}.down_proj"] is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: e.register_parameter("w13_bias", torch.nn.Parameter(torch.zeros(1))), r"\['w13_bias'\].*unquantized experts"),
        (lambda e: setattr(e.moe_config.moe_parallel_config, "enable_eplb", True), "without --enable-eplb"),
        (lambda e: setattr(e, "expert_map", torch.tensor([0, -1, 1, -1])), r"\[0, 2\].*not consecutive.*linear"),
    ],
)  # fmt: skip
def test_experts_that_cannot_be_published_to_are_refused(change, message):
    model = Model((4, 6, 8))
    change(model.experts)
    with pytest.raises(NotImplementedError, match=message):
        targets_of(model)


# -- from the learner's memory -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_expert", [False, True])
@pytest.mark.parametrize(
    "spec", [(), ("expert",), ("expert", None, None, "fsdp"), (None, None, "fsdp", "expert")], ids=str
)
def test_matrices_arrive_from_memory_in_any_sharding(spec, by_expert):
    sizes, ranks = (4, 6, 8), 2
    mesh = Partitioner.create(MeshConfig(fsdp=2, expert=2), jax.devices()[:4]).mesh
    published, memory = tensors(sizes), HostMemory()
    arrays = {}
    for name, x in published.items():
        axes = spec if x.ndim == 4 else spec[: min(len(spec), 1)]
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
        arrays[name] = jax.block_until_ready(jax.device_put(x, sharding))
    entries = {n: TensorEntry(shape=a.shape, dtype="float32", checksum=checksum(a)) for n, a in published.items()}
    manifest = Manifest(version=1, model_type="x", tied=False, tensors=entries, forward=forward_of(SERVED))
    found = cuda_ipc.parse(cuda_ipc.share(arrays, manifest, memory, 0))
    for rank in range(ranks):
        model, told = Model(sizes, rank, ranks, by_expert), {}
        targets = {name: t for name, t in targets_of(model).items() if ".experts." in name}
        with cuda_ipc.opened(found, memory) as bases:

            def copied(tensor, bases=bases):
                out = torch.full(tensor.shape, float("nan"))
                cuda_ipc.copy_into(out.data_ptr(), tensor, bases, memory)
                return out

            for name, target in targets.items():
                for matrix, tensor in vllm_experts.from_learner(name, found.tensors[name], target, copied, told):
                    model.experts.load(matrix, tensor)
        w13, w2 = kept(sizes, rank, ranks, by_expert)
        assert np.array_equal(model.experts.w13_weight.detach().numpy(), w13)
        assert np.array_equal(model.experts.w2_weight.detach().numpy(), w2)
        assert compare({n: held_by(model)[n] for n in targets}, targets, told).checked == 2
    assert memory.open == 0


def test_memory_that_was_overwritten_is_refused():
    sizes = (2, 3, 4)
    published = tensors(sizes)
    name = f"{STEM}.down_proj"
    x = np.array(published[name], order="C")
    shard = cuda_ipc.Shard(allocation=0, offset=0, start=(0, 0, 0), shape=x.shape)
    tensor = cuda_ipc.RemoteTensor(shape=x.shape, dtype="float32", checksum=checksum(x), shards=(shard,))
    x[1, 2, 3] += 1

    def copied(matrix):
        out = torch.empty(matrix.shape)
        cuda_ipc.copy_into(out.data_ptr(), matrix, {0: x.ctypes.data}, HostMemory())
        return out

    (target,) = [t for n, t in targets_of(Model(sizes)).items() if n == name]
    with pytest.raises(BadVersion, match=rf"{name}.*arrived with checksum"):
        list(vllm_experts.from_learner(name, tensor, target, copied, {}))


# -- what shapes the forward pass --------------------------------------------------------------------------------------


def test_a_server_that_sends_tokens_to_experts_otherwise_is_told_apart():
    base = {"num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    one = forward_of(base | {"norm_topk_prob": True, "decoder_sparse_step": 2})
    assert one["dense_layers"] == [0, 2]
    same = {**base, "num_experts": None, "num_local_experts": 8, "norm_topk_prob": True, "mlp_only_layers": [0, 2]}
    assert differences(one, forward_of(same)) == ""
    for name, value in (("norm_topk_prob", False), ("num_experts_per_tok", 3), ("mlp_only_layers", [0])):
        assert differences(one, forward_of(same | {name: value})) != ""
    assert "num_experts" not in forward_of(SERVED)
