"""A real coordinator, a real agent, and a launcher that is played by the test."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.agent.stage import AgentProcess, RawClient, Stage
from tests.waiting import wait_until

from everstep.wire.messages import (
    BindStore,
    Committed,
    Hello,
    Join,
    Joined,
    Link,
    Numbered,
    Plan,
    RankEnded,
    RanksStarted,
    StoreBound,
)

TOKEN = "the-join-token"
TRACEBACK = "Traceback (most recent call last):\n  ...\nValueError: \x1b[2Jno such shard: 7"


class Coordinator:
    """`everstep coordinator` as a process of its own."""

    def __init__(self, folder: Path, config: str = "") -> None:
        self.folder = folder
        self.log = folder / "coordinator.log"
        file = folder / "coordinator.toml"
        file.write_text(
            f'[coordinator]\nlisten = "127.0.0.1:0"\nstate_dir = "{folder / "state"}"\n'
            f'token = "{TOKEN}"\nsettle_s = 0.1\n{config}'
        )
        command = [sys.executable, "-m", "everstep.cli", "coordinator", "--config", str(file)]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        wait_until("the coordinator is ready", self._is_ready)

    @property
    def address(self) -> str:
        found = re.search(r"coordinator ready listen=(\S+)", self.log.read_text())
        assert found is not None, self.log.read_text()
        return found[1]

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def close(self) -> None:
        self._process.kill()
        self._process.wait(10)

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, self.log.read_text()
        return "coordinator ready" in self.log.read_text()


@dataclass
class Scene:
    """Who is on stage."""

    stage: Stage = field(default_factory=Stage)

    def __post_init__(self) -> None:
        self.coordinator = Coordinator(self.stage.folder)

    def agent(self, name: str = "n1") -> AgentProcess:
        config = f'[agent]\ncoordinators = ["{self.coordinator.address}"]\ntoken = "{TOKEN}"\n'
        return self.stage.agent(name=name, config=config)

    def launcher(self, agent: AgentProcess) -> Launcher:
        return Launcher(self.stage.client(agent))

    def close(self) -> None:
        self.coordinator.close()
        self.stage.close()


class Launcher:
    """Does what a launcher of one rank would, as far as the coordinator can tell."""

    def __init__(self, client: RawClient) -> None:
        self._client = client
        self.nonce = ""

    def join(self, run_id: str) -> None:
        """Join, as the only node of the job."""
        self._client.say(Hello(role="launcher"))
        self._client.expect(Link, lambda link: link.up)
        join = Join(
            run_id=run_id,
            nonce=None,
            min_nodes=1,
            max_nodes=1,
            local_world_size=1,
            address="127.0.0.1",
            command="train.py",
        )
        self._client.say(join)
        self.nonce = self._client.expect(Joined).nonce

    def run(self, generation: int) -> Plan:
        """Bind the store that is asked for and start a rank under the plan that follows."""
        self._client.expect(BindStore, lambda m: m.generation == generation)
        bound = StoreBound(nonce=self.nonce, generation=generation, address="127.0.0.1", port=29500)
        self._client.say(bound)
        committed = self._client.expect(Committed, lambda m: m.plan.generation == generation)
        started = RanksStarted(
            nonce=self.nonce, generation=generation, pids=[os.getpid()], ranks=[0]
        )
        self._client.say(Numbered(seq=generation * 2, body=started))
        return committed.plan

    def fail(self, generation: int) -> None:
        """Tell that the rank ended with a traceback."""
        ended = RankEnded(
            nonce=self.nonce,
            generation=generation,
            rank=0,
            local_rank=0,
            pid=os.getpid(),
            exit_code=1,
            signal=None,
            at_s=time.time(),
            error=TRACEBACK,
        )
        self._client.say(Numbered(seq=generation * 2 + 1, body=ended))
