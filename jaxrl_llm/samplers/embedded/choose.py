"""Samples the next token of each slot of the embedded sampler: penalty, temperature, filters, one draw.

The steps are, in this order, each on the result of the one before: repetition penalty (https://arxiv.org/abs/1909.05858),
temperature, top-k, top-p (https://arxiv.org/abs/1904.09751), min-p (https://arxiv.org/abs/2407.01082), then one draw by the Gumbel
maximum. A wide vocabulary is drawn from in two stages, first a block of entries by the blocks' sums, then an entry of that block: the
distribution is the same, and the noise is hundreds of numbers instead of one for each entry. The penalty counts the prompt's tokens
too. Entries whose logit equals the last one kept are kept as well. A greedy row (temperature 0) takes the largest logit after the
penalty and reports its log-prob under the untempered, unfiltered softmax.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from jaxrl_llm.experience import SamplingParams
from jaxrl_llm.kernels import dispatch

HostOrDevice = Any  # a NumPy array, or its tracer under jit
WIDE = 2**14  # entries of a vocabulary from which on tokens are drawn in two stages
BLOCKS = (512, 256, 128, 64)


class Choice(NamedTuple):
    """The settings of each slot's draws: arrays [S], traced, so that other values compile nothing."""

    temperature: HostOrDevice  # float32, 0 is greedy
    top_k: HostOrDevice  # int32, 0 keeps all
    top_p: HostOrDevice  # float32
    min_p: HostOrDevice  # float32
    repetition_penalty: HostOrDevice  # float32

    @classmethod
    def empty(cls, slots: int) -> "Choice":
        """Returns host arrays of the plain softmax for `slots` slots."""
        one = np.ones(slots, np.float32)
        return cls(one, np.zeros(slots, np.int32), one.copy(), np.zeros(slots, np.float32), one.copy())

    def set(self, slot: int, settings: SamplingParams) -> None:
        """Writes one slot of host arrays."""
        for name, values in self._asdict().items():
            values[slot] = getattr(settings, name)


def filters(settings: SamplingParams) -> bool:
    """Returns whether `settings` restrict the distribution's support, which costs a sort of the logits in each step."""
    return settings.temperature > 0 and (settings.top_k > 0 or settings.top_p < 1 or settings.min_p > 0)


def plain(choice: Choice) -> Bool[Array, " S"]:
    """Returns in which slots a token is drawn from the whole softmax, or is its largest entry."""
    cut = (choice.top_k > 0) | (choice.top_p < 1) | (choice.min_p > 0)
    return jnp.asarray((choice.repetition_penalty == 1) & ((choice.temperature == 0) | ~cut))


def read_temperature(choice: Choice) -> Float[Array, " S"]:
    """Returns the temperature of the softmax whose log-probs are recorded: 1 for greedy rows."""
    temperature = jnp.asarray(choice.temperature)
    return jnp.where(temperature > 0, temperature, 1.0)


def penalise(logits: Float[Array, "S V"], seen: Bool[Array, "S V"], penalty: Float[Array, " S"]) -> Float[Array, "S V"]:
    """Divides the logits of tokens seen before by the penalty where they are positive, and multiplies them by it where negative."""
    scaled = jnp.where(logits > 0, logits / penalty[:, None], logits * penalty[:, None])
    return jnp.where(seen, scaled, logits)


def tempered(logits: Float[Array, "S V"], temperature: Float[Array, " S"]) -> Float[Array, "S V"]:
    """Divides the logits by the temperature; greedy rows are unchanged."""
    return logits / jnp.where(temperature > 0, temperature, 1.0)[:, None]


def filtered(logits: Float[Array, "S V"], choice: Choice) -> Float[Array, "S V"]:
    """Returns the tempered logits with -inf outside the support that top-k, top-p and min-p leave; greedy rows keep all."""
    vocabulary = logits.shape[-1]
    ordered = -jnp.sort(-logits, axis=-1)
    rank = jnp.arange(vocabulary)
    kept = rank < jnp.where(choice.top_k > 0, choice.top_k, vocabulary)[:, None]
    ordered = jnp.where(kept, ordered, -jnp.inf)
    probability = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    top_p = jnp.asarray(choice.top_p)[:, None]
    kept &= (before < top_p) | (top_p >= 1) | (rank == 0)  # a rounded sum may reach 1 early: top_p = 1 still keeps all
    kept &= probability >= jnp.asarray(choice.min_p)[:, None] * probability[:, :1]
    last = jnp.take_along_axis(ordered, jnp.sum(kept, axis=-1, keepdims=True) - 1, axis=-1)
    greedy = (jnp.asarray(choice.temperature) == 0)[:, None]
    return jnp.where((logits >= last) | greedy, logits, -jnp.inf)


def block_of(vocabulary: int) -> int | None:
    """Returns the number of entries of a block for a draw in two stages; None where one draw is among all entries.

    Blocks have the largest size of BLOCKS that divides the vocabulary. TPUs draw among all entries: their compiler changes the logits'
    layout for the sums of blocks, which takes longer than the noise (5.4 ms against 4.6 a step by its estimate, 1.5B with 256 slots on
    v6e).
    """
    if vocabulary < WIDE or dispatch.device().platform == "tpu":
        return None
    return next((block for block in BLOCKS if vocabulary % block == 0), None)


def sample_keys(seed: UInt32[Array, "S 2"], sample: Int[Array, " S"]) -> Key[Array, " S"]:
    """Returns the key of sample `sample` of a prefix with 64-bit seed (high, low); draw t folds t in."""
    return jax.vmap(lambda s, i: jax.random.fold_in(jax.random.wrap_key_data(s, impl="threefry2x32"), i))(seed, sample)


def noise(keys: Key[Array, " S"], drawn: Int[Array, " S"], vocabulary: int) -> Float[Array, "S N"]:
    """Returns Gumbel noise of draw number `drawn` of each slot's own key, so no draw depends on other slots.

    N is the size of the vocabulary, or for a wide one the number of blocks plus the entries of a block.
    """
    block = block_of(vocabulary)
    count = vocabulary if block is None else vocabulary // block + block
    return jax.vmap(lambda key, t: jax.random.gumbel(jax.random.fold_in(key, t), (count,), jnp.float32))(keys, drawn)


def drawn_at_once(
    logits: Float[Array, "S V"], gumbel: Float[Array, "S V"], greedy: Bool[Array, " S"]
) -> tuple[Int[Array, " S"], Float[Array, " S"]]:
    """Draws one of all entries; returns the token and its log-prob."""
    token = jnp.argmax(jnp.where(greedy[:, None], logits, logits + gumbel), axis=-1)
    chosen = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]
    return token.astype(jnp.int32), chosen - jax.nn.logsumexp(logits, axis=-1)


def drawn_in_blocks(
    logits: Float[Array, "S V"], gumbel: Float[Array, "S N"], greedy: Bool[Array, " S"], block: int
) -> tuple[Int[Array, " S"], Float[Array, " S"]]:
    """Draws a block by the sums of its exponentials, then one of its entries; returns the token and its log-prob.

    P(block) P(entry | block) is the entry's softmax. A greedy row takes the block with the largest entry, and that entry.
    """
    blocks = logits.reshape(len(logits), -1, block)
    top = jnp.max(blocks, axis=-1)
    base = jnp.where(top == -jnp.inf, 0.0, top)  # of a block whose entries are all cut
    mass = jnp.log(jnp.sum(jnp.exp(blocks - base[..., None]), axis=-1)) + base
    count = mass.shape[1]
    at = jnp.argmax(jnp.where(greedy[:, None], top, mass + gumbel[:, :count]), axis=-1)
    entries = jnp.take_along_axis(blocks, at[:, None, None], axis=1)[:, 0]
    entry = jnp.argmax(jnp.where(greedy[:, None], entries, entries + gumbel[:, count:]), axis=-1)
    chosen = jnp.take_along_axis(entries, entry[:, None], axis=-1)[:, 0]
    return (at * block + entry).astype(jnp.int32), chosen - jax.nn.logsumexp(mass, axis=-1)


def draw(
    logits: Float[Array, "S V"],
    gumbel: Float[Array, "S N"],
    choice: Choice,
    seen: Bool[Array, "S V"] | None,
    *,
    cut: bool,
) -> tuple[Int[Array, " S"], Float[Array, " S"]]:
    """Draws one token of each slot; returns it and its log-prob under the distribution that it was drawn from.

    Args:
      logits: float32 of the next token.
      gumbel: standard Gumbel noise, as `noise` gives it; argmax(logits + noise) is a draw from the softmax.
      choice: per-slot settings.
      seen: tokens of the prompt and the response so far, or None where no slot is penalised.
      cut: static; False skips the filters where no slot has one (`filters`).
    """
    temperature = jnp.asarray(choice.temperature)
    if seen is not None:
        logits = penalise(logits, seen, jnp.asarray(choice.repetition_penalty))
    logits = tempered(logits, temperature)
    if cut:
        logits = filtered(logits, choice)
    block, greedy = block_of(logits.shape[1]), temperature == 0
    return drawn_at_once(logits, gumbel, greedy) if block is None else drawn_in_blocks(logits, gumbel, greedy, block)
