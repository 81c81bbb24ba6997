"""The flags that launchers give a learner make the sampler that was meant."""

import importlib.util

import pytest
import yaml
from stand_ins import Machine, commands
from test_gke import CLUSTER

from jaxrl_llm.command_line import build
from jaxrl_llm.launch import parse_arguments
from jaxrl_llm.samplers.vllm.sampler import VllmSampler

GIN = ["--gin_file=gin/quickstart.gin"]


def sampler_of(arguments: list[str]) -> VllmSampler:
    """The sampler of the run that launch makes of its arguments."""
    asked = parse_arguments([a for a in arguments if a != "--distributed"])
    run, _ = build(asked.gin_file, asked.gin)
    return run.sampler


def test_samplers_that_are_listed_are_asked_through_their_proxies(tmp_path):
    machine = Machine(home=tmp_path)
    machine.tool("ssh")
    machine.tool("curl")
    variables = {
        "SAMPLER_HOSTS": "a b",
        "MODEL": "/m",
        "PUBLICATION": "/nfs/p",
        "JAXRL_LLM_TOKEN": "0123456789abcdef",
        "SAMPLER_GPUS": "1",
    }
    done = machine.run("gpu_samplers.sh", "--dry_run", "run", *GIN, **variables)
    sampler = sampler_of(commands(done.stdout)[-1][1:])
    assert (sampler.spawn, tuple(sampler.urls)) == (False, ("http://a:9000", "http://b:9000"))
    assert (sampler.proxied, sampler.api_key_variable, sampler.publication) == (True, "JAXRL_LLM_TOKEN", "/nfs/p")


@pytest.mark.skipif(
    importlib.util.find_spec("jaxrl_llm.samplers.servers.discovery") is None,
    reason="samplers are not found by name in this checkout",
)
def test_samplers_of_a_cluster_are_found_by_the_name_of_their_service(tmp_path):
    machine = Machine(home=tmp_path, variables=dict(CLUSTER))
    machine.tool("kubectl")
    machine.python("python3")
    shown = [d for d in yaml.safe_load_all(machine.run("gke.sh", "show", *GIN).stdout) if d["kind"] == "JobSet"]
    (job,) = shown[0]["spec"]["replicatedJobs"]
    sampler = sampler_of(job["template"]["spec"]["template"]["spec"]["containers"][0]["args"])
    assert sampler.discovery.dns == "http://trial-samplers.lab.svc:9000" and sampler.proxied and not sampler.spawn
