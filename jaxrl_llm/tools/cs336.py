"""The functions of CS336's alignment assignment (Stanford, Spring 2025, assignment 5), written with this package's parts.

Names, arguments, shapes and NaN results are those of the assignment. A model is any function from token ids
to logits; `logits_of` makes one from a policy and its parameters. Instead of calling `backward`, a microbatch step
returns the gradient of its loss with respect to the given log-probs. Training does not use these functions: its runs
are gin/cs336_*.gin, with losses that are normalised by global counts and never NaN.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.algorithms import surrogate
from jaxrl_llm.data.pipeline import Encoder
from jaxrl_llm.data.templates import alpaca
from jaxrl_llm.experience import Prompt
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.rewards.multiple_choice import MultipleChoice
from jaxrl_llm.rollouts.offline import documents

Model = Callable[[Int[Array, "B T"]], Float[Array, "B T V"]]
Metadata = dict[str, Any]
LossType = Literal["no_baseline", "reinforce_with_baseline", "grpo_clip"]


# -- models ------------------------------------------------------------------------------------------------------------


def logits_of(policy: Policy, params: Params) -> Model:
    """Returns the policy as a function of token ids; rows are right-padded, so that no response sees padding."""

    def model(input_ids: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        positions = jnp.broadcast_to(jnp.arange(input_ids.shape[1], dtype=jnp.int32), input_ids.shape)
        hidden = policy.hidden(params, input_ids, positions, jnp.ones_like(input_ids), max_segments=1)
        return (hidden @ policy.head(params).T.astype(hidden.dtype)).astype(jnp.float32)

    return jax.jit(model)


def tokenize_prompt_and_output(
    prompt_strs: Sequence[str], output_strs: Sequence[str], tokenizer: Any
) -> dict[str, np.ndarray]:
    """Encodes prompts and outputs separately, joins and right-pads them.

    Returns:
      {"input_ids": int32 [B, T], "labels": int32 [B, T], "response_mask": bool [B, T]}, where T is the longest row less 1;
      labels are the tokens one position later, and the mask is True where a label is a token of the output.

    Raises:
      ValueError: the numbers of prompts and outputs differ.
    """
    if len(prompt_strs) != len(output_strs):
        raise ValueError(f"{len(prompt_strs)} prompts and {len(output_strs)} outputs: give an output for each prompt")
    pairs = [
        tuple(tokenizer(text, add_special_tokens=False)["input_ids"] for text in pair)
        for pair in zip(prompt_strs, output_strs)
    ]
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    width = max(len(p) + len(o) for p, o in pairs)
    rows, mask = np.full((len(pairs), width), pad, np.int32), np.zeros((len(pairs), width), bool)
    for i, (prompt, output) in enumerate(pairs):
        rows[i, : len(prompt) + len(output)] = [*prompt, *output]
        mask[i, len(prompt) : len(prompt) + len(output)] = True
    return {"input_ids": rows[:, :-1], "labels": rows[:, 1:], "response_mask": mask[:, 1:]}


def compute_entropy(logits: Float[Array, "B T V"]) -> Float[Array, "B T"]:
    """Returns the entropy -sum_v p_v log p_v in nats."""
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    return -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)


def get_response_log_probs(
    model: Model, input_ids: Int[Array, "B T"], labels: Int[Array, "B T"], return_token_entropy: bool = False
) -> dict[str, Array]:
    """Returns {"log_probs": float32 [B, T] of every label, including padding} and, on request, {"token_entropy": float32 [B, T]}."""
    logits = model(input_ids)
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    found = {"log_probs": jnp.take_along_axis(logprobs, labels[..., None], axis=-1)[..., 0]}
    return found | ({"token_entropy": compute_entropy(logits)} if return_token_entropy else {})


# -- masks -------------------------------------------------------------------------------------------------------------


def masked_normalize(
    tensor: Float[Array, "*S"], mask: Bool[Array, "*S"], normalize_constant: float, dim: int | None = None
) -> Float[Array, "..."]:
    """Returns the sum over the mask, along `dim` or over all axes, divided by a constant."""
    return jnp.sum(jnp.where(mask, tensor, 0.0), axis=dim) / normalize_constant


def masked_mean(tensor: Float[Array, "*S"], mask: Bool[Array, "*S"], dim: int | None = None) -> Float[Array, "..."]:
    """Returns the mean over the mask, along `dim` or over all axes; NaN where the mask is empty, as the assignment requires."""
    return jnp.sum(jnp.where(mask, tensor, 0.0), axis=dim) / jnp.sum(mask, axis=dim)


# -- supervised --------------------------------------------------------------------------------------------------------


def sft_microbatch_train_step(
    policy_log_probs: Float[Array, "B T"],
    response_mask: Bool[Array, "B T"],
    gradient_accumulation_steps: int,
    normalize_constant: float = 1.0,
) -> tuple[Float[Array, ""], Float[Array, "B T"], Metadata]:
    """Returns (loss, its gradient with respect to the log-probs, metadata): -mean_b(sum_t logp / constant) / accumulation steps."""

    def loss(logprobs: Float[Array, "B T"]) -> Float[Array, ""]:
        per_row = masked_normalize(logprobs, response_mask, normalize_constant, dim=1)
        return -jnp.mean(per_row) / gradient_accumulation_steps

    value, gradient = jax.value_and_grad(loss)(policy_log_probs)
    return value, gradient, {"response_tokens": jnp.sum(response_mask)}


@dataclass(frozen=True)
class PackedDataset:
    """Documents, concatenated and cut into rows of equal length.

    Attributes:
      rows: int32 [seq_length + 1] each; the last token of a row is the first of the next row.
    """

    rows: Sequence[np.ndarray]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Returns {"input_ids": int32 [seq_length], "labels": the same tokens one position later}."""
        if not 0 <= i < len(self):
            raise IndexError(f"row {i} of {len(self)}")
        return {"input_ids": self.rows[i][:-1], "labels": self.rows[i][1:]}


def get_packed_sft_dataset(
    tokenizer: Any, dataset_path: str | Path, seq_length: int, shuffle: bool, seed: int = 0
) -> PackedDataset:
    """Packs a JSONL file of {"prompt", "response"} in the Alpaca template into rows; end tokens surround each document.

    `algorithms.packed_sft` learns from the same rows.

    Args:
      shuffle: whether the documents are shuffled, by `seed`; the last, incomplete row is dropped.

    Raises:
      ValueError: there are fewer tokens than a row needs.
    """
    lines = Path(dataset_path).read_text(encoding="utf-8").splitlines()
    given = [json.loads(line) for line in lines if line.strip()]
    prompts = [Prompt(id=str(i), text=alpaca(row["prompt"]), response=row["response"]) for i, row in enumerate(given)]
    encoder = Encoder(tokenizer=tokenizer, max_prompt_tokens=seq_length)
    chunks = [group.rollouts[0] for group in documents(encoder, prompts, seq_length, seed if shuffle else None)]
    return PackedDataset([np.concatenate([chunk.prompt.prefix, chunk.tokens]) for chunk in chunks])


def iterate_batches(
    dataset: PackedDataset, batch_size: int, shuffle: bool, seed: int = 0
) -> Iterator[dict[str, np.ndarray]]:
    """Yields {"input_ids", "labels"} int32 [B, T] in one pass over the rows; the last batch may be smaller."""
    order = np.random.default_rng(seed).permutation(len(dataset)) if shuffle else np.arange(len(dataset))
    for start in range(0, len(order), batch_size):
        rows = [dataset[int(i)] for i in order[start : start + batch_size]]
        yield {name: np.stack([row[name] for row in rows]) for name in ("input_ids", "labels")}


# -- policy gradients --------------------------------------------------------------------------------------------------


def compute_group_normalized_rewards(
    reward_fn: Callable[[str, Any], Mapping[str, float]],
    rollout_responses: Sequence[str],
    repeated_ground_truths: Sequence[Any],
    group_size: int,
    advantage_eps: float,
    normalize_by_std: bool,
) -> tuple[Float[Array, " N"], Float[Array, " N"], Metadata]:
    """Returns (advantages, raw rewards, metadata), with (r - mean) / (std + eps) in each group of `group_size` neighbours.

    The standard deviation divides by n - 1; it is only used if `normalize_by_std`.

    Raises:
      ValueError: the responses do not split into groups, or the number of ground truths differs.
    """
    if len(rollout_responses) % group_size or len(rollout_responses) != len(repeated_ground_truths):
        raise ValueError(
            f"{len(rollout_responses)} responses and {len(repeated_ground_truths)} ground truths must be as many, and a "
            f"multiple of group_size={group_size}"
        )
    raw = jnp.asarray(
        [reward_fn(r, g)["reward"] for r, g in zip(rollout_responses, repeated_ground_truths)], jnp.float32
    )
    grouped = raw.reshape(-1, group_size)
    centered = grouped - jnp.mean(grouped, axis=1, keepdims=True)
    if normalize_by_std:
        centered = centered / (jnp.std(grouped, axis=1, keepdims=True, ddof=1) + advantage_eps)
    metadata = {"reward_mean": raw.mean(), "reward_std": raw.std(), "reward_max": raw.max(), "reward_min": raw.min()}
    return centered.reshape(-1), raw, metadata


def compute_naive_policy_gradient_loss(
    raw_rewards_or_advantages: Float[Array, "B 1"], policy_log_probs: Float[Array, "B T"]
) -> Float[Array, "B T"]:
    """Returns the loss -A log pi of every token."""
    return -raw_rewards_or_advantages * policy_log_probs


def compute_grpo_clip_loss(
    advantages: Float[Array, "B 1"],
    policy_log_probs: Float[Array, "B T"],
    old_log_probs: Float[Array, "B T"],
    cliprange: float,
) -> tuple[Float[Array, "B T"], Metadata]:
    """Returns the loss -min(rho A, clip(rho, 1 - e, 1 + e) A) of every token, with {"clipped": bool [B, T]}."""
    ratio = jnp.exp(policy_log_probs - old_log_probs)
    loss, measured = surrogate.clip(ratio, jnp.broadcast_to(advantages, ratio.shape), cliprange, cliprange)
    return loss, {"clipped": measured["ratio/clip_fraction"]}


def compute_policy_gradient_loss(
    policy_log_probs: Float[Array, "B T"],
    loss_type: LossType,
    raw_rewards: Float[Array, "B 1"] | None = None,
    advantages: Float[Array, "B 1"] | None = None,
    old_log_probs: Float[Array, "B T"] | None = None,
    cliprange: float | None = None,
) -> tuple[Float[Array, "B T"], Metadata]:
    """Returns the loss of every token and metadata for "no_baseline", "reinforce_with_baseline" or "grpo_clip".

    Raises:
      ValueError: an argument that the loss type needs is missing, or the loss type is unknown.
    """
    if loss_type == "no_baseline":
        return compute_naive_policy_gradient_loss(_given(raw_rewards, "raw_rewards", loss_type), policy_log_probs), {}
    if loss_type == "reinforce_with_baseline":
        return compute_naive_policy_gradient_loss(_given(advantages, "advantages", loss_type), policy_log_probs), {}
    if loss_type == "grpo_clip":
        return compute_grpo_clip_loss(
            _given(advantages, "advantages", loss_type), policy_log_probs,
            _given(old_log_probs, "old_log_probs", loss_type), _given(cliprange, "cliprange", loss_type),
        )  # fmt: skip
    raise ValueError(f"loss_type must be no_baseline, reinforce_with_baseline or grpo_clip (got {loss_type!r})")


def _given(argument: Any, name: str, loss_type: str) -> Any:
    if argument is None:
        raise ValueError(f"loss_type {loss_type!r} needs {name}")
    return argument


def grpo_microbatch_train_step(
    policy_log_probs: Float[Array, "B T"],
    response_mask: Bool[Array, "B T"],
    gradient_accumulation_steps: int,
    loss_type: LossType,
    raw_rewards: Float[Array, "B 1"] | None = None,
    advantages: Float[Array, "B 1"] | None = None,
    old_log_probs: Float[Array, "B T"] | None = None,
    cliprange: float | None = None,
) -> tuple[Float[Array, ""], Float[Array, "B T"], Metadata]:
    """Returns (loss, its gradient with respect to the log-probs, metadata), with the loss mean_b(masked_mean_t(loss)) / accumulation steps.

    Raises:
      ValueError: as for compute_policy_gradient_loss.
    """

    def loss(logprobs: Float[Array, "B T"]) -> tuple[Float[Array, ""], Metadata]:
        each, metadata = compute_policy_gradient_loss(
            logprobs, loss_type, raw_rewards, advantages, old_log_probs, cliprange
        )
        return jnp.mean(masked_mean(each, response_mask, dim=1)) / gradient_accumulation_steps, metadata

    (value, metadata), gradient = jax.value_and_grad(loss, has_aux=True)(policy_log_probs)
    return value, gradient, metadata


# -- preferences and parsing -------------------------------------------------------------------------------------------


def compute_per_instance_dpo_loss(
    lm: Model, lm_ref: Model, tokenizer: Any, beta: float, prompt: str, response_chosen: str, response_rejected: str
) -> Float[Array, ""]:
    """Returns the loss -log sigmoid(beta (log-ratio of the chosen response - that of the rejected one)), in the Alpaca template.

    The end token is part of each response. Prompt and response are encoded separately, as in training.
    """
    ratios = []
    for response in (response_chosen, response_rejected):
        tokens = tokenize_prompt_and_output([alpaca(prompt)], [response + tokenizer.eos_token], tokenizer)
        ids, labels, mask = (jnp.asarray(tokens[n]) for n in ("input_ids", "labels", "response_mask"))
        both = [get_response_log_probs(model, ids, labels)["log_probs"] for model in (lm, lm_ref)]
        ratios.append(masked_normalize(both[0] - both[1], mask, 1.0))
    return -jax.nn.log_sigmoid(beta * (ratios[0] - ratios[1]))


def parse_mmlu_response(mmlu_example: Mapping[str, Any], model_output: str) -> str | None:
    """Returns the letter, A to D, of the last "The correct answer is _"; None where there is none."""
    del mmlu_example
    return MultipleChoice(places=("sentence",)).choice(model_output, "ABCD")


def parse_gsm8k_response(model_output: str) -> str | None:
    """Returns the last number of the text without its commas; None where there is none."""
    found = re.findall(r"-?\d[\d,]*(?:\.\d+)?", model_output)
    return found[-1].replace(",", "") if found else None
