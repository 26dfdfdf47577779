"""The callers of the soak: each kind of call, and how it must end."""

import random
import time

import grpc
import numpy as np
from google.rpc import error_details_pb2, status_pb2
from sinkhorn_client._proto import sinkhorn_pb2 as pb

from tests.load import problems

SERVICE = "/sinkhorn.v1.SinkhornService/"
KINDS = {"solve": 70, "stream": 8, "cancel": 6, "deadline": 6, "bad": 7, "anytime": 3}  # And how often, of 100.
TIMEOUT = 600  # Of calls that are to be answered, in seconds.


def identified(body, name):
    """The encoded request with this id: protobuf takes the last of a field that comes twice."""
    return body + pb.SolveRequest(request_id=name).SerializeToString()


def reason(details):
    rich, info = status_pb2.Status.FromString(details or b""), error_details_pb2.ErrorInfo()
    return next((info.reason for detail in rich.details if detail.Unpack(info)), "")


class Caller:
    """One who calls, of each kind in turn by chance, and looks at all that comes back."""

    def __init__(self, number, load, seed):
        self.number, self.load, self.random = number, load, random.Random(seed)
        self.count = 0

    def connect(self, channel):
        none = {"request_serializer": None}
        self.solve = channel.unary_unary(SERVICE + "Solve", response_deserializer=pb.SolveResponse.FromString, **none)
        self.stream = channel.stream_stream(
            SERVICE + "SolveStream", response_deserializer=pb.SolveStreamResponse.FromString, **none
        )

    def call(self, kind):
        started = time.monotonic()
        try:
            problem = getattr(self, "call_" + kind)()
        except grpc.RpcError as error:
            problem = f"{error.code().name}: {error.details()}"
        self.load.ended(kind, problem, time.monotonic() - started)

    def next_id(self):
        self.count += 1
        return f"caller-{self.number}-{self.count}"

    def pick(self):
        return self.random.choices(self.load.cases, self.load.weights)[0]

    def look(self, case, name, reply):
        if reply.request_id != name:
            return f"the answer to {name} says {reply.request_id}"
        return None if problems.bits_of(reply) == case.bits else f"{case.name}: other bits than before"

    def call_solve(self):
        case, name = self.pick(), self.next_id()
        return self.look(case, name, self.solve(identified(case.body, name), timeout=TIMEOUT))

    def call_stream(self):
        """Several problems on one call: each is answered once, in any order."""
        sent = {self.next_id(): self.pick() for _ in range(self.random.randint(2, 12))}
        messages = [pb.SolveStreamRequest(solve=pb.SolveRequest.FromString(c.body)) for c in sent.values()]
        for message, name in zip(messages, sent):
            message.solve.request_id = name
        encoded = (message.SerializeToString() for message in messages)
        for reply in self.stream(encoded, timeout=TIMEOUT):
            case = sent.pop(reply.request_id, None)
            if case is None:
                return f"a stream answers {reply.request_id!r}, which it was not asked or has answered"
            if reply.WhichOneof("result") != "solve":
                return f"a problem of a stream failed: {reply.error.message}"
            if (problem := self.look(case, reply.request_id, reply.solve)) is not None:
                return problem
        return f"a stream has not answered {list(sent)}" if sent else None

    def call_cancel(self):
        call = self.solve.future(identified(self.load.endless, self.next_id()), timeout=TIMEOUT)
        time.sleep(self.random.uniform(0, 0.03))
        call.cancel()
        return None if call.cancelled() else f"a cancelled call ended in {call.code()}"

    def call_deadline(self):
        try:
            self.solve(identified(self.load.endless, self.next_id()), timeout=self.random.uniform(0.005, 0.05))
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                return None
            # A connection of age is closed with its last call. If that is one whose deadline the server sees first,
            # gRPC's core (1.51) closes before it has sent why.
            if error.code() == grpc.StatusCode.UNAVAILABLE and "GOAWAY received" in error.details():
                self.load.taken_along()
                return None
            return f"a late call: {error.code().name}: {error.details()}"
        return "a call was answered that takes forever"

    def call_bad(self):
        body, code, why = self.random.choice(self.load.bad)
        try:
            self.solve(body, timeout=TIMEOUT)
        except grpc.RpcError as error:
            got = error.code().name, reason(dict(error.trailing_metadata()).get("grpc-status-details-bin"))
            return None if got == (code, why) else f"a bad request got {got}, not {(code, why)}"
        return f"a bad request was answered ({why} expected)"

    def call_anytime(self):
        """The iterate reached in time: its bits depend on it, its certificate does not."""
        request, name = pb.SolveRequest.FromString(self.load.endless), self.next_id()
        request.solver.time_budget, request.request_id = self.random.uniform(0.005, 0.05), name
        reply = self.solve(request.SerializeToString(), timeout=TIMEOUT)
        if reply.request_id != name:
            return f"the answer to {name} says {reply.request_id}"
        reached, errors = reply.convergence, (reply.convergence.marginal_error_a, reply.convergence.marginal_error_b)
        good = reached.iterations >= 1 and not reached.converged and np.all(np.isfinite(errors)) and min(errors) >= 0
        good &= reached.stop_reason == pb.STOP_REASON_TIME_BUDGET and np.isfinite(reply.value[0])
        return None if good else f"an anytime answer is {reached}"
