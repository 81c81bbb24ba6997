"""Where vllm_proxy was; hosts that start it by this name are told the new one. Goes one version later."""

raise ImportError(
    "jaxrl_llm.samplers.vllm.proxy is jaxrl_llm.samplers.vllm_proxy now, which needs no JAX: start that one"
)
