"""The JobSet examples/jobset.yaml has the fields and types of its schema, and its values are consistent.

The fields are those of `api/jobset/v1alpha2/jobset_types.go` of kubernetes-sigs/jobset at commit 0336a8f, and of JobSpec, PodSpec
and Container in Kubernetes 1.31 (`batch/v1`, `v1`), as far as a training job needs them: the API server would drop or refuse any
other.
"""

import pathlib
import re

import pytest
import yaml

from launch import command

MANIFEST = pathlib.Path(__file__).resolve().parents[1] / "examples/jobset.yaml"


class Required(str):
    """A required field."""


ANY = object()
NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
QUANTITY = (int, str)
POD_FAILURES = {
    Required("rules"): [
        {
            Required("action"): {"FailJob", "FailIndex", "Ignore", "Count"},
            "onExitCodes": {"containerName": NAME, Required("operator"): {"In", "NotIn"}, Required("values"): [int]},
        }
    ]
}
CONTAINER = {
    Required("name"): NAME,
    "image": str,
    "workingDir": str,
    "command": [str],
    "args": [str],
    "env": [{Required("name"): str, "value": str}],
    "ports": [{Required("containerPort"): int, "name": NAME, "protocol": {"TCP", "UDP", "SCTP"}}],
    "resources": {"limits": {ANY: QUANTITY}, "requests": {ANY: QUANTITY}},
    "volumeMounts": [{Required("name"): NAME, Required("mountPath"): str, "readOnly": bool, "subPath": str}],
}
POD = {
    Required("containers"): [CONTAINER],
    "restartPolicy": {"OnFailure", "Never"},  # of a Job
    "terminationGracePeriodSeconds": int,
    "serviceAccountName": NAME,
    "nodeSelector": {ANY: str},
    "volumes": [{Required("name"): NAME, "persistentVolumeClaim": {Required("claimName"): NAME, "readOnly": bool}}],
}
JOB = {
    "completionMode": {"Indexed", "NonIndexed"},
    "completions": int,
    "parallelism": int,
    "backoffLimit": int,
    "podFailurePolicy": POD_FAILURES,
    Required("template"): {"metadata": {"labels": {ANY: str}}, Required("spec"): POD},
}
ACTIONS = {"FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts", "RestartJob", "RestartJobAndIgnoreMaxRestarts"}
REASONS = {"BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "MaxFailedIndexesExceeded", "PodFailurePolicy"}
JOBSET = {
    Required("apiVersion"): {"jobset.x-k8s.io/v1alpha2"},
    Required("kind"): {"JobSet"},
    Required("metadata"): {Required("name"): NAME, "namespace": NAME, "labels": {ANY: str}, "annotations": {ANY: str}},
    Required("spec"): {
        Required("replicatedJobs"): [
            {
                Required("name"): NAME,
                "groupName": str,
                "replicas": int,
                Required("template"): {"metadata": {}, Required("spec"): JOB},
            }
        ],
        "network": {"enableDNSHostnames": bool, "subdomain": NAME, "publishNotReadyAddresses": bool},
        "successPolicy": {Required("operator"): {"All", "Any"}, "targetReplicatedJobs": [str]},
        "failurePolicy": {
            "maxRestarts": int,
            "restartStrategy": {"Recreate", "BlockingRecreate", "InPlaceRestart"},
            "rules": [
                {
                    Required("name"): re.compile(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?"),
                    Required("action"): ACTIONS,
                    "onJobFailureReasons": [REASONS],
                    "onJobFailureMessagePatterns": [str],
                    "targetReplicatedJobs": [str],
                }
            ],
        },
        "suspend": bool,
        "coordinator": {Required("replicatedJob"): str, "jobIndex": int, "podIndex": int},
        "ttlSecondsAfterFinished": int,
    },
}


def faults(value, schema, where="manifest"):
    """Yield the violations of a schema: a type or types, a set of words, a pattern, a list of one schema, or fields."""
    if isinstance(schema, dict):
        if not isinstance(value, dict):
            return [f"{where} is no section"]
        fields = {str(name): inner for name, inner in schema.items() if name is not ANY}
        found = [f"{where} lacks {name}" for name in schema if isinstance(name, Required) and name not in value]
        for name, held in value.items():
            if name in fields:
                found += faults(held, fields[name], f"{where}.{name}")
            else:
                found += faults(held, schema[ANY], f"{where}.{name}") if ANY in schema else [f"{where}.{name} is unknown"]
        return found
    if isinstance(schema, list):
        if not isinstance(value, list):
            return [f"{where} is no list"]
        return [fault for index, held in enumerate(value) for fault in faults(held, schema[0], f"{where}[{index}]")]
    if isinstance(schema, set):
        fits = value in schema
    elif isinstance(schema, re.Pattern):
        fits = isinstance(value, str) and bool(schema.fullmatch(value))
    else:
        fits = isinstance(value, schema) and (schema is bool or not isinstance(value, bool))
    return [] if fits else [f"{where}={value!r}"]


@pytest.fixture
def manifest():
    return yaml.safe_load(MANIFEST.read_text())


def test_it_has_the_fields_and_types_of_the_schema(manifest):
    assert faults(manifest, JOBSET) == []


def test_it_says_the_same_everywhere(manifest):
    (job,) = manifest["spec"]["replicatedJobs"]
    spec, pod = job["template"]["spec"], job["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    flags = dict(re.findall(r"--(\w+)=(\S+)", container["args"][0]))
    # The name of a pod: JobSet, job, index of the job, index of the pod; the subdomain is the JobSet's name.
    name, port = manifest["metadata"]["name"], container["ports"][0]["containerPort"]
    assert flags["coordinator"] == f"{name}-{job['name']}-0-0.{name}:{port}"
    assert int(flags["num_processes"]) == spec["completions"] == spec["parallelism"]
    assert flags["process_index"] == "$JOB_COMPLETION_INDEX" and spec["completionMode"] == "Indexed"
    assert f"workers={flags['num_processes']}" in flags["config"]
    (rule,) = spec["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["values"] == [command.USER_ERROR, command.DIVERGED]
    assert rule["onExitCodes"]["containerName"] == container["name"] and pod["restartPolicy"] == "Never"  # required by the rule
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert any(flags["workdir"].startswith(mount["mountPath"]) for mount in container["volumeMounts"])


@pytest.mark.parametrize(
    "changed, fault",
    [
        ({"apiVersion": "v1"}, "manifest.apiVersion='v1'"),
        ({"spec": {}}, "manifest.spec lacks replicatedJobs"),
        ({"spec": {"replicatedJobs": [], "replicas": 1}}, "manifest.spec.replicas is unknown"),
        ({"spec": {"replicatedJobs": {}}}, "manifest.spec.replicatedJobs is no list"),
        ({"spec": {"replicatedJobs": [], "suspend": "no"}}, "manifest.spec.suspend='no'"),
        ({"spec": {"replicatedJobs": [], "ttlSecondsAfterFinished": True}}, "manifest.spec.ttlSecondsAfterFinished=True"),
    ],
)
def test_a_fault_is_seen(manifest, changed, fault):
    assert faults(manifest | changed, JOBSET) == [fault]
