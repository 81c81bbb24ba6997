"""The assignment's functions against NumPy in float64, and what must be NaN there and only there."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from algorithm_cases import numeric_gradient

from jaxrl_llm.data.templates import alpaca
from jaxrl_llm.data.tokenizer import ByteTokenizer, CharTokenizer
from jaxrl_llm.tools import cs336

RNG = np.random.default_rng(0)
TOKENIZER = CharTokenizer(alphabet="abcdefghij", add_bos=True).load()
LOGPROBS = -RNG.gamma(2.0, 0.5, (3, 5))
OLD = LOGPROBS + RNG.normal(0, 0.3, LOGPROBS.shape)
MASK = np.array([[0, 1, 1, 1, 0], [1, 1, 0, 0, 0], [0, 0, 1, 1, 1]], bool)
ADVANTAGES = np.array([[1.5], [-0.5], [0.25]])


def f32(*arrays: np.ndarray) -> list[jnp.ndarray]:
    return [jnp.asarray(a, jnp.float32) for a in arrays]


def test_prompts_and_outputs_are_encoded_apart_and_labels_are_one_later() -> None:
    found = cs336.tokenize_prompt_and_output(["ab", "c"], ["cde", "d"], TOKENIZER)
    a, b, c, d, e = (3, 4, 5, 6, 7)
    assert found["input_ids"].tolist() == [[a, b, c, d], [c, d, 0, 0]]
    assert found["labels"].tolist() == [[b, c, d, e], [d, 0, 0, 0]]
    assert found["response_mask"].tolist() == [[False, True, True, True], [True, False, False, False]]
    with pytest.raises(ValueError, match="2 prompts and 1 outputs"):
        cs336.tokenize_prompt_and_output(["a", "b"], ["c"], TOKENIZER)


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def test_entropy_and_log_probs_are_those_of_the_softmax() -> None:
    logits = RNG.normal(0, 3, (2, 4, 7))
    logits[0, 0] = [0, 0, 1e4, 0, 0, 0, 0]  # no overflow
    p = softmax(logits)
    entropy = -np.sum(np.where(p > 0, p * np.log(np.maximum(p, 1e-300)), 0), -1)
    labels = RNG.integers(0, 7, (2, 4))
    labels[0, 0] = 2
    found = cs336.get_response_log_probs(
        lambda ids: jnp.asarray(logits, jnp.float32), jnp.zeros((2, 4), jnp.int32), jnp.asarray(labels), True
    )
    np.testing.assert_allclose(found["token_entropy"], entropy, atol=1e-5)
    np.testing.assert_allclose(
        found["log_probs"], np.log(np.take_along_axis(p, labels[..., None], -1)[..., 0]), atol=1e-5
    )
    assert set(cs336.get_response_log_probs(lambda ids: jnp.asarray(logits, jnp.float32), *f32i(2, 4))) == {"log_probs"}


def f32i(*shape: int) -> list[jnp.ndarray]:
    return [jnp.zeros(shape, jnp.int32)] * 2


@pytest.mark.parametrize("dim", [None, 0, 1])
def test_an_empty_mask_has_no_mean_and_a_sum_of_zero(dim: int | None) -> None:
    x = np.where(MASK, LOGPROBS, np.nan)
    (tensor,), mask = f32(LOGPROBS), jnp.asarray(MASK)
    with np.errstate(invalid="ignore"):
        expected = np.nansum(x, dim) / MASK.sum(dim)
    np.testing.assert_allclose(cs336.masked_mean(tensor, mask, dim), expected, atol=1e-6)
    np.testing.assert_allclose(cs336.masked_normalize(tensor, mask, 7.0, dim), np.nansum(x, dim) / 7, atol=1e-6)
    empty = cs336.masked_mean(tensor, mask & (jnp.arange(5) < 2)[None], 1)
    assert np.isnan(np.asarray(empty)).tolist() == [False, False, True]


def test_a_supervised_step_and_its_gradient() -> None:
    loss, gradient, _ = cs336.sft_microbatch_train_step(*f32(LOGPROBS), jnp.asarray(MASK), 4, 2.0)
    np.testing.assert_allclose(loss, -np.where(MASK, LOGPROBS, 0).sum(1).mean() / 2 / 4, atol=1e-6)
    np.testing.assert_allclose(gradient, np.where(MASK, -1 / (3 * 2 * 4), 0), atol=1e-7)


@pytest.mark.parametrize("std", [True, False])
def test_rewards_are_compared_in_groups_of_neighbours(std: bool) -> None:
    rewards = [1.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    found, raw, _ = cs336.compute_group_normalized_rewards(
        lambda text, truth: {"reward": float(text == truth)}, ["a" if r else "b" for r in rewards], ["a"] * 6, 3, 1e-6, std
    )  # fmt: skip
    grouped = np.array(rewards).reshape(2, 3)
    expected = grouped - grouped.mean(1, keepdims=True)
    if std:
        expected /= grouped.std(1, keepdims=True, ddof=1) + 1e-6
    np.testing.assert_allclose(found, expected.reshape(-1), atol=1e-5)
    assert raw.tolist() == rewards
    with pytest.raises(ValueError, match="group_size=4"):
        cs336.compute_group_normalized_rewards(lambda text, truth: {"reward": 0.0}, ["a"] * 6, ["a"] * 6, 4, 1e-6, True)


def clip_loss(logprobs: np.ndarray) -> np.ndarray:
    ratio = np.exp(logprobs - OLD)
    return -np.minimum(ratio * ADVANTAGES, np.clip(ratio, 0.8, 1.2) * ADVANTAGES)


@pytest.mark.parametrize("kind", ["no_baseline", "reinforce_with_baseline", "grpo_clip"])
def test_a_policy_step_and_its_gradient(kind: str) -> None:
    each = clip_loss if kind == "grpo_clip" else lambda x: -ADVANTAGES * x

    def loss(logprobs: np.ndarray) -> float:
        return float((np.where(MASK, each(logprobs), 0).sum(1) / MASK.sum(1)).mean() / 2)

    names = {"no_baseline": ("raw_rewards",), "reinforce_with_baseline": ("advantages",)}
    logprobs, advantages, old = f32(LOGPROBS, ADVANTAGES, OLD)
    given = dict.fromkeys(names.get(kind, ("advantages",)), advantages)
    given |= {"old_log_probs": old, "cliprange": 0.2} if kind == "grpo_clip" else {}
    value, gradient, metadata = cs336.grpo_microbatch_train_step(logprobs, jnp.asarray(MASK), 2, kind, **given)  # type: ignore[arg-type]
    np.testing.assert_allclose(value, loss(LOGPROBS), atol=1e-5)
    np.testing.assert_allclose(gradient, numeric_gradient(loss, LOGPROBS, MASK), atol=1e-5)
    if kind == "grpo_clip":
        ratio = np.exp(LOGPROBS - OLD)
        clipped = np.where(ADVANTAGES > 0, ratio > 1.2, ratio < 0.8)
        assert (np.asarray(metadata["clipped"]) == clipped).all()


def test_the_two_normalisations_of_length_differ_as_the_handout_says() -> None:
    ones, mask = jnp.full((2, 7), 2.0), jnp.asarray(np.arange(7) < np.array([[4], [7]]))
    assert cs336.masked_mean(ones, mask, 1).tolist() == [2.0, 2.0]
    np.testing.assert_allclose(cs336.masked_normalize(ones, mask, 7.0, 1), [8 / 7, 2.0], atol=1e-6)


def test_a_loss_type_names_what_it_lacks() -> None:
    (logprobs,) = f32(LOGPROBS)
    with pytest.raises(ValueError, match="needs raw_rewards"):
        cs336.compute_policy_gradient_loss(logprobs, "no_baseline")
    with pytest.raises(ValueError, match="needs old_log_probs"):
        cs336.compute_policy_gradient_loss(logprobs, "grpo_clip", advantages=f32(ADVANTAGES)[0], cliprange=0.2)


def test_documents_are_packed_across_their_ends(tmp_path: Path) -> None:
    tokenizer = ByteTokenizer(add_bos=True).load()
    rows = [{"prompt": "one", "response": "1"}, {"prompt": "two", "response": "22"}]
    (tmp_path / "sft.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    dataset = cs336.get_packed_sft_dataset(tokenizer, tmp_path / "sft.jsonl", 16, shuffle=False)
    texts = [alpaca(r["prompt"]) + r["response"] for r in rows]
    total = sum(len(text) + 2 for text in texts)  # a token a byte, and both ends
    assert len(dataset) == (total - 1) // 16
    joined = np.concatenate([dataset[i]["input_ids"] for i in range(len(dataset))])
    assert "".join(texts).startswith(tokenizer.decode(joined, skip_special_tokens=True))
    assert np.flatnonzero(joined < 3).tolist() == [0, len(texts[0]) + 1, len(texts[0]) + 2]
    for i in range(len(dataset) - 1):
        assert dataset[i]["labels"][-1] == dataset[i + 1]["input_ids"][0]
    batches = list(cs336.iterate_batches(dataset, 4, shuffle=True))
    shuffled = np.concatenate([b["input_ids"] for b in batches])
    assert sorted(map(tuple, shuffled)) == sorted(tuple(dataset[i]["input_ids"]) for i in range(len(dataset)))
    with pytest.raises(ValueError, match="a chunk of 9999 needs 10000"):
        cs336.get_packed_sft_dataset(tokenizer, tmp_path / "sft.jsonl", 9999, shuffle=True)


def test_a_preference_is_the_log_ratio_of_the_responses_alone() -> None:
    tokenizer = ByteTokenizer().load()
    tables = [RNG.normal(0, 1, (259, 259)) for _ in range(2)]
    models = [lambda ids, t=t: jnp.asarray(t, jnp.float32)[ids] for t in tables]
    loss = cs336.compute_per_instance_dpo_loss(*models, tokenizer, 0.5, "Hi?", "yes", "no")
    prompt = tokenizer(alpaca("Hi?"), add_special_tokens=False)["input_ids"]
    ratios = []
    for response in ("yes", "no"):
        ids = [*prompt, *tokenizer(response, add_special_tokens=False)["input_ids"], 2]
        both = [
            sum(np.log(softmax(t[a])[b]) for a, b in zip(ids[len(prompt) - 1 : -1], ids[len(prompt) :])) for t in tables
        ]
        ratios.append(both[0] - both[1])
    np.testing.assert_allclose(loss, np.log1p(np.exp(-0.5 * (ratios[0] - ratios[1]))), atol=1e-5)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("The correct answer is B.", "B"), ("the correct answer is A, no: The correct answer is C", "C"), ("B", None), ("The correct answer is E", None)],
)  # fmt: skip
def test_mmlu_answers(text: str, expected: str | None) -> None:
    assert cs336.parse_mmlu_response({}, text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("so 1,234 + 1 = 1,235 apples.", "1235"), ("-3.5", "-3.5"), ("none", None), ("7 of 72", "72")],
)
def test_gsm8k_answers(text: str, expected: str | None) -> None:
    assert cs336.parse_gsm8k_response(text) == expected


def test_a_policy_is_a_model() -> None:
    import jax

    from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
    from jaxrl_llm.models.qwen3 import Qwen3
    from jaxrl_llm.models.sources import PolicySource

    size = Qwen3(
        vocabulary_size=32, width=16, layers=1, heads=2, kv_heads=1, head_width=8, mlp_width=16, tied=True, max_positions=16
    )  # fmt: skip
    policy = PolicySource(architecture=size).policy(Partitioner.create(MeshConfig()))
    model = cs336.logits_of(policy, policy.init(jax.random.key(0)))
    long = model(jnp.asarray([[1, 2, 3, 0]]))
    assert long.shape == (1, 4, 32)
    np.testing.assert_allclose(long[:, :3], model(jnp.asarray([[1, 2, 3, 9]]))[:, :3], atol=1e-6)  # padding is not seen
