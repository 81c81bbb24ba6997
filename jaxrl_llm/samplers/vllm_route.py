"""Where vllm_route was; servers started with this name are told the new one. Goes one version later."""

raise ImportError(
    "jaxrl_llm.samplers.vllm_route is jaxrl_llm.publication.vllm_route now: change the flag of `vllm serve`"
)
