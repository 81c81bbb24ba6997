"""launch/gke.sh: the manifests, checked against the fields that Kubernetes and JobSet require, and what kubectl is given."""

import base64
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import yaml
from stand_ins import LAUNCH, Machine

from jaxrl_llm.samplers.vllm_proxy import Proxy

TOKEN = "0123456789abcdef0123"
GIN = ["--gin_file=gin/grpo_gsm8k.gin", "--gin=RUN_DIR='/shared/runs/my \"run\" & $(x)'"]
CLUSTER = {
    "NAME": "trial",
    "NAMESPACE": "lab",
    "LEARNER_IMAGE": "registry.example/learner@sha256:12ab",
    "SAMPLER_IMAGE": "registry.example/sampler:1",
    "CLAIM": "filestore",
    "MODEL": "/shared/models/qwen",
    "TPU_ACCELERATOR": "tpu-v6e-slice",
    "TPU_TOPOLOGY": "4x4",
    "HOSTS": "4",
    "GPU_ACCELERATOR": "nvidia-h100-80gb",
    "GPUS": "2",
    "SAMPLERS": "3",
    "JAXRL_LLM_TOKEN": TOKEN,
}
# Required (dotted paths from the kind's root) by the API references of Kubernetes 1.32 and JobSet v1alpha2. A list is looked
# into whole.
REQUIRED = {
    "Service": ["spec.selector", "spec.ports.port"],
    "Deployment": [
        "spec.replicas",
        "spec.selector.matchLabels",
        "spec.template.metadata.labels",
        "spec.template.spec.containers",
    ],
    "NetworkPolicy": ["spec.podSelector", "spec.policyTypes", "spec.ingress.from.podSelector"],
    "JobSet": ["spec.replicatedJobs.name", "spec.replicatedJobs.template.spec.template.spec.restartPolicy"],
    "Secret": ["stringData.token"],
}
VERSIONS = {
    "Service": "v1",
    "Secret": "v1",
    "Deployment": "apps/v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "JobSet": "jobset.x-k8s.io/v1alpha2",
}
# Every field of a container that the manifests use, with its type.
CONTAINER = {
    "name": str, "image": str, "command": list, "args": list, "env": list, "ports": list, "resources": dict,
    "startupProbe": dict, "livenessProbe": dict, "readinessProbe": dict, "securityContext": dict, "volumeMounts": list,
    "lifecycle": dict,
}  # fmt: skip


@pytest.fixture
def machine(tmp_path) -> Machine:
    made = Machine(home=tmp_path, variables=dict(CLUSTER))
    made.tool(
        "kubectl",
        'case "$*" in *apply*) cat >>"$HOME/applied"; echo --- >>"$HOME/applied" ;; *"get jobset"*) cat "$HOME/there" 2>/dev/null || : ;; esac',
    )
    made.python("python3")
    return made


def manifests(text: str) -> dict[str, Any]:
    """{"Kind/name": manifest}."""
    found = [document for document in yaml.safe_load_all(text) if document]
    return {f"{document['kind']}/{document['metadata']['name']}": document for document in found}


@pytest.fixture
def shown(machine) -> dict[str, Any]:
    done = machine.run("gke.sh", "show", *GIN)
    assert done.returncode == 0, done.stderr
    assert TOKEN not in done.stdout and "${" not in done.stdout
    return manifests(done.stdout)


def at(document: Any, path: str) -> list[Any]:
    """What lies at a dotted path; of a list, what lies there in each element."""
    found = [document]
    for name in path.split("."):
        found = [y[name] for x in found for y in (x if isinstance(x, list) else [x])]
    return found


def pods(shown: dict[str, Any]) -> dict[str, Any]:
    """The two pod templates."""
    (job,) = shown["JobSet/trial-learner"]["spec"]["replicatedJobs"]
    return {
        "learner": job["template"]["spec"]["template"],
        "sampler": shown["Deployment/trial-samplers"]["spec"]["template"],
    }


def test_manifests_have_what_their_kinds_require(shown):
    assert set(shown) == {
        "Service/trial-samplers", "Deployment/trial-samplers", "NetworkPolicy/trial-samplers", "JobSet/trial-learner",
        "NetworkPolicy/trial-learner",
    }  # fmt: skip
    for manifest in shown.values():
        kind = manifest["kind"]
        assert manifest["apiVersion"] == VERSIONS[kind] and manifest["metadata"]["namespace"] == "lab"
        for path in REQUIRED[kind]:
            assert all(value not in (None, "", [], {}) for value in at(manifest, path)), f"{kind}: {path}"
    for pod in pods(shown).values():
        volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
        for container in pod["spec"]["containers"]:
            for name, value in container.items():
                assert isinstance(value, CONTAINER[name]), f"{container['name']}: {name}"
            assert {mount["name"] for mount in container.get("volumeMounts", [])} <= volumes
            assert all(isinstance(entry.get("value", ""), str) for entry in container["env"]), "values are texts"


def test_the_learner_is_a_job_of_each_slice_on_a_node_pool_of_its_own(machine):
    learner = manifests(machine.run("gke.sh", "show", *GIN, TPU_SLICES="2").stdout)["JobSet/trial-learner"]
    assert learner["metadata"]["annotations"] == {
        "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
    }
    assert learner["spec"]["failurePolicy"]["maxRestarts"] == 100
    (job,) = learner["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert (job["replicas"], spec["parallelism"], spec["completions"], spec["backoffLimit"]) == (2, 4, 4, 0)
    assert (spec["completionMode"], spec["template"]["spec"]["restartPolicy"]) == ("Indexed", "Never")
    selector = {"cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice", "cloud.google.com/gke-tpu-topology": "4x4"}
    assert spec["template"]["spec"]["nodeSelector"] == selector
    (container,) = spec["template"]["spec"]["containers"]
    assert container["command"] == ["launch/learner.sh"] and container["resources"]["limits"] == {"google.com/tpu": 4}
    assert container["args"] == [
        "--gin=VLLM_SPAWN=False", "--gin=VLLM_URLS_DNS='http://trial-samplers.lab.svc:9000'",
        "--gin=PUBLICATION='/shared/publication/trial'", "--gin=vllm.VllmSampler.proxied=True",
        "--gin=vllm.VllmSampler.api_key_variable='JAXRL_LLM_TOKEN'", GIN[0],
        "--gin=RUN_DIR='/shared/runs/my \"run\" & $$(x)'",  # $$( is Kubernetes' spelling of $(
        "--gin_file=gin/samplers/vllm.gin",
    ]  # fmt: skip


def test_only_learners_reach_the_proxies_and_nothing_reaches_vllm(shown):
    labels = {name: pod["metadata"]["labels"] for name, pod in pods(shown).items()}
    assert labels["learner"]["app.kubernetes.io/component"] != labels["sampler"]["app.kubernetes.io/component"]
    for name, target in (("samplers", "sampler"), ("learner", "learner")):
        policy = shown[f"NetworkPolicy/trial-{name}"]["spec"]
        assert policy["policyTypes"] == ["Ingress"] and len(policy["ingress"]) == 1
        assert policy["podSelector"]["matchLabels"].items() <= labels[target].items()
        assert at(policy, "ingress.from.podSelector.matchLabels")[0].items() <= labels["learner"].items()
    assert shown["NetworkPolicy/trial-samplers"]["spec"]["ingress"][0]["ports"] == [{"protocol": "TCP", "port": 9000}]
    service = shown["Service/trial-samplers"]["spec"]
    assert service["clusterIP"] == "None" and service["selector"].items() <= labels["sampler"].items()
    assert service["ports"] == [{"name": "proxy", "port": 9000, "targetPort": "proxy"}]
    vllm, proxy = pods(shown)["sampler"]["spec"]["containers"]
    assert "ports" not in vllm and {"name": "LISTEN", "value": "0.0.0.0"} in proxy["env"]
    assert "JAXRL_LLM_TOKEN" not in [entry["name"] for entry in vllm["env"]]
    for pod in pods(shown).values():
        assert pod["spec"]["automountServiceAccountToken"] is False and not pod["spec"].get("hostNetwork")
        for container in pod["spec"]["containers"]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False and context["capabilities"]["drop"] == ["ALL"]
            assert context["seccompProfile"] == {"type": "RuntimeDefault"}


def test_a_sampler_is_ready_when_vllm_answers_through_its_proxy(shown):
    vllm, proxy = pods(shown)["sampler"]["spec"]["containers"]
    assert vllm["startupProbe"]["exec"]["command"] == ["launch/healthy.sh", "http://127.0.0.1:8000/health"]
    assert proxy["readinessProbe"]["exec"]["command"] == ["launch/healthy.sh", "http://127.0.0.1:9000/health"]
    assert "livenessProbe" in vllm and "livenessProbe" in proxy
    assert vllm["startupProbe"]["periodSeconds"] * vllm["startupProbe"]["failureThreshold"] == 1800
    assert vllm["resources"]["limits"] == {"nvidia.com/gpu": 2}


def test_a_pod_that_is_taken_away_has_time_to_hand_back_what_it_had(machine, shown):
    """A preempted node gives a pod 15 s; the proxy takes 8 s at most, and vLLM is there meanwhile."""
    vllm, proxy = pods(shown)["sampler"]["spec"]["containers"]
    assert vllm["lifecycle"] == {"preStop": {"exec": {"command": ["sleep", "10"]}}} and "lifecycle" not in proxy
    assert Proxy(server="http://127.0.0.1:1", token=TOKEN).leave_s < 10
    nodes = [
        pods(manifests(machine.run("gke.sh", "show", *GIN, SPOT=spot).stdout))["sampler"]["spec"] for spot in ("", "1")
    ]
    spot = {"cloud.google.com/gke-spot": "true"}
    assert (
        nodes[1]["nodeSelector"] == nodes[0]["nodeSelector"] | spot
        and not spot.items() <= nodes[0]["nodeSelector"].items()
    )
    assert "SPOT is 1 or not set" in machine.run("gke.sh", "show", *GIN, SPOT="yes").stderr


def test_samplers_are_scaled_and_take_as_many_gpus_as_the_model_needs(machine, tmp_path):
    assert machine.run("gke.sh", "scale", "5").returncode == 0
    assert machine.calls() == [["kubectl", "--namespace=lab", "scale", "deployment", "trial-samplers", "--replicas=5"]]
    assert machine.run("gke.sh", "scale", "many").returncode == 2
    llama_70b = {
        "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 28672,
        "vocab_size": 128256,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(llama_70b))
    shown = machine.run("gke.sh", "show", *GIN, GPUS="", MODEL_CONFIG=str(tmp_path))
    vllm, _ = pods(manifests(shown.stdout))["sampler"]["spec"]["containers"]
    assert (
        vllm["resources"]["limits"] == {"nvidia.com/gpu": 4}
        and {"name": "TENSOR_PARALLEL", "value": "4"} in vllm["env"]
    )


def test_applying_creates_token_samplers_and_learner_and_leaves_a_learner_that_is_there(machine):
    done = machine.run("gke.sh", "apply", *GIN)
    assert done.returncode == 0, done.stderr
    kubectl = ["kubectl", "--namespace=lab"]
    get = [*kubectl, "get", "jobset", "trial-learner", "--ignore-not-found", "--output=name"]
    apply = [*kubectl, "apply", "-f", "-"]
    assert machine.calls() == [apply, apply, get, apply]
    applied = manifests((machine.home / "applied").read_text())
    assert applied["Secret/trial-token"]["stringData"] == {"token": TOKEN} and len(applied) == 6
    for path in REQUIRED["Secret"]:
        assert at(applied["Secret/trial-token"], path)
    (machine.home / "there").write_text("jobset.jobset.x-k8s.io/trial-learner\n")
    done = machine.run("gke.sh", "apply", *GIN)
    assert done.returncode == 0 and "is there already" in done.stderr
    assert machine.calls() == [apply, apply, get]


def test_a_sandbox_has_no_capability_reaches_nothing_and_is_reached_by_learners_alone(machine):
    done = machine.run("gke.sh", "show", *GIN, SANDBOXES="2")
    assert done.returncode == 0, done.stderr
    shown = manifests(done.stdout)
    spec = shown["Deployment/trial-sandbox"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    security = container["securityContext"]
    assert spec["replicas"] == 2 and spec["template"]["spec"]["automountServiceAccountToken"] is False
    assert security["capabilities"] == {"drop": ["ALL"]} and security["runAsNonRoot"] and security["runAsUser"] > 0
    assert security["seccompProfile"] == {"type": "RuntimeDefault"} and security["readOnlyRootFilesystem"]
    assert "--token_env" in container["args"] and "--allow_weak_isolation" not in container["args"]
    policy = shown["NetworkPolicy/trial-sandbox"]["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"] and "egress" not in policy
    ((source,),) = [rule["from"] for rule in policy["ingress"]]
    assert source["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "learner"
    (job,) = shown["JobSet/trial-learner"]["spec"]["replicatedJobs"]
    (learner,) = job["template"]["spec"]["template"]["spec"]["containers"]
    assert "--gin=sandbox/service.Service.urls=('http://trial-sandbox.lab.svc:8001',)" in learner["args"]


def test_a_tool_s_sandbox_is_named_by_its_macro_alone(machine):
    address = "--gin=SANDBOX='http://trial-sandbox.lab.svc:8001'"
    done = machine.run("gke.sh", "show", *GIN, address, SANDBOXES="2")
    assert done.returncode == 0, done.stderr
    (job,) = manifests(done.stdout)["JobSet/trial-learner"]["spec"]["replicatedJobs"]
    (learner,) = job["template"]["spec"]["template"]["spec"]["containers"]
    assert address in learner["args"] and not any("service.Service" in word for word in learner["args"])


def test_a_relay_in_each_pod_is_reached_by_learners_and_samplers_alone(machine, shown):
    """It lies in the memory that vLLM sees too, reads /shared alone, and the learner is told its port."""
    done = machine.run("gke.sh", "show", *GIN, RELAY_PORT="9100")
    assert done.returncode == 0, done.stderr
    found = manifests(done.stdout)
    assert "${" not in done.stdout and "relay" not in str(shown)
    vllm, _, relay = pods(found)["sampler"]["spec"]["containers"]
    variables = {entry["name"]: entry.get("value") for entry in relay["env"]}
    assert (
        variables["ONLY"] == "relay"
        and variables["RELAY_PORT"] == "9100"
        and relay["ports"][0]["containerPort"] == 9100
    )
    mounts = {m["mountPath"]: m["name"] for m in relay["volumeMounts"]}
    assert mounts == {m["mountPath"]: m["name"] for m in vllm["volumeMounts"]} and "/dev/shm" in mounts
    assert variables["RELAY_FOLDER"].startswith("/dev/shm/")
    assert relay["securityContext"] == vllm["securityContext"]
    proxies, relays = found["NetworkPolicy/trial-samplers"]["spec"]["ingress"]
    assert proxies == shown["NetworkPolicy/trial-samplers"]["spec"]["ingress"][0]
    assert relays["ports"] == [{"protocol": "TCP", "port": 9100}]
    components = at(relays, "from.podSelector.matchLabels")
    assert [labels["app.kubernetes.io/component"] for labels in components] == ["learner", "sampler"]
    assert {labels["app.kubernetes.io/instance"] for labels in components} == {"trial"}
    (job,) = found["JobSet/trial-learner"]["spec"]["replicatedJobs"]
    assert "--gin=VLLM_RELAY_PORT=9100" in job["template"]["spec"]["template"]["spec"]["containers"][0]["args"]
    assert "RELAY_PORT must be an integer" in machine.run("gke.sh", "show", *GIN, RELAY_PORT="any").stderr


def test_restarting_and_removing_leave_the_claim(machine):
    kubectl = ["kubectl", "--namespace=lab"]
    gone = [*kubectl, "delete", "jobset", "trial-learner", "--ignore-not-found", "--wait=true"]
    assert machine.run("gke.sh", "restart", *GIN).returncode == 0
    assert machine.calls() == [gone, [*kubectl, "apply", "-f", "-"]]
    assert machine.run("gke.sh", "delete").returncode == 0
    calls = machine.calls()
    assert calls[0] == gone and calls[1][2:5] == ["delete", "deployment,service,networkpolicy", "trial-samplers"]
    assert not any("pvc" in word or "persistentvolumeclaim" in word for call in calls for word in call)


def test_a_dry_run_shows_everything_but_the_token_and_calls_nothing(machine):
    done = machine.run("gke.sh", "--dry_run", "apply", *GIN)
    assert done.returncode == 0, done.stderr
    assert machine.calls() == [] and TOKEN not in done.stdout + done.stderr
    assert done.stdout.count("kubectl --namespace=lab apply -f -") == 2 and "kind: JobSet" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        (GIN, {"CLAIM": ""}, "set CLAIM"),
        (GIN, {"HOSTS": ""}, "HOSTS must be an integer >= 1"),
        (GIN, {"SAMPLER_IMAGE": 'x"}, {evil: '}, "SAMPLER_IMAGE may hold letters"),
        (GIN, {"JAXRL_LLM_TOKEN": "a\nb: c"}, "random token of at least 16"),
        ([], {}, "apply needs launch's arguments"),
    ],
)
def test_what_is_missing_or_unsafe_is_named_before_anything_is_done(machine, arguments, variables, message):
    done = machine.run("gke.sh", "apply", *arguments, **variables)
    assert done.returncode == 2 and message in done.stderr
    assert machine.calls() == []


def test_health_is_asked_with_the_token(tmp_path):
    program = (
        "import http.server, os\n"
        "class Handler(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        f"        good = self.headers['Authorization'] == 'Bearer {TOKEN}' and self.path == '/health'\n"
        "        self.send_response(200 if good else 401); self.end_headers()\n"
        "server = http.server.HTTPServer(('127.0.0.1', 0), Handler)\n"
        "print(server.server_port, flush=True)\n"
        "server.serve_forever()\n"
    )
    served = subprocess.Popen(
        [sys.executable, "-I", "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert served.stdout is not None
        url = f"http://127.0.0.1:{served.stdout.readline().strip()}/health"
        codes = []
        for token in (TOKEN, base64.b64encode(TOKEN.encode()).decode()):
            given = {**os.environ, "SAMPLER_PYTHON": sys.executable, "JAXRL_LLM_TOKEN": token}
            codes.append(subprocess.run([str(LAUNCH / "healthy.sh"), url], env=given, capture_output=True).returncode)
        assert codes == [0, 1]
    finally:
        served.kill()
        served.communicate()
