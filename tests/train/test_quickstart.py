"""The quickstart stays a matter of a minute: what its updates multiply is counted before anything runs."""

from jaxrl_llm import command_line

RATE = 30e9  # operations a processor second, at which updates with rows as short as these were measured
SECONDS = 60  # processor seconds for updates, of about 100 that two cores give in a minute of such a run


def test_the_products_of_the_quickstarts_updates_fit_their_share_of_a_minute():
    """Six operations for each weight of a layer and each position: two of the forward pass and four of the backward pass."""
    run, _ = command_line.build(["gin/quickstart.gin"])
    model = run.policy.architecture
    letters = run.stages[1].data.max_length
    weights = 2 * model.width * model.head_width * (model.heads + model.kv_heads) + 3 * model.width * model.mlp_width
    work = 0
    for stage in run.stages:
        in_a_row = stage.packing.row_tokens // len("s:" + letters * "a" + "=" + letters * "a" + "\n")
        rows = stage.prompts_per_step * stage.group_size // in_a_row
        assert rows // stage.minibatches == stage.packing.rows, (
            "a mini-batch fills one micro-batch, and no row is empty"
        )
        work += 6 * model.layers * weights * stage.steps * rows * stage.packing.row_tokens
    assert work <= RATE * SECONDS
