"""The former place of vllm_plugin: an import tells servers started with this name of the new one. It is removed one version later."""

raise ImportError(
    "jaxrl_llm.samplers.vllm_plugin is jaxrl_llm.publication.vllm_plugin now: change the flag of `vllm serve`"
)
