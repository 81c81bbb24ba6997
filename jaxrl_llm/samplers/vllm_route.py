"""The former place of vllm_route: an import tells servers started with this name of the new one. It is removed one version later."""

raise ImportError(
    "jaxrl_llm.samplers.vllm_route is jaxrl_llm.publication.vllm_route now: change the flag of `vllm serve`"
)
