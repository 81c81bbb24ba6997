"""The native weight-transfer engine `orbax` of vLLM 0.26 and newer: the plugin's reading and checks behind vLLM's own update routes.

    POST /init_weight_transfer_engine {"init_info": {}}, /start_weight_update,
    /update_weights {"update_info": {"path": "...", "version": 3}}, /finish_weight_update

vLLM takes the parameters away at the start of an update. Here that waits until the version is read and checked, so that a bad one
leaves the old weights serving. The routes tell of a bad version by an exception, which vLLM survives on one rank only: servers with
several use the worker extension.
"""

from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from jaxrl_llm.publication.vllm_plugin import UNKNOWN, agreed, repack_tied_head, set_version, stager_for, whole_tensors
from jaxrl_llm.publication.vllm_targets import targets_of


@dataclass
class OrbaxInitInfo(WeightTransferInitInfo):
    """There is nothing to agree on beforehand."""


@dataclass
class OrbaxUpdateInfo(WeightTransferUpdateInfo):
    """One published version.

    Attributes:
      path: its folder or address.
      version: its number.
    """

    path: str
    version: int


class OrbaxWeightTransferEngine(WeightTransferEngine[OrbaxInitInfo, OrbaxUpdateInfo]):
    """Reads, checks and loads a whole version in one `update_weights`."""

    init_info_cls = OrbaxInitInfo
    update_info_cls = OrbaxUpdateInfo

    def init_transfer_engine(self, init_info: OrbaxInitInfo) -> None:
        """Nothing to set up."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        """As vLLM's; NotImplementedError on more than one rank."""
        super().__init__(*arguments, **named)
        if self.parallel_config.world_size != 1:
            raise NotImplementedError(
                f"the engine `orbax` serves one rank, this server has {self.parallel_config.world_size}: "
                "start it with --worker-extension-cls jaxrl_llm.publication.vllm_plugin.OrbaxWorkerExtension instead"
            )

        self._stager = stager_for(self.device)

    def start_weight_update(self) -> None:
        """Nothing yet: the parameters stay until a version is known to be good."""

    def receive_weights(self, update_info: OrbaxUpdateInfo) -> None:
        """Reads, checks and loads; a bad version raises BadVersion and leaves the model as it was."""
        stager = self._stager
        targets = targets_of(self.model)
        stager.read(update_info.path, int(update_info.version), targets)
        staged = agreed(stager, int(update_info.version), targets)
        assert staged is not None
        set_version(self.model, UNKNOWN)
        initialize_layerwise_reload(self.model)
        try:
            self.model.load_weights(whole_tensors(staged.parts, targets, self.device))
        finally:
            finalize_layerwise_reload(self.model, self.model_config)
        repack_tied_head(self.model)
        set_version(self.model, staged.manifest.version)
        del staged
        stager.drop()

    def finish_weight_update(self) -> None:
        """Nothing is left to do."""

    def shutdown(self) -> None:
        """Holds no resources."""
