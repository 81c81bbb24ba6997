"""The former place of vllm_proxy: an import tells hosts that start it by this name of the new one. It is removed one version later."""

raise ImportError(
    "jaxrl_llm.samplers.vllm.proxy is jaxrl_llm.samplers.vllm_proxy now, which needs no JAX: start that one"
)
