"""Files to deploy with say what this server understands: flags, paths, ports, times."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from command_line import parse
from paths import ROOT
from quire.cli.flags import to_engine, to_server
from quire.cli.serve import with_config
from quire.server.keys import read_keys
from quire.server.routes import TABLE
from quire.server.server_options import ServerOptions

yaml = pytest.importorskip("yaml")

DEPLOY = ROOT / "deploy"
PATHS = {route.path for route in TABLE.routes}


def options_of(file: Path) -> ServerOptions:
    """What a file of flags says of the server; all flags are read as the command line reads them."""
    given = with_config(str(file), {})
    to_engine(given)
    return to_server(given)


def test_the_file_of_flags() -> None:
    options = options_of(DEPLOY / "quire.toml")
    assert (options.host, options.port, options.shutdown_timeout) == ("0.0.0.0", 8000, 30)


def test_the_unit() -> None:
    text = (DEPLOY / "quire.service").read_text()
    (command,) = re.findall(r"^ExecStart=\S+/quire (.+)$", text, re.MULTILINE)
    parse(command.split())
    drain = options_of(DEPLOY / "quire.toml").shutdown_timeout
    assert int(re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)[0]) > drain
    assert "api-keys-file" in (DEPLOY / "quire.toml").read_text(), "or a reload would drain the server"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "quire.service"
    text = (DEPLOY / "quire.service").read_text()
    unit.write_text(re.sub(r"^ExecStart=\S+", f"ExecStart={sys.executable}", text, flags=re.MULTILINE))
    run = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0 and not run.stderr, run.stderr
    unit.write_text(text.replace("KillMode=mixed", "KillMode=gently"))
    run = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=60)
    assert "gently" in run.stderr


@pytest.fixture
def manifests() -> dict[str, Any]:
    found = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    return {each["kind"]: each for each in found}


def test_the_manifests(manifests: dict[str, Any], tmp_path: Path) -> None:
    flags, keys = tmp_path / "quire.toml", tmp_path / "keys.json"
    flags.write_text(manifests["ConfigMap"]["data"]["quire.toml"])
    keys.write_text(manifests["Secret"]["stringData"]["keys.json"])
    options = options_of(flags)
    assert read_keys(str(keys))
    pod = manifests["Deployment"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    parse(container["args"])
    assert container["ports"][0]["containerPort"] == options.port
    assert int(pod["metadata"]["annotations"]["prometheus.io/port"]) == options.port
    probes = [container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")]
    assert {*probes, pod["metadata"]["annotations"]["prometheus.io/path"]} <= PATHS
    assert pod["spec"]["terminationGracePeriodSeconds"] > options.shutdown_timeout + 5
    assert container["resources"]["requests"] == container["resources"]["limits"], "or threads are throttled"
    assert manifests["Service"]["spec"]["selector"] == pod["metadata"]["labels"]


def test_every_mount_is_a_volume(manifests: dict[str, Any]) -> None:
    spec = manifests["Deployment"]["spec"]["template"]["spec"]
    mounts = {mount["name"]: mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in spec["volumes"]}
    flags = tomllib.loads(manifests["ConfigMap"]["data"]["quire.toml"])
    for name, path in (("models", flags["model"]), ("keys", flags["api-keys-file"])):
        assert path.startswith(mounts[name] + "/")
    claims = {v["persistentVolumeClaim"]["claimName"] for v in spec["volumes"] if "persistentVolumeClaim" in v}
    assert claims == {manifests["PersistentVolumeClaim"]["metadata"]["name"]}


def test_the_container_copies_what_is_there() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    for words in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE):
        for name in words.split()[:-1]:
            assert (ROOT / name).exists(), name
    (arguments,) = re.findall(r"^CMD \[(.+)\]$", text, re.MULTILINE)
    parse([word.strip(' "') for word in arguments.split(",")])
    extras = re.findall(r"'\.\[(.+?)\]'", text)[0].split(",")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras) <= set(project["optional-dependencies"])


def test_the_compose_file() -> None:
    found = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    service = found["services"]["quire"]
    assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).resolve() == DEPLOY / "Containerfile"
    parse(service["command"])
    given = dict(pairwise(service["command"]))
    port = given["--port"]
    assert given["--host"] == "0.0.0.0" and service["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert int(service["stop_grace_period"].removesuffix("s")) > int(given["--shutdown-timeout"])
    address = re.findall(r"http://127\.0\.0\.1:(\d+)(/\w+)", service["healthcheck"]["test"][-1])
    assert address == [(port, "/readyz")] and "/readyz" in PATHS
    mounts = [volume.rsplit(":ro")[0].rsplit(":", 1)[-1] for volume in service["volumes"]]
    assert service["command"][1].startswith(mounts[0] + "/") and mounts[1] == "/cache"
    assert f"XDG_CACHE_HOME={mounts[1]}" in (DEPLOY / "Containerfile").read_text()
    assert {volume.split(":")[0] for volume in service["volumes"][1:]} == set(found["volumes"])
