"""Where vllm_plugin was; servers started with this name are told the new one. Goes one version later."""

raise ImportError(
    "jaxrl_llm.samplers.vllm_plugin is jaxrl_llm.publication.vllm_plugin now: change the flag of `vllm serve`"
)
