"""Client of the Sinkhorn Service: entropic optimal transport, numpy in and out.

    >>> from sinkhorn_client import Client
    >>> with Client("localhost:8001") as client:
    ...     result = client.point_cloud(x, y, cost="squared_euclidean", epsilon=0.05)

`Client` (threads) and `AsyncClient` (asyncio) have the same methods; `problems` documents what can be solved, `results`
what comes back and `errors` what can go wrong.
"""

from sinkhorn_client import errors, problems, results
from sinkhorn_client._channel import CHANNEL_DEFAULTS, StreamReply
from sinkhorn_client.aio import AsyncClient
from sinkhorn_client.client import Client
from sinkhorn_client.errors import (
    Cancelled,
    DeadlineExceeded,
    DeviceLost,
    DeviceMemory,
    Diverged,
    Draining,
    Expired,
    InfeasibleDeadline,
    InternalError,
    InvalidField,
    InvalidRequest,
    ProblemTooLarge,
    QueueFull,
    ResourceExhausted,
    SinkhornError,
    Unauthenticated,
    Unavailable,
    Warming,
)
from sinkhorn_client.problems import CustomRecipe, Problem
from sinkhorn_client.results import (
    Convergence,
    Execution,
    HessianConvergence,
    NormalizationResult,
    ServerInfo,
    SparsePlan,
    TransportResult,
)

__all__ = [
    "CHANNEL_DEFAULTS",
    "AsyncClient",
    "Cancelled",
    "Client",
    "Convergence",
    "CustomRecipe",
    "DeadlineExceeded",
    "DeviceLost",
    "DeviceMemory",
    "Diverged",
    "Draining",
    "Execution",
    "Expired",
    "HessianConvergence",
    "InfeasibleDeadline",
    "InternalError",
    "InvalidField",
    "InvalidRequest",
    "NormalizationResult",
    "Problem",
    "ProblemTooLarge",
    "QueueFull",
    "ResourceExhausted",
    "ServerInfo",
    "SinkhornError",
    "SparsePlan",
    "StreamReply",
    "TransportResult",
    "Unauthenticated",
    "Unavailable",
    "Warming",
    "errors",
    "problems",
    "results",
]
