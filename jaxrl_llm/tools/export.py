"""Writes a run's model as a Hugging Face folder: `python -m jaxrl_llm.tools.export RUN --out DIR [--step N | --best] [--dtype bfloat16]`.

--upload OWNER/NAME uploads the folder to the hub as a model, which is private unless --public is given; `hf auth login` or HF_TOKEN
gives the account.

Adapters are merged into the model's weights; --adapters writes them alone in PEFT's format. --model reward_model writes
the reward model that a stage trained, as a sequence classifier with one label.
"""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm import command_line
from jaxrl_llm.distributed import compilation_cache
from jaxrl_llm.models.hf_weights import save, save_adapters
from jaxrl_llm.models.lora import AdaptedPolicy
from jaxrl_llm.train.build import new_key
from jaxrl_llm.train.checkpoint import read_host, read_model
from jaxrl_llm.train.load import Saved, saved


def value_model(found: Saved, name: str) -> tuple[Any, Any]:
    """Returns the value model `name` ("critic" or "reward_model") that the checkpoint's stage trained, and its parameters.

    Raises:
      ValueError: the stage trained no such model.
    """
    number = read_host(found.folder, found.step)["stage"]
    stage = found.run.stages[number]
    if name not in stage.value_models:
        raise ValueError(
            f"checkpoint {found.step} is of stage {stage.name!r}, which has no {name} (it has {['policy', *stage.value_models]}): "
            "give --step of another stage's checkpoint, or another --model"
        )
    source = stage.value_models[name]
    model = source.model(found.policy)
    params = read_model(found.folder, found.step, model.abstract(), name, own=model.sizes())
    return model.plain, model.merged(params, source.base(model, new_key(found.run.seed, number)))


def write_adapters(found: Saved, out: Path, dtype: str) -> None:
    """Writes only the adapters, in PEFT's format.

    Raises:
      ValueError: the run trained no adapters.
      OSError: `out` exists or cannot be written.
    """
    if not isinstance(found.policy, AdaptedPolicy):
        raise ValueError("the run trained all weights and has no adapters: leave out --adapters")
    save_adapters(found.policy, found.trained(), out, base_name=found.run.policy.pretrained, dtype=dtype)


def write(
    run: Path,
    out: Path,
    *,
    step: int | None = None,
    best: bool = False,
    model: str = "policy",
    adapters: bool = False,
    dtype: str = "float32",
) -> Path:
    """Writes a checkpoint of a run as a Hugging Face folder; returns the folder. The arguments are those of the command.

    Raises:
      ValueError: the run has no such model or no adapters.
      OSError: `out` exists or cannot be written, or there is no such run or checkpoint.
    """
    if out.exists():
        raise FileExistsError(f"{out} exists: give a new folder")
    found = saved(run, step=step, best=best)
    if adapters:
        write_adapters(found, out, dtype)
    else:
        named = model == "policy"
        written, params = (found.policy.plain, found.merged()) if named else value_model(found, model)
        save(written, params, out, tokenizer=found.run.tokenizer.load(), dtype=dtype)
    return out


def upload(folder: Path, model: str, *, public: bool = False) -> str:
    """Uploads a folder's files to the hub as the model OWNER/NAME, which is created where it is missing; returns its address.

    An existing model keeps its visibility. HF_ENDPOINT names the hub.

    Raises:
      OSError: the hub cannot be reached or refuses, also where there is no token.
      ValueError: `model` is not OWNER/NAME.
    """
    from huggingface_hub import HfApi

    if not re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        raise ValueError(f"--upload needs OWNER/NAME of a model on the hub (got {model!r})")
    hub = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    try:
        hub.create_repo(model, private=not public, exist_ok=True)
        hub.upload_folder(repo_id=model, folder_path=folder, commit_message=f"Add {folder.name}")
    except (
        Exception
    ) as error:  # those of the hub, and of the client's transport, which is another package in other versions
        raise OSError(
            f"{folder} is written, and could not be uploaded to {model} ({' '.join(str(error).split())}): log in with `hf auth login`, or try again with "
            f"`hf upload {model} {folder}`"
        ) from error
    return f"{hub.endpoint}/{model}"


@command_line.told
def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line.parser("tools.export", __doc__)
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--out", type=Path, required=True, help="folder to write; must not exist")
    parser.add_argument("--step", type=int, help="checkpoint to export (default: the last)")
    parser.add_argument("--best", action="store_true", help="export the best checkpoint")
    parser.add_argument(
        "--model", default="policy", choices=("policy", "critic", "reward_model"), help="which to export"
    )
    parser.add_argument("--adapters", action="store_true", help="write the LoRA adapters alone, in PEFT's format")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--upload", metavar="OWNER/NAME", help="model on the hub to upload the folder to")
    parser.add_argument("--public", action="store_true", help="let everybody see a model that --upload makes")
    arguments = vars(parser.parse_args(argv))
    model, public = arguments.pop("upload"), arguments.pop("public")
    compilation_cache.keep()
    write(**arguments)
    print(f"wrote {arguments['out']}")
    if model is not None:
        print(f"uploaded to {upload(arguments['out'], model, public=public)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
