"""Who answers: the agent of this machine and the coordinator."""

from __future__ import annotations

from importlib.metadata import version

from everstep.cli.api import ApiError, ApiRefusedError
from everstep.cli.doctor.checks import Found, Patient
from everstep.cli.local import AgentUnreachableError, ask_agent
from everstep.wire.ids import agent_socket


def agent(patient: Patient) -> Found:
    """Ask the local agent how it is."""
    path = patient.socket or agent_socket(patient.environ)
    try:
        status = ask_agent("status", path)
    except AgentUnreachableError as exc:
        # One that is not there was perhaps never started here; one that does not answer is broken.
        absent = isinstance(exc.__cause__, FileNotFoundError | ConnectionRefusedError)
        if not absent:
            return Found("missing", str(exc), "everstep status", broken=True)
        advice = "everstep agent --coordinator HOST:PORT, or everstep agent --with-coordinator"
        return Found("warn", f"none runs on {path}", advice)
    text = f"{status['node']} on {path}"
    if status["reasons"]:
        return Found("warn", f"{text}: {'; '.join(status['reasons'])}", "everstep status")
    if status["version"] != version("everstep"):
        return Found("warn", f"{text} is everstep {status['version']}", "restart the agent")
    return Found("ok", text)


def coordinator(patient: Patient) -> Found:
    """Ask the coordinator for its nodes, as any verb would."""
    try:
        nodes = patient.api.get("nodes")["nodes"]
    except ApiRefusedError as exc:
        return Found("missing", str(exc), "--token or EVERSTEP_TOKEN", broken=True)
    except ApiError as exc:
        if not patient.coordinator_named:
            advice = "name it with --coordinator, EVERSTEP_COORDINATOR or in the configuration"
            return Found("warn", f"none on {patient.api.url}", advice)
        return Found("missing", str(exc), "everstep coordinator", broken=True)
    return Found("ok", f"{patient.api.url} knows {len(nodes)} nodes")
