"""The tutorial's commands and code do what its pages say, on copies of its files."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.e2e.serving import serving, wait_until
from tests.support.decoding import decode

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/tutorial/two-stages.md").read_text()
DOCKER = (ROOT / "docs/how-to/run-in-docker.md").read_text()

pytestmark = [pytest.mark.slow, pytest.mark.e2e]


def commands() -> list[str]:
    """Return the page's shell commands."""
    return re.findall(
        r"^    (\S.*)$", re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL), re.MULTILINE
    )


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder that has what the page starts from: the examples, and an environment."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (tmp_path / ".venv").symlink_to(Path(sys.prefix))
    return tmp_path


def shell(command: str, folder: Path) -> str:
    """Run a command as it stands on the page."""
    done = subprocess.run(
        ["/bin/bash", "-c", command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_the_tutorial_runs_as_it_stands(clone: Path) -> None:
    """Copy, check, look, serve, ask, watch, break: in the page's order."""
    steps = commands()
    assert len(steps) == 11, "a command was added or removed: run it below"
    copy, check, show, explain, serve, ask, ps, named, story, kill, debug = steps
    shell(copy, clone)
    code = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]
    (clone / "mine/check.py").write_text(code)
    assert "both keep the contract" in shell(".venv/bin/python mine/check.py", clone)
    assert shell(check, clone) == "ok: morse with 2 stages and 2 replicas\n"
    assert "# default" in shell(show, clone)
    assert "default" in shell(explain, clone)
    assert serve == ".venv/bin/stretto serve mine/morse.yaml"
    with serving("mine/morse.yaml", cwd=clone) as server:

        def here(command: str) -> str:
            return shell(command.replace("http://127.0.0.1:8000", server.url), clone)

        here(ask)
        found = decode((clone / "morse.wav").read_bytes())
        assert (found.rate_hz, found.channels) == (8000, 1)
        assert found.frames > 3 * 8000
        assert "tone" in here(ps)
        here(named)
        assert decode((clone / "sos.mp3").read_bytes()).frames > 8000
        assert "tone: dispatched to tone/0#1" in here(story)
        pattern = re.findall(r"pkill -f '(.*)'", kill)[0]
        (replica,) = server.processes("tone/0")
        assert pattern in " ".join(replica.cmdline())
        replica.kill()
        wait_until(lambda: "tone/0#2" in told(server.url, here))
    assert debug == f"{serve} --debug tone"


def told(url: str, here: object) -> str:
    """Return the story of one more request, served by whoever is there."""
    request = urllib.request.Request(  # noqa: S310 - our own server
        f"{url}/v1/audio/speech", b'{"input":"e"}', {"x-request-id": "again"}
    )
    try:
        with urllib.request.urlopen(request, timeout=20) as reply:  # noqa: S310 - as above
            reply.read()
    except OSError:
        return ""
    assert callable(here)
    return str(here(".venv/bin/stretto story again"))


def test_the_dockerfile_uses_what_is_there() -> None:
    """There is no Docker here to build it with: its script and its verbs exist, and it runs as a user."""
    text = re.findall(r"```dockerfile\n(.*?)```", DOCKER, re.DOTALL)[0]
    assert "scripts/install serve" in text
    assert (ROOT / "scripts/install").exists()
    assert re.search(r"^USER stretto$", text, re.MULTILINE)
    assert 'CMD ["serve", "--host", "0.0.0.0"]' in text
