"""The choice of the transport that carries the weights."""

from __future__ import annotations

import logging

from hybridflow.core.contracts.capabilities import TransportCapabilities
from hybridflow.core.contracts.transport import Link, Transport
from hybridflow.core.errors import HybridFlowError, PluginError
from hybridflow.core.job.job import AUTO, Chosen
from hybridflow.core.plugins import registry

log = logging.getLogger(__name__)


def connect(chosen: Chosen, link: Link) -> Transport:
    """Return the chosen transport, or for "auto" the first that can connect the ranks.

    Raises HybridFlowError with the reasons where none can.
    """
    # A named transport is not replaced by another one.
    reasons = []
    for name in automatic(link) if chosen.name == AUTO else [chosen.name]:
        transport: type[Transport] = registry().get("transport", name)
        reason = transport.problem(link, chosen.config)
        if reason is None:
            return transport(link, chosen.config)
        reasons.append(f"{name}: {reason}")
    raise HybridFlowError("no transport can move the weights; " + "; ".join(reasons))


def automatic(link: Link) -> list[str]:
    """Return the transports that "auto" tries, by the order that they declare.

    Within one process group those that stay inside a pool come first.
    """
    orders: dict[str, tuple[bool, int]] = {}
    for name in registry().names("transport"):
        if registry().descriptor("transport", name).missing():  # packages that it needs
            continue

        # A transport without an order is used only when it is named.
        try:
            can = registry().capabilities("transport", name)
            if isinstance(can, TransportCapabilities) and can.order is not None:
                crosses = registry().get("transport", name).crosses_pools
                orders[name] = (link.grouped and crosses, can.order)
        except PluginError as error:
            log.warning("sync.transport = auto leaves %s out: %s", name, error)
    return sorted(orders, key=lambda name: orders[name])
