"""The learner, which scores and updates under jit, by one compiled function each, with sharded inputs, donated state and global counts.

The gradient of a minibatch is the sum over its micro-batches of d/dw sum_k s_k / n_k, where s_k is a term's sum over the
micro-batch and n_k its global count, which is an input; so any split into micro-batches or over devices gives the same update.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from jaxrl_llm.algorithms.batch import MicroBatch
from jaxrl_llm.algorithms.correction import Correction, at_update
from jaxrl_llm.learner import offload
from jaxrl_llm.learner import router as routers
from jaxrl_llm.learner.bfloat16_weights import Compensated, Stochastic
from jaxrl_llm.learner.optimizer import Optimizer, Rule, Trainable, keep, read_by, rested, slopes_of, state_shardings
from jaxrl_llm.learner.score import NO_BASES, Bases, Scorer
from jaxrl_llm.learner.state import TrainState
from jaxrl_llm.protocols import Params

RULES: Mapping[str, type[Rule]] = {"float32": Rule, "stochastic": Stochastic, "compensated": Compensated}

SUMS = "router"  # names, among a micro-batch's metrics, the sums over tokens from which metrics of routers are computed


@dataclass(frozen=True, kw_only=True, eq=False)
class Learner(Scorer):
    """The compiled part of training; see Scorer for what it reads from models.

    Attributes:
      optimizers: {model name: Optimizer} of the models that are trained; the others stay as they are.
      updates: number of updates of the whole stage, for the learning-rate schedules.
      warmup: number of first updates, in which only the critic learns and the policy stays as it is.
      trainable: which parameters of the policy learn; None for all.
      seed: seed of the noise that an algorithm may need.
      own_old: whether old log-probs are those of the update's own pass, which is correct where a step makes one update.
      correction: with `own_old`, the correction that weighs tokens in the update.
    """

    optimizers: Mapping[str, Optimizer]
    updates: int
    warmup: int = 0
    trainable: Trainable | None = None
    seed: int = 0
    own_old: bool = False
    correction: Correction | None = None

    def __post_init__(self) -> None:
        for name, optimizer in self.optimizers.items():
            backbone = getattr(self.models[name], "backbone", self.models[name])
            dtypes = {optimizer.weights_dtype, optimizer.slopes_dtype}
            if dtypes != {"float32"} and backbone.plain is not backbone:
                raise ValueError(
                    f"the {name} trains adapters, which are small and rest in float32 with float32 gradients: leave train.Optimizer.weights "
                    f"and gradients_dtype as they are (got {optimizer.weights!r}, {optimizer.gradients_dtype!r}), or train all weights"
                )
            if dtypes == {"float32", "bfloat16"} and optimizer.weights == backbone.compute_dtype == "float32":
                raise ValueError(
                    f"train.Optimizer.gradients_dtype = 'bfloat16' rounds float32 weights in the forward pass, which the {name} computes in "
                    "float32: set sources.PolicySource.compute_dtype = 'bfloat16', or leave gradients_dtype"
                )

    # -- state ---------------------------------------------------------------------------------------------------------

    @cached_property
    def rules(self) -> dict[str, Rule]:
        """The rule by which the weights of each trained model begin and change."""
        late = {"policy": self.warmup}
        transforms = {name: o.transform(self.updates - late.get(name, 0)) for name, o in self.optimizers.items()}
        return {
            name: RULES[self.optimizers[name].weights](transform=transform, name=name, seed=self.seed)
            for name, transform in transforms.items()
        }

    def trained(self, params: Mapping[str, Params]) -> dict[str, Params]:
        """Returns the parameters of the models that an update changes."""
        return {name: params[name] for name in self.optimizers}

    def init(self, params: Mapping[str, Params]) -> TrainState:
        """Returns the state that training starts from; it owns `params` from here on."""
        shardings = self.shardings
        scalar = lambda: jax.device_put(jnp.zeros((), jnp.int32), self.partitioner.replicated)  # noqa: E731
        held, moments = dict(params), {}
        for n, rule in self.rules.items():
            if self.optimizers[n].offload:  # moments begin at 0, which the host makes in its own memory
                zeros = lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding)  # noqa: E731
                moments[n] = jax.tree.map(zeros, self.abstract.moments[n])
            else:
                moments[n] = jax.jit(rule.init, out_shardings=shardings.moments[n])(params[n])
            held[n], moments[n] = rule.begun(rested(params[n], "float32"), moments[n])
        return TrainState(step=scalar(), skipped=scalar(), params=held, moments=moments)

    @cached_property
    def shardings(self) -> TrainState:
        """The sharding of every leaf of the state."""
        one = self.partitioner.replicated
        abstract = {n: m.abstract() for n, m in self.models.items()}
        moments = {n: state_shardings(rule.init, abstract[n], one) for n, rule in self.rules.items()}
        away = {n: jax.tree.map(offload.on_host, moments[n]) for n, o in self.optimizers.items() if o.offload}
        return TrainState(
            step=one,  # type: ignore[arg-type]
            skipped=one,  # type: ignore[arg-type]
            params={n: jax.tree.map(lambda x: x.sharding, a) for n, a in abstract.items()},
            moments=moments | away,
        )

    @cached_property
    def abstract(self) -> TrainState:
        """Shapes, dtypes and shardings of the state, to restore a checkpoint into."""
        state = self._state({n: m.abstract() for n, m in self.models.items()})
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, self.shardings)

    @cached_property
    def sizes(self) -> TrainState:
        """The shapes of the state regardless of the mesh; `abstract` has those in which the mesh stores it (distributed/padding.py)."""
        return self._state({n: m.sizes() for n, m in self.models.items()})

    def _state(self, params: dict[str, Any]) -> TrainState:
        """Returns the state's shapes for parameters of these shapes."""
        scalar = jax.ShapeDtypeStruct((), jnp.int32)
        moments = {n: jax.eval_shape(rule.init, params[n]) for n, rule in self.rules.items()}
        params |= {n: rule.shapes(params[n]) for n, rule in self.rules.items()}
        return TrainState(step=scalar, skipped=scalar, params=params, moments=moments)  # type: ignore[arg-type]

    @property
    def gradients(self) -> dict[str, Any]:
        """Shapes and shardings of the gradient that is summed over micro-batches."""
        return {n: rested(params, "float32") for n, params in self.trained(self.abstract.params).items()}

    # -- update --------------------------------------------------------------------------------------------------------

    def _objective(
        self, params: Mapping[str, Params], batch: MicroBatch, bases: Bases, place: tuple[Any, Any]
    ) -> tuple[Array, dict[str, Array]]:
        """Returns a micro-batch's contribution to the loss of its minibatch, and to the metrics.

        Args:
          place: numbers of the update and of the micro-batch within it, which seed the micro-batch's noise.
        """
        noisy = "noise_logprob" in self.wanted
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self.seed), place[0]), place[1]) if noisy else None
        found: dict[str, Any]
        found, report = self._read(params, batch, self.wanted, bases, key)
        if "policy" in found:
            found["policy"]["entries"] = jnp.float32(self.policy.architecture.vocabulary_size)
        sums: dict[str, Any] = {}
        if self.own_old:
            batch, sums = at_update(batch, found["policy"], self.correction)
        terms, metrics = self.algorithm.loss(found, batch)
        divided = lambda sums: {name: total / batch.counts[by] for name, (total, by) in sums.items()}  # noqa: E731
        more: dict[str, Any] = {}
        loss = sum(divided(terms).values(), start=jnp.zeros(()))
        if report is not None:
            more[SUMS] = routers.sums(report)
            if self.balances:
                assert batch.loads is not None  # `_loaded` gives them
                share = routers.balance(report.mass, batch.loads, batch.counts["routed"], self.router.balance_over)
                loss, more["router/loss"] = loss + self.router.balance * share, share
        return loss, jax.lax.stop_gradient({"loss/total": loss, **divided({**metrics, **sums}), **more})

    def _slopes(
        self, params: dict[str, Params], batch: MicroBatch, bases: Bases, place: tuple[Any, Any]
    ) -> tuple[Any, dict[str, Array]]:
        """Returns a micro-batch's gradient, in the dtype that its optimizer asks for, and its share of the metrics."""
        trained = self.trained(params)
        slopes = {n: slopes_of(tree, self.optimizers[n].slopes_dtype) for n, tree in trained.items()}
        read = lambda slopes: {n: read_by(tree, trained[n]) for n, tree in slopes.items()}  # noqa: E731
        objective = lambda slopes: self._objective(read(slopes), batch, bases, place)  # noqa: E731
        (_, scalars), gradient = jax.value_and_grad(objective, has_aux=True)(slopes)
        return gradient, scalars

    def _loaded(
        self, params: Mapping[str, Params], batches: Sequence[MicroBatch], bases: Bases
    ) -> Sequence[MicroBatch]:
        """Adds the loads of a minibatch's experts to its micro-batches, where the loss that balances them needs these."""
        if not self.balances:
            return batches
        loads = [self._loads(params["policy"], batch, bases) for batch in batches]
        return [batch.replace(loads=sum(loads[1:], start=loads[0])) for batch in batches]

    @property
    def balances(self) -> bool:
        """Whether the loss has a term that balances the loads of experts."""
        return bool(self.router.balance and self.policy.architecture.experts and "policy" in self.optimizers)

    @cached_property
    def _measure(self) -> Any:
        return jax.jit(lambda params, batch, bases: self._objective(params, batch, bases, (0, 0))[1])

    def measure(
        self, params: Mapping[str, Params], batches: Iterable[MicroBatch], bases: Bases = NO_BASES
    ) -> dict[str, Array]:
        """Returns the loss and the metrics of a minibatch, without an update."""
        batches = self._loaded(params, list(batches), bases)
        shares = [self._measure(self.trained(params), batch, dict(bases)) for batch in batches]
        return self._told(jax.tree.map(lambda *x: sum(x[1:], start=x[0]), *shares), batches)

    @cached_property
    def _router_metrics(self) -> Any:
        return jax.jit(routers.metrics, static_argnums=1)

    def _told(self, scalars: dict[str, Any], batches: Sequence[MicroBatch]) -> dict[str, Array]:
        """Returns the metrics of a minibatch, with metrics of its routers in place of their sums."""
        if SUMS not in scalars:
            return scalars
        found = {name: x for name, x in scalars.items() if name != SUMS}
        return found | self._router_metrics(scalars[SUMS], batches[0].routes is not None)

    @cached_property
    def _accumulate(self) -> Any:
        """Adds a micro-batch's gradient to `total`, from `_zeros` on, and returns its share of the metrics."""

        def accumulate(total: Any, params: dict[str, Params], batch: MicroBatch, bases: Bases, place: Any) -> Any:
            gradient, scalars = self._slopes(params, batch, bases, place)
            return jax.tree.map(jnp.add, total, gradient), scalars

        return jax.jit(accumulate, donate_argnums=0, out_shardings=self._total_shardings)

    @cached_property
    def _zeros(self) -> Any:
        """What a sum of gradients begins at, so that the first micro-batch's program is that of the others of its shape."""
        return jax.jit(partial(jax.tree.map, jnp.zeros_like, self.gradients), out_shardings=self._total_shardings[0])

    @cached_property
    def _plus(self) -> Any:
        return jax.jit(partial(jax.tree.map, jnp.add), donate_argnums=0)

    @cached_property
    def _only(self) -> Any:
        """The gradient of a minibatch's only micro-batch, in float32, where the update is made apart from it."""

        def only(params: dict[str, Params], batch: MicroBatch, bases: Bases, place: Any) -> Any:
            gradient, scalars = self._slopes(params, batch, bases, place)
            return jax.tree.map(lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32)), gradient), scalars

        return jax.jit(only, out_shardings=self._total_shardings)

    @property
    def _total_shardings(self) -> Any:
        """The shardings of a gradient and of metrics: gradients are sharded as parameters are, so one program adds every micro-batch."""
        return self.trained(self.shardings.params), self.partitioner.replicated

    @cached_property
    def _apply(self) -> Any:
        return jax.jit(self._applied, donate_argnums=0, out_shardings=(self.shardings, self.partitioner.replicated))

    @cached_property
    def _whole(self) -> Any:
        """The gradient and the update in one program, for a minibatch of one micro-batch: no gradient is ever stored."""

        def whole(state: TrainState, batch: MicroBatch, bases: Bases) -> tuple[TrainState, dict[str, Array]]:
            gradient, scalars = self._slopes(state.params, batch, bases, (state.step, 0))
            state, norms = self._applied(state, gradient)
            return state, {**scalars, **norms}

        return jax.jit(whole, donate_argnums=0, out_shardings=(self.shardings, self.partitioner.replicated))

    def _applied(self, state: TrainState, gradient: dict[str, Any]) -> tuple[TrainState, dict[str, Array]]:
        """Makes one optimizer step of every trained model; a gradient that is not finite changes nothing and is counted."""
        counters, how, metrics = self._judged(state.step, state.skipped, gradient)
        params, moments = dict(state.params), {}
        for name in self.rules:
            updated = self._updated(name, how[name], params[name], gradient[name], state.moments[name])
            params[name], moments[name] = updated
        return TrainState(**counters, params=params, moments=moments), metrics

    def _judged(self, step: Array, skipped: Array, gradient: dict[str, Any]) -> tuple[dict[str, Array], Any, Any]:
        """Returns the state's counters after the update, {model: (factor of its gradient, whether it learns)}, and metrics."""
        norms = {name: optax.global_norm(rested(g, "float32")) for name, g in gradient.items()}
        finite = jnp.all(jnp.isfinite(jnp.stack(list(norms.values()))))
        how = {}
        for name in self.rules:
            limit = self.optimizers[name].max_grad_norm
            scale = jnp.minimum(1.0, limit / jnp.maximum(norms[name], 1e-30)) if limit else jnp.float32(1.0)
            how[name] = scale, finite & (step >= self.warmup) if self.warmup and name == "policy" else finite
        metrics = {f"grad_norm/{name}": norm for name, norm in norms.items()}
        metrics["update/skipped"] = 1.0 - finite.astype(jnp.float32)
        return {"step": step + 1, "skipped": jnp.where(finite, 0, skipped + 1)}, how, metrics

    def _updated(
        self, name: str, how: tuple[Array, Array], params: Any, gradient: Any, moments: Any
    ) -> tuple[Any, Any]:
        """Returns the parameters and moments of a model, or of some of its leaves, after the update."""
        scale, learns = how
        clipped = jax.tree.map(lambda g: g.astype(jnp.float32) * scale, gradient)
        changed, new = self.rules[name].updated(params, clipped, moments)
        mask = jax.tree.map(lambda m: learns & m, self._mask(name, params))
        return keep(changed, params, mask), keep(new, moments, mask)

    @cached_property
    def _move(self) -> Any:
        """The compiled step of the biases by which experts are chosen; a skipped gradient moves none."""

        def move(old: Any, counts: Array, skipped: Array, step: Array) -> Any:
            learns = (skipped == 0) & (step > self.warmup)  # `step` counts this update too
            mask = {part: learns & m for part, m in self._mask("policy", old).items()}
            return routers.moved(old, counts, self.router.bias_rate, mask)

        return jax.jit(move, donate_argnums=0, out_shardings=routers.biases(self.shardings.policy))

    def _rebiased(self, state: TrainState, scalars: Mapping[str, Any]) -> TrainState:
        """Returns the state after an update, with the biases of experts moved by the loads of its minibatch."""
        old = routers.biases(state.policy) if self.router.bias_rate and SUMS in scalars else {}
        if not old:
            return state
        new = self._move(old, scalars[SUMS]["counts"], scalars["update/skipped"], state.step)
        return replace(state, params={**state.params, "policy": routers.with_biases(state.policy, new)})

    @cached_property
    def _judge(self) -> Any:
        return jax.jit(self._judged, out_shardings=self.partitioner.replicated)

    @cached_property
    def _parts(self) -> dict[Any, Any]:
        """The compiled updates of some leaves of a model, for optimizers whose moments are in host memory."""
        return {}

    def _apply_parts(self, state: TrainState, gradient: dict[str, Any]) -> tuple[TrainState, dict[str, Array]]:
        """Updates as `_applied` does, where moments are in host memory, for one group of leaves at a time."""
        counters, how, metrics = self._judge(state.step, state.skipped, gradient)
        params, moments = dict(state.params), {}
        for name in self.rules:

            def apply(part: Any, g: Any, own: Any, name: str = name) -> tuple[Any, Any]:
                key = name, jax.tree.structure(part), offload.at(own)
                if key not in self._parts:
                    out = jax.tree.map(lambda x: x.sharding, (part, own))
                    update = partial(self._updated, name)
                    self._parts[key] = jax.jit(update, donate_argnums=(1, 3), out_shardings=out)
                return self._parts[key](how[name], part, g, own)

            run = offload.streamed if self.optimizers[name].offload else lambda apply, *args: apply(*args)
            params[name], moments[name] = run(apply, params[name], gradient[name], state.moments[name])
        return TrainState(**counters, params=params, moments=moments), metrics

    def _mask(self, name: str, parts: Mapping[str, Any]) -> dict[str, Any]:
        """Returns whether each part of a model's parameters learns in this phase."""
        if name != "policy" or self.trainable is None:
            return dict.fromkeys(parts, True)
        return self.trainable.mask(parts, self.policy.architecture.layers, self.policy.architecture.period)

    def update(
        self, state: TrainState, batches: Iterable[MicroBatch], bases: Bases = NO_BASES
    ) -> tuple[TrainState, dict[str, Array]]:
        """Makes one update from the micro-batches of a minibatch; donates `state`.

        Returns:
          The new state, and metrics on the device (float32 scalars): terms, the algorithm's metrics, gradient norms.
        """
        bases = dict(bases)
        batches = self._loaded(state.params, list(batches), bases)
        away = any(o.offload for o in self.optimizers.values())
        if len(batches) == 1 and not away:
            state, scalars = self._whole(state, batches[0], bases)
            return self._rebiased(state, scalars), self._told(scalars, batches)
        if len(batches) == 1:
            gradient, scalars = self._only(state.params, batches[0], bases, (state.step, np.uint32(0)))
        else:
            gradient = self._zeros()
            for number, batch in enumerate(batches):
                gradient, more = self._accumulate(gradient, state.params, batch, bases, (state.step, np.uint32(number)))
                scalars = self._plus(scalars, more) if number else more
        state, norms = (self._apply_parts if away else self._apply)(state, gradient)
        scalars = {**scalars, **norms}
        return self._rebiased(state, scalars), self._told(scalars, batches)

    def lowered(self, batch: MicroBatch, microbatches: int, bases: Bases = NO_BASES) -> dict[str, jax.stages.Lowered]:
        """Lowers the programs of an update with `microbatches` micro-batches like `batch`, or of scoring where it is 0, ready to be compiled.

        Only shapes and shardings of `batch` and `bases` matter; no parameters are needed.
        """
        state, bases = self.abstract, dict(bases)
        if microbatches == 0:
            return {"score": self._score.lower(state.params, batch, bases)}
        if self.balances:
            loads = jax.eval_shape(self._loads, state.params["policy"], batch, bases)
            batch = batch.replace(
                loads=jax.ShapeDtypeStruct(loads.shape, loads.dtype, sharding=self.partitioner.replicated)
            )
        away = any(o.offload for o in self.optimizers.values())
        if microbatches == 1 and not away:
            return {"whole": self._whole.lower(state, batch, bases)}
        place = state.step, jax.ShapeDtypeStruct((), np.uint32)
        if microbatches == 1:
            return {"only": self._only.lower(state.params, batch, bases, place)}
        found = {"accumulate": self._accumulate.lower(self.gradients, state.params, batch, bases, place)}
        return found if away else found | {"apply": self._apply.lower(state, self.gradients)}

    @property
    def compilations(self) -> int:
        """The number of programs compiled so far; it does not change after the first step of a phase."""
        made = [f for f in (*self.__dict__.values(), *self._parts.values()) if hasattr(f, "_cache_size")]
        return sum(f._cache_size() for f in made)
